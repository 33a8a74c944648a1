"""The drivers' own connections and cursors."""

import json
from contextlib import asynccontextmanager, closing, contextmanager

from support.handles.face import Caller, asynchronous, kind
from support.servers import libpq


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
