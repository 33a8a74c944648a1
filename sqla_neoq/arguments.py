"""A function's signature as a codec: a call becomes JSON at the enqueue, and the same call again in the worker.

Python itself binds the call, so a wrong one gets Python's own TypeError. Then each argument is written as JSON, read
back by its annotation, and compared with what was passed. That is the whole rule: **an argument is accepted when what
the task will receive equals it**, and otherwise refused with a TypeError at the enqueue. So ``"5"`` is no int,
``"2020-01-01"`` no date, and an instance with more fields than the annotated class is refused, not cut down.

* No annotation, ``Any`` or ``object``: JSON as it is; what JSON does not know, ``payloads.encode`` refuses.
* Carried both ways: bool, int, float, str, None; datetime, date, time, timedelta, UUID, Decimal, bytes; Enum with str
  or int values; list, tuple, set, frozenset, dict and their abstract forms; NamedTuple, TypedDict, dataclass, attrs and
  ``msgspec.Struct`` classes, pydantic models; Optional, Union, Literal, NewType, ``Annotated[..., msgspec.Meta(...)]``.
* An instance of a subclass of a simple type arrives as that type; an int for a float as a float, when it loses nothing;
  a list and a tuple stand for each other, as do a set and a frozenset. A naive datetime stays naive; an aware one keeps
  its instant and offset, not the name of its zone.
* A class is compared by its own ``==``; one that has none (``eq=False``) never equals what is read back.
* Refused is what cannot be read back for sure: a union whose members look alike in JSON (``datetime | str``, two
  dataclasses, a pydantic model and more than None), any other class, and a mapped one, as an ORM object belongs to its
  session. That happens when the function is decorated or, if an annotation names something that is defined only
  later, at the first call.
* An argument left out is not stored: the task runs with the default that its code has by then.

A set is written sorted, so that it has one fingerprint. Only a set that is inside a class and cannot be sorted is
written in any order.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import inspect
import sys
import types
import typing
import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec
import msgspec.inspect

from sqla_neoq.payloads import brief, clean_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["PayloadMismatch", "Signature"]

_LEFT_OUT: Final = object()
"""Stands for an argument that the caller did not pass."""

_SCALARS: Final = frozenset({bool, int, float, str, type(None)})

# How to write an instance of a subclass, which msgspec leaves to its caller: asyncpg's UUID, markupsafe's Markup,
# freezegun's datetime (datetime comes before date, its base).
_WRITE_AS_BASE: Final[Mapping[type, Callable[[Any], object]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes,
    dt.datetime: dt.datetime.isoformat,
    dt.date: dt.date.isoformat,
    dt.time: dt.time.isoformat,
    dt.timedelta: dt.timedelta.__pos__,
    decimal.Decimal: decimal.Decimal.__str__,
    uuid.UUID: uuid.UUID.__str__,
}


class PayloadMismatch(TypeError):  # noqa: N818 - it names what is wrong, as the errors in errors.py do
    """A payload does not fit the task's signature, as found in the worker.

    Deploys skew: the job may have been enqueued for an older signature, or for a newer one. So it is an ordinary
    failure, to be tried again.
    """


class Signature:
    """What a task may be called with, and how a call travels as JSON.

    Built once, by ``Signature.of``, when the function is decorated.

    Attributes:
        name: What messages call the task.
    """

    __slots__ = ("_bind", "_function", "_has_defaults", "_parameters", "_required", "_rest", "name")

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        """Use ``Signature.of``, which checks the function first."""
        self.name = name
        self._function = function
        parameters = _parameters(function)
        self._bind = _binder(name, parameters)
        self._required = frozenset(
            each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.default is each.empty
        )
        self._has_defaults = any(each.default is not each.empty for each in parameters)
        self._rest: _Parameter | None = None
        self._parameters: Mapping[str, _Parameter] | None = None
        # What names something that is defined only later is tried again at the first call.
        with contextlib.suppress(NameError, AttributeError):
            self._resolve()

    @classmethod
    def of(cls, function: Callable[..., object], *, name: str | None = None) -> Signature:
        """Return the signature of a task's function.

        Args:
            function: A plain function, sync or async, or a staticmethod. Of a function decorated with
                ``functools.wraps`` it is the inner signature that counts.
            name: What messages call the task; by default the function's qualified name.

        Raises:
            TypeError: It cannot be a task: it is no function, or a method, or a generator; it has parameters
                without a name in a payload (``*args``, positional-only), or an annotation JSON cannot carry.
        """
        if isinstance(function, staticmethod):
            function = function.__func__
        name = name or getattr(function, "__qualname__", None) or brief(function)
        _check_function(name, function)
        return cls(name, function)

    def bind(self, args: Iterable[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
        """Return the arguments of a call by name, as values for ``payloads.encode``; those left out are not in it.

        A task without parameters costs 0.2 microseconds, with two scalars 0.6, with a datetime, a UUID and a list 7;
        ``load`` 0.2, 0.6 and 3.5.

        Raises:
            TypeError: The call does not fit the signature, in Python's words; or an argument does not fit its
                annotation, naming the parameter, the value and what was expected; or an annotation cannot be
                resolved or carried.
            ValueError: An argument is nested too deep.
        """
        arguments = self._bind(*args, **kwargs)
        if self._has_defaults:
            arguments = {name: value for name, value in arguments.items() if value is not _LEFT_OUT}
        if arguments:
            parameters = self._resolve_now() if self._parameters is None else self._parameters
            for name, value in arguments.items():
                parameter = parameters.get(name, self._rest)
                assert parameter is not None
                if parameter.kinds is not None and type(value) not in parameter.kinds:
                    arguments[name] = parameter.write(value)
        return arguments

    def load(self, payload: object) -> dict[str, Any]:
        """Return the keyword arguments to call the task with, from a decoded payload.

        Values that need no conversion are shared with the payload, not copied.

        Raises:
            PayloadMismatch: The payload is not an object; or an argument is missing, not expected, or does not
                fit its annotation, naming the parameter, the value and what was expected.
            TypeError: An annotation cannot be resolved or carried.
        """
        if type(payload) is not dict:
            raise PayloadMismatch(
                f"{self.name}() takes its arguments from a JSON object, and the payload is {brief(payload)}"
            )
        if not self._required <= payload.keys():
            missing = ", ".join(map(repr, sorted(self._required - payload.keys())))
            raise PayloadMismatch(f"{self.name}() is missing {missing} in the payload {brief(payload)}")
        arguments = payload.copy()
        if payload:
            parameters = self._resolve_now() if self._parameters is None else self._parameters
            for name, value in payload.items():
                parameter = parameters.get(name, self._rest)
                if parameter is None:
                    raise PayloadMismatch(
                        f"{self.name}() has no parameter {name!r}, and the payload is {brief(payload)}"
                    )
                if parameter.kinds is not None and type(value) not in parameter.kinds:
                    arguments[name] = parameter.read(value)
        return arguments

    def _resolve_now(self) -> Mapping[str, _Parameter]:
        try:
            return self._resolve()
        except (NameError, AttributeError) as error:
            raise TypeError(
                f"{self.name}() has an annotation that cannot be resolved: {error}. Define or import the name at the "
                "top level of its module, and not under TYPE_CHECKING"
            ) from error

    def _resolve(self) -> Mapping[str, _Parameter]:
        """Look the annotations up. Two threads may both do it, with the same result."""
        annotations = _annotations(self._function)
        parameters = {}
        for each in _parameters(self._function):
            parameter = _Parameter(self.name, each.name, annotations.get(each.name, Any))
            if each.kind is each.VAR_KEYWORD:
                self._rest = parameter
            else:
                parameters[each.name] = parameter
        self._parameters = parameters
        return parameters


class _Parameter:
    """One parameter's codec.

    Attributes:
        kinds: The exact types that JSON holds as they are and the annotation allows: for these there is nothing to do,
            and for a task with scalars only that is all the work (0.1 microseconds an argument). None means any type.
    """

    __slots__ = ("_annotation", "_box", "_name", "_title", "kinds")

    def __init__(self, task: str, name: str, annotation: Any) -> None:
        self._title = f"{task}() argument {name!r}"
        self._name = name
        self._annotation = annotation
        _check_annotation(self._title, annotation)
        self.kinds = _kinds(annotation)
        # msgspec keeps the compiled form of a type only on a Struct: 0.4 microseconds, not 1.3, for each conversion.
        self._box = msgspec.defstruct("Box", [("value", annotation)])

    def write(self, value: object) -> object:
        """Return the argument as JSON values, if it will be read back equal."""
        try:
            written = _to_json(value)
            received = self._convert(written)
            alike = _alike(value, received)
        except RecursionError as error:
            raise ValueError(f"{self._title} is nested too deep, or in itself: {brief(value)}") from error
        except (TypeError, ValueError, ArithmeticError, msgspec.ValidationError) as error:
            raise TypeError(self._misfit(value, str(error))) from error
        if not alike:
            raise TypeError(self._misfit(value, f"the task would receive {brief(received)}"))
        # 5 for a float is stored as 5.0, as it arrives: the two are one call, with one fingerprint.
        return received if type(received) is float else written

    def read(self, value: object) -> object:
        """Return the argument from the payload's JSON values."""
        try:
            return self._convert(value)
        except (TypeError, ValueError, msgspec.ValidationError) as error:
            raise PayloadMismatch(self._misfit(value, str(error))) from error

    def _convert(self, value: object) -> Any:
        box: Any = msgspec.convert({"value": value}, self._box, str_keys=True, dec_hook=_read_other)
        return box.value

    def _misfit(self, value: object, reason: str) -> str:
        # msgspec's path begins at the box
        reason = reason.removesuffix(" - at `$.value`").replace("`$.value", f"`{self._name}")
        expected = inspect.formatannotation(self._annotation)
        return f"{self._title} must be {expected}, not {brief(value)}: {clean_text(reason, 500)}"


