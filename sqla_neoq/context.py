"""What a running job knows of itself: the claimed row, its session, and whether it was asked to stop."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from sqla_neoq.errors import JobCancelled, JobTimeout, NoCurrentJob
from sqla_neoq.payloads import decode

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from sqla_neoq.handles import AsyncHandle, Handle


class ClaimedJob(NamedTuple):
    """One row as the claim returned it.

    The payload is still text, and times are still seconds since 1970: they are read by the thread that runs the job,
    if it asks for them.
    """

    id: int
    token: int
    queue: str
    task: str | None
    payload: str
    priority: int
    retries: int
    max_retries: int | None
    crashes: int
    run_after: float
    deadline: float | None
    created_at: float
    ran_at: float
    fingerprint: str | None


class StopReason(Enum):
    """Why a run is asked to stop."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    SHUTDOWN = "shutdown"
    LOST = "lost"


class Transaction(Protocol):
    """The database transaction of one run, opened on first use."""

    @property
    def session(self) -> Session:
        """The session whose commit is the job's completion."""
        ...

    @property
    def connection(self) -> Connection:
        """The connection under the session."""
        ...

    @property
    def driver_connection(self) -> psycopg.Connection[Any]:
        """The driver's connection under that."""
        ...

    def async_session(self) -> Awaitable[AsyncSession]:
        """The session of a coroutine."""
        ...

    def complete_in(self, handle: Handle, job: ClaimedJob, /) -> None:
        """Write the completion in another transaction."""
        ...

    def complete_in_async(self, handle: AsyncHandle, job: ClaimedJob, /) -> Awaitable[None]:
        """The same in a coroutine."""
        ...


