"""When may a suspect run: pure policy.

Whenever a worker dies, the jobs that it ran run again elsewhere at once, as any others: mostly it was killed from
outside, and within ten seconds all of them shall be running. A *suspect* is a job under which that happened twice. One
of them may be what kills the workers, and the others were only near it. So suspects run one at a time, and as alone as
can be had, and the third run, after which a job that kills is dead, is one in which no innocent suffers.

The runner first lets its other jobs end, but waits for long ones only a moment; and it takes nothing else, suspects
included, while one runs, but again only for a moment, since what kills a process mostly does so at once. Both bounds
keep a suspect from costing much capacity, and a long one from keeping the next waiting.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

HOLD: Final = 2.0
"""Seconds to wait for the other jobs to end."""
ALONE: Final = 5.0
"""Seconds that a suspect has the runner to itself."""


class Turn(Enum):
    """What to claim now."""

    OTHERS = "others"
    SUSPECT = "suspect"
    NOTHING = "nothing"


class Quarantine:
    """Whose turn it is. Times are ``monotonic()`` seconds that the caller passes in."""

    def __init__(self) -> None:
        self.due = False
        self._held_since: float | None = None
        self._alone: int | None = None
        self._alone_until = 0.0

    def turn(self, now: float, in_flight: int) -> Turn:
        """Say what may be claimed now, with that many jobs in flight."""
        if now < self._alone_until:
            return Turn.NOTHING
        if not self.due:
            return Turn.OTHERS
        if self._held_since is None:
            self._held_since = now
        if in_flight == 0 or now >= self._held_since + HOLD:
            return Turn.SUSPECT
        return Turn.NOTHING

    def changes_at(self, now: float) -> float | None:
        """Return when, after ``now``, the answer changes by itself, if it does."""
        changes = self._alone_until if self._held_since is None else self._held_since + HOLD
        return changes if changes > now else None

    def claimed(self, now: float, job: int | None) -> None:
        """The turn of a suspect was used, on this job, or on none because there is none."""
        self._held_since = None
        # Where there was one there may be another; that is looked for when this one has had its time.
        self.due = job is not None
        self._alone = job
        self._alone_until = 0.0 if job is None else now + ALONE

    def ended(self, jobs: Collection[int]) -> None:
        """These jobs ended."""
        if self._alone is not None and self._alone in jobs:
            self._alone = None
            self._alone_until = 0.0
