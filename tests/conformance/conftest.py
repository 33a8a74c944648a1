"""Every test here runs twice: on tables found by the search_path, and in a schema of an odd name and another time zone.

Both installations share one database, so each test also shows that neither sees the other's jobs.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, Row, create_engine, make_url, text
from sqlalchemy.orm import Session
from support import Process, eventually
from support.databases import Databases, migrate, truncate
from support.running import Database

from sqla_neoq import Counts, DeadJob, Enqueued, Failure, Handler, Job, Runner, RunnerConfig, Task, enqueue
from sqla_neoq.migrations.quoting import qualifier

SCHEMA = 'The "Queue\'s" 100 % größte\\r :schema'
PLACES = {"search_path": (None, None), "odd_schema_tokyo": (SCHEMA, "Asia/Tokyo")}
"""The schema of the tables, and the time zone of the sessions (None: the database's, which is not UTC either)."""


class Place(Database):
    """One installation, as an application has it."""

    def __init__(self, url: str, schema: str | None, zone: str | None) -> None:
        target = make_url(url) if zone is None else make_url(url).update_query_dict({"options": f"-cTimeZone={zone}"})
        self.url = target.render_as_string(hide_password=False)
        self.schema = schema
        super().__init__(self.make_engine())
        self.prefix = qualifier(schema)

    def make_engine(self, *, settings: str = "", **options: Any) -> Engine:
        """Make an application's engine, its sessions with more settings (``-cname=value``)."""
        url = make_url(self.url)
        if settings:
            url = url.update_query_dict({"options": f"{url.query.get('options', '')} {settings}"})
        found = {} if self.schema is None else {"neoq_schema": self.schema}
        return create_engine(url, execution_options=found, **options)

    def enqueue(self, queue: str, payload: Any = None, **options: Any) -> Enqueued:
        """Enqueue in a transaction of its own."""
        with self.begin() as connection:
            return enqueue(connection, queue, payload, **options)

    def sql(self, statement: str, **parameters: Any) -> Any:
        """Execute SQL in which ``{}`` stands before the tables' names; return the first row's first column, if any."""
        with self.engine.begin() as connection:
            # A colon is a bind parameter's to SQLAlchemy, unless a backslash is before it.
            result = connection.execute(text(statement.replace("{}", self.prefix.replace(":", r"\:"))), parameters)
            return result.scalar() if result.returns_rows else None

    def job(self, id_: int) -> Row[Any]:
        return self.row(id_)

    def dead_job(self, id_: int) -> Row[Any]:
        return self.row(id_, DeadJob)

    def failures_of(self, id_: int) -> list[Row[Any]]:
        return [row for row in self.rows(Failure) if row.job_id == id_]

    def all_processed(self, number: int) -> bool:
        """Whether there are so many jobs, and all have succeeded."""
        return [row.status for row in self.rows(Job)] == ["processed"] * number

    def terminate(self, name: str = "sqla_neoq %") -> None:
        """End the runners' connections as the server's administrator would."""
        for pid in self.backends(name=name):
            self.sql("SELECT pg_terminate_backend(:pid)", pid=pid)

    def runner(self, *tasks: Task | Handler, queues=None, database=None, sessionmaker=None, **config: Any) -> Runner:
        """Make a runner, not started."""
        return Runner(
            database or self.engine,
            tasks,
            queues=queues,
            config=RunnerConfig(**config),
            sessionmaker=sessionmaker,
        )

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

    def start_process(source: str, *arguments: str, env: dict[str, str] | None = None) -> Process:
        (tmp_path / "tasks.py").write_text(source)
        settings = {"NEOQ_DATABASE_URL": place.url, "NEOQ_SCHEMA": place.schema, **(env or {})}
        process = run_process("tasks", *arguments, env=settings)
        process.wait_for("runner started")
        return process

    return start_process


@pytest.fixture
def done(place: Place) -> Callable[[int], None]:
    """Wait until so many jobs are there and all have succeeded."""
    return lambda number: eventually(lambda: place.all_processed(number), why=place.statuses)


@pytest.fixture
def ledger(place: Place) -> Iterator[str]:
    """The name of a table of the application's own, whose rows may refer to others only until the commit."""
    place.sql(
        "CREATE TABLE ledger (entry bigint PRIMARY KEY, of bigint REFERENCES ledger DEFERRABLE INITIALLY DEFERRED)"
    )
    yield "ledger"
    place.sql("DROP TABLE ledger")
