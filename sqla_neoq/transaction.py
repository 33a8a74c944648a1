"""A run's own transaction: the session whose commit *is* the job's completion."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from sqla_neoq.claim import completion
from sqla_neoq.dialects import cancel_statement
from sqla_neoq.errors import ClaimLost, JobCancelled
from sqla_neoq.handles.alchemy import connection_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from sqla_neoq.context import ClaimedJob

log = logging.getLogger("sqla_neoq.jobs")


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
    )

    def __init__(
        self, make_session: Callable[[], Session] | None, options: dict[str, Any], *, delete: bool = False
    ) -> None:
        self._make_session = make_session
        self._options = options
        self._delete = delete
        self._session: Session | None = None
        self._driver_connection: Any = None
        self._lock: threading.Lock | None = None
        self._cancelled = False
        self._cancelling = False

    @property
    def used(self) -> bool:
        """Whether the task asked for the session."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session, opened now if need be.

        Raises:
            RuntimeError: in an ``async def`` task, or on an AUTOCOMMIT engine.
            JobCancelled: the run was asked to stop before it opened its session.
        """
        if self._session is None:
            if self._make_session is None:
                raise RuntimeError(
                    "job.session would block the event loop of an async def task; "
                    "make the task a plain def, or use a session of your own"
                )
            self._refuse_if_cancelled()
            session = self._make_session()
            # Connected at once, so that a timeout knows which connection's statement to cancel.
            connection = connection_of(session).connection
            if getattr(connection.dbapi_connection, "autocommit", False):
                session.close()
                raise RuntimeError(
                    "job.session is on an AUTOCOMMIT engine, where nothing commits together with the job's completion; "
                    "give the Runner an engine or a sessionmaker with transactions"
                )
            self._driver_connection = connection.driver_connection
            self._lock = threading.Lock()
            self._session = session
            # A task may roll back and go on: its next statement is on another connection, this one is another job's.
            event.listen(session, "after_begin", self._began)
            event.listen(session, "after_rollback", self._let_go)
            event.listen(session, "after_commit", self._let_go)
            # Once more: a cancel() of a moment ago found no connection to cancel.
            self._refuse_if_cancelled()
        return self._session

    def _began(self, _session: Session, _transaction: Any, connection: Connection) -> None:
        assert self._lock is not None
        with self._lock:
            self._driver_connection = connection.connection.driver_connection
        self._refuse_if_cancelled()

    def _let_go(self, session: Session) -> None:
        """The connection goes back to its pool; unless only a savepoint ended."""
        assert self._lock is not None
        if not session.in_nested_transaction():
            with self._lock:
                self._driver_connection = None

    def _refuse_if_cancelled(self) -> None:
        """Nobody asks a second time: a statement that begins after the cancellation would run to its end."""
        if self._cancelled:
            raise JobCancelled("this run was asked to stop before it opened its session")

    def complete(self, job: ClaimedJob) -> None:
        """Write the completion, fenced, and commit it together with the task's own work.

        Raises:
            ClaimLost: another owns the job; everything was rolled back.
        """
        session = self.session
        session.flush()
        statement, parameters = completion(job, delete=self._delete)
        lost = connection_of(session).execute(statement, parameters, execution_options=self._options).first()
        if lost is not None:
            raise ClaimLost(f"job {job.id} was taken from this run; its work was rolled back")
        session.commit()
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
