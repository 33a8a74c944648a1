"""What depends on the database, in one place: connections as the runner needs them, and how to cut one off."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import URL, Connection, Engine, create_engine, make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from sqla_neoq.checkout import ask_the_doubtful
from sqla_neoq.errors import ConfigurationError
from sqla_neoq.migrations.quoting import qualifier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import ClauseElement, PoolProxiedConnection
    from sqlalchemy.ext.asyncio import AsyncEngine

DATABASE_ERRORS: Final = (SQLAlchemyError, psycopg.Error, OSError)
"""What a call to the database can raise; a service waits and tries again."""

# Settings of the runner's own connections, which leave the pool before they get them.
_SETTINGS: Final = {
    # Every claim is the same few index look-ups. Planned anew it takes 1.3 ms, as a generic plan 0.2 ms; and the JIT
    # compiler, if the statistics talk the planner into it, 700 ms.
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    # Nothing the runner asks reads the whole jobs table. A planner without statistics would, to prune it: 1,200 pages
    # where the BRIN index leads to 128.
    "enable_seqscan": "off",
    "TimeZone": "UTC",
    "default_transaction_isolation": "read committed",
    # Each is far above what a statement here can take, and bounds what a stuck server can do.
    "statement_timeout": "60s",
    # Short: somebody's open transaction may hold the row of a job that ends here (cancel() does, until it commits), and
    # no other job shall wait for that. What is blocked is set aside and tried again.
    "lock_timeout": "200ms",
    "idle_in_transaction_session_timeout": "60s",
}

# A link that is cut without a word is noticed in about half a minute.
_TCP: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

_COMMITTED: Final = "READ COMMITTED"
_FROM_URL: Final = "neoq_from_url"
"""The execution option that marks engines of which the URL tells all."""


class Dialect(Protocol):
    """What the runner asks of a database beyond SQL."""

    def connect(self, engine: Engine, name: str) -> Connection:
        """Open a connection of the runner's own, outside the engine's pool, in autocommit."""
        ...

    def listening_connection(self, engine: Engine, url: str | None, name: str) -> Any:
        """Open a driver connection for LISTEN, outside the engine's pool."""
        ...

    def table_name(self, schema: str | None) -> str:
        """Return the jobs table's name as SQL writes it."""
        ...


class PostgresDialect:
    """PostgreSQL through psycopg 3."""

    def connect(self, engine: Engine, name: str) -> Connection:
        """Open a connection of the runner's own, outside the engine's pool, in autocommit."""
        connection = Connection(engine, connection=_apart(engine))
        try:
            connection = connection.execution_options(
                isolation_level="AUTOCOMMIT",
                # The application's engine may read with server-side cursors, and those need a transaction.
                stream_results=False,
                yield_per=None,
            )
            connection.detach()
            settings = {**_SETTINGS, "application_name": f"sqla_neoq {name}"[:63]}
            # Each under a name of its own: the application's row factory may make named tuples.
            calls = ", ".join(f"set_config('{key}', %({key})s, false) AS \"{key}\"" for key in settings)
            connection.exec_driver_sql(f"SELECT {calls}", settings)
        except BaseException:
            connection.close()
            raise
        return connection

    def listening_connection(self, engine: Engine, url: str | None, name: str) -> psycopg.Connection[Any]:
        """Open a driver connection for LISTEN, outside the engine's pool.

        Through the engine, so that its ``creator``, ``connect_args`` and ``do_connect`` hooks (tokens) apply; from
        ``url`` when the engine leads to a pooler, behind which LISTEN hears nothing.
        """
        if url is not None:
            other = engine_of(url, pool=False)
            connection = other.raw_connection()
        else:
            connection = _apart(engine)
        driver_connection: psycopg.Connection[Any] | None = connection.driver_connection
        assert driver_connection is not None
        # Without detach() both autocommit and the LISTEN would leak into the pool.
        connection.detach()
        try:
            driver_connection.autocommit = True
            driver_connection.execute(
                "SELECT set_config('application_name', %s, false) AS name, "
                "set_config('lock_timeout', '20s', false) AS wait",
                [f"sqla_neoq {name} listen"[:63]],
            )
        except BaseException:
            driver_connection.close()
            raise
        return driver_connection

    def table_name(self, schema: str | None) -> str:
        """Return the jobs table's name as SQL writes it."""
        return f"{qualifier(schema)}neoq_jobs"


