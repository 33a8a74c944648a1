"""How long a job that was just committed waits for its start."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy.orm import Session

from benchmarks import jobs, raw
from benchmarks.bench import PATIENCE
from benchmarks.figures import Figure, percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench


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
    for percent in (50, 95, 99):
        title = f"pick-up by an idle runner, p{percent} of {count}"
        yield Figure(
            f"pick-up-p{percent}",
            title,
            "ms",
            [percentile(ours.answered, percent)],
            "raw LISTEN and claim",
            [percentile(theirs.answered, percent)],
            detail={
                "from_commit_sent": percentile(ours.sent, percent),
                "raw_from_commit_sent": percentile(theirs.sent, percent),
            },
        )


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
    waiter = raw.Waiter(bench.database)
    waiter.start()
    if not waiter.listening.wait(PATIENCE):
        raise RuntimeError("the raw loop does not listen")
    with bench.database.connect() as connection:
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
            began = waiter.arrivals.get(timeout=PATIENCE)
            waits.answered.append((began - answered) * 1000)
            waits.sent.append((began - sent) * 1000)
        connection.execute("SELECT pg_notify(%s, 'stop')", (raw.CHANNEL,))
    waiter.join(PATIENCE)
