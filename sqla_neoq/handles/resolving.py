"""From what the caller passed as ``session`` to what can run a plan in its transaction.

By the names of its classes and their package, so that no framework is imported, and by ``__class__``, so that the
proxies of tracers and of request-local variables are taken for what they stand for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from sqla_neoq.handles.alchemy import AsyncSqlalchemyHandle, SqlalchemyHandle
from sqla_neoq.handles.contract import AsyncJoined, Configured, Joined, Settings
from sqla_neoq.handles.drivers import AsyncpgHandle, AsyncPsycopgHandle, Psycopg2Handle, PsycopgHandle
from sqla_neoq.handles.frameworks import AsyncPeeweeHandle, DjangoHandle, PeeweeHandle, TortoiseHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session


class Driver(Protocol):
    """A connection of a driver or a framework: psycopg, psycopg2, Django, Peewee."""

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """Return a cursor."""
        ...

    def commit(self) -> None:
        """Commit, here and now."""
        ...


class OfConnection(Protocol):
    """A cursor of such a connection."""

    @property
    def connection(self) -> Any:
        """The connection it belongs to."""
        ...

    def fetchone(self) -> Any:
        """Return a row."""
        ...


class Lender(Protocol):
    """A database of Pony, which lends its transaction's connection."""

    def get_connection(self) -> Any:
        """Return the connection."""
        ...


class AsyncDriver(Protocol):
    """A connection of asyncpg."""

    def is_in_transaction(self) -> bool:
        """Whether a transaction is open."""
        ...


class AsyncClient(Protocol):
    """What Tortoise's in_transaction() gives."""

    async def execute_query_dict(self, query: str, values: Any = None) -> Any:
        """Run a query."""
        ...


class AsyncDatabase(Protocol):
    """An asynchronous database of Peewee."""

    async def aexecute_sql(self, sql: str, params: Any = None) -> Any:
        """Run a query."""
        ...


class AsyncEngine(Protocol):
    """An engine of Piccolo."""

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        """Open a transaction."""
        ...


# By their shape, because a type checker cannot be asked to import every framework.
Handle: TypeAlias = (
    "Session | scoped_session[Any] | Connection | psycopg.Connection[Any] | psycopg.Cursor[Any] "
    "| Driver | OfConnection | Lender | Configured[Any]"
)
"""What can hold the caller's transaction in synchronous code."""
AsyncHandle: TypeAlias = (
    "AsyncSession | async_scoped_session[Any] | AsyncConnection | psycopg.AsyncConnection[Any] "
    "| psycopg.AsyncCursor[Any] | AsyncDriver | AsyncClient | AsyncDatabase | AsyncEngine | Configured[Any]"
)
"""What can hold it in asynchronous code."""

_Kinds: TypeAlias = "set[tuple[str, str]]"


def join(handle: Handle | None, *, verb: str = "enqueue", using: str | None = None) -> Joined:
    """Return what runs plans in the transaction of a handle of synchronous code. No I/O.

    Args:
        handle: what the caller passed as ``session``.
        verb: the public function that was called.
        using: the alias of one of Django's connections, instead of a handle.

    Raises:
        TypeError: it is no such handle; the message says which one would be.
    """
    handle, configured = _unwrapped(handle, using)
    kinds = _kinds(handle)
    if not _is_asynchronous(handle, kinds):
        for names, adapter in _SYNCHRONOUS:
            if kinds & names:
                return adapter(handle, configured)
    else:
        raise _refused(handle, _EXPECTED, f"; await {verb}_async() instead")
    raise _refused(handle, _EXPECTED, _remedy(kinds, "pass a Session, or a Connection from engine.begin()"))


def join_async(handle: AsyncHandle, *, verb: str = "enqueue") -> AsyncJoined:
    """Return what runs plans in the transaction of a handle of asynchronous code. No I/O.

    Raises:
        TypeError: it is no such handle; the message says which one would be.
    """
    handle, configured = _unwrapped(handle, None)
    kinds = _kinds(handle)
    for names, adapter in _ASYNCHRONOUS:
        if kinds & names:
            return adapter(handle, configured)
    if hasattr(handle, "run_sync"):
        return AsyncSqlalchemyHandle(handle, configured)
    if any(kinds & names for names, _ in _SYNCHRONOUS):
        raise _refused(handle, _EXPECTED_ASYNC, f"; in synchronous code call {verb}()")
    raise _refused(
        handle, _EXPECTED_ASYNC, _remedy(kinds, "pass an AsyncSession, or an AsyncConnection from engine.begin()")
    )


