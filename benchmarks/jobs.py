"""The tasks that are run, and jobs put into the table by SQL, in the state that a measurement starts from."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Column, MetaData, Table, insert

from sqla_neoq import current_job, task

if TYPE_CHECKING:
    import psycopg

QUEUE: Final = "bench"
QUEUES: Final = tuple(f"bench-{number}" for number in range(50))
PRIORITIES: Final = (-20, -10, 0, 10, 20)

arrivals: Final[queue.SimpleQueue[tuple[int, float]]] = queue.SimpleQueue()
"""When each job of :func:`mark` began, on this process's ``monotonic()``."""
effects: Final = Table("bench_effects", MetaData(), Column("job", BigInteger, nullable=False))
"""What a task of an application would write: one row."""


@task(queue=QUEUE)
def noop(number: int) -> None:
    """Do nothing, with an argument to be read and checked."""


@task(queue=QUEUE)
def mark(number: int) -> None:
    """Say when it began."""
    arrivals.put((number, time.monotonic()))


@task(queue=QUEUE)
def hello(number: int) -> None:  # noqa: ARG001 - what jobs.fill gives every job
    """Say to another process when it began."""
    print(time.monotonic(), flush=True)


@task(queue=QUEUE)
def nap(seconds: float) -> None:
    """Wait for something that takes no processor, as a request to another server does."""
    time.sleep(seconds)


@task(queue=QUEUE)
def write(number: int) -> None:
    """Write one row in the transaction that completes the job."""
    current_job().session.execute(insert(effects), {"job": number})


def empty(connection: psycopg.Connection[Any]) -> None:
    """Remove all jobs and effects."""
    connection.execute("CREATE TABLE IF NOT EXISTS bench_effects (job bigint NOT NULL)")
    connection.execute("TRUNCATE neoq_jobs, neoq_dead_jobs, neoq_failures, bench_effects")


def fill(connection: psycopg.Connection[Any], count: int, *, task: str = noop.name, wake: bool = False) -> None:
    """Insert that many due jobs of one queue and priority; ``wake`` tells the runner that waits for them."""
    _insert(
        connection,
        """
        INSERT INTO neoq_jobs (queue, task, payload)
        SELECT %s, %s, jsonb_build_object('number', n) FROM generate_series(1, %s) AS n
        """,
        (QUEUE, task, count),
        wake=wake,
    )


def fill_naps(connection: psycopg.Connection[Any], count: int, seconds: float) -> None:
    """Insert that many jobs that wait so long."""
    _insert(
        connection,
        """
        INSERT INTO neoq_jobs (queue, task, payload)
        SELECT %s, %s, jsonb_build_object('seconds', %s::float8) FROM generate_series(1, %s) AS n
        """,
        (QUEUE, nap.name, seconds, count),
    )


def fill_lanes(connection: psycopg.Connection[Any], count: int) -> None:
    """Insert that many due jobs, spread evenly over fifty queues with five priorities each."""
    _insert(
        connection,
        """
        INSERT INTO neoq_jobs (queue, task, payload, priority)
        SELECT (%s::text[])[1 + n %% 50], %s, jsonb_build_object('number', n), (%s::smallint[])[1 + n / 50 %% 5]
        FROM generate_series(1, %s) AS n
        """,
        (list(QUEUES), noop.name, list(PRIORITIES), count),
    )


def fill_future(connection: psycopg.Connection[Any], count: int) -> None:
    """Insert that many jobs of the highest priority that fall due tomorrow."""
    _insert(
        connection,
        """
        INSERT INTO neoq_jobs (queue, task, payload, priority, run_after)
        SELECT %s, %s, jsonb_build_object('number', n), 100, now() + interval '1 day' + n * interval '1 ms'
        FROM generate_series(1, %s) AS n
        """,
        (QUEUE, noop.name, count),
    )


def fill_unknown(connection: psycopg.Connection[Any], count: int) -> None:
    """Insert that many jobs of a task nobody here knows, due before all others."""
    _insert(
        connection,
        """
        INSERT INTO neoq_jobs (queue, task, payload, run_after)
        SELECT %s, %s, jsonb_build_object('number', n), now() - interval '1 day' + n * interval '1 ms'
        FROM generate_series(1, %s) AS n
        """,
        (QUEUE, "nobody:knows", count),
    )


def fill_history(connection: psycopg.Connection[Any], count: int) -> None:
    """Insert that many jobs that finished within the last days."""
    _insert(
        connection,
        """
        INSERT INTO neoq_jobs (queue, task, payload, status, run_after, created_at, ran_at, finished_at, worker_id)
        SELECT %s, %s, jsonb_build_object('number', n), 'processed', t, t, t, t, 1
        FROM generate_series(1, %s) AS n, LATERAL (SELECT now() - interval '1 day' + n * interval '1 ms') AS at (t)
        """,
        (QUEUE, noop.name, count),
    )


def settle(connection: psycopg.Connection[Any]) -> None:
    """Leave nothing to be done by the way: statistics are fresh, and no checkpoint is due."""
    connection.execute("VACUUM (ANALYZE) neoq_jobs")
    connection.execute("CHECKPOINT")


def _insert(
    connection: psycopg.Connection[Any], statement: str, parameters: tuple[Any, ...], *, wake: bool = False
) -> None:
    with connection.transaction():
        if not wake:
            # Nobody listens, and the trigger need not look at a million rows to find that out.
            connection.execute("SET LOCAL neoq.notify = 'off'")
        connection.execute(statement, parameters)
