"""What holds no transaction is refused with the remedy, and what commits at once is warned of."""

import asyncio
from contextlib import asynccontextmanager, closing, suppress

import asyncpg
import peewee
import psycopg
import psycopg2
import psycopg2.pool
import psycopg_pool
import pytest
from sqlalchemy.exc import SQLAlchemyError
from support.handles import KINDS
from support.handles.alchemy import advanced_alchemy_config
from support.handles.drivers import asyncpg_dsn
from support.handles.frameworks import django_connections, peewee_arguments
from support.servers import libpq
from test_handles import stored

import sqla_neoq
from sqla_neoq import Job, NeoqWarning, configure, enqueue, enqueue_async, enqueue_many
from sqla_neoq.handles.contract import Query
from sqla_neoq.handles.rendering import render
from sqla_neoq.statements import cancel_job, insert_jobs

SYNCHRONOUS = [kind for kind in KINDS if not kind.is_async]
ASYNCHRONOUS = [kind for kind in KINDS if kind.is_async]
VERBS = {"enqueue": "q", "enqueue_many": [], "cancel": 1, "requeue": 1, "requeue_many": []}


def by_name(kind):
    return kind.name


@pytest.mark.parametrize("kind", [kind for kind in SYNCHRONOUS if kind.name != "django_using"], ids=by_name)
def test_a_handle_of_synchronous_code_says_so_to_asynchronous_code(kind, engine):
    async def work(caller):
        async with caller.transaction() as handle:
            for verb, argument in VERBS.items():
                with pytest.raises(TypeError, match=rf"got \w+; in synchronous code call {verb}\(\)$"):
                    getattr(sqla_neoq, f"{verb}_async")(handle, argument).send(None)

    kind.drive(engine.url, work)


@pytest.mark.parametrize("kind", ASYNCHRONOUS, ids=by_name)
def test_a_handle_of_asynchronous_code_says_so_to_synchronous_code(kind, engine):
    async def work(caller):
        async with caller.transaction() as handle:
            for verb, argument in VERBS.items():
                with pytest.raises(TypeError, match=rf"got \w+; await {verb}_async\(\) instead$"):
                    getattr(sqla_neoq, verb)(handle, argument)

    kind.drive(engine.url, work)


NO_TRANSACTION = "which has no transaction to join; pass a connection that the pool lends, in a transaction"


def test_pools_are_refused(engine):
    url = engine.url
    with (
        psycopg_pool.ConnectionPool(libpq(url), min_size=0, max_size=1, open=True) as pool,
    ):
        for refused in (pool, psycopg2.pool.SimpleConnectionPool(0, 1, libpq(url))):
            with pytest.raises(TypeError, match=f"Pool, {NO_TRANSACTION}"):
                enqueue(refused, "q")

    async def work():
        pool = psycopg_pool.AsyncConnectionPool(libpq(url), min_size=0, max_size=1, open=False)
        for refused in (pool, asyncpg.create_pool(asyncpg_dsn(url))):
            with pytest.raises(TypeError, match=f"Pool, {NO_TRANSACTION}"):
                await enqueue_async(refused, "q")

    asyncio.run(work())


def test_frameworks_without_a_transaction_are_refused(engine):
    from piccolo.engine.postgres import PostgresEngine
    from pony import orm
    from tortoise import Tortoise

    async def work():
        piccolo = PostgresEngine({"dsn": asyncpg_dsn(engine.url)}, extensions=())
        with pytest.raises(TypeError, match=r"got PostgresEngine outside a transaction; use async with engine.trans"):
            await enqueue_async(piccolo, "q")
        where = {**peewee_arguments(engine.url), "database": engine.url.database}
        connections = {"default": {"engine": "tortoise.backends.asyncpg", "credentials": where}}
        apps = {"models": {"models": ["support.tortoise_models"], "default_connection": "default"}}
        await Tortoise.init(config={"connections": connections, "apps": apps})
        with pytest.raises(TypeError, match=r"DBClient, which has no transaction .* async with in_transaction\(\) as"):
            await enqueue_async(Tortoise.get_connection("default"), "q")
        await Tortoise.close_connections()

    asyncio.run(work())
    database = orm.Database()
    with pytest.raises(TypeError, match="got Database that is not bound to PostgreSQL"):
        enqueue(database, "q")
    database.bind(provider="sqlite", filename=":memory:")
    with pytest.raises(TypeError, match="got Database that is not bound to PostgreSQL"):
        enqueue(database, "q")
    with pytest.raises(TypeError, match="got SqliteDatabase; of Peewee's databases only PostgresqlDatabase"):
        enqueue(peewee.SqliteDatabase(":memory:"), "q")
    with pytest.raises(TypeError, match="got DatabaseProxy; initialize it with a database first"):
        enqueue(peewee.DatabaseProxy(), "q")


