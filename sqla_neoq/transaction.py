"""A run's own transaction: the session whose commit *is* the job's completion.

:class:`RunTransaction` is that of a thread, :class:`AsyncRunTransaction` that of a coroutine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqla_neoq.claim import completion
from sqla_neoq.dialects import async_twin, cancel_statement, fetch
from sqla_neoq.errors import ClaimLost, JobCancelled
from sqla_neoq.handles import Configured, Query, configure, join, join_async
from sqla_neoq.handles.alchemy import PLAIN_CURSOR, connection_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

    from sqla_neoq.context import ClaimedJob
    from sqla_neoq.handles import AsyncHandle, Handle, Steps

log = logging.getLogger("sqla_neoq.jobs")

_RUN: Final = "neoq_run"
"""Where a session's ``info`` has its run."""


def _refuse_autocommit(connection: Connection, name: str, remedy: str) -> None:
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise RuntimeError(
            f"{name} is on an AUTOCOMMIT engine, where nothing commits together with the job's completion; "
            f"give the Runner {remedy} with transactions"
        )


def _refuse_late(*, cancelled: bool) -> None:
    """Nobody asks a second time: a statement that begins after the cancellation would run to its end."""
    if cancelled:
        raise JobCancelled("this run was asked to stop before it opened its session")


def _commit(session: Session, job: ClaimedJob, options: dict[str, Any], *, delete: bool) -> None:
    session.flush()
    statement, parameters = completion(job, delete=delete)
    connection = connection_of(session)
    if isinstance(session, RunSession):
        try:
            lost = bool(fetch(connection, statement, parameters, options))
        except psycopg.Error as error:
            # As the same statement's error would look in any other session.
            raise DBAPIError.instance(None, None, error, psycopg.Error, dialect=connection.dialect) from error
    else:
        options = {**options, **PLAIN_CURSOR}
        lost = connection.execute(statement, parameters, execution_options=options).first() is not None
    if lost:
        raise ClaimLost(f"job {job.id} was taken from this run; its work was rolled back")
    session.commit()


H = TypeVar("H")

_IN_USE: Final = "job.session is in use, and its commit completes the job already; do the one or the other"
_COMPLETED: Final = "the job was completed in a transaction of the task's own; do the one or the other"
_NO_TRANSACTION: Final = (
    "job.complete() on a connection in AUTOCOMMIT: the completion would be there before the rest of your work; "
    "begin a transaction first, with atomic() or what your handle has"
)


def _completion_plan(job: ClaimedJob, *, delete: bool) -> Steps[None]:
    rows = yield Query(*completion(job, delete=delete))
    if rows:
        raise ClaimLost(f"job {job.id} was taken from this run; roll back what it wrote")


def _at_the_tables(handle: H, options: dict[str, Any]) -> H | Configured[H]:
    """Have the completion written where the runner has its tables, if the caller does not say where."""
    schema = options.get("schema_translate_map", {}).get(None)
    return handle if schema is None or isinstance(handle, Configured) else configure(handle, schema=schema)


