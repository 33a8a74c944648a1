"""Tasks that do something, and so bring their own cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import jobs, raw
from benchmarks.bench import THREADS
from benchmarks.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.bench import Bench


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
