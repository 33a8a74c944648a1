"""Every handle that can be passed as ``session``, behind one face, so that one suite holds for all of them.

Each kind opens a :class:`Caller` at a database's URL. The suite is written as coroutines: those of asynchronous kinds
run on an event loop, those of synchronous ones are driven without one, for Django refuses to work inside of one.
"""

import asyncio
import importlib
import json
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.pool import NullPool

import sqla_neoq
from sqla_neoq import configure
from sqla_neoq.handles import Configured
from support.servers import libpq


class Undo(Exception):
    """Leaves a transaction's block so that it is rolled back."""


@dataclass
class Caller:
    """An application in the middle of its work.

    Attributes:
        is_async: whether its verbs are those of asynchronous code.
        transaction: opens a transaction and yields the handle; an exception rolls it back.
        savepoint: the same for a savepoint within it.
        execute: runs a statement of the application's own on the handle.
    """

    is_async: bool
    transaction: Callable[[], AbstractAsyncContextManager[Any]]
    savepoint: Callable[[Any], AbstractAsyncContextManager[Any]]
    execute: Callable[[Any, str], Any]

    async def call(self, verb: str, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``sqla_neoq.enqueue`` or another verb, or its asynchronous form."""
        if self.is_async:
            return await getattr(sqla_neoq, f"{verb}_async")(handle, *args, **kwargs)
        return getattr(sqla_neoq, verb)(handle, *args, **kwargs)

    async def run(self, handle: Any, statement: str) -> None:
        """Run a statement of the application's own."""
        result = self.execute(handle, statement)
        if self.is_async:
            await result


@dataclass
class Kind:
    """A kind of handle."""

    name: str
    open: Callable[[URL], AbstractAsyncContextManager[Caller]]
    is_async: bool

    def drive(self, url: URL, work: Callable[[Caller], Any]) -> Any:
        """Open a caller and run ``work(caller)`` to its end."""

        async def all_of_it() -> Any:
            async with self.open(url) as caller:
                return await work(caller)

        if self.is_async:
            return asyncio.run(all_of_it())
        try:
            all_of_it().send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("something synchronous awaited")


KINDS: list[Kind] = []


def kind(function: Callable[[URL], AsyncIterator[Caller]]) -> Callable[[URL], AsyncIterator[Caller]]:
    """Register a kind; those of asynchronous code are called ``async_...``."""
    name = function.__name__
    KINDS.append(Kind(name, asynccontextmanager(function), name.startswith("async_")))
    return function


def asynchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make of a context manager the asynchronous one that the suite enters."""

    @asynccontextmanager
    async def entered(*args: Any) -> AsyncIterator[Any]:
        with function(*args) as value:
            yield value

    return entered


# SQLAlchemy ----------------------------------------------------------------------------------------------------------


def sessions(make: Callable[[], Any], execute: Callable[..., Any] | None = None) -> Caller:
    @contextmanager
    def transaction():
        session = make()
        try:
            yield session
            session.commit()
        except BaseException:
            session.rollback()
            raise
        finally:
            session.close()

    return Caller(
        False,
        asynchronous(transaction),
        asynchronous(lambda session: session.begin_nested()),
        execute or (lambda session, statement: session.execute(text(statement))),
    )


@contextmanager
def engine_at(url, **options):
    engine = create_engine(url, poolclass=NullPool, **options)
    yield engine
    engine.dispose()


@kind
async def sqlalchemy_session(url):
    from sqlalchemy.orm import Session

    with engine_at(url) as engine:
        yield sessions(lambda: Session(engine))


@kind
async def sqlalchemy_scoped_session(url):
    from sqlalchemy.orm import scoped_session, sessionmaker

    with engine_at(url) as engine:
        session = scoped_session(sessionmaker(engine))
        yield sessions(lambda: session)
        session.remove()


@kind
async def sqlalchemy_connection(url):
    with engine_at(url) as engine:
        yield sessions(engine.connect)


@kind
async def sqlalchemy_connection_on_psycopg2(url):
    with engine_at(url.set(drivername="postgresql+psycopg2")) as engine:
        yield sessions(engine.connect)


@kind
async def sqlmodel_session(url):
    import sqlmodel
    from sqlalchemy.orm import Session

    with engine_at(url) as engine:
        yield sessions(
            lambda: sqlmodel.Session(engine), lambda session, statement: Session.execute(session, text(statement))
        )


@kind
async def flask_sqlalchemy_session(url):
    import flask
    import flask_sqlalchemy

    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    db = flask_sqlalchemy.SQLAlchemy(app)
    with app.app_context():
        yield sessions(lambda: db.session)
        db.session.remove()
        db.engine.dispose()


def advanced_alchemy_config():
    with warnings.catch_warnings():
        # It uses what SQLAlchemy 2.1 deprecates.
        warnings.simplefilter("ignore")
        return importlib.import_module("advanced_alchemy.config")


@kind
async def advanced_alchemy_session(url):
    SQLAlchemySyncConfig = advanced_alchemy_config().SQLAlchemySyncConfig
    config = SQLAlchemySyncConfig(connection_string=url.render_as_string(hide_password=False))
    maker = config.create_session_maker()
    yield sessions(maker)
    config.get_engine().dispose()


@asynccontextmanager
async def async_engine_at(url, driver):
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url.set(drivername=f"postgresql+{driver}"), poolclass=NullPool)
    yield engine
    await engine.dispose()


def async_sessions(make):
    @asynccontextmanager
    async def transaction():
        async with make() as session, session.begin():
            yield session

    return Caller(
        True,
        transaction,
        lambda session: session.begin_nested(),
        lambda session, statement: session.execute(text(statement)),
    )


@kind
async def async_session_on_psycopg(url):
    from sqlalchemy.ext.asyncio import AsyncSession

    async with async_engine_at(url, "psycopg") as engine:
        yield async_sessions(lambda: AsyncSession(engine))


@kind
async def async_session_on_asyncpg(url):
    from sqlalchemy.ext.asyncio import AsyncSession

    async with async_engine_at(url, "asyncpg") as engine:
        yield async_sessions(lambda: AsyncSession(engine))


@kind
async def async_connection(url):
    async with async_engine_at(url, "psycopg") as engine:
        yield async_sessions(engine.connect)


@kind
async def async_scoped_session(url):
    from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker

    async with async_engine_at(url, "asyncpg") as engine:
        session = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)

        @asynccontextmanager
        async def transaction():
            async with session.begin():
                yield session

        caller = async_sessions(None)
        caller.transaction = transaction
        yield caller
        await session.remove()


@kind
async def async_sqlmodel_session(url):
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelSession

    async with async_engine_at(url, "asyncpg") as engine:
        caller = async_sessions(lambda: SQLModelSession(engine))
        caller.execute = lambda session, statement: AsyncSession.execute(session, text(statement))
        yield caller


@kind
async def async_advanced_alchemy_session(url):
    SQLAlchemyAsyncConfig = advanced_alchemy_config().SQLAlchemyAsyncConfig
    url = url.set(drivername="postgresql+asyncpg")
    config = SQLAlchemyAsyncConfig(connection_string=url.render_as_string(hide_password=False))
    yield async_sessions(config.create_session_maker())
    await config.get_engine().dispose()


# Drivers -------------------------------------------------------------------------------------------------------------


def psycopg_caller(connection, handle_of=lambda connection: connection):
    @contextmanager
    def transaction():
        with connection.transaction():
            yield handle_of(connection)

    return Caller(
        False,
        asynchronous(transaction),
        asynchronous(lambda _: connection.transaction()),
        lambda _, statement: connection.execute(statement),
    )


@kind
async def psycopg_connection(url):
    import psycopg

    with closing(psycopg.connect(libpq(url))) as connection:
        yield psycopg_caller(connection)


@kind
async def psycopg_connection_in_autocommit(url):
    import psycopg

    with closing(psycopg.connect(libpq(url), autocommit=True)) as connection:
        yield psycopg_caller(connection)


@kind
async def psycopg_connection_with_dict_rows(url):
    import psycopg

    with closing(psycopg.connect(libpq(url), row_factory=psycopg.rows.dict_row)) as connection:
        yield psycopg_caller(connection)


@kind
async def psycopg_connection_with_client_cursors(url):
    import psycopg

    with closing(psycopg.connect(libpq(url), cursor_factory=psycopg.ClientCursor)) as connection:
        yield psycopg_caller(connection)


@kind
async def psycopg_connection_with_raw_cursors(url):
    import psycopg

    with closing(psycopg.connect(libpq(url), cursor_factory=psycopg.RawCursor)) as connection:
        yield psycopg_caller(connection)


@kind
async def psycopg_cursor(url):
    import psycopg

    with closing(psycopg.connect(libpq(url), row_factory=psycopg.rows.scalar_row)) as connection:
        yield psycopg_caller(connection, lambda connection: connection.cursor(binary=True))


@kind
async def psycopg_server_cursor(url):
    import psycopg

    with closing(psycopg.connect(libpq(url))) as connection, connection.cursor("mine") as cursor:
        yield psycopg_caller(connection, lambda _: cursor)


@kind
async def psycopg_pooled_connection(url):
    import psycopg_pool

    with psycopg_pool.ConnectionPool(libpq(url), min_size=1, open=True) as pool, pool.connection() as connection:
        yield psycopg_caller(connection)


def async_psycopg_caller(connection, handle_of=lambda connection: connection):
    @asynccontextmanager
    async def transaction():
        async with connection.transaction():
            yield handle_of(connection)

    return Caller(
        True, transaction, lambda _: connection.transaction(), lambda _, statement: connection.execute(statement)
    )


@kind
async def async_psycopg_connection(url):
    import psycopg

    async with await psycopg.AsyncConnection.connect(libpq(url), row_factory=psycopg.rows.dict_row) as connection:
        yield async_psycopg_caller(connection)


@kind
async def async_psycopg_cursor(url):
    import psycopg

    connection = await psycopg.AsyncConnection.connect(libpq(url), cursor_factory=psycopg.AsyncRawCursor)
    async with connection:
        yield async_psycopg_caller(connection, lambda connection: connection.cursor())


def psycopg2_caller(connection, handle_of=lambda connection: connection):
    @contextmanager
    def transaction():
        with connection:
            yield handle_of(connection)

    @contextmanager
    def savepoint(_):
        with connection.cursor() as cursor:
            cursor.execute("SAVEPOINT mine")
            try:
                yield
                cursor.execute("RELEASE mine")
            except BaseException:
                cursor.execute("ROLLBACK TO mine")
                raise

    def execute(_, statement):
        with connection.cursor() as cursor:
            cursor.execute(statement)

    return Caller(False, asynchronous(transaction), asynchronous(savepoint), execute)


@kind
async def psycopg2_connection(url):
    import psycopg2

    with closing(psycopg2.connect(libpq(url))) as connection:
        yield psycopg2_caller(connection)


@kind
async def psycopg2_connection_with_dict_rows(url):
    import psycopg2
    import psycopg2.extras

    with closing(psycopg2.connect(libpq(url), cursor_factory=psycopg2.extras.RealDictCursor)) as connection:
        yield psycopg2_caller(connection)


@kind
async def psycopg2_cursor(url):
    import psycopg2

    with closing(psycopg2.connect(libpq(url))) as connection:
        yield psycopg2_caller(connection, lambda connection: connection.cursor())


def asyncpg_caller(connection):
    @asynccontextmanager
    async def transaction():
        async with connection.transaction():
            yield connection

    return Caller(
        True, transaction, lambda _: connection.transaction(), lambda _, statement: connection.execute(statement)
    )


def asyncpg_dsn(url):
    """asyncpg's and its users' idea of a URL: the socket's directory is an option."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


@kind
async def async_asyncpg_connection(url):
    import asyncpg

    connection = await asyncpg.connect(asyncpg_dsn(url))
    yield asyncpg_caller(connection)
    await connection.close()


@kind
async def async_asyncpg_connection_of_a_pool(url):
    import asyncpg

    # As one does behind a pooler, and with a codec of the application's for JSON.
    async with (
        asyncpg.create_pool(asyncpg_dsn(url), min_size=1, max_size=1, statement_cache_size=0) as pool,
        pool.acquire() as connection,
    ):
        for name in ("json", "jsonb"):
            await connection.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        yield asyncpg_caller(connection)


# Frameworks ----------------------------------------------------------------------------------------------------------


def django_connections(url):
    """Configure Django once a process, and point its two connections at the database."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        engine = {"ENGINE": "django.db.backends.postgresql"}
        settings.configure(DATABASES={"default": {**engine}, "other": {**engine}}, USE_TZ=True)
        django.setup()
    where = {
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or url.query.get("host", ""),
        "PORT": str(url.port or url.query.get("port", "")),
    }
    for alias in ("default", "other"):
        connections[alias].close()
        connections[alias].settings_dict.update(where)
    return connections


def django_caller(handle, alias, call=None):
    from django.db import connections, transaction

    @contextmanager
    def atomic(*_):
        with transaction.atomic(using=alias):
            yield handle

    def execute(_, statement):
        with connections[alias].cursor() as cursor:
            cursor.execute(statement)

    return Caller(False, asynchronous(atomic), asynchronous(atomic), execute)


@kind
async def django_connection(url):
    from django.db import connection

    connections = django_connections(url)
    yield django_caller(connection, "default")
    connections.close_all()


@kind
async def django_connection_by_alias(url):
    connections = django_connections(url)
    yield django_caller(connections["other"], "other")
    connections.close_all()


@kind
async def django_using(url):
    connections = django_connections(url)
    caller = django_caller(None, "other")

    async def call(verb, handle, *args, **kwargs):
        configured = isinstance(handle, Configured)
        if verb in {"enqueue", "enqueue_many"} and (configured or handle is None):
            return getattr(sqla_neoq, verb)(handle, *args, using="other", **kwargs)
        handle = configure(connections["other"], schema=handle.schema if configured else None)
        return getattr(sqla_neoq, verb)(handle, *args, **kwargs)

    caller.call = call
    yield caller
    connections.close_all()


def peewee_caller(database, handle=None):
    @contextmanager
    def transaction():
        with database.atomic():
            yield handle or database

    return Caller(
        False,
        asynchronous(transaction),
        asynchronous(lambda _: database.atomic()),
        lambda _, statement: database.execute_sql(statement),
    )


def peewee_arguments(url):
    where = {"host": url.host or url.query.get("host"), "port": url.port or url.query.get("port")}
    return {"user": url.username, "password": url.password} | where


@kind
async def peewee_database(url):
    import peewee

    database = peewee.PostgresqlDatabase(url.database, **peewee_arguments(url))
    yield peewee_caller(database)
    database.close()


@kind
async def peewee_proxy_of_a_pool(url):
    import peewee
    from playhouse.pool import PooledPostgresqlDatabase

    database = PooledPostgresqlDatabase(url.database, max_connections=2, **peewee_arguments(url))
    proxy = peewee.DatabaseProxy()
    proxy.initialize(database)
    yield peewee_caller(database, proxy)
    database.close_all()


@kind
async def async_peewee_database(url):
    from playhouse.pwasyncio import AsyncPostgresqlDatabase

    database = AsyncPostgresqlDatabase(url.database, **peewee_arguments(url))

    @asynccontextmanager
    async def transaction():
        async with database.atomic():
            yield database

    yield Caller(True, transaction, lambda _: database.atomic(), lambda _, statement: database.aexecute_sql(statement))
    await database.close_pool()


@kind
async def pony_database(url):
    from pony import orm

    database = orm.Database()
    where = {name: value for name, value in peewee_arguments(url).items() if value}
    database.bind(provider="postgres", database=url.database, **where)

    @contextmanager
    def transaction():
        with orm.db_session:
            yield database

    @contextmanager
    def savepoint(_):
        # Pony has none of its own.
        database.execute("SAVEPOINT mine")
        try:
            yield
        except BaseException:
            database.execute("ROLLBACK TO mine")
            raise

    yield Caller(
        False, asynchronous(transaction), asynchronous(savepoint), lambda _, statement: database.execute(statement)
    )
    database.disconnect()


async def tortoise_caller(url, scheme):
    from tortoise import Tortoise
    from tortoise.transactions import in_transaction

    where = peewee_arguments(url) | {"database": url.database}
    config = {
        "connections": {"default": {"engine": f"tortoise.backends.{scheme}", "credentials": where}},
        "apps": {"models": {"models": ["support.tortoise_models"], "default_connection": "default"}},
    }
    await Tortoise.init(config=config)
    yield Caller(
        True,
        in_transaction,
        lambda connection: connection._in_transaction(),
        lambda connection, statement: connection.execute_query(statement),
    )
    await Tortoise.close_connections()


@kind
async def async_tortoise_connection(url):
    async for caller in tortoise_caller(url, "asyncpg"):
        yield caller


@kind
async def async_tortoise_connection_on_psycopg(url):
    async for caller in tortoise_caller(url, "psycopg"):
        yield caller


@kind
async def async_piccolo_transaction(url):
    async for caller in piccolo_caller(url, lambda engine, transaction: transaction):
        yield caller


@kind
async def async_piccolo_engine(url):
    async for caller in piccolo_caller(url, lambda engine, transaction: engine):
        yield caller


async def piccolo_caller(url, handle_of):
    from piccolo.engine.postgres import PostgresEngine

    engine = PostgresEngine({"dsn": asyncpg_dsn(url)}, extensions=())

    @asynccontextmanager
    async def transaction():
        async with engine.transaction() as opened:
            yield handle_of(engine, opened)

    @asynccontextmanager
    async def savepoint(_):
        point = await engine.current_transaction.get().savepoint()
        try:
            yield
        except BaseException:
            await point.rollback_to()
            raise

    yield Caller(True, transaction, savepoint, lambda _, statement: engine.run_ddl(statement))


def at(url: str) -> URL:
    """Return a URL object."""
    return make_url(url)