class RunTransaction:
    """Opened on first use by the thread that runs the job; may be cancelled from another.

    The fence makes the work in it happen exactly once: the completion, ``WHERE status = 'running' AND claim_token =
    :token``, is the last statement before the commit. If it hits no row, this run is not the owner any more, and
    everything is rolled back.
    """

    __slots__ = (
        "_cancelled",
        "_cancelling",
        "_delete",
        "_driver_connection",
        "_lock",
        "_make_session",
        "_options",
        "_session",
        "joined",
    )

    def __init__(self, make_session: Callable[[], Session], options: dict[str, Any], *, delete: bool = False) -> None:
        self._make_session = make_session
        self._options = options
        self._delete = delete
        self._session: Session | None = None
        self._driver_connection: Any = None
        self._lock: threading.Lock | None = None
        self._cancelled = False
        self._cancelling = False
        self.joined = False

    @property
    def used(self) -> bool:
        """Whether the task asked for the session."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session, opened now if need be.

        Raises:
            RuntimeError: on an AUTOCOMMIT engine.
            JobCancelled: the run was asked to stop before it opened its session.
        """
        if self._session is None:
            if self.joined:
                raise RuntimeError(_COMPLETED)
            _refuse_late(cancelled=self._cancelled)
            session = self._make_session()
            # Connected at once, so that a timeout knows which connection's statement to cancel.
            connection = connection_of(session)
            try:
                _refuse_autocommit(connection, "job.session", "an engine or a sessionmaker")
            except RuntimeError:
                session.close()
                raise
            self._driver_connection = connection.connection.driver_connection
            self._lock = threading.Lock()
            self._session = session
            session.info[_RUN] = self
            if not isinstance(session, RunSession):
                _listen(session)
            # Once more: a cancel() of a moment ago found no connection to cancel.
            _refuse_late(cancelled=self._cancelled)
        return self._session

    @property
    def connection(self) -> Connection:
        """The connection that the session's transaction is on."""
        return connection_of(self.session)

    @property
    def driver_connection(self) -> psycopg.Connection[Any]:
        """The driver's connection under it, in the transaction."""
        connection = self.connection
        driver_connection: Any = connection.connection.driver_connection
        if driver_connection.info.transaction_status == TransactionStatus.IDLE:
            # SQLAlchemy has begun, and the server not yet: a first "with driver_connection.transaction()" would be no
            # savepoint then, and commit at its end.
            connection.exec_driver_sql("SELECT 1")
        return driver_connection  # type: ignore[no-any-return]  # SQLAlchemy does not know whose it is

    def async_session(self) -> NoReturn:
        """Refused: a thread has no event loop to wait on."""
        raise RuntimeError(
            "job.async_session() is for async def tasks on the runner's event loop; use job.session here"
        )

    def complete_in(self, handle: Handle, job: ClaimedJob, /) -> None:
        """Write the completion, fenced, in the handle's transaction, which is the caller's to commit."""
        if self.used:
            raise RuntimeError(_IN_USE)
        joined = join(_at_the_tables(handle, self._options), verb="job.complete")
        joined.perform(lambda _: _completion_plan(job, delete=self._delete), must=_NO_TRANSACTION)
        self.joined = True

    def complete_in_async(self, _handle: AsyncHandle, _job: ClaimedJob, /) -> NoReturn:
        """Refused: a thread has no event loop to wait on."""
        raise RuntimeError("job.complete_async() is for async def tasks; call job.complete() here")

    def began(self, connection: Connection) -> None:
        """The session's next transaction is on this connection."""
        assert self._lock is not None
        with self._lock:
            self._driver_connection = connection.connection.driver_connection
        _refuse_late(cancelled=self._cancelled)

    def let_go(self) -> None:
        """The session's connection goes back to its pool."""
        assert self._lock is not None
        with self._lock:
            self._driver_connection = None

    def complete(self, job: ClaimedJob) -> None:
        """Write the completion, fenced, and commit it together with the task's own work.

        Raises:
            ClaimLost: another owns the job; everything was rolled back.
        """
        _commit(self.session, job, self._options, delete=self._delete)
        self._close()

    def rollback(self) -> None:
        """Undo whatever the task wrote. Never raises: the task's own error is the one to tell."""
        if self._session is not None:
            try:
                self._close()
            except BaseException:  # the session's own events are the application's code, and may raise anything
                log.warning("a job's session could not be rolled back", exc_info=True)

    def cancel(self) -> None:
        """Have the statement cancelled that the session's connection is running; from any thread, which does not wait.

        If the session is not open yet, it will not be opened any more.
        """
        self._cancelled = True
        if self._lock is not None and self._driver_connection is not None and not self._cancelling:
            self._cancelling = True
            # To ask the server takes a connection, and 5 s when it does not answer. Whoever cancels has other runs to
            # look after, which may be late as well.
            threading.Thread(target=self._cancel, args=[self._lock], name="neoq-cancel", daemon=True).start()

    def _cancel(self, lock: threading.Lock) -> None:
        try:
            with lock:
                if self._driver_connection is not None:
                    cancel_statement(self._driver_connection)
        except Exception:
            log.warning("the statement of a timed-out job could not be cancelled", exc_info=True)
        finally:
            self._cancelling = False

    def _close(self) -> None:
        session, lock = self._session, self._lock
        assert session is not None
        assert lock is not None
        with lock:
            # From here on cancel() finds nothing to cancel: the connection may be another job's.
            self._driver_connection = None
            cancelled = self._cancelled
        if cancelled:
            # A cancellation may still be under way and would hit the connection's next user.
            session.invalidate()
        session.close()
        # An application's scoped session goes on after the run.
        session.info.pop(_RUN, None)


class RunSession(Session):
    """``job.session`` where the application does not make its own; its listeners are there once, not made for each."""


# A task may roll back and go on: its next statement is on another connection, and the one it had is another job's.


def _began(session: Session, _transaction: Any, connection: Connection) -> None:
    run = session.info.get(_RUN)
    if run is not None:
        run.began(connection)


def _let_go(session: Session) -> None:
    run = session.info.get(_RUN)
    # Unless only a savepoint ended.
    if run is not None and not session.in_nested_transaction():
        run.let_go()


def _listen(sessions: Session | type[Session]) -> None:
    event.listen(sessions, "after_begin", _began)
    event.listen(sessions, "after_rollback", _let_go)
    event.listen(sessions, "after_commit", _let_go)


