"""The fixtures of every test. A PostgreSQL is found or made by ``--pg``; when none can be had the run fails.

======================  =====================================================================================
``server_url``          URL of a maintenance database on the run's server
``database_url``        URL of this worker's database: migrated, emptied before the test
``engine``, ``session`` an Engine and an ORM Session on it, closed after the test
``fresh_database``      factory: URL of a new, empty database, dropped after the test
``migrated_database``   factory: URL of a new, migrated database, dropped after the test
``schema_engine``       an Engine whose tables are in a schema that is on no search_path (``neoq_schema`` option)
``neoq_schema``         the schema of ``--pg-schema``, None by default
``run_process``         factory: ``run_process("tasks", "--burst", env=…)`` starts ``python -m sqla_neoq.run``
======================  =====================================================================================

A test that uses any of the databases is marked ``db``.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session
from support.databases import Databases, migrate, shared, truncate
from support.processes import Process, environment, python
from support.servers import VARIABLE, NoServerError, open_server

SCHEMA = "The Queue's"
"""The schema of ``schema_engine``: a space, capitals and an apostrophe, so what is not quoted does not work."""


def pytest_addoption(parser):
    group = parser.getgroup("PostgreSQL")
    group.addoption(
        "--pg",
        default="auto",
        metavar="auto|embedded|system|docker[:image]|URL",
        help=f"where the tests' PostgreSQL comes from; auto: {VARIABLE}, else embedded, system, docker, in this order",
    )
    group.addoption("--pg-timezone", default="America/New_York", help="TimeZone of every session (%(default)s)")
    group.addoption("--pg-schema", default=None, help="put the tables in this schema, on every search_path")


def pytest_configure(config):
    config.addinivalue_line("markers", "db: uses PostgreSQL (set by the fixtures, not by hand)")
    config.addinivalue_line("markers", "neoq(*rows): the rows of docs/reference/neoq.md that the test shows")
    # pytest-alembic binds its own tests to this file, with a collector that pytest 9.2 breaks. Whoever wants them
    # imports them from pytest_alembic.tests; no file has this name.
    config.option.pytest_alembic_tests_path = "nowhere"


def pytest_collection_modifyitems(items):
    for item in items:
        if "server_url" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.db)


@pytest.fixture(scope="session")
def databases(request, tmp_path_factory) -> Iterator[Databases]:
    directory = tmp_path_factory.getbasetemp()
    xdist = "PYTEST_XDIST_WORKER" in os.environ
    option = request.config.getoption
    try:
        with shared(
            directory.parent if xdist else directory,
            lambda: open_server(option("--pg")),
            timezone=option("--pg-timezone"),
            schema=option("--pg-schema"),
        ) as databases:
            yield databases
    except NoServerError as error:
        sentence = f"The tests need a PostgreSQL, and --pg={option('--pg')} found none: {error}"
        if xdist:  # a worker cannot end the run, so each of its tests fails with the sentence
            pytest.fail(sentence, pytrace=False)
        pytest.exit(sentence, returncode=1)


@pytest.fixture(scope="session")
def server_url(databases: Databases) -> str:
    return databases.server_url


@pytest.fixture(scope="session")
def neoq_schema(request) -> str | None:
    return request.config.getoption("--pg-schema")


@pytest.fixture(scope="session")
def worker_database(databases: Databases, server_url: str) -> Iterator[str]:
    url = databases.create(template=databases.template)
    yield url
    databases.drop(url)


@pytest.fixture
def database_url(worker_database: str) -> str:
    truncate(worker_database)
    return worker_database


@pytest.fixture
def engine(database_url: str, neoq_schema: str | None) -> Iterator[Engine]:
    options = {} if neoq_schema is None else {"neoq_schema": neoq_schema}
    engine = create_engine(database_url, execution_options=options)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def fresh_database(databases: Databases, server_url: str) -> Iterator[Callable[[], str]]:
    made: list[str] = []

    def make() -> str:
        made.append(databases.create())
        return made[-1]

    yield make
    for url in made:
        databases.drop(url)


@pytest.fixture
def migrated_database(databases: Databases, server_url: str) -> Iterator[Callable[[], str]]:
    made: list[str] = []

    def make() -> str:
        made.append(databases.create(template=databases.template))
        return made[-1]

    yield make
    for url in made:
        databases.drop(url)


@pytest.fixture
def schema_engine(fresh_database: Callable[[], str]) -> Iterator[Engine]:
    url = fresh_database()
    migrate(url, SCHEMA)
    engine = create_engine(url, execution_options={"neoq_schema": SCHEMA})
    yield engine
    engine.dispose()


@pytest.fixture
def run_process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []
    number = itertools.count()

    def run(
        *arguments: str,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        module: str = "sqla_neoq.run",
    ) -> Process:
        """Start ``python -m module arguments`` in ``cwd`` (the test's tmp_path), without NEOQ_* and DATABASE_URL."""
        directory = tmp_path / f"process-{next(number)}"
        directory.mkdir()
        command = python("-m", module, *arguments)
        started.append(Process(command, directory=directory, cwd=cwd or tmp_path, env=environment(env or {})))
        return started[-1]

    yield run
    for process in started:
        process.kill()