def _apart(engine: Engine) -> PoolProxiedConnection:
    """Open a connection as the engine's pool would, without waiting for a place in it.

    The runner's connections leave the pool before they are used, but to open one takes a place for a moment. When jobs
    hold all of them, a heartbeat that has to connect again would wait for one to end, and be taken for dead meanwhile.
    A pool of the same making has the same creator, arguments and events, and all of its places are free.

    Raises:
        DBAPIError: as ``engine.connect()`` does; a pool by itself lets the driver's own error through.
    """
    try:
        return engine.pool.recreate().connect()
    except psycopg.Error as error:
        raise DBAPIError.instance(None, None, error, psycopg.Error, dialect=engine.dialect) from error


def dialect_of(engine: Engine) -> Dialect:
    """Return the dialect of an engine.

    Raises:
        ConfigurationError: the runner does not work on such an engine.
    """
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(f"database={engine!r}: the runner works on PostgreSQL, not on {engine.dialect.name}")
    if engine.dialect.driver != "psycopg" or engine.dialect.is_async:
        raise ConfigurationError(
            f"database={engine!r}: the runner needs a synchronous engine on psycopg, not {engine.dialect.driver}; "
            "give it a postgresql+psycopg:// URL of its own"
        )
    return PostgresDialect()


def engine_of(database: str | URL, *, pool: bool = True, size: int = 5) -> Engine:
    """Make an engine from a URL; ``postgres://`` and ``postgresql://`` mean psycopg.

    Raises:
        ConfigurationError: it is no URL, or one of a database that cannot be.
    """
    try:
        url = make_url(database)
    except (ArgumentError, ValueError, TypeError):
        raise ConfigurationError(
            "database: this is not a database URL; write one like postgresql://user:password@host:5432/name"
        ) from None
    if url.drivername in {"postgres", "postgresql"}:
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername != "postgresql+psycopg":
        raise ConfigurationError(
            f"database: the runner works on postgresql:// and postgresql+psycopg:// URLs, not {url.drivername}://"
        )
    connect_args, options = _connect_args(url), {_FROM_URL: True}
    if not pool:
        return create_engine(
            url,
            poolclass=NullPool,
            isolation_level=_COMMITTED,
            connect_args=connect_args,
            execution_options=options,
        )
    # READ COMMITTED once a connection: as an execution option it is set and reset around every transaction.
    engine = create_engine(
        url,
        pool_size=size,
        max_overflow=5,
        isolation_level=_COMMITTED,
        connect_args=connect_args,
        execution_options=options,
    )
    ask_the_doubtful(engine)
    return engine


def read_committed(engine: Engine) -> Engine:
    """Return the engine in READ COMMITTED, whatever its default: in SERIALIZABLE, completions would fail each other."""
    if _FROM_URL in engine.get_execution_options():
        return engine
    return engine.execution_options(isolation_level=_COMMITTED)


def async_twin(engine: Engine, *, size: int) -> AsyncEngine | None:
    """Make an asynchronous engine like one that :func:`engine_of` made, with its execution options.

    None for any other: how it connects (``creator``, ``connect_args``, hooks that fetch tokens) cannot be taken over.
    """
    from sqlalchemy.ext.asyncio import create_async_engine

    options, url = engine.get_execution_options(), engine.url
    if _FROM_URL not in options:
        return None
    twin = create_async_engine(
        url,
        pool_size=size,
        max_overflow=5,
        pool_pre_ping=True,
        isolation_level=_COMMITTED,
        connect_args=_connect_args(url),
    )
    return twin.execution_options(**options)


