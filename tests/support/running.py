"""What tests of the running side share: claimed jobs as values, rows as they are, and gates that jobs wait at."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, text, update

from sqla_neoq.claim import Claimant
from sqla_neoq.context import ClaimedJob
from sqla_neoq.models import DeadJob, Failure, Job, Worker
from sqla_neoq.payloads import encode

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SOON = timedelta(seconds=0)
_LONGEST = 20.0


def claimed(**changes: Any) -> ClaimedJob:
    """A claimed job as the dispatcher hands it out, without a database."""
    return ClaimedJob(
        **{
            "id": 1,
            "token": 7,
            "queue": "default",
            "task": "m:f",
            "payload": "{}",
            "priority": 0,
            "retries": 0,
            "max_retries": None,
            "crashes": 0,
            "run_after": MOMENT.timestamp(),
            "deadline": None,
            "created_at": MOMENT.timestamp(),
            "ran_at": MOMENT.timestamp(),
            "fingerprint": None,
        }
        | changes
    )


class Database:
    """The tables as one sees them from outside, each call in a transaction of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with self.engine.begin() as connection:
            yield connection.execution_options(**options_of(connection))

    def rows(self, model: Any = Job) -> list[Row[Any]]:
        """All rows of a table, by id."""
        with self.begin() as connection:
            return list(connection.execute(select(model.__table__).order_by(model.__table__.c.id)))

    def row(self, id_: int, model: Any = Job) -> Row[Any]:
        with self.begin() as connection:
            return connection.execute(select(model.__table__).where(model.__table__.c.id == id_)).one()

    def add(self, *, model: Any = Job, **values: Any) -> int:
        """Insert a row and return its id."""
        table = model.__table__
        with self.begin() as connection:
            return int(connection.execute(insert(table).values(**values).returning(table.c.id)).scalar_one())

    def change(self, id_: int, *, model: Any = Job, **values: Any) -> None:
        table = model.__table__
        with self.begin() as connection:
            changed = connection.execute(update(table).where(table.c.id == id_).values(**values)).rowcount
        assert changed == 1, f"no row {id_} in {table.name}"

    def remove(self, id_: int, *, model: Any = Job) -> None:
        with self.begin() as connection:
            connection.execute(delete(model.__table__).where(model.__table__.c.id == id_))

    def worker(self, **values: Any) -> int:
        """Enter a worker, as a runner would."""
        given = {"name": "w", "host": "h", "pid": 1, "queues": {}, "version": "0", "listening": False}
        return self.add(model=Worker, **(given | values))

    def statuses(self) -> dict[int, str]:
        return {row.id: row.status for row in self.rows()}

    def dead(self) -> dict[int, str]:
        return {row.id: row.reason for row in self.rows(DeadJob)}

    def failures(self) -> list[Row[Any]]:
        return self.rows(Failure)

    def backends(self, *, name: str = "sqla_neoq %") -> list[int]:
        """The server processes of the runners' own connections to this database."""
        with self.engine.connect() as connection:
            return list(
                connection.scalars(
                    text(
                        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                        "AND pid <> pg_backend_pid() AND application_name LIKE :name"
                    ),
                    {"name": name},
                )
            )

    def cut_backends(self, name: str) -> None:
        """End the server processes of the connections called so, and wait until they are gone."""
        with self.engine.connect() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND application_name = :name"
                ),
                {"name": name},
            )


def options_of(connection: Connection) -> dict[str, Any]:
    """Return the options by which a statement finds the tables: the engine's ``neoq_schema``, if it has one."""
    schema = connection.get_execution_options().get("neoq_schema")
    return {} if schema is None else {"schema_translate_map": {None: schema}}


def claimant(database: Database, worker: int, *tasks: str) -> Claimant:
    with database.engine.connect() as connection:
        return Claimant(worker, encode(sorted(tasks)), options_of(connection))


def ago(seconds: float) -> Any:
    """That many seconds before the database's now, as an SQL expression."""
    return func.now() - timedelta(seconds=seconds)


def ahead(seconds: float) -> Any:
    return func.now() + timedelta(seconds=seconds)


class Gate:
    """Where a job waits until the test lets it on; the test waits until a number of jobs have come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._changed = threading.Condition()
        self.arrived = 0
        self.inside = 0
        self.most_inside = 0

    def __call__(self) -> None:
        """Pass the gate: for the job."""
        with self._changed:
            self.arrived += 1
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            self._changed.notify_all()
        try:
            assert self._open.wait(_LONGEST), "the test never opened the gate"
        finally:
            with self._changed:
                self.inside -= 1
                self._changed.notify_all()

    def open(self) -> None:
        self._open.set()

    def await_arrived(self, number: int) -> None:
        """Wait until that many jobs have come, in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.arrived >= number, _LONGEST), f"{self.arrived} of {number} came"


def threads(prefix: str = "neoq-") -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)}


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
