"""JSON in and out of a job: what a payload may be, its text, its fingerprint, and text made safe to store.

A payload is refused here, at the enqueue and with its path, when the database or the worker would choke on
it later. What is accepted reads back equal after a stay in a PostgreSQL ``jsonb`` column, with three things
that JSON cannot tell apart: a tuple comes back as a list, ``-0.0`` as ``0.0``, and a dict keeps no order.

Pure functions; nothing here knows SQLAlchemy or does I/O.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import hashlib
import math
import re
import reprlib
import sys
import uuid
from json.encoder import encode_basestring
from typing import Any, Final

import msgspec

__all__ = [
    "MAX_DEPTH",
    "MAX_INT_DIGITS",
    "MAX_PAYLOAD_BYTES",
    "brief",
    "canonical",
    "clean_text",
    "decode",
    "encode",
    "fingerprint",
]

MAX_PAYLOAD_BYTES: Final = 1024 * 1024
"""The default limit for a payload's JSON text, in bytes of UTF-8."""

MAX_DEPTH: Final = 100
"""How deep lists and dicts may be nested. Parsers count too: serde_json stops at 128, msgspec at the
interpreter's recursion limit (1,000 less what the caller's stack already uses)."""

MAX_INT_DIGITS: Final = 4300
"""How many characters an int may have: Python parses no more digits, and msgspec counts the sign.

PostgreSQL parses 131,072."""

# Types that need no look inside: msgspec checks strings, Python the length of ints, both in C.
_ATOMS = frozenset({str, int, bool, type(None)})

# From here on msgspec (like repr) writes an exponent, and jsonb turns 1e16 into the int 10000000000000000.
_WRITTEN_WITH_EXPONENT = 1e16

_LONG_NEGATIVE: Final = re.compile(rb"-[0-9]{%d}" % MAX_INT_DIGITS)

_write = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder().decode


class _Shortener(reprlib.Repr):
    """repr() with bounds, that does not raise for a huge int as repr() does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:
            return f"an int of about {int(x.bit_length() * math.log10(2)) + 1:,} digits"
        return super().repr_int(x, level)


_shortener = _Shortener()


def encode(value: object, *, limit: int = MAX_PAYLOAD_BYTES, name: str = "payload") -> str:
    """Return the JSON text of a value, for a ``jsonb`` column.

    Args:
        value: Dicts with str keys, lists, tuples, str, int, float, bool and None, and nothing else: a type
            that JSON does not know is never converted silently, and a subclass of these is another type.
        limit: The most bytes of UTF-8 the text may have.
        name: What error messages call the value.

    Raises:
        TypeError: A type other than these.
        ValueError: NaN or an infinity; a NUL character or a lone surrogate, in keys too; more than
            ``MAX_DEPTH`` levels, or a container inside itself; an int of more than ``MAX_INT_DIGITS``
            characters; a text over the limit.

    Every error gives the path, the value and the remedy. A small payload takes about 0.8 microseconds.
    """
    text = _encode(value, name)
    if len(text) > limit:
        raise ValueError(
            f"{name} is {len(text):,} bytes of JSON, over the limit of {limit:,}: "
            "keep the data in a table or a file and pass its key"
        )
    return text.decode()


def decode(text: str | bytes) -> Any:
    """Return the value of a JSON text: ints of up to ``MAX_INT_DIGITS`` digits stay exact.

    Plain SQL can store what ``encode`` refuses, so decode each job on its own: one bad payload must fail
    its own job, not the claim that brought it along with others.

    Raises:
        ValueError: Not JSON, or nested too deep, or a number too big for Python.
    """
    try:
        return _read(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"the payload cannot be read as JSON ({error}): {brief(text)}") from error


def canonical(value: object) -> str:
    """Return the one JSON text of all equal payloads: what PostgreSQL makes of the payload as ``jsonb``.

    So SQL has it as ``payload::text``. Shorter keys stand before longer ones, counted in bytes of UTF-8, and
    those of one length in the order of their bytes; a space follows each comma and colon; numbers have no
    exponent. It accepts and refuses what ``encode`` does, without the limit on size. Numbers are equal when
    their text is: ``1``, ``1.0`` and ``True`` are three different payloads.
    """
    _encode(value, "payload")  # only to refuse what it refuses
    return _as_jsonb(value)


def fingerprint(task: str | None, value: object) -> str:
    """Return the fingerprint of a job: 64 hexadecimal digits that equal jobs share.

    Hashed, with SHA-256, is the UTF-8 of the JSON list of the task's name and the payload, in canonical form:
    ``["myapp.tasks:send_welcome", {"user_id": 1}]``, or ``[null, {"message": "hello"}]`` for a job without a
    task. ``neoq_enqueue`` in SQL computes the same. The queue is not in it, because the unique index is on
    queue and fingerprint.
    """
    return hashlib.sha256(f"[{canonical(task)}, {canonical(value)}]".encode()).hexdigest()


def clean_text(text: str, limit: int) -> str:
    r"""Return a text that a database stores: for error messages and tracebacks.

    NUL and lone surrogates are replaced by what Python would write for them (``\x00``, ``\udc80``). A text
    over ``limit`` characters keeps its beginning and, twice as long, its end, where a traceback says most;
    between them stands how many characters were cut. The result is never longer than ``limit``.
    """
    text = text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
    if len(text) <= limit:
        return text
    keep = limit - len(_cut_mark(len(text)))
    if keep < 2:  # no room for both ends and the mark
        return text[:limit]
    head = keep // 3
    tail = keep - head
    return text[:head] + _cut_mark(len(text) - keep) + text[-tail:]


def brief(value: object) -> str:
    """Return a value's repr for an error message: on one line, at most 200 characters, and never raising."""
    return _bounded(" ".join(_shortener.repr(value).split()), 200)


