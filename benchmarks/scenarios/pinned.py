"""Draining while a long transaction elsewhere keeps what is dead from being removed.

Finished jobs then stay in the claim index, and a claim that starts at its beginning walks over all of them.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import jobs, raw
from benchmarks.bench import PATIENCE
from benchmarks.figures import Figure, percentile
from benchmarks.meters import Cpu
from benchmarks.processes import Producer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.bench import Bench
    from sqla_neoq import Runner

_RATE = 800
_AFTER = 3
"""So many more slices are drained for the figure, the best of which counts."""


@contextmanager
def snapshot(bench: Bench) -> Iterator[None]:
    """Hold a snapshot, and a transaction id, in another connection."""
    with bench.database.connect() as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT pg_current_xact_id()")
        yield
        connection.execute("ROLLBACK")


def pinned(bench: Bench) -> Iterator[Figure]:
    """Drain slices of 20,000 jobs, one after the other, under one snapshot; and the same without it."""
    count = bench.sizes.small
    free = _by_a_runner(bench)
    with snapshot(bench):
        ours = _by_a_runner(bench)
        fresh = [_rate(bench, bench.runner(jobs.noop).drain) for _ in range(2)]
    with snapshot(bench):
        jobs.empty(bench.admin)
        theirs = [_rate(bench, lambda: raw.drain(bench.database)) for _ in range(bench.sizes.slices + _AFTER)]
    jobs.empty(bench.admin)
    done = bench.sizes.slices * count
    title = f"{count:,} jobs after {done:,} under one snapshot"
    ages = [number * count for number in range(bench.sizes.slices + _AFTER)]
    series = {
        "series": [*zip(ages, ours, strict=True)],
        "free_series": [*zip(ages, free, strict=True)],
        "raw_series": [*zip(ages, theirs, strict=True)],
    }
    yield Figure("pinned", title, "jobs/s", ours[-_AFTER:], "the same without it", free[-_AFTER:], series)
    yield Figure("pinned-raw", title, "jobs/s", ours[-_AFTER:], "raw claim-and-complete loop", theirs[-_AFTER:])
    title = f"{count:,} jobs by a runner that was started after {done:,} under one snapshot"
    yield Figure("pinned-fresh", title, "jobs/s", fresh, "the same without it", free[-_AFTER:])


def _by_a_runner(bench: Bench) -> list[float]:
    """Return the rate of each slice, all drained by one runner."""
    jobs.empty(bench.admin)
    jobs.settle(bench.admin)
    with bench.runner(jobs.noop) as runner:

        def wait() -> None:
            expected = runner.counts.total + bench.sizes.small
            jobs.fill(bench.admin, bench.sizes.small, wake=True)
            _reached(runner, expected)

        return [_rate(bench, wait, fill=False) for _ in range(bench.sizes.slices + _AFTER)]


def _reached(runner: Runner, expected: int) -> None:
    limit = time.monotonic() + PATIENCE
    while runner.counts.total < expected:
        if time.monotonic() > limit:
            raise RuntimeError(f"{runner.counts.total} jobs are processed, and {expected} should be")
        time.sleep(0.02)


def _rate(bench: Bench, run: Callable[[], object], *, fill: bool = True) -> float:
    (last,) = bench.row("SELECT coalesce(max(id), 0) FROM neoq_jobs")
    if fill:
        jobs.fill(bench.admin, bench.sizes.small)
    run()
    return bench.sizes.small / bench.seconds_of("id > %s", last, bench.sizes.small)


class _Part(NamedTuple):
    """What was seen in one part of the time."""

    done: int
    seconds: float
    p50: float
    p99: float
    cpu: float


def reader(bench: Bench) -> Iterator[Figure]:
    """Run 800 jobs a second for three minutes while a reader holds its snapshot."""
    sizes = bench.sizes
    jobs.empty(bench.admin)
    jobs.settle(bench.admin)
    began: dict[int, float] = {}
    marks: list[tuple[float, int, Cpu]] = []
    with (
        snapshot(bench),
        bench.runner(jobs.mark) as runner,
        Producer(bench, _RATE, sizes.half_minutes * sizes.half_minute) as producer,
    ):
        first, moment = jobs.arrivals.get(timeout=PATIENCE)
        began[first] = moment
        for number in range(sizes.half_minutes + 1):
            time.sleep(max(0.0, moment + number * sizes.half_minute - time.monotonic()))
            marks.append((time.monotonic(), runner.counts.total, Cpu.now(bench)))
        answers = producer.answers()
        began.update(jobs.arrivals.get(timeout=PATIENCE) for _ in range(len(answers) - 1))
        _reached(runner, len(answers))
    parts = []
    for (start, done, cpu), (stop, done_later, cpu_later) in pairwise(marks):
        waits = [(began[n] - at) * 1000 for n, at in answers.items() if start <= at < stop]
        count = done_later - done
        used = cpu_later.since(cpu) / count * 1e6
        parts.append(_Part(count, stop - start, percentile(waits, 50), percentile(waits, 99), used))
    jobs.empty(bench.admin)
    yield from _first_and_last(parts, sizes.half_minutes * sizes.half_minute)


def _first_and_last(parts: list[_Part], seconds: float) -> Iterator[Figure]:
    title = f"{_RATE} jobs/s for {seconds:.0f} s under one snapshot, the last sixth: "
    beside = "the first sixth"
    first, last = parts[0], parts[-1]
    detail = {"parts": [part._asdict() for part in parts]}
    rates = [part.done / part.seconds for part in (last, first)]
    yield Figure("reader", title + "done", "jobs/s", rates[:1], beside, rates[1:], detail)
    yield Figure("reader-p50", title + "pick-up p50", "ms", [last.p50], beside, [first.p50])
    yield Figure("reader-p99", title + "pick-up p99", "ms", [last.p99], beside, [first.p99])
    yield Figure(
        "reader-cpu", title + "processor time a job, runner and server", "µs/job", [last.cpu], beside, [first.cpu]
    )
