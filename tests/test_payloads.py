"""What a payload may be, and that what is accepted reads back equal from a jsonb column."""

import datetime as dt
import decimal
import enum
import hashlib
import itertools
import json
import random
import re
import sys
import uuid
from collections import OrderedDict
from contextlib import closing
from typing import NamedTuple

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url
from support.servers import libpq

from sqla_neoq import payloads
from sqla_neoq.payloads import (
    MAX_DEPTH,
    MAX_INT_DIGITS,
    MAX_PAYLOAD_BYTES,
    brief,
    canonical,
    clean_text,
    decode,
    encode,
    fingerprint,
)

no_deadline = settings(deadline=None)

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Markup(str):
    __slots__ = ()


class Point(NamedTuple):
    x: int
    y: int


def through_jsonb(text):
    """What jsonb makes of it: numbers are numeric, without exponent or negative zero, and keep their scale."""

    def write(value):
        match value:
            case dict():
                return f"{{{', '.join(f'{write(key)}: {write(item)}' for key, item in value.items())}}}"
            case list():
                return f"[{', '.join(map(write, value))}]"
            case decimal.Decimal():
                return f"{value or abs(value):f}"
            case _:
                return json.dumps(value, ensure_ascii=False)

    return write(json.loads(text, parse_float=decimal.Decimal))


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def typed(value):
    """The value with the type of each part: 1, 1.0 and True are equal to Python."""
    match value:
        case dict():
            return {key: typed(item) for key, item in value.items()}
        case list():
            return [typed(item) for item in value]
        case _:
            return (type(value), value)


@no_deadline
@given(JSON)
@example(1e16)
@example(1.7976931348623157e308)
@example(5e-324)
@example(-0.0)
@example({"": [10**4299, -(2**64)]})
@example("\\u0000 is six characters")
def test_what_is_accepted_reads_back_equal_with_the_same_types(value):
    assert typed(decode(through_jsonb(encode(value)))) == typed(value)


@no_deadline
@given(JSON)
def test_the_way_that_explains_writes_the_same_as_the_fast_one(value):
    assert payloads._write(payloads._checked(value, "payload", ())).decode() == encode(value)


@no_deadline
@given(st.floats(min_value=1e15, allow_infinity=False))
def test_a_large_float_stays_a_float_although_jsonb_knows_no_exponent(value):
    back = decode(through_jsonb(encode([value, -value])))

    assert back == [value, -value]
    assert [type(number) for number in back] == [float, float]


def test_a_tuple_comes_back_as_a_list():
    assert decode(encode({"a": (1, (2,))})) == {"a": [1, [2]]}


@pytest.mark.parametrize("text", ['{"a": 1}', b'{"a": 1}'])
def test_decode_reads_text_and_bytes(text):
    assert decode(text) == {"a": 1}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            {"items": [1, 2, 3, dt.date(2020, 1, 1)]},
            "payload['items'][3] is datetime.date(2020, 1, 1), and JSON has no date: pass its .isoformat()",
        ),
        (
            {"at": dt.datetime(2020, 1, 1)},
            "payload['at'] is datetime.datetime(2020, 1, 1, 0, 0), and JSON has no datet",
        ),
        ({"for": dt.timedelta(1)}, "JSON has no timedelta: pass its .total_seconds()"),
        ({"id": uuid.UUID(int=1)}, "JSON has no UUID: pass str() of it"),
        ({"price": decimal.Decimal(1)}, "payload['price'] is Decimal('1'), and JSON has no Decimal: pass str() of it"),
        ({"tags": {1}}, "payload['tags'] is {1}, and JSON has no set: pass a sorted list"),
        ({"raw": b"x"}, "payload['raw'] is b'x', and JSON has no bytes: pass text, or base64"),
        ({"colour": Colour.RED}, "JSON has no Colour: pass its .value"),
        ({"level": Level.LOW}, "JSON has no Level: pass its .value"),
        ({"html": Markup("x")}, "JSON has no Markup: pass str() of it"),
        ({"d": OrderedDict(a=1)}, "JSON has no OrderedDict: pass dict() of it"),
        ({"p": Point(1, 2)}, "JSON has no Point: pass tuple() of it"),
        ({"o": object}, "payload['o'] is <class 'object'>, and JSON has no type: pass its key or its fields"),
        (uuid.UUID(int=1), "payload is UUID("),
        ({1: "x"}, "payload has the key 1, and JSON keys are str: pass str(key)"),
        ({"a": [{None: 1}]}, "payload['a'][0] has the key None, and JSON keys are str"),
        ({"a": [{Markup("k"): 1}]}, "payload['a'][0] has the key 'k', and JSON keys are str"),
    ],
)
def test_a_type_json_does_not_know_is_a_type_error_with_path_value_and_remedy(value, says):
    with pytest.raises(TypeError, match=re.escape(says)):
        encode(value)
    with pytest.raises(TypeError, match=re.escape(says)):
        canonical(value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": float("nan")}, "payload['a'] is nan, which JSON cannot hold"),
        ({"a": [float("-inf")]}, "payload['a'][0] is -inf, which JSON cannot hold"),
        ({"a": "x\0y"}, "payload['a'] has a NUL character at 1"),
        ({"a\0": 1}, r"the key 'a\x00' of payload has a NUL character at 1"),
        ({"a": ["ok", "x\ud800"]}, r"payload['a'][1] has the lone surrogate '\ud800' at 1"),
        ({"a": {"\udfff": 1}}, r"the key '\udfff' of payload['a'] has the lone surrogate '\udfff' at 0"),
        ({"a": 10**MAX_INT_DIGITS}, "payload['a'] is an int of about 4,301 digits, and Python reads at most 4,300"),
        (-(10**MAX_INT_DIGITS), "payload is an int of about 4,301 digits"),
        ([1 - 10**MAX_INT_DIGITS], "payload[0] is an int of about 4,301 digits, and Python reads at most 4,299"),
        ({"a": nested(MAX_DEPTH)}, "is nested over 100 levels deep"),
    ],
    ids=itertools.count(),
)
def test_a_value_the_database_or_the_worker_would_choke_on_is_a_value_error(value, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        encode(value)
    with pytest.raises(ValueError, match=re.escape(says)):
        canonical(value)


def test_the_name_stands_in_the_messages():
    with pytest.raises(TypeError, match=r"^arguments\['a'\] is b'x'"):
        encode({"a": b"x"}, name="arguments")
    with pytest.raises(ValueError, match=r"^arguments is 3 bytes of JSON, over the limit of 2"):
        encode("x", limit=2, name="arguments")


def test_the_deepest_allowed_nesting_reads_back():
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)


