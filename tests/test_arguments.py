"""Calls become JSON and the same calls again; what would not arrive as it was sent is refused at the enqueue."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import re
import subprocess
import sys
import threading
import types
import typing
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from sqla_neoq.arguments import PayloadMismatch, Signature
from sqla_neoq.payloads import decode, encode, fingerprint

no_deadline = settings(deadline=None)


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    left: int
    right: dt.date


class Options(TypedDict, total=False):
    price: decimal.Decimal
    colour: Colour


@dataclasses.dataclass
class Address:
    street: str
    since: dt.date | None = None


@dataclasses.dataclass
class BusinessAddress(Address):
    company: str = ""


@dataclasses.dataclass
class Tree:
    value: uuid.UUID
    children: list[Tree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Tag:
    colour: Colour


@dataclasses.dataclass(eq=False)
class Incomparable:
    value: int


@attrs.define
class Parcel:
    id: uuid.UUID
    weights: list[float]


class Basket(msgspec.Struct):
    contents: set[str]


class Event(msgspec.Struct, rename="camel"):
    happened_at: dt.datetime
    attendees: set[str] = set()


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    name: str
    born: dt.date | None = None
    email: str = pydantic.Field(default="", alias="eMail")


class StrictPerson(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    seen: dt.datetime


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class DataUser(DataBase):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)


UserId = NewType("UserId", int)
Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Shout = Annotated[str, "louder"]

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ZONES = st.none() | st.builds(
    dt.timezone, st.builds(dt.timedelta, minutes=st.integers(min_value=-23 * 60, max_value=23 * 60))
)
DATETIMES = st.datetimes(timezones=ZONES)

# What may also be the key of a dict, or in a set.
KEYS = [
    (int, st.integers()),
    (str, TEXTS),
    (float, FLOATS),
    (uuid.UUID, st.uuids()),
    (decimal.Decimal, st.decimals(allow_nan=False)),
    (dt.datetime, DATETIMES),
    (dt.date, st.dates()),
    (dt.time, st.times(timezones=ZONES)),
    (dt.timedelta, st.timedeltas()),
    (bytes, st.binary(max_size=10)),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (UserId, st.integers()),
    (Percent, st.integers(0, 100)),
    (Shout, TEXTS),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
]
ATOMS = [
    *KEYS,
    (bool, st.booleans()),
    (None, st.none()),
    (Access, st.sampled_from([Access.READ, Access.READ | Access.WRITE])),
    (Any, TEXTS | st.integers() | st.lists(st.booleans())),
    (object, st.dictionaries(TEXTS, FLOATS)),
    (Pair, st.builds(Pair, st.integers(), st.dates())),
    (Options, st.fixed_dictionaries({}, optional={"price": st.decimals(allow_nan=False)})),
    (Address, st.builds(Address, TEXTS, st.none() | st.dates())),
    (Tree, st.builds(Tree, st.uuids(), st.lists(st.builds(Tree, st.uuids())))),
    (Parcel, st.builds(Parcel, st.uuids(), st.lists(FLOATS))),
    (Event, st.builds(Event, DATETIMES, st.sets(TEXTS))),
    (Person, st.builds(Person, name=TEXTS, born=st.none() | st.dates(), eMail=TEXTS)),
    (StrictPerson, st.builds(StrictPerson, seen=DATETIMES)),
    (int | str | None, st.integers() | TEXTS | st.none()),
    (dt.date | int, st.dates() | st.integers()),
    (int | float, st.integers() | FLOATS),
    (frozenset[Tag], st.frozensets(st.builds(Tag, st.sampled_from(Colour)))),
]  # fmt: skip


@st.composite
def typed_values(draw, depth=2):
    """An annotation, and a value that fits it."""
    wrap = draw(st.sampled_from(["", "optional", "list", "tuple", "pair", "set", "dict", "mapping"])) if depth else ""
    if wrap in ("set", "dict", "mapping"):
        key, keys = draw(st.sampled_from(KEYS))
        if wrap == "set":
            return set[key], draw(st.sets(keys, max_size=4))
        inner, value = draw(typed_values(depth - 1))
        container = dict if wrap == "dict" else collections.abc.Mapping
        return container[key, inner], dict.fromkeys(draw(st.lists(keys, max_size=3)), value)
    if not wrap:
        annotation, values = draw(st.sampled_from(ATOMS))
        return annotation, draw(values)
    inner, value = draw(typed_values(depth - 1))
    if wrap == "optional":
        return typing.Optional[inner], draw(st.sampled_from([value, None]))  # noqa: UP045 - inner may be None
    if wrap == "list":
        return list[inner], [value] * draw(st.integers(0, 3))
    if wrap == "tuple":
        return tuple[inner, ...], (value,) * draw(st.integers(0, 3))
    other, second = draw(typed_values(depth - 1))
    return tuple[inner, other], (value, second)


def taking(annotation, name="task"):
    """The signature of a task with one parameter."""

    def function(value): ...

    function.__annotations__ = {"value": annotation}
    return Signature.of(function, name=name)


def sent(signature, *args, **kwargs):
    """What the task receives."""
    return signature.load(decode(encode(signature.bind(args, kwargs))))


@settings(deadline=None, max_examples=400)
@given(typed_values())
def test_the_task_receives_what_was_sent(typed):
    annotation, value = typed
    received = sent(taking(annotation), value)["value"]

    assert received == value
    assert type(received) is type(value)


@no_deadline
@given(st.sets(st.sampled_from(ATOMS), min_size=1, max_size=4).flatmap(
    lambda atoms: st.tuples(st.just([atom[0] for atom in atoms]), st.tuples(*(atom[1] for atom in atoms)))
))  # fmt: skip
def test_several_arguments_do_not_disturb_each_other(call):
    annotations, values = call
    names = [f"p{number}" for number in range(len(values))]
    function = eval(f"lambda {', '.join(names)}: None")
    function.__annotations__ = dict(zip(names, annotations, strict=True))

    assert sent(Signature.of(function), *values) == dict(zip(names, values, strict=True))


# ---- Python binds


def nothing(): ...
def two(a, b): ...
def default(a, b=5): ...
def keyword_only(a, *, b, c=None): ...
def rest(a, b=1, **c): ...
def only_rest(**a): ...


@no_deadline
@given(
    st.sampled_from([nothing, two, default, keyword_only, rest, only_rest]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers()),
)
def test_a_call_binds_as_python_binds_it_and_fails_in_python_s_words(function, args, kwargs):
    signature = Signature.of(function)
    try:
        function(*args, **kwargs)
    except TypeError as error:
        with pytest.raises(TypeError, match=f"^{re.escape(str(error))}$"):
            signature.bind(args, kwargs)
        return
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    expected = {name: value for name, value in bound.items() if not isinstance(value, dict)}
    expected |= {name: value for named in bound.values() if isinstance(named, dict) for name, value in named.items()}

    assert signature.bind(args, kwargs) == expected
    assert signature.load(expected) == expected


def test_the_task_s_name_begins_the_message():
    signature = Signature.of(two, name="myapp.tasks:two")

    with pytest.raises(TypeError, match=r"^myapp\.tasks:two\(\) missing 1 required positional argument: 'b'$"):
        signature.bind((1,), {})


def test_an_argument_left_out_is_not_stored_so_that_its_default_may_change():
    def old(a: int, b: dt.date = dt.date(2020, 1, 1), *, c: str = "old"): ...
    def new(a: int, b: dt.date = dt.date(2030, 1, 1), *, c: str = "new"): ...

    payload = Signature.of(old).bind((1,), {})

    assert payload == {"a": 1}
    assert Signature.of(new).load(payload) == {"a": 1}
    assert Signature.of(old).bind((1,), {"c": "old"}) == {"a": 1, "c": "old"}


def test_the_caller_s_dicts_are_left_as_they_are():
    signature = taking(dt.date)
    kwargs = {"value": dt.date(2020, 1, 1)}
    payload = signature.bind((), kwargs)
    assert kwargs == {"value": dt.date(2020, 1, 1)}

    assert signature.load(payload) == kwargs
    assert payload == {"value": "2020-01-01"}


def test_keyword_arguments_of_any_name_are_converted_by_their_one_annotation():
    def function(a: int, **more: dt.date): ...

    signature = Signature.of(function)

    assert sent(signature, 1, x=dt.date(2020, 1, 1), left_out=dt.date(2021, 1, 1)) == (
        {"a": 1, "x": dt.date(2020, 1, 1), "left_out": dt.date(2021, 1, 1)}
    )
    with pytest.raises(TypeError, match=r"argument 'more' must be datetime.date, not 5"):
        signature.bind((1,), {"x": 5})


# ---- what does not fit


@pytest.mark.parametrize(
    ("annotation", "value", "says"),
    [
        (int, "5", "task() argument 'value' must be int, not '5': Expected `int`, got `str`"),
        (int, 5.0, "must be int, not 5.0: Expected `int`, got `float`"),
        (int, True, "must be int, not True: Expected `int`, got `bool`"),
        (bool, 1, "must be bool, not 1: Expected `bool`, got `int`"),
        (float, "1", "must be float, not '1'"),
        (float, True, "must be float, not True"),
        (float, 2**60 + 1, "must be float, not 1152921504606846977: the task would receive 1.152921504606847e+18"),
        (str, 5, "must be str, not 5"),
        (str, None, "must be str, not None: Expected `str`, got `null`"),
        (int | None, "5", "must be int | None, not '5': Expected `int | null`, got `str`"),
        (dt.date, "2020-01-01", "not '2020-01-01': the task would receive datetime.date(2020, 1, 1)"),
        (dt.date, dt.datetime(2020, 1, 1), "must be datetime.date, not datetime.datetime(2020, 1, 1, 0, 0)"),
        (dt.datetime, dt.date(2020, 1, 1), "must be datetime.datetime, not datetime.date(2020, 1, 1)"),
        (dt.timedelta, 5, "must be datetime.timedelta, not 5"),
        (uuid.UUID, str(uuid.UUID(int=1)), "must be uuid.UUID, not '00000000-0000-0000-0000-000000000001'"),
        (decimal.Decimal, 1.5, "must be decimal.Decimal, not 1.5"),
        (decimal.Decimal, 1, "must be decimal.Decimal, not 1"),
        (decimal.Decimal, "1.5", "must be decimal.Decimal, not '1.5'"),
        (bytes, "eA==", "must be bytes, not 'eA=='"),
        (Colour, "red", "must be test_arguments.Colour, not 'red': the task would receive <Colour.RED: 'red'>"),
        (Level, 1, "must be test_arguments.Level, not 1"),
        (list[int], [1, 2, "x"], "must be list[int], not [1, 2, 'x']: Expected `int`, got `str` - at `value[2]`"),
        (list[int], {1}, "must be list[int], not {1}"),
        (list[int], iter([1]), "list_iterator has no form in JSON"),
        (set[int], [1], "must be set[int], not [1]"),
        (tuple[int, str], (1, "x", 2), "must be tuple[int, str], not (1, 'x', 2)"),
        (dict[str, int], {"a": "x"}, "must be dict[str, int], not {'a': 'x'}: Expected `int`, got `str`"),
        (dict[int, int], {"1": 1}, "must be dict[int, int], not {'1': 1}"),
        (dict[str, Any], {"at": dt.date(2020, 1, 1)}, "the task would receive {'at': '2020-01-01'}"),
        (Literal["a"], "b", "must be Literal['a'], not 'b'"),
        (Percent, 101, "msgspec.Meta(ge=0, le=100)], not 101: Expected `int` <= 100"),
        (Options, {"price": 5}, "must be test_arguments.Options, not {'price': 5}"),
        (Options, {"unknown": 5}, "must be test_arguments.Options, not {'unknown': 5}: the task would receive {}"),
        (Pair, (1, dt.date(2020, 1, 1)), "must be test_arguments.Pair, not (1, datetime.date(2020, 1, 1))"),
        (Address, Address(5), "must be test_arguments.Address, not Address(street=5, since=None): Expected `str`"),
        (Address, Address("a", "2020-01-01"), "would receive Address(street='a', since=datetime.date(2020, 1, 1))"),
        (Address, BusinessAddress("a"), "not BusinessAddress(street='a', since=None, company='')"),
        (Address, {"street": "a"}, "must be test_arguments.Address, not {'street': 'a'}"),
        (Incomparable, Incomparable(1), "not Incomparable(value=1): the task would receive Incomparable(value=1)"),
        (Person, {"name": "x"}, "must be test_arguments.Person, not {'name': 'x'}"),
        (list[Person], [Person(name="x"), "y"], "- at `value[1]`"),
        (decimal.Decimal, decimal.Decimal("sNaN"), "must be decimal.Decimal, not Decimal('sNaN')"),
        (decimal.Decimal, decimal.Decimal("NaN"), "must be decimal.Decimal, not Decimal('NaN')"),
        (
            dt.datetime,
            dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=7))),
            "must be datetime.datetime",
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_a_type_error_with_name_value_and_expectation(annotation, value, says):
    with pytest.raises(TypeError, match=re.escape(says)) as error:
        taking(annotation).bind((value,), {})
    assert not isinstance(error.value, PayloadMismatch)


def test_a_message_stays_short_whatever_the_value_is():
    for value in ("x" * 100_000, ["x" * 1000] * 1000, {"x" * 1000: [["y" * 1000] * 100] * 100}):
        with pytest.raises(TypeError) as error:
            taking(int).bind((value,), {})
        assert len(str(error.value)) < 300


def test_nesting_without_end_is_a_value_error():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)

    for value in (deep, loop):
        with pytest.raises(ValueError, match=r"task\(\) argument 'value' is nested too deep, or in itself"):
            taking(list[Any]).bind((value,), {})
        with pytest.raises(ValueError, match=r"nested over 100 levels deep|contains itself"):
            encode(taking(Any).bind((value,), {}))


# ---- what fits although it is not the same


class Markup(str):
    __slots__ = ()


class DriverUUID(uuid.UUID):
    pass


class FrozenDatetime(dt.datetime):
    pass


class FrozenDate(dt.date):
    pass


class FrozenTime(dt.time):
    pass


class Duration(dt.timedelta):
    pass


class Money(decimal.Decimal):
    pass


class Count(int):
    pass


class Measure(float):
    pass


class Blob(bytes):
    pass


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (str, Markup("x")),
        (int, Count(5)),
        (int, Level.LOW),
        (float, Measure(1.5)),
        (float, 5),
        (bytes, Blob(b"x")),
        (uuid.UUID, DriverUUID(int=1)),
        (dt.datetime, FrozenDatetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)),
        (dt.datetime, FrozenDatetime(2020, 1, 2)),
        (dt.date, FrozenDate(2020, 1, 2)),
        (dt.time, FrozenTime(1, 2, 3, 4)),
        (dt.timedelta, Duration(1, 2, 3)),
        (decimal.Decimal, Money("1.50")),
    ],
)
def test_a_subclass_of_a_simple_type_arrives_as_that_type(annotation, value):
    received = sent(taking(annotation), value)["value"]

    assert received == value
    assert type(received) is annotation
    assert sent(taking(list[annotation]), [value])["value"] == [value]


@pytest.mark.parametrize(
    ("annotation", "value", "received"),
    [
        (list[int], (1, 2), [1, 2]),
        (tuple[int, ...], [1, 2], (1, 2)),
        (collections.abc.Sequence[Colour], (Colour.RED,), [Colour.RED]),
        (collections.abc.Set[int], frozenset({1}), {1}),
        (frozenset[int], {1}, frozenset({1})),
        (Any, {"a": (1, (2,))}, {"a": [1, [2]]}),
    ],
)
def test_containers_that_json_cannot_tell_apart_stand_for_each_other(annotation, value, received):
    back = sent(taking(annotation), value)["value"]

    assert back == received
    assert type(back) is type(received)


def test_an_int_for_a_float_is_stored_as_it_arrives_so_that_both_have_one_fingerprint():
    signature = taking(float)

    assert fingerprint("task", signature.bind((5,), {})) == fingerprint("task", signature.bind((5.0,), {}))


def test_an_aware_datetime_keeps_its_instant_and_a_naive_one_stays_naive():
    signature = taking(dt.datetime)
    summer = dt.datetime(2020, 7, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2)))

    assert sent(signature, summer)["value"].isoformat() == "2020-07-01T12:00:00+02:00"
    assert sent(signature, dt.datetime(2020, 7, 1, 12))["value"].tzinfo is None


def test_an_unannotated_argument_is_json_as_it_is():
    def function(a, b: Any, c: object): ...

    signature = Signature.of(function)
    value = {"a": [1, {"b": None}]}

    assert sent(signature, value, "x", c=1.5) == {"a": value, "b": "x", "c": 1.5}
    with pytest.raises(TypeError, match=re.escape("payload['b'] is datetime.date(2020, 1, 1), and JSON has no date")):
        encode(signature.bind((1, dt.date(2020, 1, 1), 3), {}))


@pytest.mark.parametrize(
    ("annotation", "value", "written"),
    [
        (set[str], {"c", "a", "b"}, ["a", "b", "c"]),
        (set[Colour], {Colour.RED, Colour.GREEN}, ["green", "red"]),
        (list[set[Colour]], [{Colour.RED, Colour.GREEN}], [["green", "red"]]),
        (dict[str, set[Colour]], {"x": {Colour.RED, Colour.GREEN}}, {"x": ["green", "red"]}),
        (frozenset[Tag], frozenset({Tag(Colour.RED), Tag(Colour.GREEN)}), [{"colour": "green"}, {"colour": "red"}]),
        (set[str | int | None], {"b", 1, "a", None}, ["a", "b", 1, None]),
        (set[frozenset[Colour]], {frozenset(Colour), frozenset({Colour.RED})}, [["green", "red"], ["red"]]),
        (Basket, Basket({"c", "a", "b"}), {"contents": ["a", "b", "c"]}),
    ],
)  # fmt: skip
def test_a_set_is_written_sorted_so_that_equal_calls_have_equal_fingerprints(annotation, value, written):
    signature = taking(annotation)

    assert signature.bind((value,), {}) == {"value": written}
    assert sent(signature, value) == {"value": value}


# ---- what can be no task


class Service:
    def method(self, a): ...

    @classmethod
    def of_class(cls, a): ...

    @staticmethod
    def static(a: int): ...

    def __call__(self, a): ...


def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def generator(a):
    yield a


async def async_generator(a):
    yield a


def positional_only(a, /, b): ...
def star(a, *more): ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (star, "star() takes *more, and arguments travel by name: take a list as one parameter"),
        (positional_only, "positional_only() takes 'a' by position only, and arguments travel by name: remove the '/'"),
        (Service().method, "Service.method is a bound method"),
        (wrapping(Service().method), "Service.method is a bound method"),
        (Service.of_class, "Service.of_class is a bound method"),
        (Service.__dict__["of_class"], "of_class is a bound method"),
        (Service.method, "Service.method is a method, and a payload cannot carry its 'self': put @staticmethod above"),
        (Service(), "is not a function, and only a function can be a task"),
        (Service, "Service is not a function"),
        (functools.partial(two, 1), "is not a function, and only a function can be a task: write one with def"),
        (len, "len is not a function"),
        (5, "5 is not a function"),
        (generator, "generator is a generator, and calling it would run nothing of it: remove the yield"),
        (async_generator, "async_generator is a generator"),
    ],
)
def test_what_cannot_be_a_task_is_refused_at_decoration_with_the_remedy(function, says):
    with pytest.raises(TypeError, match=re.escape(says)):
        Signature.of(function)


async def coroutine(a: int): ...


@wrapping
def decorated(a: int): ...


@functools.lru_cache
def cached(a: int): ...


@pytest.mark.parametrize("function", [coroutine, decorated, cached, Service.static, Service.__dict__["static"]])
def test_functions_of_every_make_can_be_tasks(function):
    signature = Signature.of(function)

    assert sent(signature, 5) == {"a": 5}
    with pytest.raises(TypeError, match="argument 'a' must be int, not '5'"):
        signature.bind(("5",), {})


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        (dt.datetime | str, "is annotated datetime.datetime | str, which cannot be read back from JSON: Type unions"),
        (Address | Parcel, "which cannot be read back from JSON"),
        (Person | StrictPerson, "which cannot be read back from JSON"),
        (Person | int, "which cannot be read back from JSON"),
        (typing.Self, "which cannot be read back from JSON"),
        (5, "which cannot be read back from JSON"),
        (threading.Lock().__class__, "has no form in JSON: pass what identifies it"),
        (list[complex], "is annotated list[complex], and complex has no form in JSON"),
        (dict[str, tuple[int, types.SimpleNamespace]], "and types.SimpleNamespace has no form in JSON"),
        (collections.abc.Callable[[], int], "has no form in JSON"),
        (User, "a mapped object belongs to its session: pass its primary key"),
        (list[User], "a mapped object belongs to its session: pass its primary key"),
        (DataUser | None, "a mapped object belongs to its session: pass its primary key"),
    ],
)
def test_an_annotation_json_cannot_carry_is_refused_at_decoration(annotation, says):
    with pytest.raises(TypeError, match=re.escape(says)) as error:
        taking(annotation)
    assert str(error.value).startswith("task() argument 'value' is annotated ")


# ---- annotations as text


def early(a: Later, b: list[Later] | None = None) -> NeverDefined: ...  # noqa: F821


early_signature = Signature.of(early)


@dataclasses.dataclass
class Nested:
    inner: DefinedLast


def early_nested(a: Nested): ...


early_nested_signature = Signature.of(early_nested)


@dataclasses.dataclass
class Later:
    at: dt.date


@dataclasses.dataclass
class DefinedLast:
    at: dt.date


def test_an_annotation_may_name_a_class_that_is_defined_later():
    value = Later(dt.date(2020, 1, 1))

    assert sent(early_signature, value, [value]) == {"a": value, "b": [value]}
    with pytest.raises(TypeError, match=r"early\(\) argument 'a' must be test_arguments.Later, not 5"):
        early_signature.bind((5,), {})


def test_a_class_within_an_annotation_may_name_one_that_is_defined_later():
    value = Nested(DefinedLast(dt.date(2020, 1, 1)))

    assert sent(early_nested_signature, value) == {"a": value}


@pytest.mark.parametrize("function", [two, only_rest])
def test_annotations_are_looked_up_once(function, monkeypatch):
    signature = Signature.of(function)
    monkeypatch.setattr(Signature, "_resolve", None)

    assert sent(signature, a=1, b=2) == {"a": 1, "b": 2}


def test_a_name_that_is_never_defined_is_a_clear_type_error_at_the_first_use():
    def function(a: Missing = None, b: int = 0): ...  # noqa: F821

    signature = Signature.of(function, name="task")

    assert signature.bind((), {}) == {}
    for use in (lambda: signature.bind((), {"b": 1}), lambda: signature.load({"b": 1})):
        with pytest.raises(
            TypeError, match=r"task\(\) has an annotation that cannot be resolved: name 'Missing'.*TYPE_CHECK"
        ):
            use()


def test_a_module_that_is_not_there_yet_is_tried_again_too():
    def function(a: collections.later): ...

    signature = Signature.of(function, name="task")

    with pytest.raises(TypeError, match=r"task\(\) has an annotation that cannot be resolved: .*'later'"):
        signature.bind((1,), {})


# ---- in the worker


@pytest.mark.parametrize("payload", [None, [], [1], "x", 5, True])
def test_a_payload_that_is_not_an_object_does_not_fit(payload):
    for function in (nothing, two):
        with pytest.raises(PayloadMismatch, match=rf"{function.__name__}\(\) takes its arguments from a JSON object"):
            Signature.of(function).load(payload)


def test_missing_and_unexpected_arguments_do_not_fit_and_are_named():
    def function(a: int, b: dt.date, c: int = 0): ...

    signature = Signature.of(function, name="task")

    with pytest.raises(PayloadMismatch, match=re.escape("task() is missing 'a', 'b' in the payload {'c': 1}")):
        signature.load({"c": 1})
    with pytest.raises(PayloadMismatch, match=re.escape("task() has no parameter 'd', and the payload is {'a': 1,")):
        signature.load({"a": 1, "b": "2020-01-01", "d": 1})
    with pytest.raises(PayloadMismatch, match=re.escape("nothing() has no parameter 'd'")):
        Signature.of(nothing).load({"d": 1})


@pytest.mark.parametrize(
    ("annotation", "value", "says"),
    [
        (int, "5", "task() argument 'value' must be int, not '5': Expected `int`, got `str`"),
        (int, 5.5, "task() argument 'value' must be int, not 5.5"),
        (dt.date, "soon", "task() argument 'value' must be datetime.date, not 'soon': Invalid RFC3339"),
        (list[uuid.UUID], ["x"], "Invalid UUID - at `value[0]`"),
        (Address, {"since": None}, "Object missing required field `street`"),
        (Tree, {"value": str(uuid.UUID(int=1)), "children": [{"value": 5}]}, "- at `value.children[0].value`"),
        (Colour, "blue", "Invalid enum value 'blue'"),
        (Person, {"born": "x"}, "validation errors for Person"),
        (Colour, "blue" * 1000, "characters cut"),
    ],
)
def test_an_argument_of_another_type_does_not_fit_and_is_named_with_its_place(annotation, value, says):
    with pytest.raises(PayloadMismatch, match=re.escape(says)):
        taking(annotation).load({"value": value})


def test_a_mismatch_is_a_type_error():
    assert issubclass(PayloadMismatch, TypeError)


def test_a_payload_from_plain_sql_may_say_the_same_in_other_numbers():
    assert taking(float).load({"value": 5}) == {"value": 5.0}
    assert type(taking(float).load({"value": 5})["value"]) is float
    assert taking(decimal.Decimal).load({"value": 5}) == {"value": decimal.Decimal(5)}


def test_without_pydantic_imported_it_stays_so():
    code = """
import sys
from sqla_neoq.arguments import Signature
def function(a: int, b: list[float]): ...
signature = Signature.of(function)
assert signature.load(signature.bind((1, [2.0]), {})) == {"a": 1, "b": [2.0]}
assert "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
