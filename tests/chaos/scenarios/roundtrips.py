"""A whole life of jobs, cut at every round trip to the database: before the server hears of it, and after it answered.

The runner is a thread of the harness here, not a process: that makes hundreds of lives a matter of minutes.
"""

import logging
import os
import time
from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from chaos import tasks
from chaos.ledger import VARIABLE
from chaos.proxy import Link, Proxy, Verdict
from chaos.scenarios import SCENARIOS
from chaos.world import World, patiently
from sqla_neoq import Runner, RunnerConfig
from sqla_neoq.errors import DatabaseUnavailable

_CONFIG = RunnerConfig(
    concurrency=3,
    heartbeat_interval=timedelta(milliseconds=100),
    poll_interval=timedelta(milliseconds=100),
    shutdown_timeout=timedelta(milliseconds=200),
)
_LONGEST_LIFE = 30.0


@SCENARIOS.add(
    "every-round-trip",
    promise="nothing lost, nothing doubled, wherever a connection breaks",
    faults="one cut at the n-th round trip of enqueue, claim, run, complete, retry, rescue, dead, cancel and shutdown: "
    "for every n, before the server heard of it and after it answered",
    limit=15.0,
    smoke=True,
    ends={"chaos:doomed": {"dead:exhausted"}, "chaos:victim": {"dead:crashed", "processed"}},
)
def every_round_trip(world: World) -> None:
    os.environ[VARIABLE] = str(world.ledger.path)
    logging.getLogger("sqla_neoq").setLevel(logging.CRITICAL)
    proxy, url = world.proxy()
    counts = [_life(world, proxy, url, None, Verdict.PASS)[0] for _ in range(2)]
    last = max(counts) + 3
    step = max(1, last // 3) if world.smoke else 1
    left_behind = 0
    for kind in (Verdict.CUT_BEFORE, Verdict.CUT_AFTER):
        for n in range(1, last + 1, step):
            _, seconds, hit = _life(world, proxy, url, n, kind)
            if hit:
                world.injure()
                world.recovered(seconds)
            left_behind += world.server.value("SELECT count(*) FROM neoq_workers")
            world.server.execute("DELETE FROM neoq_workers")
    world.notes["round trips of a life"] = counts
    world.notes["worker rows left behind"] = left_behind
    # What the last life gave back.
    with Runner(world.url, tasks, config=_CONFIG):
        patiently(lambda: _unfinished(world) == 0, within=30)


def _life(world: World, proxy: Proxy, url: str, n: int | None, kind: Verdict) -> tuple[int, float, bool]:
    """Live once; returns the round trips, the seconds until all was done, and whether the cut came to pass."""
    first = proxy.round_trips
    cuts = proxy.cuts

    def judge(_link: Link, _request: bytes) -> Verdict:
        return kind if n is not None and proxy.round_trips - first == n else Verdict.PASS

    proxy.judge = judge
    began = time.monotonic()
    for task in ("chaos:effect", "chaos:plain", "chaos:async", "chaos:fails", "chaos:doomed"):
        _enqueue(world, task, url)
    _orphan(world, _enqueue(world, "chaos:plain", url), crashes=0)
    _orphan(world, _enqueue(world, "chaos:victim", url), crashes=2)
    runner = _started(url)
    try:
        patiently(
            lambda: _unfinished(world) == 0,
            within=_LONGEST_LIFE,
            why=lambda: f"cut {kind.value} round trip {n}: {world.server.rows(_STATES)}",
        )
        seconds = time.monotonic() - began
        # Now one that does not end before the stop.
        key = _enqueue(world, "chaos:plain", url, seconds=0.6)
        world.await_started([key], within=_LONGEST_LIFE)
    finally:
        runner.stop()
    return proxy.round_trips - first, seconds, proxy.cuts > cuts


_STATES = "SELECT id, task, status, worker_id, claim_token FROM neoq_jobs WHERE status IN ('new', 'running', 'failed')"


def _enqueue(world: World, task: str, url: str, **arguments: float) -> int:
    while True:
        try:
            return world.enqueue(task, url=url, **arguments)[0]
        except (SQLAlchemyError, OSError):
            continue  # as a producer does: with another job


def _orphan(world: World, key: int, crashes: int) -> None:
    """Make the job one whose worker has died under it."""
    world.server.execute(
        "UPDATE neoq_jobs SET status = 'running', worker_id = 0, ran_at = now(), "
        f"claim_token = nextval('neoq_claim_tokens'), crashes = {crashes} "
        f"WHERE payload ->> 'key' = '{key}' AND status = 'new'"
    )


def _started(url: str) -> Runner:
    """Start a runner, and again when the cut hits its start, as a service manager does."""
    while True:
        runner = Runner(url, tasks, config=_CONFIG)
        try:
            runner.start()
        except DatabaseUnavailable:
            runner.stop()
        else:
            return runner


def _unfinished(world: World) -> int:
    return int(world.server.value("SELECT count(*) FROM neoq_jobs WHERE status IN ('new', 'running', 'failed')"))