def test_nesting_beyond_any_recursion_limit_is_a_value_error():
    value = nested(100_000)
    with pytest.raises(ValueError, match="nested over 100 levels"):
        encode(value)
    while value:  # taken apart by hand: freeing it recurses too
        value = value.pop()


def test_a_container_inside_itself_is_a_value_error():
    loop = {"a": [1]}
    loop["a"].append(loop)

    with pytest.raises(ValueError, match=re.escape("payload['a'][1] contains itself")):
        encode(loop)


def test_the_same_container_twice_is_no_loop():
    shared = [1]

    assert decode(encode({"a": shared, "b": [shared, shared]})) == {"a": [1], "b": [[1], [1]]}


def test_the_limit_counts_bytes_of_utf_8():
    assert encode("ä" * 10, limit=22) == '"ääääääääää"'
    with pytest.raises(ValueError, match="payload is 22 bytes of JSON, over the limit of 21"):
        encode("ä" * 10, limit=21)


def test_the_default_limit_is_one_mebibyte():
    assert len(encode("x" * (MAX_PAYLOAD_BYTES - 2))) == MAX_PAYLOAD_BYTES == 1024 * 1024
    with pytest.raises(ValueError, match="payload is 1,048,577 bytes of JSON, over the limit of 1,048,576"):
        encode("x" * (MAX_PAYLOAD_BYTES - 1))


def test_a_message_stays_short_whatever_the_value_is():
    for value in (
        {"k" * 10_000: [b"x" * 10_000]},
        {"k": {"x": dict.fromkeys(range(10_000), "v" * 1000)}},
        {"a" * 100: {"b" * 100: {"c" * 100: {"d" * 100: {1}}}}},
    ):
        with pytest.raises(TypeError) as error:
            encode(value)
        assert len(str(error.value)) < 1000


@pytest.fixture(params=[0, 640, 100_000])
def _int_limit(request):
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(request.param)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("_int_limit")
def test_a_huge_int_is_refused_also_where_the_host_moved_python_s_own_limit():
    with pytest.raises(ValueError, match=r"payload\['a'\] is an int of about 4,301 digits"):
        encode({"a": 10**MAX_INT_DIGITS})
    assert decode(encode({"a": 10**600, "b": "7" * 5000})) == {"a": 10**600, "b": "7" * 5000}


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', b"\xff", '"\ud800"', "1" * 4301, "[" * 100_000, "1.5e400"])
def test_what_cannot_be_read_is_a_value_error_and_nothing_else(text):
    with pytest.raises(ValueError, match="the payload cannot be read as JSON"):
        decode(text)


