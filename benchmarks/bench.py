"""What every scenario works with: sizes, rounds, connections, and the timing of a drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import create_engine

from benchmarks import jobs
from sqla_neoq import Runner, RunnerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg
    from sqlalchemy import Engine

    from benchmarks.database import Database

THREADS: Final = 20
PATIENCE: Final = 30.0
"""Seconds to wait for what comes at once unless something is broken."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done in each scenario: for figures, or only to see that all of it works."""

    small: int = 20_000
    large: int = 100_000
    huge: int = 300_000
    million: int = 1_000_000
    bulk_calls: int = 5
    single_transactions: int = 5
    pickups: int = 400
    rates: tuple[tuple[int, float], ...] = ((10, 20.0), (200, 10.0), (2_000, 8.0))
    in_session: int = 4_000
    naps: tuple[tuple[float, int], ...] = ((0.001, 40_000), (0.01, 10_000), (0.1, 1_000))
    slices: int = 12
    half_minutes: int = 6
    half_minute: float = 30.0
    rush_seconds: int = 8
    idle_seconds: float = 20.0
    starts: int = 5


SMOKE: Final = Sizes(
    small=500,
    large=1_000,
    huge=1_000,
    million=1_000,
    bulk_calls=1,
    single_transactions=1,
    pickups=10,
    rates=((10, 0.5), (200, 0.5), (2_000, 0.5)),
    in_session=100,
    naps=((0.001, 200), (0.01, 100), (0.1, 20)),
    slices=2,
    half_minutes=2,
    half_minute=0.5,
    rush_seconds=1,
    idle_seconds=0.5,
    starts=1,
)


class Bench:
    """What every scenario works with.

    Args:
        database: where.
        sizes: how much.
        rounds: how often each measurement is repeated at most.
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

    def row(self, statement: str, parameters: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """Return the one row that the statement has."""
        row: tuple[Any, ...] | None = self.admin.execute(statement, parameters).fetchone()
        assert row is not None
        return row

    def timed_drain(self, run: Callable[[], object], expected: int) -> float:
        """Return the seconds, by the database's clock, from the first claim to the end of the last of ``expected``.

        What comes before the first claim (to connect, to register) is a figure of its own.
        """
        (started,) = self.row("SELECT clock_timestamp()")
        run()
        return self.seconds_of("finished_at >= %s", started, expected)

    def seconds_of(self, which: str, parameter: object, expected: int) -> float:
        """Return the seconds from the first claim of such jobs to the end of the last."""
        count, seconds = self.row(
            "SELECT count(*), extract(epoch FROM max(finished_at) - min(ran_at))::float8 FROM neoq_jobs "
            f"WHERE status = 'processed' AND {which}",
            (parameter,),
        )
        if count != expected:
            raise RuntimeError(f"{count} jobs are processed, and {expected} should be")
        return float(seconds)

    def runner(self, task: Any, queues: Sequence[str] = (jobs.QUEUE,), *, threads: int = THREADS) -> Runner:
        """Return a runner; all it is asked for it keeps."""
        config = RunnerConfig(concurrency=threads, retention=None)
        return Runner(self.database.url, task, queues=dict.fromkeys(queues), config=config)
