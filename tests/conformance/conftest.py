"""Every test here runs twice: on tables found by the search_path, and in a schema of an odd name and another time zone.

Both installations share one database, so each test also shows that neither sees the other's jobs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, Row, create_engine, make_url, select, text
from sqlalchemy.orm import Session
from support import Process, eventually
from support.databases import Databases, migrate, truncate

from sqla_neoq import Counts, DeadJob, Enqueued, Failure, Handler, Job, Runner, RunnerConfig, Task, Worker, enqueue

SCHEMA = 'The "Queue\'s" 100 % größte\\r :schema'
PLACES = {"search_path": (None, None), "odd_schema_tokyo": (SCHEMA, "Asia/Tokyo")}
"""The schema of the tables, and the time zone of the sessions (None: the database's, which is not UTC either)."""

once = pytest.mark.parametrize("place", ["odd_schema_tokyo"], indirect=True)
"""For a test that waits for seconds: the harder place is enough."""


class Place:
    """One installation, seen as a user sees it."""

    def __init__(self, url: str, schema: str | None, zone: str | None) -> None:
        self.schema = schema
        target = make_url(url) if zone is None else make_url(url).update_query_dict({"options": f"-c TimeZone={zone}"})
        self.url = target.render_as_string(hide_password=False)
        self.engine = self.make_engine()
        self.prefix = "" if schema is None else self.engine.dialect.identifier_preparer.quote(schema) + "."

    def make_engine(self, url: str | None = None, **options: Any) -> Engine:
        """Make an application's engine, with other options."""
        found = {} if self.schema is None else {"neoq_schema": self.schema}
        return create_engine(url or self.url, execution_options=found, **options)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with self.engine.begin() as connection:
            yield connection

    def enqueue(self, queue: str, payload: Any = None, **options: Any) -> Enqueued:
        """Enqueue in a transaction of its own."""
        with self.begin() as connection:
            return enqueue(connection, queue, payload, **options)

    def sql(self, statement: str, **parameters: Any) -> Any:
        """Execute SQL in which ``{}`` stands before the tables' names; return the first row's first column, if any."""
        with self.begin() as connection:
            # A colon is a bind parameter's to SQLAlchemy, unless a backslash is before it.
            result = connection.execute(text(statement.replace("{}", self.prefix.replace(":", r"\:"))), parameters)
            return result.scalar() if result.returns_rows else None

    def rows(self, model: Any, **where: Any) -> list[Row]:
        """Return rows of a table, oldest first."""
        statement = select(*model.__table__.c).filter_by(**where).order_by(model.__table__.primary_key.columns[0])
        translated = {"schema_translate_map": {None: self.schema}}
        with self.begin() as connection:
            return list(connection.execute(statement, execution_options=translated))

    def job(self, id_: int) -> Row:
        [row] = self.rows(Job, id=id_)
        return row

    def dead(self, id_: int) -> Row:
        [row] = self.rows(DeadJob, id=id_)
        return row

    def failures(self, id_: int) -> list[Row]:
        return self.rows(Failure, job_id=id_)

    def workers(self) -> list[Row]:
        return self.rows(Worker)

    def statuses(self) -> dict[int, str]:
        return {row.id: row.status for row in self.rows(Job)}

    def all_processed(self, number: int) -> bool:
        """Whether there are so many jobs, and all succeeded."""
        return [row.status for row in self.rows(Job)] == ["processed"] * number

    def backends(self, kind: str = "%") -> int:
        """Count the connections of runners on this database."""
        return self.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE :name",
            name=f"sqla_neoq {kind}",
        )

    def terminate(self, kind: str = "%") -> int:
        """End the connections of runners as the server's administrator would; return how many."""
        return self.sql(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE :name",
            name=f"sqla_neoq {kind}",
        )

    def runner(self, *tasks: Task | Handler, queues=None, database=None, sessionmaker=None, **config: Any) -> Runner:
        """Make a runner, not started."""
        settings = RunnerConfig(**{"name": "conformance", **config})
        return Runner(database or self.engine, tasks, queues=queues, config=settings, sessionmaker=sessionmaker)

    def drain(self, *tasks: Task | Handler, **options: Any) -> Counts:
        """Run all that is due."""
        return self.runner(*tasks, **options).drain()


@pytest.fixture(scope="session")
def conformance_database(databases: Databases, server_url: str) -> Iterator[str]:
    url = databases.create(template=databases.template)
    migrate(url, SCHEMA)
    yield url
    databases.drop(url)


@pytest.fixture(params=PLACES)
def place(request, conformance_database: str) -> Iterator[Place]:
    truncate(conformance_database)
    place = Place(conformance_database, *PLACES[request.param])
    yield place
    place.engine.dispose()


@pytest.fixture
def engine(place: Place) -> Engine:
    return place.engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def start(place: Place) -> Iterator[Callable[..., Runner]]:
    """Start a runner that is stopped after the test: ``start(handler, concurrency=2)``."""
    runners: list[Runner] = []

    def start(*tasks: Task | Handler, **options: Any) -> Runner:
        runners.append(place.runner(*tasks, **options))
        runners[-1].start()
        return runners[-1]

    yield start
    for runner in runners:
        runner.stop(timedelta(0))


@pytest.fixture
def start_process(place: Place, run_process, tmp_path) -> Callable[..., Process]:
    """Start ``python -m sqla_neoq.run`` on tasks given as source, and wait until it works."""

    def start_process(source: str, *arguments: str, env: dict[str, str] | None = None, wait: bool = True) -> Process:
        (tmp_path / "tasks.py").write_text(source)
        settings = {"NEOQ_DATABASE_URL": place.url, "NEOQ_SCHEMA": place.schema, **(env or {})}
        process = run_process("tasks", *arguments, env=settings)
        if wait:
            process.wait_for("runner started")
        return process

    return start_process


@pytest.fixture
def done(place: Place) -> Callable[[int], None]:
    """Wait until so many jobs are there and all have succeeded."""
    return lambda number: eventually(lambda: place.all_processed(number), why=place.statuses)