def _check_function(name: str, function: Callable[..., object]) -> None:
    inner = inspect.unwrap(function)
    if inspect.ismethod(inner) or isinstance(function, classmethod):
        raise TypeError(
            f"{name} is a bound method, and a payload cannot carry the object it belongs to: use a plain function or a "
            "staticmethod, and pass what identifies the object"
        )
    if not inspect.isfunction(inner):
        raise TypeError(f"{name} is not a function, and only a function can be a task: write one with def")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name} is a generator, and calling it would run nothing of it: remove the yield")
    first = next(iter(inner.__code__.co_varnames[: inner.__code__.co_argcount]), None)
    if first in ("self", "cls") and "." in inner.__qualname__.rpartition("<locals>.")[2]:
        raise TypeError(
            f"{name} is a method, and a payload cannot carry its {first!r}: put @staticmethod above the decorator, or "
            "use a plain function"
        )
    for parameter in _parameters(function):
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(
                f"{name}() takes *{parameter.name}, and arguments travel by name: take a list as one parameter"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(
                f"{name}() takes {parameter.name!r} by position only, and arguments travel by name: remove the '/'"
            )


def _check_annotation(title: str, annotation: Any) -> None:
    """Raise for what cannot be read back from JSON; a NameError when a class in it is not complete yet."""
    declared = f"{title} is annotated {inspect.formatannotation(annotation)}"
    try:
        info = msgspec.inspect.type_info(annotation)
    except TypeError as error:
        raise TypeError(f"{declared}, which cannot be read back from JSON: {error}") from error
    for node in _nodes(info, set()):
        kind = getattr(node, "cls", None)
        if hasattr(kind, "__mapper__") or hasattr(kind, "__table__"):
            raise TypeError(f"{declared}, and a mapped object belongs to its session: pass its primary key")
        if isinstance(node, msgspec.inspect.CustomType) and kind is not object and not _is_pydantic(kind):
            raise TypeError(
                f"{declared}, and {inspect.formatannotation(kind)} has no form in JSON: pass what identifies it, as "
                "text, numbers or a dataclass"
            )


def _nodes(info: object, seen: set[int]) -> Iterator[object]:
    """Yield each type within a type; a class may contain itself."""
    if isinstance(info, tuple):
        for item in info:
            yield from _nodes(item, seen)
    elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field) and id(info) not in seen:
        seen.add(id(info))
        yield info
        for name in info.__struct_fields__:
            yield from _nodes(getattr(info, name), seen)