def _unwrapped(handle: Any, using: str | None) -> tuple[Any, Configured[Any] | None]:
    configured = handle if isinstance(handle, Configured) else None
    if configured is not None:
        handle = configured.handle
    if using is not None:
        if handle is not None:
            raise TypeError(f"using={using!r}: there is a session already; pass one or the other")
        handle = _django_connection(using)
    # Peewee's placeholder for a database that is chosen later.
    if ("peewee", "Proxy") in _kinds(handle) and handle.obj is not None:
        handle = handle.obj
    return handle, configured


def _django_connection(alias: str) -> Any:
    if not isinstance(alias, str):
        raise TypeError(f"using={alias!r}: expected the alias of a Django database, got {type(alias).__name__}")
    database = sys.modules.get("django.db")
    if database is None:
        raise TypeError(f"using={alias!r}: names one of Django's connections, and Django is not in use; pass a session")
    return database.connections[alias]


def _kinds(handle: Any) -> _Kinds:
    """Return the names of the handle's classes, each with its package."""
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in handle.__class__.__mro__}


def _is_asynchronous(handle: Any, kinds: _Kinds) -> bool:
    return hasattr(handle, "run_sync") or any(kinds & names for names, _ in _ASYNCHRONOUS)


def _settings(configured: Configured[Any] | None) -> Settings:
    return Settings() if configured is None else configured.over(Settings())


# Synchronous handles -------------------------------------------------------------------------------------------------


def _psycopg2(handle: Any, configured: Configured[Any] | None) -> Joined:
    return Psycopg2Handle(lambda: handle, _settings(configured))


def _django(handle: Any, configured: Configured[Any] | None) -> Joined:
    if handle.vendor != "postgresql":
        raise _refused(handle, _EXPECTED, f" to {handle.vendor}; the jobs are in PostgreSQL")
    return DjangoHandle(handle, _settings(configured))


def _peewee(handle: Any, configured: Configured[Any] | None) -> Joined:
    if ("peewee", "PostgresqlDatabase") not in _kinds(handle):
        raise _refused(handle, _EXPECTED, "; of Peewee's databases only PostgresqlDatabase can be joined")
    return PeeweeHandle(handle, _settings(configured))


def _pony(handle: Any, configured: Configured[Any] | None) -> Joined:
    if getattr(handle.provider, "dialect", None) != "PostgreSQL":
        raise _refused(handle, _EXPECTED, " that is not bound to PostgreSQL")
    # Begins the transaction if nothing else has; outside db_session it raises Pony's own error.
    return Psycopg2Handle(handle.get_connection, _settings(configured))


_SYNCHRONOUS: Final[list[tuple[_Kinds, Callable[[Any, Configured[Any] | None], Joined]]]] = [
    ({("sqlalchemy", "scoped_session"), ("sqlalchemy", "Session"), ("sqlalchemy", "Connection")}, SqlalchemyHandle),
    ({("psycopg", "Connection")}, lambda handle, configured: PsycopgHandle(handle, _settings(configured))),
    ({("psycopg", "Cursor")}, lambda handle, configured: PsycopgHandle(handle.connection, _settings(configured))),
    ({("psycopg2", "connection")}, _psycopg2),
    ({("psycopg2", "cursor")}, lambda handle, configured: _psycopg2(handle.connection, configured)),
    ({("django", "ConnectionProxy"), ("django", "BaseDatabaseWrapper")}, _django),
    ({("django", "CursorWrapper")}, lambda handle, configured: _django(handle.db, configured)),
    ({("peewee", "Database")}, _peewee),
    ({("pony", "Database")}, _pony),
]


# Asynchronous handles ------------------------------------------------------------------------------------------------