def test_what_only_has_the_handle_names_it(engine):
    import flask_sqlalchemy

    with pytest.raises(TypeError, match=r"got SQLAlchemy; pass its session, db.session$"):
        enqueue(flask_sqlalchemy.SQLAlchemy(), "q")
    with psycopg.connect(libpq(engine.url)) as connection, connection.transaction() as transaction:
        with pytest.raises(TypeError, match=r"got Transaction; pass its connection$"):
            enqueue(transaction, "q")
        assert enqueue(transaction.connection, "q").created


def test_pony_outside_its_session_says_so_itself(engine, monkeypatch):
    import pony
    from pony import orm

    # A main module without a file, such as that of a pytest worker, is an interactive session to Pony, and needs none.
    monkeypatch.setattr(pony, "MODE", "CHERRYPY")
    database = orm.Database()
    where = {name: value for name, value in peewee_arguments(engine.url).items() if value}
    database.bind(provider="postgres", database=engine.url.database, **where)
    with pytest.raises(orm.TransactionError, match="db_session is required"):
        enqueue(database, "q")
    database.disconnect()


def test_django_says_which_connection_to_pass(engine):
    connections = django_connections(engine.url)
    with pytest.raises(TypeError, match=r'got ConnectionHandler; pass one of them, such as connections\["default"\]'):
        enqueue(connections, "q")
    with pytest.raises(TypeError, match="using='other': there is a session already; pass one or the other"):
        enqueue(connections["other"], "q", using="other")
    with pytest.raises(TypeError, match="using=5: expected the alias of a Django database, got int"):
        enqueue(None, "q", using=5)
    from django.db.backends.sqlite3.base import DatabaseWrapper
    from django.utils.connection import ConnectionDoesNotExist

    with pytest.raises(ConnectionDoesNotExist, match="nowhere"):
        enqueue(None, "q", using="nowhere")
    with pytest.raises(TypeError, match="got DatabaseWrapper to sqlite; the jobs are in PostgreSQL"):
        enqueue(DatabaseWrapper({}), "q")
    connections.close_all()


def test_using_without_django_says_so(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "django.db", raising=False)
    with pytest.raises(TypeError, match=r"using='x': .* Django is not in use; pass a session"):
        enqueue(target="q", using="x")


def test_jobs_must_be_given(engine):
    with engine.begin() as connection, pytest.raises(TypeError, match="jobs=None: expected what"):
        enqueue_many(connection)


# AUTOCOMMIT ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def warned():
    with pytest.warns(NeoqWarning, match="enqueue.. on a connection in AUTOCOMMIT: the job is there at once") as said:
        yield
    assert [warning.filename for warning in said] == [__file__]


def test_a_driver_s_connection_in_autocommit_is_warned_of(engine):
    async def work():
        with closing(psycopg.connect(libpq(engine.url), autocommit=True)) as connection:
            async with warned():
                enqueue(connection, "psycopg")
        with closing(psycopg2.connect(libpq(engine.url))) as connection:
            connection.autocommit = True
            async with warned():
                enqueue(connection, "psycopg2")
            with connection:  # a transaction all the same
                enqueue(connection, "q")
                connection.rollback()
        connection = await psycopg.AsyncConnection.connect(libpq(engine.url), autocommit=True)
        async with connection, warned():
            await enqueue_async(connection, "psycopg asynchronous")
        connection = await asyncpg.connect(asyncpg_dsn(engine.url))
        async with warned():
            await enqueue_async(connection, "asyncpg")
        await connection.execute("BEGIN")
        await enqueue_async(connection, "q")
        await connection.execute("ROLLBACK")
        await connection.close()

    asyncio.run(work())
    names = ["psycopg", "psycopg2", "psycopg asynchronous", "asyncpg"]
    assert stored(engine, "queue") == [(name,) for name in names]


def test_a_framework_outside_its_transaction_is_warned_of(engine):
    async def work():
        connections = django_connections(engine.url)
        async with warned():
            enqueue(connections["default"], "django")
        async with warned():
            enqueue(None, "django by alias", using="other")
        connections["other"].set_autocommit(False)
        enqueue(connections["other"], "q")
        connections["other"].rollback()
        connections["other"].set_autocommit(True)
        connections.close_all()

        database = peewee.PostgresqlDatabase(engine.url.database, **peewee_arguments(engine.url))
        async with warned():
            enqueue(database, "peewee")
        with database.manual_commit():
            database.begin()
            enqueue(database, "q")
            database.rollback()
        database.close()

    with suppress(StopIteration):
        work().send(None)
    assert stored(engine, "queue") == [("django",), ("django by alias",), ("peewee",)]