_listen(RunSession)


class AsyncRunTransaction:
    """The same for a run on the event loop, which everything but ``cancel`` is called on."""

    __slots__ = ("_cancelled", "_delete", "_make_session", "_opening", "_options", "_session", "joined")

    def __init__(
        self, make_session: Callable[[], AsyncSession], options: dict[str, Any], *, delete: bool = False
    ) -> None:
        self._make_session = make_session
        self._options = options
        self._delete = delete
        self._session: AsyncSession | None = None
        self._opening: asyncio.Lock | None = None
        self._cancelled = False
        self.joined = False

    @property
    def used(self) -> bool:
        """Whether the task asked for the session."""
        return self._session is not None

    @property
    def session(self) -> NoReturn:
        """Refused, as are the connections: whoever waits for them waits with the whole loop."""
        raise RuntimeError(
            "job.session would block the event loop of an async def task; "
            "await job.async_session(), or make the task a plain def"
        )

    connection = session
    driver_connection = session

    def complete_in(self, _handle: Handle, _job: ClaimedJob, /) -> NoReturn:
        """Refused: whoever waits for the database waits with the whole loop."""
        raise RuntimeError("job.complete() would block the event loop of an async def task; await job.complete_async()")

    async def complete_in_async(self, handle: AsyncHandle, job: ClaimedJob, /) -> None:
        """Write the completion, fenced, in the handle's transaction, which is the caller's to commit."""
        if self.used:
            raise RuntimeError(_IN_USE)
        joined = join_async(_at_the_tables(handle, self._options), verb="job.complete")
        await joined.perform(lambda _: _completion_plan(job, delete=self._delete), must=_NO_TRANSACTION)
        self.joined = True

    async def async_session(self) -> AsyncSession:
        """The session, opened now if need be.

        Raises:
            RuntimeError: the runner has no asynchronous sessions, or they are on an AUTOCOMMIT engine.
            JobCancelled: the run was asked to stop before it opened its session.
        """
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:  # coroutines that the task gathers share one session, not the first of each
            if self._session is None:
                if self.joined:
                    raise RuntimeError(_COMPLETED)
                _refuse_late(cancelled=self._cancelled)
                session = self._make_session()
                try:
                    await session.run_sync(
                        lambda inner: _refuse_autocommit(
                            connection_of(inner), "job.async_session()", "an async_sessionmaker"
                        )
                    )
                except BaseException:
                    await _closed(session)
                    raise
                self._session = session
        return self._session

    async def complete(self, job: ClaimedJob) -> None:
        """Write the completion, fenced, and commit it together with the task's own work.

        Raises:
            ClaimLost: another owns the job; everything is rolled back by the one who catches it.
        """
        session = await self.async_session()
        await session.run_sync(_commit, job, self._options, delete=self._delete)
        await _closed(session)

    async def rollback(self) -> None:
        """Undo whatever the task wrote. Never raises: the task's own error is the one to tell."""
        if self._session is not None:
            await _closed(self._session)

    def cancel(self) -> None:
        """Open no session any more; from any thread. What the task waits for is cancelled with its coroutine."""
        self._cancelled = True


class AsyncSessions:
    """Makes the sessions of ``job.async_session()``; an engine of its own is there from the first use on.

    Args:
        make: the application's; then nothing here is closed but what it made.
        engine: otherwise, the engine whose database they are for.
        size: of the pool.
    """

    def __init__(self, make: Callable[[], AsyncSession] | None, engine: Engine, *, size: int) -> None:
        self._make = make
        self._engine = engine
        self._size = size
        self._twin: AsyncEngine | None = None

    def __call__(self) -> AsyncSession:
        """Return a new session.

        Raises:
            RuntimeError: the runner has an Engine, and no ``async_sessionmaker``.
        """
        if self._make is not None:
            return self._make()
        if self._twin is None:
            self._twin = async_twin(self._engine, size=self._size)
        if self._twin is None:
            raise RuntimeError(
                "job.async_session(): the runner was given an Engine, from which no asynchronous one can be made; "
                "pass Runner(..., async_sessionmaker=...) as well, or a URL instead"
            )
        from sqlalchemy.ext.asyncio import AsyncSession

        return AsyncSession(self._twin)

    async def dispose(self) -> None:
        """Close the connections of its own engine, on the loop that used them."""
        if self._twin is not None:
            await self._twin.dispose()


async def _closed(session: AsyncSession) -> None:
    """Close it, whatever happens: a cancellation that arrives here must not leave the connection in its transaction."""
    closing = asyncio.ensure_future(session.close())
    try:
        await asyncio.shield(closing)
    except BaseException:  # the session's own events are the application's code, and may raise anything
        log.warning("a job's session could not be closed", exc_info=True)
