"""How attempts ended: counted, and logged one line each."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from sqla_neoq.outcomes import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqla_neoq.outcomes import Outcome

log = logging.getLogger("sqla_neoq.jobs")


@dataclass(frozen=True, slots=True)
class Counts:
    """How many attempts ended in which way since the runner started.

    Attributes:
        processed: succeeded.
        failed: failed, and will be tried again.
        dead: failed for the last time, or discarded.
        snoozed: put themselves off.
        released: given back before they had started, or at a forced stop.
        cancelled: stopped because somebody asked for it.
        lost: ended after another runner had taken the job; nothing was written.
    """

    processed: int = 0
    failed: int = 0
    dead: int = 0
    snoozed: int = 0
    released: int = 0
    cancelled: int = 0
    lost: int = 0

    @property
    def total(self) -> int:
        """All attempts that ended; jobs given back are none."""
        return self.processed + self.failed + self.dead + self.snoozed + self.cancelled + self.lost


_NAMES: Final = {
    Verb.FAIL: "failed",
    Verb.BURY: "dead",
    Verb.CANCEL: "cancelled",
    Verb.LOST: "lost",
}
_LOUD: Final = frozenset({"failed", "dead", "lost"})


class Tally:
    """Keeps the counts and writes the log. Used by the dispatcher's thread; ``counts`` is read by any."""

    def __init__(self) -> None:
        self.counts = Counts()

    def settled(self, outcomes: Sequence[Outcome], lost: set[int]) -> None:
        """Take in outcomes that were written, of which the fence refused the ``lost`` ones."""
        verbose = log.isEnabledFor(logging.INFO)
        names = ["lost" if lost and o.job.id in lost else _name_of(o) for o in outcomes]
        ended = Counter(names)
        if verbose or not _LOUD.isdisjoint(ended):
            for outcome, what in zip(outcomes, names, strict=True):
                if verbose or what in _LOUD:
                    _log(outcome, what)
        before = self.counts
        self.counts = replace(before, **{name: getattr(before, name) + number for name, number in ended.items()})


def _name_of(outcome: Outcome) -> str:
    if outcome.verb is Verb.COMPLETE:
        return "processed"
    if outcome.verb is Verb.PUT_BACK:
        return "released" if outcome.delay is None else "snoozed"
    return _NAMES[outcome.verb]


def _log(outcome: Outcome, what: str) -> None:
    job = outcome.job
    fields: dict[str, object] = {
        "event": what,
        "job_id": job.id,
        "task": job.task,
        "queue": job.queue,
        "attempt": job.retries + 1,
    }
    for name in ("duration", "reason", "kind", "delay"):
        if (value := getattr(outcome, name)) is not None:
            fields[name] = value
    if outcome.message is not None:
        fields["error"] = outcome.message
    log.log(logging.WARNING if what in _LOUD else logging.INFO, "job %s", what, extra={"neoq": fields})
