"""The measurements. Each alternates between the library and its raw counterpart, so that both meet the same load.

Throughput is the best of the rounds: whatever else the machine does can only make a round slower. A drain is timed by
the database: from before the runner starts, connects and registers, to the last ``finished_at``.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks import jobs, raw
from benchmarks.report import Figure
from sqla_neoq import Runner, RunnerConfig, enqueue_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg
    from sqlalchemy import Engine

    from benchmarks.database import Database

THREADS: Final = 20
_PATIENCE: Final = 30.0
_BULK: Final = 10_000
_SINGLES: Final = 1_000
_RAW_LOOP: Final = "raw claim-and-complete loop"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done in each scenario: for figures, or only to see that all of it works."""

    small: int = 20_000
    large: int = 100_000
    bulk_calls: int = 5
    single_transactions: int = 5
    pickups: int = 400
    in_session: int = 4_000
    million: int = 1_000_000


SMOKE: Final = Sizes(
    small=500, large=1_000, bulk_calls=1, single_transactions=1, pickups=10, in_session=100, million=1_000
)


class Bench:
    """What every scenario works with.

    Args:
        database: where.
        sizes: how much.
        rounds: how often each measurement is repeated.
    """

    def __init__(self, database: Database, sizes: Sizes, rounds: int) -> None:
        self.database = database
        self.sizes = sizes
        self.rounds = rounds
        self.admin: psycopg.Connection[Any] = database.connect()
        self.engine: Engine = create_engine(database.url)

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()
        self.admin.close()

    def timed_drain(self, run: Callable[[], object], expected: int) -> float:
        """Return the seconds, by the database's clock, until the last of ``expected`` jobs was processed."""
        (started,) = self._row("SELECT clock_timestamp()")
        run()
        count, seconds = self._row(
            "SELECT count(*), extract(epoch FROM max(finished_at) - %s)::float8 FROM neoq_jobs "
            "WHERE status = 'processed' AND finished_at >= %s",
            (started, started),
        )
        if count != expected:
            raise RuntimeError(f"{count} jobs are processed, and {expected} should be")
        return float(seconds)

    def _row(self, statement: str, parameters: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self.admin.execute(statement, parameters).fetchone()
        assert row is not None
        return row

    def runner(self, task: Any, queues: Sequence[str] = (jobs.QUEUE,)) -> Runner:
        """Return a runner with as many threads as all scenarios use; all it is asked for it keeps."""
        config = RunnerConfig(concurrency=THREADS, retention=None)
        return Runner(self.database.url, task, queues=dict.fromkeys(queues), config=config)


# --- draining ---


def _drained(
    bench: Bench,
    prepare: Callable[[], None],
    count: int,
    queues: Sequence[str] = (jobs.QUEUE,),
) -> tuple[list[float], list[float]]:
    """Return the jobs a second of each round: the library's, and the raw loop's."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(bench.rounds):
        for rates, run in (
            (ours, bench.runner(jobs.noop, queues).drain),
            (theirs, lambda: raw.drain(bench.database, queues)),
        ):
            prepare()
            jobs.settle(bench.admin)
            rates.append(count / bench.timed_drain(run, count))
    return ours, theirs


def _refill(bench: Bench, count: int) -> Callable[[], None]:
    def prepare() -> None:
        jobs.empty(bench.admin)
        jobs.fill(bench.admin, count)

    return prepare


def _drain(name: str, bench: Bench, count: int) -> Iterator[Figure]:
    ours, theirs = _drained(bench, _refill(bench, count), count)
    yield Figure(name, f"no-op drain, {count:,} jobs, {THREADS} threads", "jobs/s", ours, _RAW_LOOP, theirs)


def drain_small(bench: Bench) -> Iterator[Figure]:
    """Drain 20,000 no-op jobs."""
    yield from _drain("drain-small", bench, bench.sizes.small)


def drain_large(bench: Bench) -> Iterator[Figure]:
    """Drain 100,000 no-op jobs."""
    yield from _drain("drain-large", bench, bench.sizes.large)


def drain_million(bench: Bench) -> Iterator[Figure]:
    """Drain 1,000,000 no-op jobs."""
    yield from _drain("drain-million", bench, bench.sizes.million)


def _drain_beside(
    name: str, title: str, bench: Bench, fill: Callable[[psycopg.Connection[Any], int], None]
) -> Iterator[Figure]:
    """Drain 20,000 jobs of an otherwise empty table, and then of one with a million other rows."""
    count = bench.sizes.small
    alone, _ = _drained(bench, _refill(bench, count), count)
    jobs.empty(bench.admin)
    fill(bench.admin, bench.sizes.million)
    ours, theirs = _drained(bench, lambda: jobs.fill(bench.admin, count), count)
    title = f"no-op drain, {count:,} jobs beside {bench.sizes.million:,} {title}"
    yield Figure(name, title, "jobs/s", ours, "the same without them", alone)
    yield Figure(f"{name}-raw", title, "jobs/s", ours, _RAW_LOOP, theirs)


def future(bench: Bench) -> Iterator[Figure]:
    """Drain beside 1,000,000 jobs of the highest priority that are due tomorrow."""
    yield from _drain_beside("future", "future jobs of top priority", bench, jobs.fill_future)


def history(bench: Bench) -> Iterator[Figure]:
    """Drain beside 1,000,000 finished jobs."""
    yield from _drain_beside("history", "finished jobs", bench, jobs.fill_history)


def lanes(bench: Bench) -> Iterator[Figure]:
    """Drain 100,000 jobs spread over ten queues with five priorities each."""
    count = bench.sizes.large
    one_lane, _ = _drained(bench, _refill(bench, count), count)

    def prepare() -> None:
        jobs.empty(bench.admin)
        jobs.fill_lanes(bench.admin, count)

    ours, theirs = _drained(bench, prepare, count, jobs.QUEUES)
    title = f"no-op drain, {count:,} jobs over {len(jobs.QUEUES)} queues x {len(jobs.PRIORITIES)} priorities"
    yield Figure("lanes", title, "jobs/s", ours, "the same in one queue", one_lane)
    yield Figure("lanes-raw", title, "jobs/s", ours, _RAW_LOOP, theirs)


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


# --- enqueueing ---


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


# --- picking up ---


class _Waits(NamedTuple):
    """Milliseconds from a COMMIT to the start of its job: from its answer, and from its being sent."""

    answered: list[float]
    sent: list[float]


def pick_up(bench: Bench) -> Iterator[Figure]:
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
                sent = time.perf_counter()
                session.commit()
                answered = time.perf_counter()
            _, began = jobs.arrivals.get(timeout=_PATIENCE)
            waits.answered.append((began - answered) * 1000)
            waits.sent.append((began - sent) * 1000)


def _raw_waits(bench: Bench, count: int, waits: _Waits) -> None:
    waiter = raw.Waiter(bench.database)
    waiter.start()
    if not waiter.listening.wait(_PATIENCE):
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
            sent = time.perf_counter()
            connection.execute("COMMIT")
            answered = time.perf_counter()
            began = waiter.arrivals.get(timeout=_PATIENCE)
            waits.answered.append((began - answered) * 1000)
            waits.sent.append((began - sent) * 1000)
        connection.execute("SELECT pg_notify(%s, 'stop')", (raw.CHANNEL,))
    waiter.join(_PATIENCE)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many percent of ``values`` do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class Scenario(NamedTuple):
    """A measurement, and whether a plain run includes it."""

    measure: Callable[[Bench], Iterator[Figure]]
    always: bool


SCENARIOS: Final[dict[str, Scenario]] = {
    "drain-small": Scenario(drain_small, always=True),
    "drain-large": Scenario(drain_large, always=True),
    "in-session": Scenario(in_session, always=True),
    "bulk": Scenario(bulk, always=True),
    "one-by-one": Scenario(one_by_one, always=True),
    "pick-up": Scenario(pick_up, always=True),
    "drain-million": Scenario(drain_million, always=False),
    "future": Scenario(future, always=False),
    "history": Scenario(history, always=False),
    "lanes": Scenario(lanes, always=False),
}