class JobContext:
    """The job that is running, as its task or handler sees it.

    A handler gets it as its argument; a task asks for it with :func:`current_job`.
    """

    __slots__ = ("_claimed", "_payload", "_stop", "_transaction")

    def __init__(self, claimed: ClaimedJob, transaction: Transaction) -> None:
        self._claimed = claimed
        self._transaction = transaction
        self._payload: Any = _UNREAD
        # A plain attribute, set from another thread: an Event costs more to make than a small task takes to run.
        self._stop: StopReason | None = None

    def __repr__(self) -> str:
        return f"<JobContext id={self.id} task={self.task!r} queue={self.queue!r} attempt={self.attempt}>"

    @property
    def id(self) -> int:
        """The job's id."""
        return self._claimed.id

    @property
    def queue(self) -> str:
        """The queue it came from."""
        return self._claimed.queue

    @property
    def task(self) -> str | None:
        """The name of its task; None for a job that the queue's handler runs."""
        return self._claimed.task

    @property
    def payload(self) -> Any:
        """The payload, from JSON. Parsed on first use.

        Raises:
            ValueError: plain SQL stored a payload that Python cannot read.
        """
        if self._payload is _UNREAD:
            self._payload = decode(self._claimed.payload)
        return self._payload

    @property
    def attempt(self) -> int:
        """1 for the first attempt, 2 for the first retry, and so on."""
        return self._claimed.retries + 1

    @property
    def retries(self) -> int:
        """How many retries there have been, this one included."""
        return self._claimed.retries

    @property
    def max_retries(self) -> int | None:
        """How many there may be, as the row says; None leaves it to the task."""
        return self._claimed.max_retries

    @property
    def priority(self) -> int:
        """-100 to 100, higher runs first."""
        return self._claimed.priority

    @property
    def run_after(self) -> datetime:
        """When it was due."""
        return _moment(self._claimed.run_after)

    @property
    def deadline(self) -> datetime | None:
        """When it would no longer have been started."""
        deadline = self._claimed.deadline
        return None if deadline is None else _moment(deadline)

    @property
    def created_at(self) -> datetime:
        """When it was enqueued."""
        return _moment(self._claimed.created_at)

    @property
    def fingerprint(self) -> str | None:
        """What makes it unique among the unfinished jobs of its queue, if it is."""
        return self._claimed.fingerprint

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier claim.

        Pass it to systems outside the database that can refuse a lower one than they have seen.
        """
        return self._claimed.token

    @property
    def session(self) -> Session:
        """A SQLAlchemy session, opened on first use, that commits **together with the job's completion**.

        What is written through it happens exactly once: if the task fails, or this run has lost its job, it is rolled
        back. Do not commit it yourself; it belongs to the thread that runs the job.

        Raises:
            RuntimeError: in an ``async def`` task, which must not block the event loop.
        """
        return self._transaction.session

    @property
    def connection(self) -> Connection:
        """The SQLAlchemy Core connection of :attr:`session`, in the same transaction.

        It does not flush what the session has pending. Take it anew after a rollback, which may end on another one.

        Raises:
            RuntimeError: in an ``async def`` task, which must not block the event loop.
        """
        return self._transaction.connection

    @property
    def driver_connection(self) -> psycopg.Connection[Any]:
        """The psycopg connection under :attr:`connection`, in the same transaction, which has begun.

        For COPY, for pipelines, and for libraries that take a driver's connection. ``transaction()`` on it is a
        savepoint. Do not commit it.

        Raises:
            RuntimeError: in an ``async def`` task, which must not block the event loop.
        """
        return self._transaction.driver_connection

    def async_session(self) -> Awaitable[AsyncSession]:
        """Await it for what :attr:`session` is to a plain ``def``: an AsyncSession, with the same promise.

        Opened by the first call; every call of one run gives the same session. Let no two coroutines use it at once.

        Raises:
            RuntimeError: in a plain ``def``, or in a child process; or the runner has an Engine and no
                ``async_sessionmaker``.
        """
        return self._transaction.async_session()

    def complete(self, handle: Handle) -> None:
        """Complete the job in a transaction of your own: your commit is the completion.

        For work that goes through no SQLAlchemy session: Django's ``connection``, Peewee's database, a driver's
        connection, or whatever else :func:`sqla_neoq.enqueue` takes. What is written in that transaction happens
        exactly once. Let it be the last statement before the commit, and the commit the last that the task does: a
        task that fails after it has failed, but it will not run again.

        Raises:
            ClaimLost: another owns the job. Let it pass, so that your transaction is rolled back.
            RuntimeError: the handle is in no transaction, or ``job.session``, which does the same, is in use.
            TypeError: the handle is none that ``enqueue`` takes.
        """
        self._transaction.complete_in(handle, self._claimed)

    async def complete_async(self, handle: AsyncHandle) -> None:
        """The same in an ``async def`` task, for a handle that :func:`sqla_neoq.enqueue_async` takes."""
        await self._transaction.complete_in_async(handle, self._claimed)

    @property
    def cancelled(self) -> bool:
        """Whether the run was asked to stop: past its timeout, cancelled by somebody, or at a forced shutdown."""
        return self._stop is not None

    def raise_if_cancelled(self) -> None:
        """Stop here if the run was asked to stop; for long loops.

        Raises:
            JobTimeout: the run is past its timeout.
            JobCancelled: somebody cancelled the job, or the runner shuts down.
        """
        if self._stop is StopReason.TIMEOUT:
            raise JobTimeout(f"job {self.id} ran past its timeout")
        if self._stop is not None:
            raise JobCancelled(f"job {self.id} was asked to stop ({self._stop.value})")

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the run was asked to stop, if it was."""
        return self._stop

    def ask_to_stop(self, reason: StopReason) -> None:
        """Ask the run to stop; the first reason given stays. For the runner."""
        if self._stop is None:
            self._stop = reason


def _moment(epoch: float) -> datetime:
    try:
        return datetime.fromtimestamp(epoch, UTC)
    except (OverflowError, ValueError):
        # 'infinity', or a year that only PostgreSQL knows: whatever it is, it is further than Python can count.
        return datetime.max.replace(tzinfo=UTC) if epoch > 0 else datetime.min.replace(tzinfo=UTC)


_UNREAD: Final = object()
_current: ContextVar[JobContext] = ContextVar("neoq_current_job")

enter = _current.set
leave = _current.reset


def current_job() -> JobContext:
    """Return the job that this thread, or this asyncio task, is running.

    Raises:
        NoCurrentJob: none is.
    """
    try:
        return _current.get()
    except LookupError:
        raise NoCurrentJob(
            "current_job() was called outside a job; in a test, run the task through a Runner's drain()"
        ) from None
