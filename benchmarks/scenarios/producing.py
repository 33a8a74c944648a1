"""Enqueueing, everything from the call to the commit included."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.orm import Session

from benchmarks import jobs, raw
from benchmarks.bench import PATIENCE
from benchmarks.figures import Figure
from benchmarks.processes import Rush, pgbench, workers
from sqla_neoq import enqueue_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from benchmarks.bench import Bench

_BULK: Final = 10_000
_SINGLES: Final = 1_000
_CLIENTS: Final = 16


def _timed_enqueue(bench: Bench, run: Callable[[], None], count: int) -> float:
    """Return the jobs a second that ``run`` commits into an empty table."""
    jobs.empty(bench.admin)
    jobs.settle(bench.admin)
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    (found,) = bench.admin.execute("SELECT count(*) FROM neoq_jobs WHERE status = 'new'").fetchone() or (0,)
    if found != count:
        raise RuntimeError(f"{found} jobs are there, and {count} should be")
    return count / seconds


def bulk(bench: Bench) -> Iterator[Figure]:
    """Enqueue with enqueue_many, 10,000 jobs a call and a transaction."""
    calls = bench.sizes.bulk_calls

    def ours() -> None:
        for _ in range(calls):
            with Session(bench.engine) as session, session.begin():
                enqueue_many(session, [jobs.noop.job(number=number) for number in range(_BULK)])

    def by_hand(insert: Callable[[psycopg.Connection[Any], int], None]) -> Callable[[], None]:
        def run() -> None:
            with bench.database.connect() as connection:
                for _ in range(calls):
                    insert(connection, _BULK)

        return run

    rates: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(bench.rounds):
        for found, run in zip(rates, (ours, by_hand(raw.copy), by_hand(raw.insert_rows)), strict=True):
            found.append(_timed_enqueue(bench, run, calls * _BULK))
    title = f"enqueue_many, {_BULK:,} jobs a call and commit"
    yield Figure("bulk", title, "jobs/s", rates[0], "raw COPY", rates[1])
    yield Figure("bulk-insert", title, "jobs/s", rates[0], "raw INSERT of many rows", rates[2])


def one_by_one(bench: Bench) -> Iterator[Figure]:
    """Enqueue one job a call, 1,000 in a session's transaction."""
    transactions = bench.sizes.single_transactions

    def ours() -> None:
        for _ in range(transactions):
            with Session(bench.engine) as session, session.begin():
                for number in range(_SINGLES):
                    jobs.noop.enqueue(session, number=number)

    def theirs() -> None:
        with bench.database.connect() as connection:
            for _ in range(transactions):
                raw.insert_one_by_one(connection, _SINGLES)

    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(bench.rounds):
        for found, run in zip(rates, (ours, theirs), strict=True):
            found.append(_timed_enqueue(bench, run, transactions * _SINGLES))
    title = f"enqueue one by one, {_SINGLES:,} in a session's transaction"
    yield Figure("one-by-one", title, "jobs/s", rates[0], "raw INSERT each", rates[1])


def rush(bench: Bench) -> Iterator[Figure]:
    """Insert one job a transaction from 16 connections while a worker drains them.

    Beside it the same with a trigger that always notifies, as most queues have one; and the inserts alone, with the
    trigger off and nobody to drain.
    """
    ours: list[float] = []
    always: list[float] = []
    alone: list[float] = []
    behind: list[float] = []
    for _ in range(min(bench.rounds, 2)):
        rate, late = _rush_drained(bench)
        ours.append(rate)
        behind.append(late)
        with _always_notifying(bench):
            always.append(_rush_drained(bench)[0])
        jobs.empty(bench.admin)
        alone.append(_insert_rush(bench, PGOPTIONS="-c neoq.notify=off").rate)
    title = f"one job a transaction from {_CLIENTS} connections while a worker drains them"
    detail = {"seconds_until_drained": behind}
    yield Figure("rush", title, "commits/s", ours, "a trigger that always notifies", always, detail)
    yield Figure("rush-alone", title, "commits/s", ours, "the inserts alone", alone)


def _rush_drained(bench: Bench) -> tuple[float, float]:
    """Return the commits a second, and how many seconds after the last one everything was done."""
    jobs.empty(bench.admin)
    jobs.settle(bench.admin)
    with workers(bench, (), runners=1):
        done = _insert_rush(bench)
        ended = time.monotonic()
        while bench.row("SELECT EXISTS (SELECT FROM neoq_jobs WHERE status <> 'processed')") == (True,):
            if time.monotonic() > ended + PATIENCE:
                raise RuntimeError("the worker does not catch up")
            time.sleep(0.05)
        late = time.monotonic() - ended
    (count,) = bench.row("SELECT count(*) FROM neoq_jobs")
    if count != done.commits:
        raise RuntimeError(f"{count} jobs are there, and {done.commits} were committed")
    return done.rate, late


def _insert_rush(bench: Bench, **environment: str) -> Rush:
    # pgbench takes a colon and a word for a variable of its own, between apostrophes too.
    task = jobs.noop.name.replace(":", "' || chr(58) || '")
    insert = f"INSERT INTO neoq_jobs (queue, task, payload) VALUES ('{jobs.QUEUE}', '{task}', '{{\"number\": 1}}')"
    return pgbench(bench, f"{insert};\n", clients=_CLIENTS, seconds=bench.sizes.rush_seconds, **environment)


@contextmanager
def _always_notifying(bench: Bench) -> Iterator[None]:
    """Replace the trigger's function by one that asks nobody."""
    function, definition = bench.row(
        "SELECT tgfoid::regprocedure::text, pg_get_functiondef(tgfoid) FROM pg_trigger "
        "WHERE tgrelid = 'neoq_jobs'::regclass AND NOT tgisinternal"
    )
    bench.admin.execute(
        f"CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM pg_notify('neoq', TG_RELID::bigint || ' ' || n.queue) FROM neoq_inserted AS n GROUP BY n.queue; "
        "RETURN NULL; END $$"
    )
    try:
        yield
    finally:
        bench.admin.execute(definition)
