"""Connections of frameworks that are not SQLAlchemy's."""

from contextlib import asynccontextmanager, contextmanager

import sqla_neoq
from sqla_neoq import configure
from sqla_neoq.handles import Configured
from support.handles.drivers import asyncpg_dsn
from support.handles.face import Caller, asynchronous, kind


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

    @asynccontextmanager
    async def savepoint(connection):
        # Nested transactions of the older releases are none.
        await connection.execute_query("SAVEPOINT mine")
        try:
            yield
        except BaseException:
            await connection.execute_query("ROLLBACK TO mine")
            raise

    yield Caller(
        True,
        in_transaction,
        savepoint,
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
