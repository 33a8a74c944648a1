"""A job that is not in the database yet: every option checked before any I/O, and made what the INSERT takes."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypedDict

import msgspec

from sqla_neoq.models import (
    MAX_FINGERPRINT_LENGTH,
    MAX_PRIORITY,
    MAX_QUEUE_LENGTH,
    MAX_TASK_LENGTH,
    MIN_PRIORITY,
)
from sqla_neoq.payloads import encode
from sqla_neoq.payloads import fingerprint as fingerprint_of
from sqla_neoq.retries import checked_delay

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

_MOST_RETRIES: Final = 2**31 - 1


class Options(TypedDict, total=False):
    """What can be said of a job beside its payload; the meanings are those of :func:`sqla_neoq.enqueue`."""

    queue: str
    run_after: datetime | timedelta | None
    priority: int | None
    deadline: datetime | timedelta | None
    max_retries: int | None
    unique: bool
    fingerprint: str | None


class NewJob(msgspec.Struct, frozen=True, gc=False):
    """One job to enqueue, checked. Made by ``Task.job(...)`` or :meth:`of`, inserted by ``enqueue_many``."""

    # A struct, as it is made in a sixth of the 1.2 µs that a frozen dataclass takes, and a batch of them gives the
    # garbage collector nothing to look through.

    queue: str
    task: str | None
    payload: str
    priority: int = 0
    run_at: datetime | None = None
    run_in: float | None = None
    deadline_at: datetime | None = None
    deadline_in: float | None = None
    max_retries: int | None = None
    fingerprint: str | None = None

    @classmethod
    def of(
        cls,
        queue: str,
        payload: Any,
        *,
        task: str | None = None,
        run_after: datetime | timedelta | None = None,
        priority: int | None = None,
        deadline: datetime | timedelta | None = None,
        max_retries: int | None = None,
        unique: bool = False,
        fingerprint: str | None = None,
    ) -> Self:
        """Check everything; the options mean what they mean to :func:`sqla_neoq.enqueue`.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: a value that cannot be.
        """
        queue = checked_queue(queue)
        if task is not None:
            task = checked_text("task", task, MAX_TASK_LENGTH)
        if not isinstance(unique, bool):
            raise TypeError(f"unique={unique!r}: expected True or False; a key of your own goes into fingerprint=")
        # How large a payload may be is the engine's say, see insertion.
        text = encode(payload, limit=sys.maxsize)
        if fingerprint is not None:
            fingerprint = checked_text("fingerprint", fingerprint, MAX_FINGERPRINT_LENGTH)
        elif unique:
            fingerprint = fingerprint_of(task, payload)
        run_at, run_in = _moment("run_after", run_after)
        deadline_at, deadline_in = _moment("deadline", deadline)
        return cls(
            queue,
            task,
            text,
            checked_priority(priority),
            run_at,
            run_in,
            deadline_at,
            deadline_in,
            checked_retries(max_retries),
            fingerprint,
        )


def with_payload(job: NewJob, payload: Any) -> NewJob:
    """Return the same job with another payload, which alone is left to be checked.

    Raises:
        TypeError: a type that JSON does not have.
        ValueError: a value that JSON cannot hold.
    """
    return NewJob(
        job.queue,
        job.task,
        encode(payload, limit=sys.maxsize),
        job.priority,
        job.run_at,
        job.run_in,
        job.deadline_at,
        job.deadline_in,
        job.max_retries,
        job.fingerprint,
    )


def records(jobs: Iterable[NewJob]) -> str:
    """Return the JSON that :func:`sqla_neoq.statements.insert_jobs` takes: jobs alike and side by side in one object.

    What is None is left out.
    """
    runs = []
    for _, run in groupby(jobs, _ALL_BUT_THE_PAYLOAD):
        alike = list(run)
        # The payloads are JSON already; encoding them again would only cost.
        runs.append(f'{_head(alike[0])}"payloads":[{",".join([job.payload for job in alike])}]}}')
    return f"[{','.join(runs)}]"


_ALL_BUT_THE_PAYLOAD: Final = attrgetter(*(name for name in NewJob.__struct_fields__ if name != "payload"))


def _head(job: NewJob) -> str:
    head = _usual_head(job.queue, job.task, job.priority)
    plain = job.fingerprint is None and job.run_in is None and job.run_at is None
    if plain and job.deadline_in is None and job.deadline_at is None and job.max_retries is None:
        return head
    return head + _fields(
        run_at=None if job.run_at is None else job.run_at.isoformat(),
        run_in=job.run_in,
        deadline_at=None if job.deadline_at is None else job.deadline_at.isoformat(),
        deadline_in=job.deadline_in,
        max_retries=job.max_retries,
        fingerprint=job.fingerprint,
    )


@lru_cache(maxsize=256)
def _usual_head(queue: str, task: str | None, priority: int) -> str:
    # The same for most jobs. What the server need not parse it does not: ten members a record, most of them
    # null, took it a tenth longer than three, and Python four times as long.
    return "{" + _fields(queue=queue, task=task, priority=priority)


def _fields(**values: Any) -> str:
    """Write the members that are not None, each with a comma behind it."""
    given = {name: value for name, value in values.items() if value is not None}
    return encode(given, limit=sys.maxsize)[1:-1] + "," if given else ""


def checked_queue(queue: object, name: str = "queue") -> str:
    """Return a queue's name if it can be one: 1 to 128 characters of any kind but NUL."""
    return checked_text(name, queue, MAX_QUEUE_LENGTH)


