"""Enqueueing, everything from the call to the commit included."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.orm import Session

from benchmarks import jobs, raw
from benchmarks.figures import Figure
from sqla_neoq import enqueue_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from benchmarks.bench import Bench

_BULK: Final = 10_000
_SINGLES: Final = 1_000


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
