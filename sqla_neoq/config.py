"""The runner's settings: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Final

from sqla_neoq.errors import ConfigurationError

_AGE_OF_THE_WORLD: Final = timedelta(days=36_525)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a runner works.

    Attributes:
        concurrency: how many jobs run at once in this runner, over all queues.
        poll_interval: how long an idle runner waits at most before it looks for itself. Wake-ups only shorten the wait.
        heartbeat_interval: how often the runner renews its lease and looks for dead ones.
        shutdown_timeout: how long ``stop`` lets running jobs finish before it cancels them and gives them back. The
            default stays below the 30 s that Kubernetes grants.
        retention: how long processed and cancelled jobs stay in the table; None for ever, zero not at all.
        listen: whether to LISTEN for wake-ups. False polls only, as behind a transaction pooler.
        listen_url: a direct database URL for LISTEN, when the main one leads to a pooler.
        schema: the schema that holds the tables; None leaves it to the connections' search_path.
        name: what the runner is called in ``neoq_workers``; None makes it ``host:pid``.
        max_jobs: end the run, for a restart, after this many jobs; None never.
        crash_limit: how many workers may die under a job before it is dead as ``crashed``.
        stuck_limit: how many timed-out runs may still hang in their threads before the run ends for a restart; None
            makes it ``concurrency``.
    """

    concurrency: int = 10
    poll_interval: timedelta = timedelta(seconds=2)
    heartbeat_interval: timedelta = timedelta(seconds=2.5)
    shutdown_timeout: timedelta = timedelta(seconds=25)
    retention: timedelta | None = timedelta(days=7)
    listen: bool = True
    listen_url: str | None = None
    schema: str | None = None
    name: str | None = None
    max_jobs: int | None = None
    crash_limit: int = 3
    stuck_limit: int | None = None

    def __post_init__(self) -> None:
        self._count("concurrency", self.concurrency, 1, 10_000)
        self._count("crash_limit", self.crash_limit, 1, 1000)
        for name in ("max_jobs", "stuck_limit"):
            if (value := getattr(self, name)) is not None:
                self._count(name, value, 1, 2**63 - 1)
        self._duration("poll_interval", self.poll_interval, timedelta(milliseconds=10), timedelta(hours=1))
        # Below the 4 s of silence after which a worker whose listening connection is down too is taken for dead.
        self._duration("heartbeat_interval", self.heartbeat_interval, timedelta(milliseconds=100), timedelta(seconds=3))
        self._duration("shutdown_timeout", self.shutdown_timeout, timedelta(0), timedelta(days=7))
        if self.retention is not None:
            self._duration("retention", self.retention, timedelta(0), _AGE_OF_THE_WORLD)
        if not isinstance(self.listen, bool):
            raise ConfigurationError(f"listen={self.listen!r}: expected True or False")
        for field in fields(self):
            if field.name in {"listen_url", "schema", "name"}:
                text = getattr(self, field.name)
                if text is not None and (not isinstance(text, str) or not text or "\x00" in text):
                    raise ConfigurationError(f"{field.name}={text!r}: expected text, or None")

    @staticmethod
    def _count(name: str, value: object, low: int, high: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigurationError(f"{name}={value!r}: expected a whole number from {low} to {high}")

    @staticmethod
    def _duration(name: str, value: object, low: timedelta, high: timedelta) -> None:
        if not isinstance(value, timedelta) or not low <= value <= high:
            raise ConfigurationError(f"{name}={value!r}: expected a timedelta from {low} to {high}")