def _connect_args(url: URL) -> dict[str, Any]:
    # What the URL says itself goes first.
    return {key: value for key, value in _TCP.items() if key not in url.query}


def schema_of(engine: Engine) -> str | None:
    """Return the schema that an engine's options name for the tables; None leaves it to the search path.

    ``neoq_schema``, or what the application's own ``schema_translate_map`` says of tables without a schema: by that
    SQLAlchemy sends what is enqueued there, so whoever looks for it must look there too.
    """
    options = engine.get_execution_options()
    schema: str | None = options.get("neoq_schema") or (options.get("schema_translate_map") or {}).get(None)
    return schema


def fetch(
    connection: Connection,
    statement: ClauseElement,
    parameters: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    meanwhile: Callable[[], object] | None = None,
) -> list[tuple[Any, ...]]:
    """Run a statement on the driver's own cursor, and return its rows as tuples.

    The connection is in autocommit, or its transaction was begun: nothing here begins one for SQLAlchemy to commit. For
    claims, whose rows are read a thousand at a time: SQLAlchemy's rows and the text format take 5 us of the
    dispatcher's thread for each, this way it is 1.5. Errors are the driver's, not wrapped.

    ``meanwhile`` is called once the statement was sent, and before its answer is awaited.
    """
    sql, defaults = _compiled(statement, options.get("schema_translate_map", {}).get(None))
    # Not driver_connection, which a connection that has left its pool no longer knows.
    driver_connection: Any = connection.connection.dbapi_connection
    with driver_connection.cursor(row_factory=tuple_row) as cursor:
        # The application's cursor_factory may be one that binds on the client, and those cannot read the binary format.
        binary = not isinstance(cursor, psycopg.ClientCursor)
        # A pipeline only sends what it is given; the server begins at once, and its answer is collected at the end.
        pipeline = psycopg.Pipeline.is_supported() and meanwhile is not None
        with driver_connection.pipeline() if pipeline else nullcontext():
            cursor.execute(sql, {**defaults, **parameters}, prepare=True, binary=binary)
            if meanwhile is not None:
                meanwhile()
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


@lru_cache(maxsize=64)
def _compiled(statement: ClauseElement, schema: str | None) -> tuple[str, dict[str, Any]]:
    dialect: Any = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy's own is not annotated
    if schema is None:
        compiled = statement.compile(dialect=dialect)
    else:
        compiled = statement.compile(dialect=dialect, schema_translate_map={None: schema}, render_schema_translate=True)
    return str(compiled), dict(compiled.params)


def cancel_statement(driver_connection: Any) -> None:
    """Cancel the statement that a connection is running, if it is running one; from another thread."""
    if driver_connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
        driver_connection.cancel_safe(timeout=5.0)


def is_locked(error: BaseException) -> bool:
    """Whether the error says that somebody else held a lock for too long."""
    return isinstance(getattr(error, "orig", error), psycopg.errors.LockNotAvailable)


def is_missing(error: BaseException) -> bool:
    """Whether the database lacks what the statement names: a table, a column, the right to use it."""
    return isinstance(getattr(error, "orig", error), psycopg.ProgrammingError)


def is_refusal(error: BaseException) -> bool:
    """Whether the server refused what it was given: a value, a constraint, a trigger's own objection.

    Another try would be refused as well, unlike after a lost connection, a shortage or a serialization failure.
    """
    state = getattr(getattr(error, "orig", error), "sqlstate", None) or ""
    return state[:2] in {"22", "23", "44", "P0"}


def cut(driver_connection: Any) -> None:
    """Break a connection from another thread, so that whoever waits on it gets an error at once."""
    try:
        copy = socket.socket(fileno=os.dup(driver_connection.fileno()))
    except Exception:  # noqa: BLE001 - it is broken already
        return
    try:
        copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        copy.close()