# Settings and proxies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"schema": 5}, TypeError, "schema=5: expected str or None"),
        ({"schema": ""}, ValueError, "schema='': a schema's name is not empty"),
        ({"schema": "a\0b"}, ValueError, "no NUL characters"),
        ({"max_payload": "1"}, TypeError, "max_payload='1': expected int or None"),
        ({"max_payload": True}, TypeError, "max_payload=True: expected int or None"),
        ({"max_payload": 1}, ValueError, "max_payload=1: expected at least 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, error, sentence):
    with pytest.raises(error, match=sentence):
        configure(None, **settings)


def test_settings_add_up_and_go_before_the_engine_s(schema_engine):
    schema = schema_engine.get_execution_options()["neoq_schema"]
    other = schema_engine.execution_options(neoq_schema="nowhere", neoq_max_payload=10)
    with other.begin() as connection:
        handle = configure(configure(connection, schema=schema), max_payload=100)
        assert enqueue(handle, "q", "x" * 50).created
        handle = configure(handle)
        with pytest.raises(ValueError, match="the most are 100"):
            enqueue(handle, "q", "x" * 150)
        with pytest.raises(ValueError, match="the most are 10"):
            enqueue(configure(connection, schema=schema), "q", "x" * 50)
    with pytest.raises(SQLAlchemyError), other.begin() as connection:
        enqueue(connection, "q")


class Traced:
    """A proxy as tracers put around a connection: it passes itself off as what is inside."""

    def __init__(self, wrapped):
        self._wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self._wrapped, name)

    @property
    def __class__(self):
        return type(self._wrapped)


@pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])
def test_a_tracer_s_proxy_is_taken_for_what_is_inside(engine, connect):
    with closing(connect(libpq(engine.url))) as connection:
        enqueue(Traced(connection), "q", unique=True)
        assert not enqueue(Traced(connection), "q", unique=True).created
        connection.commit()
    assert len(stored(engine)) == 1


def test_a_cursor_that_is_being_read_is_not_disturbed(engine):
    with closing(psycopg.connect(libpq(engine.url))) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT generate_series(1, 3)")
        assert cursor.fetchone() == (1,)
        enqueue(cursor, "q")
        assert cursor.fetchall() == [(2,), (3,)]


def test_a_pipeline_of_psycopg_s_goes_on(engine):
    with closing(psycopg.connect(libpq(engine.url))) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        first = enqueue(connection, "q", unique=True)
        assert enqueue(connection, "q", unique=True) == (first.id, False)
        connection.commit()
    assert len(stored(engine)) == 1


def test_a_session_of_advanced_alchemy_that_reads_from_replicas_enqueues_on_the_primary(engine):
    advanced_alchemy_config()
    from advanced_alchemy.config.routing import RoutingConfig
    from advanced_alchemy.routing import RoundRobinSelector, RoutingSyncSession
    from sqlalchemy import create_engine

    replica = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere")
    config = RoutingConfig(primary_connection_string="postgresql://", read_replicas=["postgresql://"])
    selectors = {config.read_group: RoundRobinSelector([replica])}
    with RoutingSyncSession(routing_config=config, selectors=selectors, default_engine=engine) as session:
        enqueue(session, "q")
        session.commit()
    assert len(stored(engine)) == 1


# Statements as drivers take them -------------------------------------------------------------------------------------


def test_a_statement_is_written_in_the_driver_s_style_and_schema():
    query = Query(insert_jobs(), {"jobs": "[]"})
    assert render(query, "format", None)[1] == render(query, "numeric_dollar", None)[1] == ["[]"]
    assert "CAST(%s::VARCHAR AS JSON)" in render(query, "format", None)[0]
    assert "CAST($1::VARCHAR AS JSON)" in render(query, "numeric_dollar", None)[0]
    assert render(query, "format", None)[0].startswith("INSERT INTO neoq_jobs ")
    assert render(query, "format", 'a "b" 100%')[0].startswith('INSERT INTO "a ""b"" 100%%".neoq_jobs ')
    assert render(query, "numeric_dollar", 'a "b" 100%')[0].startswith('INSERT INTO "a ""b"" 100%".neoq_jobs ')


def test_a_statement_s_own_constants_stand_where_they_belong():
    sql, values = render(Query(cancel_job(), {"job": 5}), "numeric_dollar", None)
    assert sorted(map(str, values)) == ["5", "cancelled"]
    assert f"neoq_jobs.id = ${values.index(5) + 1}::BIGINT" in sql
    assert Job.__table__.name in sql