def _bounded(text: str, limit: int) -> str:
    half = limit // 2 - 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def _cut_mark(count: int) -> str:
    return f"\n[... {count} characters cut ...]\n"


def _encode(value: object, name: str) -> bytes:
    """Two ways to one text: nearly every payload is plain, the other way finds what is wrong, and where."""
    if _is_plain(value, MAX_DEPTH):
        try:
            text: bytes = _write(value)
        except ValueError:  # a lone surrogate, or a huge int
            pass
        else:
            if b"\\u0000" not in text and not _may_hold_huge_int(text):
                return text
    checked: bytes = _write(_checked(value, name, ()))
    return checked


def _as_jsonb(value: Any) -> str:
    """Write what passed :func:`encode` as PostgreSQL writes it."""
    kind = type(value)
    if kind is str:
        return encode_basestring(value)
    if kind is dict:
        items = sorted((len(encoded := key.encode()), encoded, key) for key in value)
        return "{" + ", ".join([f"{encode_basestring(key)}: {_as_jsonb(value[key])}" for _, _, key in items]) + "}"
    if kind is list or kind is tuple:
        return "[" + ", ".join([_as_jsonb(item) for item in value]) + "]"
    if kind is float:
        return _float_as_jsonb(value)
    if kind is int:
        return str(value)
    return "null" if value is None else "true" if value else "false"


def _float_as_jsonb(value: float) -> str:
    text = repr(value or 0.0)  # numeric has no negative zero
    if "e" not in text:
        return text
    return f"{decimal.Decimal(text):f}{'.0' if abs(value) >= _WRITTEN_WITH_EXPONENT else ''}"


def _is_plain(value: Any, depth: int) -> bool:
    """Whether msgspec, which would convert more types than we want, writes all of this as it should.

    A leaf is tested in the loop over its container: a call for each takes twice as long (4 and 9 ms for 30,000).
    """
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return False
        items = value.values()
    elif kind is list or kind is tuple:
        items = value
    elif kind is float:
        return bool(-_WRITTEN_WITH_EXPONENT < value < _WRITTEN_WITH_EXPONENT)  # False for NaN as well
    else:
        return kind in _ATOMS
    if not depth:
        return False
    for item in items:  # noqa: SIM110 - the docstring says why
        if type(item) not in _ATOMS and not _is_plain(item, depth - 1):
            return False
    return True


