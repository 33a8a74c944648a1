"""Draining backlogs of jobs that do nothing: how fast the queue itself is, and whether that depends on anything.

Timed by the database: from the first claim to the last ``finished_at``, of the library and of the raw loop alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks import jobs, raw
from benchmarks.bench import THREADS
from benchmarks.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

    from benchmarks.bench import Bench

RAW_LOOP: Final = "raw claim-and-complete loop"


def drain_20k(bench: Bench) -> Iterator[Figure]:
    """Drain 20,000 jobs."""
    yield from _drain("drain-20k", bench, bench.sizes.small, bench.rounds)


def drain_100k(bench: Bench) -> Iterator[Figure]:
    """Drain 100,000 jobs."""
    yield from _drain("drain-100k", bench, bench.sizes.large, bench.rounds)


def drain_300k(bench: Bench) -> Iterator[Figure]:
    """Drain 300,000 jobs."""
    yield from _drain("drain-300k", bench, bench.sizes.huge, min(bench.rounds, 2))


def drain_million(bench: Bench) -> Iterator[Figure]:
    """Drain 1,000,000 jobs."""
    yield from _drain("drain-million", bench, bench.sizes.million, 1)


def threads(bench: Bench) -> Iterator[Figure]:
    """Drain with 20 threads and with 4."""
    count = bench.sizes.large
    many: list[float] = []
    few: list[float] = []
    for _ in range(bench.rounds):
        many.append(_our_rate(bench, _refill(bench, count), count))
        few.append(_our_rate(bench, _refill(bench, count), count, threads=4))
    yield Figure("threads", f"{count:,} jobs, {THREADS} threads", "jobs/s", many, "the same with 4 threads", few)


def future(bench: Bench) -> Iterator[Figure]:
    """Drain beside 1,000,000 jobs of the highest priority that are due tomorrow."""
    yield from _drain_beside("future", "future jobs of top priority", bench, jobs.fill_future, bench.sizes.million)


def history(bench: Bench) -> Iterator[Figure]:
    """Drain beside 1,000,000 finished jobs."""
    yield from _drain_beside("history", "finished jobs", bench, jobs.fill_history, bench.sizes.million)


def unknown(bench: Bench) -> Iterator[Figure]:
    """Drain behind 100,000 due jobs of a task that the runner does not know."""
    yield from _drain_beside(
        "unknown", "due jobs of an unknown task, ahead in the queue", bench, jobs.fill_unknown, bench.sizes.large
    )


def lanes(bench: Bench) -> Iterator[Figure]:
    """Drain 100,000 jobs spread over fifty queues with five priorities each."""
    count = bench.sizes.large

    def spread() -> None:
        jobs.empty(bench.admin)
        jobs.fill_lanes(bench.admin, count)

    ours: list[float] = []
    theirs: list[float] = []
    one_lane: list[float] = []
    for _ in range(min(bench.rounds, 2)):
        one_lane.append(_our_rate(bench, _refill(bench, count), count))
        ours.append(_our_rate(bench, spread, count, jobs.QUEUES))
        theirs.append(_raw_rate(bench, spread, count, jobs.QUEUES))
    title = f"{count:,} jobs over {len(jobs.QUEUES)} queues x {len(jobs.PRIORITIES)} priorities"
    yield Figure("lanes", title, "jobs/s", ours, "the same in one queue", one_lane)
    yield Figure("lanes-raw", title, "jobs/s", ours, RAW_LOOP, theirs)


# --- how ---


def _our_rate(
    bench: Bench,
    prepare: Callable[[], None],
    count: int,
    queues: Sequence[str] = (jobs.QUEUE,),
    *,
    threads: int = THREADS,
) -> float:
    prepare()
    jobs.settle(bench.admin)
    return count / bench.timed_drain(bench.runner(jobs.noop, queues, threads=threads).drain, count)


def _raw_rate(
    bench: Bench,
    prepare: Callable[[], None],
    count: int,
    queues: Sequence[str] = (jobs.QUEUE,),
    *,
    chooses: bool = False,
) -> float:
    prepare()
    jobs.settle(bench.admin)
    task = jobs.noop.name if chooses else None
    return count / bench.timed_drain(lambda: raw.drain(bench.database, queues, task=task), count)


def _refill(bench: Bench, count: int) -> Callable[[], None]:
    def prepare() -> None:
        jobs.empty(bench.admin)
        jobs.fill(bench.admin, count)

    return prepare


def _drain(name: str, bench: Bench, count: int, rounds: int) -> Iterator[Figure]:
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours.append(_our_rate(bench, _refill(bench, count), count))
        theirs.append(_raw_rate(bench, _refill(bench, count), count))
    yield Figure(
        name, f"{count:,} jobs, {THREADS} threads", "jobs/s", ours, RAW_LOOP, theirs, detail={"backlog": count}
    )


def _drain_beside(
    name: str, title: str, bench: Bench, fill: Callable[[psycopg.Connection[Any], int], None], others: int
) -> Iterator[Figure]:
    """Drain 20,000 jobs of an otherwise empty table, and then of one with many other rows."""
    count = bench.sizes.small
    alone = [_our_rate(bench, _refill(bench, count), count) for _ in range(bench.rounds)]
    jobs.empty(bench.admin)
    fill(bench.admin, others)
    ours: list[float] = []
    theirs: list[float] = []
    # The raw loop would take what it does not know, so it is told to leave that.
    chooses = fill is jobs.fill_unknown
    for _ in range(bench.rounds):
        ours.append(_our_rate(bench, lambda: jobs.fill(bench.admin, count), count))
        theirs.append(_raw_rate(bench, lambda: jobs.fill(bench.admin, count), count, chooses=chooses))
    title = f"{count:,} jobs beside {others:,} {title}"
    yield Figure(name, title, "jobs/s", ours, "the same without them", alone)
    yield Figure(f"{name}-raw", title, "jobs/s", ours, RAW_LOOP, theirs)