def checked_text(name: str, value: object, longest: int) -> str:
    """Return ``value`` as a plain str if it is a text that PostgreSQL can store in that length."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: expected str, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name}={value!r}: cannot be empty")
    if len(value) > longest:
        raise ValueError(f"{name}={value[:40]!r}...: {len(value)} characters, the most are {longest}")
    if "\x00" in value:
        raise ValueError(f"{name}={value!r}: cannot hold a NUL character")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}={value!r}: cannot hold a lone surrogate") from None
    # A StrEnum's member, or what a template engine has marked as safe: its text, and not what its str() may say.
    return str.__str__(value)


def checked_priority(priority: object) -> int:
    """Return a priority if it is one: -100 to 100, higher runs first; None is 0."""
    if priority is None:
        return 0
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority={priority!r}: expected int, got {type(priority).__name__}")
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority={priority!r}: expected {MIN_PRIORITY} to {MAX_PRIORITY}; higher runs first")
    return int(priority)


def checked_retries(max_retries: object) -> int | None:
    """Return a number of retries if it is one; None leaves it to the task."""
    if max_retries is None:
        return None
    if isinstance(max_retries, bool) or not isinstance(max_retries, int):
        raise TypeError(f"max_retries={max_retries!r}: expected int or None, got {type(max_retries).__name__}")
    if not 0 <= max_retries <= _MOST_RETRIES:
        raise ValueError(f"max_retries={max_retries!r}: expected 0 (one attempt) to {_MOST_RETRIES}")
    return int(max_retries)


def _moment(name: str, value: object) -> tuple[datetime | None, float | None]:
    """Split a moment into an absolute time or a number of seconds from the database's now."""
    if value is None:
        return None, None
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise ValueError(
                f"{name}={value!r}: a naive datetime means another moment on every machine; "
                "give it a timezone, such as datetime.now(UTC) + ..., or pass a timedelta"
            )
        try:
            # PostgreSQL refuses offsets of more than 16 hours, and of fractions of a second.
            return value.astimezone(UTC), None
        except OverflowError:
            raise ValueError(f"{name}={value!r}: in UTC this is before the year 1 or after 9999") from None
    return None, checked_delay(name, value, what="an aware datetime or a timedelta").total_seconds()
