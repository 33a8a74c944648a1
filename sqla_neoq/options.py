"""What the command line's values mean: queues, durations, addresses.

Each function turns the text of a flag or an environment variable into a checked value, or raises ``ValueError`` with a
sentence that says what is wrong and what would be right.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqla_neoq.config import MIN_MEMORY
from sqla_neoq.dialects import engine_of
from sqla_neoq.newjob import checked_queue

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNITS: Final = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s|m|h|d|w|)", re.ASCII)
_SIZE: Final = re.compile(r"(\d{1,15}\.?\d{0,15}|\.\d{1,15})(?:([KMGT])I?)?B?", re.ASCII)
# A backslash takes away the meaning of the character after it.
_QUEUE_ITEM: Final = re.compile(r"(?:\\.|[^,\\])+", re.DOTALL)
_QUEUE: Final = re.compile(r"\s*((?:\\.|[^\\])*?)(?::(\d+))?\s*", re.DOTALL | re.ASCII)


def duration(text: str) -> timedelta:
    """Read seconds (``25``, ``0.5``), or a number with its unit: ``500ms``, ``30s``, ``5m``, ``12h``, ``7d``, ``2w``.

    Raises:
        ValueError: the text is none of these, or more than Python's timedelta can hold.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write seconds (25, 0.5) or a unit: 500ms, 30s, 5m, 12h, 7d, 2w")
    try:
        return timedelta(seconds=float(match[1]) * _UNITS[match[2]])
    except OverflowError:
        raise ValueError(f"{text!r} is longer than a duration can be; say none if you mean for ever") from None


def duration_or_none(text: str) -> timedelta | None:
    """Read a duration, or ``none``."""
    return None if text.strip().lower() == "none" else duration(text)


def size(text: str) -> int:
    """Read a size of memory with its unit, ``512M`` or ``1.5G`` (of 1,024 each); return it in bytes.

    Raises:
        ValueError: the text is none, or the size is less than any worker takes.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write one like 512M or 1.5G")
    size = int(float(match[1]) * 1024 ** "BKMGT".index(match[2] or "B"))
    if size < MIN_MEMORY:
        raise ValueError(f"{text!r} is {size} bytes, less than any worker takes; write a size like 512M or 1.5G")
    return size


def queues(texts: Iterable[str]) -> dict[str, int | None]:
    """Read queues and how many of their jobs may run at once: ``emails:10,default`` is 10 of emails, any of default.

    The last colon with digits after it starts the number. Names may hold any character: a backslash before a comma, a
    colon, a space at either end or another backslash makes it part of the name.

    Raises:
        ValueError: a name is none for a queue or comes twice, a number is 0, or the text ends in a lone backslash.
    """
    read: dict[str, int | None] = {}
    for text in texts:
        items = _QUEUE_ITEM.findall(text)
        if not items or ",".join(items) != text:
            raise ValueError(f"{text!r} is not a list of queues; write them like emails:10,default")
        for item in items:
            match = _QUEUE.fullmatch(item)
            name = re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL) if match else ""
            if match is None or not name.strip():
                raise ValueError(f"{text!r} names an empty queue; write queues like emails:10,default")
            if match[2] is not None and int(match[2]) < 1:
                raise ValueError(f"queue {name!r} would run 0 jobs at once; leave it out, or give it 1 or more")
            checked_queue(name)
            if name in read:
                raise ValueError(f"queue {name!r} is given twice")
            read[name] = int(match[2]) if match[2] else None
    return read


def database_url(text: str) -> str:
    """Return a URL of a database that the runner can use; it is not connected to.

    Raises:
        ConfigurationError: it is no such URL. The error does not repeat it, for it may hold a password.
    """
    engine_of(text, pool=False)
    return text


def address(text: str) -> tuple[str, int]:
    """Read ``[HOST:]PORT``; without a host, all addresses.

    Raises:
        ValueError: the port is no number from 0 to 65535.
    """
    host, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{text!r} is not a port; write 8080, or 127.0.0.1:8080 to listen on that address alone")
    return host.removeprefix("[").removesuffix("]"), int(port)