def _parameters(function: Callable[..., object]) -> tuple[inspect.Parameter, ...]:
    if sys.version_info >= (3, 14):  # there it would evaluate annotations, and fail for what is defined later
        import annotationlib

        signature = inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    else:
        signature = inspect.signature(function)
    return tuple(signature.parameters.values())


def _annotations(function: Callable[..., object]) -> dict[str, Any]:
    """Return the parameters' types, names looked up; whether the return type can be is nobody's business here."""
    holder = types.SimpleNamespace(
        __annotations__={
            each.name: each.annotation for each in _parameters(function) if each.annotation is not each.empty
        }
    )
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(holder, globalns=names, include_extras=True)


def _binder(name: str, parameters: Iterable[inspect.Parameter]) -> Callable[..., dict[str, Any]]:
    """Return a function that takes what the task takes, and returns it by name.

    So Python binds, and words what does not fit: in 0.2 microseconds, where inspect.Signature.bind takes 2. It is made
    from source, as namedtuple's and dataclass's functions are; only parameters' names go into it.
    """
    takes: list[str] = []
    gives: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes.append(f"**{parameter.name}")
            gives.append(f"**{parameter.name}")
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in takes:
            takes.append("*")
        takes.append(parameter.name if parameter.default is parameter.empty else f"{parameter.name}=left_out")
        gives.append(f"{parameter.name!r}: {parameter.name}")
    source = f"lambda {', '.join(takes)}: {{{', '.join(gives)}}}"
    binder: Callable[..., dict[str, Any]] = eval(source, {"left_out": _LEFT_OUT})  # noqa: S307 - the docstring says why
    binder.__qualname__ = name
    return binder


