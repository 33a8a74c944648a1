"""What the life of a job must be, written from ``docs/reference/states.md`` and not from the code."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqla_neoq import Discard, JobCancelled, JobTimeout, Retry, Snooze, constant, handler
from sqla_neoq.context import ClaimedJob, StopReason
from sqla_neoq.outcomes import Outcome, Verb, failure, judge

QUEUES = ("a", "b")
LATER = timedelta(hours=1)
CRASH_LIMIT = 3
UNFINISHED = {"new", "running", "failed"}
WAITING = {"new", "failed"}

_soon = handler("a", backoff=constant(timedelta(0)))(lambda job: None)
_later = handler("b", backoff=constant(LATER))(lambda job: None)


@dataclass
class Life:
    """What must be known of one job."""

    queue: str
    priority: int
    key: str | None
    max_retries: int | None
    due: bool
    in_time: bool | None
    """Whether its deadline lies ahead; None without one."""
    status: str = "new"
    retries: int = 0
    crashes: int = 0
    token: int | None = None
    worker: int | None = None
    asked: bool = False

    @property
    def waiting(self) -> bool:
        return self.status in WAITING

    @property
    def startable(self) -> bool:
        return self.waiting and self.due and self.in_time is not False

    @property
    def suspect(self) -> bool:
        return self.crashes > 1

    @property
    def tries_left(self) -> bool:
        return self.retries < (23 if self.max_retries is None else self.max_retries)

    def end(self, status: str) -> None:
        self.status, self.token, self.asked = status, None, False

    def go_back(self, status: str) -> None:
        """Wait again, unless somebody has called it off."""
        self.end("cancelled" if self.asked else status)


@dataclass
class Model:
    """All there must be: each committed job in one of these, and nothing else."""

    jobs: dict[int, Life] = field(default_factory=dict)
    dead: dict[int, tuple[Life, str]] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)
    failures: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    effects: Counter[int] = field(default_factory=Counter)
    silent: dict[int, float] = field(default_factory=dict)
    """The workers, and for how many seconds each has been silent."""
    locked: set[int] = field(default_factory=set)
    listening: set[int] = field(default_factory=set)

    def twin(self, life: Life) -> int | None:
        """Return the unfinished job with its fingerprint."""
        twins = [
            id_
            for id_, other in self.jobs.items()
            if other.status in UNFINISHED and (other.queue, other.key) == (life.queue, life.key)
        ]
        assert len(twins) <= 1 or life.key is None
        return twins[0] if twins and life.key is not None else None

    def some(self, **facts: Any) -> list[int]:
        return [id_ for id_, life in self.jobs.items() if all(getattr(life, k) == v for k, v in facts.items())]

    def orphans(self) -> list[int]:
        return [id_ for id_ in self.some(status="running") if self.jobs[id_].worker not in self.silent]

    def bury(self, id_: int, reason: str) -> None:
        life = self.jobs.pop(id_)
        life.end("dead")
        self.dead[id_] = (life, reason)

    def fail(self, id_: int, kind: str, *, due: bool) -> None:
        """An attempt failed: another one, or death."""
        life = self.jobs[id_]
        self.failures[id_, life.retries + 1, kind] += 1
        if life.tries_left:
            life.due = due
            life.go_back("failed")
        else:
            self.bury(id_, "exhausted")

    def crash(self, id_: int) -> None:
        """Its worker died."""
        life = self.jobs[id_]
        life.crashes += 1
        if life.crashes < CRASH_LIMIT:
            self.fail(id_, "crashed", due=True)
        else:
            self.failures[id_, life.retries + 1, "crashed"] += 1
            self.bury(id_, "crashed")


def _succeed(job: ClaimedJob) -> Outcome:
    return Outcome(job, Verb.COMPLETE)


ENDS: dict[str, Callable[[ClaimedJob], Outcome]] = {
    "success": _succeed,
    "error": lambda job: judge(ValueError("no"), job, _soon, None),
    "error, tried later": lambda job: judge(ValueError("no"), job, _later, None),
    "retry": lambda job: judge(Retry(after=timedelta(0)), job, _later, None),
    "timeout": lambda job: failure(JobTimeout("late"), job, _soon, kind="timeout"),
    "snooze": lambda job: judge(Snooze(LATER), job, _soon, None),
    "discard": lambda job: judge(Discard("never"), job, _soon, None),
    "given back": lambda job: Outcome(job, Verb.PUT_BACK),
    "cancelled": lambda job: judge(JobCancelled("as told"), job, _soon, StopReason.CANCELLED),
    "too late to start": lambda job: Outcome(job, Verb.BURY, reason="deadline", message="too late"),
    "taken away": lambda job: judge(JobCancelled("as told"), job, _soon, StopReason.LOST),
}
"""How a run may end, and the outcome that the runner makes of it."""
