"""SQLAlchemy's handles, and those of libraries whose sessions are SQLAlchemy's."""

import asyncio
import importlib
import warnings
from contextlib import asynccontextmanager, contextmanager

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from support.handles.face import Caller, asynchronous, kind


def sessions(make, execute=None):
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