def _kinds(annotation: Any) -> frozenset[type] | None:
    """Return the exact types that need no conversion, None for any; an empty set is always right, only slower."""
    if annotation is Any or annotation is object:
        return None
    if any(annotation is scalar for scalar in _SCALARS):
        return frozenset({annotation})
    if isinstance(annotation, typing.NewType):
        return _kinds(annotation.__supertype__)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [_kinds(member) for member in typing.get_args(annotation)]
        return None if None in members else frozenset(kind for kinds in members if kinds for kind in kinds)
    return frozenset()


def _to_json(value: object) -> object:
    """Return the value in JSON's types, equal values always the same."""
    try:
        return msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=_write_other)
    except TypeError:  # a set that cannot be sorted, for example of Enum members; or not for JSON at all
        return msgspec.to_builtins(_with_sets_sorted(value), str_keys=True, enc_hook=_write_other)


def _with_sets_sorted(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(_with_sets_sorted, value), key=lambda item: msgspec.json.encode(item, enc_hook=_write_other))
    if type(value) in (list, tuple):
        return [_with_sets_sorted(item) for item in value]
    if type(value) is dict:
        return {key: _with_sets_sorted(item) for key, item in value.items()}
    return value


def _write_other(value: Any) -> object:
    """Write what msgspec does not know itself."""
    for base, write in _WRITE_AS_BASE.items():
        if isinstance(value, base):
            return write(value)
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
    raise TypeError(f"{type(value).__qualname__} has no form in JSON")


def _read_other(kind: Any, value: object) -> object:
    """Read what msgspec does not know itself, which _check_annotation has let through."""
    if kind is object:
        return value
    # From JSON text, because pydantic's strict mode takes a datetime from a text only when it is JSON.
    return kind.model_validate_json(msgspec.json.encode(value))


def _is_pydantic(kind: object) -> bool:
    """Whether it is a model's class; if pydantic was never imported, nothing is."""
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return base is not None and isinstance(kind, type) and issubclass(kind, base)


def _alike(sent: Any, received: Any) -> bool:
    """Whether the task would receive what was sent."""
    if sent is received:
        return True
    kind = type(received)
    if kind is list or kind is tuple:
        return isinstance(sent, list | tuple) and len(sent) == len(received) and all(map(_alike, sent, received))
    if kind is dict:
        return (
            isinstance(sent, dict)
            and len(sent) == len(received)
            and all(key in sent and _alike(sent[key], value) for key, value in received.items())
        )
    allowed = {float: (float, int), set: (set, frozenset), frozenset: (set, frozenset)}.get(kind, kind)
    return isinstance(sent, allowed) and bool(sent == received)