@no_deadline
@given(JSON)
def test_canonical_is_json_and_the_same_however_often_it_is_written(value):
    text = canonical(value)

    assert decode(text) == value
    assert canonical(decode(text)) == text


def test_canonical_sorts_at_every_level_by_length_in_bytes_and_escapes_nothing_it_need_not():
    assert canonical({"b": {"zz": 1, "aaa": (), "a": -0.0}, "\U0001f600": 1, "\uffff": "ü", "B": None, "é": 1e-7}) == (
        '{"B": null, "b": {"a": 0.0, "zz": 1, "aaa": []}, "é": 0.0000001, "\uffff": "ü", "\U0001f600": 1}'
    )


@no_deadline
@given(st.lists(JSON, min_size=1, max_size=50))
@example([1e16, -1e22, 5e-324, 1.5e-7, 0.0001, -0.0, 10**400, '\x7f\x1f\\"/\b\f\n\r\t\u2028', {"": 1, "ü": 2, "zz": 3}])
def test_canonical_is_what_postgresql_makes_of_the_payload(jsonb_texts, values):
    assert jsonb_texts([encode(value) for value in values]) == [canonical(value) for value in values]


@pytest.fixture(scope="module")
def jsonb_texts(worker_database):
    """Return a function from JSON texts to the texts of the jsonb that they become."""
    with closing(psycopg.connect(libpq(make_url(worker_database)), autocommit=True)) as connection:
        query = "SELECT t::jsonb::text FROM unnest(%s::text[]) WITH ORDINALITY AS u (t, place) ORDER BY place"
        yield lambda texts: [row[0] for row in connection.execute(query, [texts])]


@no_deadline
@given(st.dictionaries(TEXTS, LEAVES | st.lists(LEAVES)), st.randoms(use_true_random=False))
def test_equal_payloads_have_equal_fingerprints_whatever_the_order_of_keys(payload, chance: random.Random):
    items = list(payload.items())
    chance.shuffle(items)

    assert fingerprint("task", dict(items)) == fingerprint("task", payload)


def test_the_fingerprint_is_the_documented_hash():
    assert fingerprint("myapp.tasks:send", {"user_id": 1, "name": "ü"}) == (
        hashlib.sha256('["myapp.tasks:send", {"name": "ü", "user_id": 1}]'.encode()).hexdigest()
    )
    assert fingerprint(None, {"message": "hello"}) == hashlib.sha256(b'[null, {"message": "hello"}]').hexdigest()


def test_different_jobs_have_different_fingerprints():
    jobs = [
        (task, value)
        for task in (None, "null", "a", '"a"')
        for value in (1, 1.0, True, "1", None, [1], [True], {"a": 1}, {"a": 1.0}, {}, [], "", 10**16, 1e16)
    ]

    assert len({fingerprint(task, value) for task, value in jobs}) == len(jobs)


def test_the_deepest_payload_has_a_fingerprint():
    assert len(fingerprint("a", nested(MAX_DEPTH))) == 64


def test_clean_text_shows_what_a_database_cannot_store():
    assert clean_text("a\0b\udc80ü\ud83d", 100) == r"a\x00b\udc80ü\ud83d"


def test_clean_text_keeps_both_ends_and_says_how_much_is_missing():
    text = "".join(f"line {number}\n" for number in range(1000))

    short = clean_text(text, 200)
    head, count, tail = re.fullmatch(r"(.*)\n\[\.\.\. (\d+) characters cut \.\.\.\]\n(.*)", short, re.DOTALL).groups()

    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(count) + len(tail) == len(text)
    assert len(tail) > len(head) > 50
    assert 195 <= len(short) <= 200


@no_deadline
@given(st.text(st.characters(categories=["L", "Cs", "Cc"])), st.integers(0, 200))
@example("x" * 1000, 30)
@example("\0" * 1000, 100)
def test_clean_text_is_bounded_storable_and_done_in_one_go(text, limit):
    cleaned = clean_text(text, limit)

    assert len(cleaned) <= limit
    assert "\0" not in cleaned
    assert cleaned.encode().decode() == cleaned
    assert clean_text(cleaned, limit) == cleaned


def test_brief_is_one_short_line_for_anything():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    class Chatty:
        def __repr__(self):
            return "one\ntwo " * 1000

    for value in (10**10_000, "x" * 10_000, Broken(), Chatty(), [[[[[[]]]]]], {"a": Chatty()}, "\ud800"):
        text = brief(value)
        assert len(text.encode()) < 400
        assert "\n" not in text
    assert brief(-5) == "-5"
    assert brief(10**5000) == "an int of about 5,001 digits"
    assert brief([10**5000, 1]) == "[an int of about 5,001 digits, 1]"
