"""The runner's settings: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Final

from sqla_neoq import memory
from sqla_neoq.errors import ConfigurationError

_AGE_OF_THE_WORLD: Final = timedelta(days=36_525)

MIN_MEMORY: Final = 16 * 2**20
"""Bytes. No Python process with SQLAlchemy in it stays below, so less is a slip of the unit."""


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
        max_memory: end the run, for a restart, when the process holds more bytes than this after a job and still a
            second later; None never. A child process that holds more after its job is replaced.
        crash_limit: how many workers may die under a job before it is dead as ``crashed``.
        stuck_limit: how many timed-out runs may still hang in their threads before the run ends for a restart; None
            makes it ``concurrency``.
        child_database: where ``job.session`` leads in the child processes of ``executor="process"``: a URL, or the
            ``module:name`` of an Engine, of a function that returns one, or of a sessionmaker. None means the runner's
            own URL; a runner that was given an Engine or a sessionmaker cannot send that to another process.
        child_logs: level, format and file that child processes configure their logs with, as the command line does;
            None leaves logging to the tasks' modules.
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
    max_memory: int | None = None
    crash_limit: int = 3
    stuck_limit: int | None = None
    child_database: str | None = field(default=None, repr=False)
    child_logs: tuple[str, str, str | None] | None = None

    def __post_init__(self) -> None:
        self._count("concurrency", self.concurrency, 1, 10_000)
        self._count("crash_limit", self.crash_limit, 1, 1000)
        for name in ("max_jobs", "stuck_limit"):
            if (value := getattr(self, name)) is not None:
                self._count(name, value, 1, 2**63 - 1)
        if self.max_memory is not None:
            self._count("max_memory", self.max_memory, MIN_MEMORY, 2**63 - 1)
            if memory.resident() is None:
                raise ConfigurationError(f"max_memory={self.max_memory}: this system has no /proc to measure memory by")
        self._duration("poll_interval", self.poll_interval, timedelta(milliseconds=10), timedelta(hours=1))
        # Below the 4 s of silence after which a worker whose listening connection is down too is taken for dead.
        self._duration("heartbeat_interval", self.heartbeat_interval, timedelta(milliseconds=100), timedelta(seconds=3))
        self._duration("shutdown_timeout", self.shutdown_timeout, timedelta(0), timedelta(days=7))
        if self.retention is not None:
            self._duration("retention", self.retention, timedelta(0), _AGE_OF_THE_WORLD)
        if not isinstance(self.listen, bool):
            raise ConfigurationError(f"listen={self.listen!r}: expected True or False")
        logs: object = self.child_logs
        if logs is not None and not (
            isinstance(logs, tuple) and len(logs) == 3 and all(isinstance(part, str) for part in logs[:2])
        ):
            raise ConfigurationError(f"child_logs={logs!r}: expected a tuple of level, format and file, or None")
        for one in fields(self):
            if one.name in {"listen_url", "schema", "name", "child_database"}:
                text = getattr(self, one.name)
                if text is not None and (not isinstance(text, str) or not text or "\x00" in text):
                    raise ConfigurationError(f"{one.name}={text!r}: expected text, or None")

    @staticmethod
    def _count(name: str, value: object, low: int, high: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigurationError(f"{name}={value!r}: expected a whole number from {low} to {high}")

    @staticmethod
    def _duration(name: str, value: object, low: timedelta, high: timedelta) -> None:
        if not isinstance(value, timedelta) or not low <= value <= high:
            raise ConfigurationError(f"{name}={value!r}: expected a timedelta from {low} to {high}")
