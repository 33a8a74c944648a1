"""SQLAlchemy's handles: Session, scoped_session, Connection, and the asynchronous ones around them.

Statements go to ``session.connection()``, because ``session.execute()`` would flush the caller's pending objects first.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Connection

from sqla_neoq.handles.contract import AsyncJoined, Configured, Joined, Settings
from sqla_neoq.models import Base, Job

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, scoped_session

    from sqla_neoq.handles.contract import Plan, Query, Rows

T = TypeVar("T")

# For sessions that choose among several engines: by the class, as SQLAlchemy's own binds do, or by what is done, like
# those that read from replicas.
_CHOICE: Final[dict[str, Any]] = {"mapper": Job.__mapper__, "clause": Base.metadata.tables["neoq_jobs"].insert()}

PLAIN_CURSOR: Final[dict[str, Any]] = {"stream_results": False, "yield_per": None}
"""Options over those of the caller's connection: a server-side cursor to read large results declares no INSERT."""


class SqlalchemyHandle(Joined):
    """A Session, scoped_session or Connection. The engine's execution options are its settings."""

    def __init__(self, handle: Any, configured: Configured[Any] | None = None) -> None:
        self._handle = handle
        # A proxy of a Connection, as tracers make them, is one by its __class__.
        bind: Any = handle if isinstance(handle, Connection) else handle.get_bind(**_CHOICE)
        if bind.dialect.name != "postgresql":
            raise TypeError(
                f"session={handle!r}: expected one to PostgreSQL, where the jobs are, "
                f"got {handle.__class__.__name__} to {bind.dialect.name}"
            )
        options = bind.get_execution_options()
        settings = Settings(options.get("neoq_schema"), options.get("neoq_max_payload", Settings().max_payload))
        super().__init__(settings if configured is None else configured.over(settings))

    @cached_property
    def _connection(self) -> Connection:
        return connection_of(self._handle)

    def in_transaction(self) -> bool:
        """Whether the driver's connection is not in AUTOCOMMIT."""
        return not getattr(self._connection.connection.dbapi_connection, "autocommit", False)

    def rows(self, query: Query) -> Rows:
        """Run one query."""
        schema = self.settings.schema
        options = PLAIN_CURSOR if schema is None else {**PLAIN_CURSOR, "schema_translate_map": {None: schema}}
        return self._connection.execute(query.statement, query.parameters, execution_options=options).all()


class AsyncSqlalchemyHandle(AsyncJoined):
    """An AsyncSession or AsyncConnection: the plan runs on the synchronous one inside."""

    def __init__(self, handle: Any, configured: Configured[Any] | None = None) -> None:
        super().__init__(Settings())
        # An async_scoped_session has no run_sync of its own, but hands out its AsyncSession.
        self._handle = handle if hasattr(handle, "run_sync") else handle.registry()
        self._configured = configured

    def in_transaction(self) -> bool:
        """Not asked: the synchronous handle is."""
        raise NotImplementedError

    async def rows(self, query: Query) -> Rows:
        """Not asked: the synchronous handle is."""
        raise NotImplementedError

    async def perform(self, plan: Plan[T], *, warn: bool = False, must: str | None = None) -> T:
        """Run the plan in one greenlet."""

        def run(handle: Any) -> T:
            return SqlalchemyHandle(handle, self._configured).perform(plan, warn=warn, must=must)

        result: T = await self._handle.run_sync(run)
        return result


def connection_of(handle: Session | scoped_session[Any] | Connection) -> Connection:
    """Return the connection of the handle's open transaction, beginning one as the session would."""
    if isinstance(handle, Connection):
        return handle
    return handle.connection(bind_arguments={**_CHOICE})