def _may_hold_huge_int(text: bytes) -> bool:
    """Python itself refuses to write a huge int, unless the host application switched that off or it is negative."""
    if len(text) <= MAX_INT_DIGITS:
        return False
    return not 0 < sys.get_int_max_str_digits() <= MAX_INT_DIGITS or _LONG_NEGATIVE.search(text) is not None


def _checked(value: object, path: str, outer: tuple[int, ...]) -> object:
    """Return a copy that the encoder writes as it should, or raises for the first thing that cannot be.

    Args:
        value: What to look at.
        path: Where it stands, as Python would write it.
        outer: The ids of the containers around it.
    """
    kind = type(value)
    if isinstance(value, float) and kind is float:
        return _checked_float(value, path)
    if isinstance(value, str) and kind is str:
        _check_text(value, path)
    elif isinstance(value, int) and kind is int:
        _check_int(value, path)
    elif isinstance(value, dict | list | tuple) and kind in (dict, list, tuple):
        if id(value) in outer:
            raise ValueError(f"{path} contains itself, which JSON cannot hold: pass a copy without the loop")
        if len(outer) == MAX_DEPTH:
            raise ValueError(f"{_bounded(path, 80)} is nested over {MAX_DEPTH} levels deep: pass it flatter")
        outer = (*outer, id(value))
        if isinstance(value, dict):
            return {
                _checked_key(key, path): _checked(item, f"{path}[{brief(key)}]", outer) for key, item in value.items()
            }
        return [_checked(item, f"{path}[{index}]", outer) for index, item in enumerate(value)]
    elif kind not in _ATOMS:
        raise TypeError(
            f"{path} is {brief(value)}, and JSON has no {kind.__qualname__}: {_remedy(value)}, "
            "or annotate the task's parameter with the type, which converts it both ways"
        )
    return value


def _checked_key(key: object, path: str) -> str:
    if not isinstance(key, str) or type(key) is not str:
        raise TypeError(f"{path} has the key {brief(key)}, and JSON keys are str: pass str(key)")
    _check_text(key, f"the key {brief(key)} of {path}")
    return key


def _checked_float(value: float, path: str) -> object:
    if not math.isfinite(value):
        raise ValueError(f"{path} is {value}, which JSON cannot hold: pass None, or a text")
    if abs(value) < _WRITTEN_WITH_EXPONENT:
        return value
    # All digits and ".0": jsonb keeps the scale of a number, and so it stays a float.
    return msgspec.Raw(_float_as_jsonb(value).encode())


def _check_int(value: int, path: str) -> None:
    longest = MAX_INT_DIGITS - (value < 0)
    limit = min(longest, sys.get_int_max_str_digits() or longest)
    if value.bit_length() > 2_000 and abs(value) >= 10**limit:  # 640 digits is the lowest limit there is
        raise ValueError(f"{path} is {brief(value)}, and Python reads at most {limit:,} from a text: pass hex(value)")


def _check_text(value: str, path: str) -> None:
    if "\0" in value:
        raise ValueError(f"{path} has a NUL character at {value.index(chr(0))}, and jsonb has none: remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path} has the lone surrogate {value[error.start]!r} at {error.start}, which UTF-8 cannot "
            "hold: decode the bytes it came from with errors='replace'"
        ) from None


def _remedy(value: object) -> str:
    match value:
        case enum.Enum():
            return "pass its .value"
        case dt.date() | dt.time():
            return "pass its .isoformat()"
        case dt.timedelta():
            return "pass its .total_seconds()"
        case set() | frozenset():
            return "pass a sorted list"
        case bytes() | bytearray() | memoryview():
            return "pass text, or base64"
        case decimal.Decimal() | uuid.UUID():
            return "pass str() of it"
        case str() | int() | float() | dict() | list() | tuple():
            plain = next(kind for kind in (str, int, float, dict, list, tuple) if isinstance(value, kind))
            return f"pass {plain.__name__}() of it"
        case _:
            return "pass its key or its fields"
