"""How long a job that was just committed waits for its start."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy.orm import Session

from benchmarks import jobs, raw
from benchmarks.bench import PATIENCE
from benchmarks.figures import Figure, percentile
from benchmarks.processes import Producer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from queue import SimpleQueue

    from benchmarks.bench import Bench
    from sqla_neoq import Runner

_SHOWN: Final = (50, 95, 99)
_RAW: Final = "raw LISTEN and claim"


class _Waits(NamedTuple):
    """Milliseconds from a COMMIT to the start of its job: from its answer, and from its being sent."""

    answered: list[float]
    sent: list[float]


def idle(bench: Bench) -> Iterator[Figure]:
    """Measure how long an idle runner takes to start a job that was just committed."""
    jobs.empty(bench.admin)
    jobs.settle(bench.admin)
    count = bench.sizes.pickups
    ours, theirs = _Waits([], []), _Waits([], [])
    # In two halves each, so that a busy minute of the machine does not hit one side alone.
    for half in (count // 2, count - count // 2):
        _our_waits(bench, half, ours)
        _raw_waits(bench, half, theirs)
    yield from _percentiles("pick-up", f"one at a time with pauses, {count} jobs", ours.answered, theirs.answered)
    for percent in _SHOWN:
        yield Figure(
            f"pick-up-sent-p{percent}",
            f"the same from when the COMMIT was sent, p{percent}",
            "ms",
            [percentile(ours.sent, percent)],
            _RAW,
            [percentile(theirs.sent, percent)],
        )


def at_rates(bench: Bench) -> Iterator[Figure]:
    """Measure it at 10, 200 and 2,000 jobs a second, inserted by a process of its own."""
    for rate, seconds in bench.sizes.rates:
        jobs.empty(bench.admin)
        jobs.settle(bench.admin)
        with bench.runner(jobs.mark) as runner:
            ours = _waits(bench, rate, seconds, jobs.arrivals)
            _settled(runner, len(ours))
        jobs.empty(bench.admin)
        jobs.settle(bench.admin)
        with _raw_waiter(bench, most=100) as waiter:
            theirs = _waits(bench, rate, seconds, waiter.arrivals, channel=raw.CHANNEL)
        yield from _percentiles(f"pick-up-{rate}", f"{rate:,} jobs/s, {len(ours):,} jobs", ours, theirs)


def _settled(runner: Runner, count: int) -> None:
    limit = time.monotonic() + PATIENCE
    while runner.counts.total < count and time.monotonic() < limit:
        time.sleep(0.01)


def _waits(
    bench: Bench, rate: int, seconds: float, arrivals: SimpleQueue[tuple[int, float]], channel: str | None = None
) -> list[float]:
    with Producer(bench, rate, seconds, channel=channel) as producer:
        answers = producer.answers()
    began = dict(arrivals.get(timeout=PATIENCE) for _ in answers)
    return [(began[number] - answered) * 1000 for number, answered in answers.items()]


def _percentiles(name: str, title: str, ours: Sequence[float], theirs: Sequence[float]) -> Iterator[Figure]:
    for percent in _SHOWN:
        # All of them go with the first, for the plot.
        every = {} if percent != _SHOWN[0] else {"percentiles": _every(ours), "other_percentiles": _every(theirs)}
        yield Figure(
            f"{name}-p{percent}",
            f"{title}, p{percent}",
            "ms",
            [percentile(ours, percent)],
            _RAW,
            [percentile(theirs, percent)],
            detail=every,
        )


def _every(values: Sequence[float]) -> list[float]:
    return [round(percentile(values, percent), 4) for percent in range(1, 100)]


def _pauses(count: int) -> Iterator[float]:
    """Yield seconds between two jobs: long enough to be idle again, and in step with nothing."""
    chance = random.Random(2)
    for _ in range(count):
        yield chance.uniform(0.02, 0.18)


def _our_waits(bench: Bench, count: int, waits: _Waits) -> None:
    with bench.runner(jobs.mark):
        for number, pause in enumerate(_pauses(count)):
            time.sleep(pause)
            with Session(bench.engine) as session:
                jobs.mark.enqueue(session, number=number)
                sent = time.monotonic()
                session.commit()
                answered = time.monotonic()
            _, began = jobs.arrivals.get(timeout=PATIENCE)
            waits.answered.append((began - answered) * 1000)
            waits.sent.append((began - sent) * 1000)


def _raw_waits(bench: Bench, count: int, waits: _Waits) -> None:
    with _raw_waiter(bench) as waiter, bench.database.connect() as connection:
        for number, pause in enumerate(_pauses(count)):
            time.sleep(pause)
            connection.execute("BEGIN")
            connection.execute(
                "INSERT INTO neoq_jobs (queue, task, payload) VALUES (%s, %s, %s)",
                (jobs.QUEUE, jobs.mark.name, f'{{"number":{number}}}'),
            )
            connection.execute("SELECT pg_notify(%s, %s)", (raw.CHANNEL, jobs.QUEUE))
            sent = time.monotonic()
            connection.execute("COMMIT")
            answered = time.monotonic()
            _, began = waiter.arrivals.get(timeout=PATIENCE)
            waits.answered.append((began - answered) * 1000)
            waits.sent.append((began - sent) * 1000)


@contextmanager
def _raw_waiter(bench: Bench, most: int = 1) -> Iterator[raw.Waiter]:
    waiter = raw.Waiter(bench.database, most)
    waiter.start()
    if not waiter.listening.wait(PATIENCE):
        raise RuntimeError("the raw loop does not listen")
    try:
        yield waiter
    finally:
        waiter.stopping.set()
        bench.admin.execute("SELECT pg_notify(%s, 'stop')", (raw.CHANNEL,))
        waiter.join(PATIENCE)
        if waiter.is_alive():
            # It would take the next scenario's jobs.
            raise RuntimeError("the raw loop does not stop")
