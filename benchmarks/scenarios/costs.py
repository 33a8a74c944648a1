"""What a runner costs: to start, to do nothing, for each job, and in memory."""

from __future__ import annotations

import time
from threading import Timer
from typing import TYPE_CHECKING, Final

from benchmarks import jobs, raw
from benchmarks.bench import PATIENCE, THREADS
from benchmarks.figures import Figure
from benchmarks.meters import Cpu, ServerMeter, TracedEngine, resident_mb
from benchmarks.processes import end, spawn, worker, workers
from benchmarks.scenarios.draining import RAW_LOOP
from sqla_neoq import Runner, RunnerConfig

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from benchmarks.bench import Bench

_LEAST: Final = """
import os, time
from sqlalchemy import create_engine, text
with create_engine(os.environ["NEOQ_DATABASE_URL"]).connect() as connection:
    connection.execute(text("SELECT 1"))
print(time.monotonic(), flush=True)
"""


def start(bench: Bench) -> Iterator[Figure]:
    """Start a worker process, and see when its first job starts."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(bench.sizes.starts):
        jobs.empty(bench.admin)
        jobs.fill(bench.admin, 1, task=jobs.hello.name)
        started = time.monotonic()
        ours.append(_said(worker(bench)) - started)
        started = time.monotonic()
        theirs.append(_said(spawn(bench, "-c", _LEAST)) - started)
    beside = "import SQLAlchemy, connect, SELECT 1"
    yield Figure("start", "from the start of the process to that of its first job", "s", ours, beside, theirs)


def _said(process: subprocess.Popen[str]) -> float:
    """Return the first line that the process writes, and end it."""
    assert process.stdout is not None
    # A process that has nothing to say is killed, and its output ends.
    limit = Timer(PATIENCE, process.kill)
    limit.start()
    try:
        return float(process.stdout.readline())
    finally:
        limit.cancel()
        end(process)


def idle(bench: Bench) -> Iterator[Figure]:
    """Let a runner wait for jobs that do not come."""
    jobs.empty(bench.admin)
    config = RunnerConfig(concurrency=THREADS)
    with TracedEngine(bench) as traced, Runner(traced.engine, jobs.noop, config=config):
        # First it looks more often, in case a transaction was open while it came.
        time.sleep(min(5.0, bench.sizes.idle_seconds))
        before, queries, began = Cpu.now(bench), traced.queries(), time.monotonic()
        time.sleep(bench.sizes.idle_seconds)
        after, queries_later, ended = Cpu.now(bench), traced.queries(), time.monotonic()
    seconds = ended - began
    yield Figure("idle-queries", "an idle runner: queries", "/s", [(queries_later - queries) / seconds])
    yield Figure(
        "idle-cpu",
        "an idle runner: processor time, its own and the server's",
        "% of a core",
        [100 * after.since(before) / seconds],
        detail={"runner_seconds": after.runner - before.runner, "server_seconds": after.server - before.server},
    )


def memory(bench: Bench) -> Iterator[Figure]:
    """Run 1,000,000 jobs in one worker process, and watch its memory."""
    jobs.empty(bench.admin)
    with workers(bench, (), runners=1) as (process,):
        time.sleep(min(1.0, bench.sizes.idle_seconds))
        waiting = resident_mb(process.pid)
    jobs.fill(bench.admin, bench.sizes.million)
    jobs.settle(bench.admin)
    process = worker(bench, "--burst")
    held: list[float] = []
    limit = time.monotonic() + PATIENCE + bench.sizes.million / 1000
    while process.poll() is None:
        if time.monotonic() > limit:
            process.kill()
            raise RuntimeError("the worker does not come to an end")
        if now := resident_mb(process.pid):
            held.append(now)
        time.sleep(0.1)
    process.communicate()
    bench.seconds_of("id > %s", 0, bench.sizes.million)
    tenth = max(held[: 1 + len(held) // 10])
    yield Figure("memory-idle", f"memory of an idle worker process, {THREADS} threads", "MB", [waiting])
    title = f"the most memory over {bench.sizes.million:,} jobs"
    yield Figure("memory", title, "MB", [max(held)], "in the first tenth of the time", [tenth])


def per_job(bench: Bench) -> Iterator[Figure]:
    """Count what 100,000 jobs cost: WAL, commits, and queries sent."""
    count = bench.sizes.large
    config = RunnerConfig(concurrency=THREADS, retention=None)
    for_raw, for_us = ServerMeter(bench), ServerMeter(bench)
    _refill(bench, count)
    with for_raw:
        raw.drain(bench.database)
    _refill(bench, count)
    with for_us:
        Runner(bench.database.url, jobs.noop, config=config).drain()
    _refill(bench, count)
    with TracedEngine(bench) as traced:
        Runner(traced.engine, jobs.noop, config=config).drain()
        queries = traced.queries()
    title = f"of {count:,} jobs, each: "
    wal = [meter.wal / count for meter in (for_us, for_raw)]
    commits = [meter.commits / count for meter in (for_us, for_raw)]
    yield Figure("wal", title + "WAL, drained right after a checkpoint", "bytes/job", wal[:1], RAW_LOOP, wal[1:])
    yield Figure("commits", title + "commits", "/job", commits[:1], RAW_LOOP, commits[1:])
    yield Figure("queries", title + "queries sent, BEGIN and COMMIT included", "/job", [queries / count])


def _refill(bench: Bench, count: int) -> None:
    bench.engine.dispose()
    jobs.empty(bench.admin)
    jobs.fill(bench.admin, count)
    jobs.settle(bench.admin)
