"""Tasks that do something: wait, as for another server, or write."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks import jobs, raw
from benchmarks.bench import THREADS
from benchmarks.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.bench import Bench


def naps(bench: Bench) -> Iterator[Figure]:
    """Run jobs that sleep for 1, 10 and 100 ms, and compare with 20 threads that do nothing else."""
    for seconds, count in bench.sizes.naps:
        ideal = THREADS / seconds
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(min(bench.rounds, 2)):
            jobs.empty(bench.admin)
            jobs.fill_naps(bench.admin, count, seconds)
            jobs.settle(bench.admin)
            taken = bench.timed_drain(bench.runner(jobs.nap).drain, count)
            ours.append(100 * count / taken / ideal)
            theirs.append(100 * _rate_of_sleep(seconds, count) / ideal)
        milliseconds = round(seconds * 1000)
        title = f"{count:,} jobs that sleep {milliseconds} ms, {THREADS} threads: part of {ideal:,.0f}/s"
        yield Figure(f"nap-{milliseconds}", title, "% of ideal", ours, "threads that only sleep", theirs)


def _rate_of_sleep(seconds: float, count: int) -> float:
    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(THREADS):
            pool.submit(lambda: [time.sleep(seconds) for _ in range(count // THREADS)])
    return count / (time.monotonic() - started)


def in_session(bench: Bench) -> Iterator[Figure]:
    """Complete jobs in their own session's transaction, one commit each."""
    count = bench.sizes.in_session
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(bench.rounds):
        runs: tuple[Callable[[], object], ...] = (
            bench.runner(jobs.write).drain,
            lambda: raw.drain_writing(bench.database, THREADS),
        )
        for rates, run in zip((ours, theirs), runs, strict=True):
            jobs.empty(bench.admin)
            jobs.fill(bench.admin, count, task=jobs.write.name)
            jobs.settle(bench.admin)
            rates.append(count / bench.timed_drain(run, count))
            (written,) = bench.admin.execute("SELECT count(*) FROM bench_effects").fetchone() or (0,)
            if written != count:
                raise RuntimeError(f"{written} rows are written by {count} jobs")
    title = f"one row written and completed in job.session, {count:,} jobs, {THREADS} threads"
    yield Figure("in-session", title, "jobs/s", ours, "raw INSERT and complete, one commit each", theirs)