def _asyncpg(handle: Any, configured: Configured[Any] | None) -> AsyncJoined:
    return AsyncpgHandle(handle, _settings(configured))


def _tortoise(handle: Any, configured: Configured[Any] | None) -> AsyncJoined:
    kinds = _kinds(handle)
    if ("tortoise", "AsyncpgDBClient") in kinds:
        return TortoiseHandle(handle, _settings(configured), "numeric_dollar")
    if ("tortoise", "PsycopgClient") in kinds:
        return TortoiseHandle(handle, _settings(configured), "format")
    raise _refused(handle, _EXPECTED_ASYNC, " to another database; the jobs are in PostgreSQL")


def _piccolo(handle: Any, configured: Configured[Any] | None) -> AsyncJoined:
    transaction = handle.current_transaction.get()
    if transaction is None:
        raise _refused(handle, _EXPECTED_ASYNC, " outside a transaction; use async with engine.transaction()")
    return _asyncpg(transaction.connection, configured)


_ASYNCHRONOUS: Final[list[tuple[_Kinds, Callable[[Any, Configured[Any] | None], AsyncJoined]]]] = [
    (
        {("sqlalchemy", "async_scoped_session"), ("sqlalchemy", "AsyncSession"), ("sqlalchemy", "AsyncConnection")},
        AsyncSqlalchemyHandle,
    ),
    ({("psycopg", "AsyncConnection")}, lambda handle, configured: AsyncPsycopgHandle(handle, _settings(configured))),
    (
        {("psycopg", "AsyncCursor")},
        lambda handle, configured: AsyncPsycopgHandle(handle.connection, _settings(configured)),
    ),
    ({("asyncpg", "Connection"), ("asyncpg", "PoolConnectionProxy")}, _asyncpg),
    # Its asynchronous databases are synchronous ones as well, by descent.
    (
        {("playhouse", "AsyncPostgresqlDatabase")},
        lambda handle, configured: AsyncPeeweeHandle(handle, _settings(configured)),
    ),
    ({("tortoise", "TransactionWrapper")}, _tortoise),
    ({("piccolo", "PostgresTransaction")}, lambda handle, configured: _asyncpg(handle.connection, configured)),
    ({("piccolo", "PostgresEngine")}, _piccolo),
]


# Handles that are none -----------------------------------------------------------------------------------------------

_EXPECTED: Final = "expected a Session, a connection or another handle that holds a transaction"
_EXPECTED_ASYNC: Final = "expected an AsyncSession, an async connection or another handle that holds a transaction"
_NO_TRANSACTION: Final = ", which has no transaction to join; "
_FROM_POOL: Final = f"{_NO_TRANSACTION}pass a connection that the pool lends, in a transaction"
_REMEDIES: Final[list[tuple[_Kinds, str]]] = [
    (
        {("sqlalchemy", "sessionmaker"), ("sqlalchemy", "async_sessionmaker")},
        "; call it, and pass the session it makes",
    ),
    ({("asyncpg", "Pool"), ("psycopg_pool", "BasePool"), ("psycopg2", "AbstractConnectionPool")}, _FROM_POOL),
    ({("django", "BaseConnectionHandler")}, '; pass one of them, such as connections["default"]'),
    (
        {("tortoise", "BaseDBAsyncClient")},
        f"{_NO_TRANSACTION}pass what async with in_transaction() as connection gives",
    ),
    ({("flask_sqlalchemy", "SQLAlchemy")}, "; pass its session, db.session"),
    ({("psycopg", "Transaction"), ("psycopg", "AsyncTransaction")}, "; pass its connection"),
    ({("peewee", "Proxy")}, "; initialize it with a database first"),
]


def _remedy(kinds: _Kinds, better: str) -> str:
    if kinds & {("sqlalchemy", "Engine"), ("sqlalchemy", "AsyncEngine")}:
        return f"{_NO_TRANSACTION}{better}"
    return next((remedy for names, remedy in _REMEDIES if kinds & names), "")


def _refused(handle: Any, expected: str, remedy: str) -> TypeError:
    return TypeError(f"session={handle!r}: {expected}, got {handle.__class__.__name__}{remedy}")
