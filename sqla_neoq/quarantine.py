"""When may a suspect run: pure policy.

A *suspect* is a job whose worker died while it ran. One of the jobs that died with that worker may be what killed it,
and the others are innocent. So suspects run one at a time, and as alone as can be had: the runner first lets its other
jobs end, but waits for long ones only a moment; and takes no others while the suspect runs, but again only for a
moment, since what kills a process mostly does so at once. Both bounds keep one suspect from costing much capacity.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

HOLD: Final = 2.0
"""Seconds to wait for the other jobs to end. Part of the ten seconds after which a dead worker's jobs run again."""
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
        self._running_since: float | None = None

    def turn(self, now: float, in_flight: int) -> Turn:
        """Say what may be claimed now, with that many jobs in flight."""
        if self._running_since is not None:
            return Turn.NOTHING if now < self._running_since + ALONE else Turn.OTHERS
        if not self.due:
            return Turn.OTHERS
        if self._held_since is None:
            self._held_since = now
        if in_flight == 0 or now >= self._held_since + HOLD:
            return Turn.SUSPECT
        return Turn.NOTHING

    def changes_at(self) -> float | None:
        """Return when the answer changes by itself, if it does."""
        if self._running_since is not None:
            return self._running_since + ALONE
        return None if self._held_since is None else self._held_since + HOLD

    def claimed(self, now: float, *, found: bool) -> None:
        """The turn of a suspect was used; ``found`` says whether there was one."""
        self._held_since = None
        self._running_since = now if found else None
        self.due = False

    def ended(self) -> None:
        """The suspect ended; there may be another."""
        self._running_since = None
        self.due = True
