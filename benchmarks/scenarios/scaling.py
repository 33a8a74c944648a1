"""More than one process on the same backlog."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks import jobs
from benchmarks.figures import Figure
from benchmarks.processes import workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench


def processes(bench: Bench) -> Iterator[Figure]:
    """Drain 100,000 jobs with one worker, with ``--processes 2``, and with two workers."""
    rates: dict[str, list[float]] = {"one": [], "processes": [], "workers": []}
    for _ in range(min(bench.rounds, 2)):
        rates["one"].append(_drained(bench, (), runners=1))
        rates["processes"].append(_drained(bench, ("--processes", "2"), runners=2))
        rates["workers"].append(_drained(bench, (), (), runners=2))
    count = bench.sizes.large
    beside = "one worker process"
    yield Figure("processes-2", f"{count:,} jobs, --processes 2", "jobs/s", rates["processes"], beside, rates["one"])
    yield Figure("workers-2", f"{count:,} jobs, two workers", "jobs/s", rates["workers"], beside, rates["one"])


def _drained(bench: Bench, *commands: tuple[str, ...], runners: int) -> float:
    count = bench.sizes.large
    jobs.empty(bench.admin)
    with workers(bench, *commands, runners=runners):
        jobs.fill(bench.admin, count, wake=True)
        limit = time.monotonic() + 60 + count / 1000
        while bench.row("SELECT EXISTS (SELECT FROM neoq_jobs WHERE status IN ('new', 'failed', 'running'))")[0]:
            if time.monotonic() > limit:
                raise RuntimeError("the workers do not come to an end")
            time.sleep(0.25)
    return count / bench.seconds_of("id > %s", 0, count)
