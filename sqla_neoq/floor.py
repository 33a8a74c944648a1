"""Where a claim may begin: pure policy.

A job leaves the claim index when it is claimed, but its entry stays until vacuum may remove it, and that is not before
the oldest transaction on the server ends. While one of those is long, every claim walks over all that was claimed since
it began; and over jobs of tasks that nobody here knows, always. So, while that walk is *dear*, a claim begins at a
*floor*, where the last one stopped, and only now and then one looks *everywhere*: it alone sees what came in below.

Below the floor come the jobs of transactions that lasted longer than ``GRACE``, jobs that were given back, and those
enqueued for a time in the past. They wait for the next look everywhere, ten times as long as that takes. All others
are seen by every claim: new ones, new priorities, retries and rescued jobs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from sqla_neoq.models import MAX_PRIORITY, MIN_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sqla_neoq.context import ClaimedJob

DEAR: Final = 0.002
"""Seconds from which a walk is dear: twice what a claim of a thousand jobs takes over an index without dead entries."""
SHARE: Final = 10
"""A look everywhere comes after ten times as long as the last one took, so that they take a tenth of the time."""
GRACE: Final = 1.0
"""Seconds before the claim that a floor never passes: so long may the transaction last that enqueues a job."""
_WORTH: Final = 2
_FORGETTING: Final = 0.9


class Position(NamedTuple):
    """A place in a lane, by when a job was due, in seconds since 1970, and its id; a claim begins behind it."""

    since: float | None
    last: int


class View(NamedTuple):
    """Where a claim looks.

    Attributes:
        lanes: the known lanes (queue, priority), and where it begins in each; nobody need look for them.
        queues: the time at which it begins in other lanes of these queues.
        everywhere: whether it sees all that is due.
    """

    lanes: Mapping[tuple[str, int], Position]
    queues: Mapping[str, float]
    everywhere: bool


_START: Final = Position(None, 0)
EVERYWHERE: Final = View({}, {}, everywhere=True)


class Floor:
    """Decides for each claim whether it looks everywhere.

    Times called ``now`` are ``monotonic()``; those of jobs, and ``at``, are the database's, in seconds since 1970.

    Attributes:
        due: when the next look everywhere shall be, while they are dear.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self._lanes: dict[tuple[str, int], Position] = {}
        self._queues: dict[str, float] = {}
        # What the last claim of each kind had to walk.
        self._everywhere = 0.0
        self._above = 0.0

    def view(self, now: float) -> View:
        """Return where the next claim looks."""
        if self._everywhere <= DEAR:
            return EVERYWHERE
        # A floored claim that did not walk much less is no use.
        if now < self.due and self._everywhere > _WORTH * self._above and (self._lanes or self._queues):
            return View(self._lanes, self._queues, everywhere=False)
        # The lanes need not be found: that would be another walk over the same dead entries.
        return View(dict.fromkeys(self._lanes, _START), {}, everywhere=True)

    def looked_everywhere(
        self, now: float, walked: float, jobs: Sequence[ClaimedJob], *, at: float, short: Iterable[str]
    ) -> None:
        """Learn from a claim that looked everywhere.

        Args:
            now: the time.
            walked: the seconds that the server took to find the jobs.
            jobs: what was claimed, in the order of each lane.
            at: when the server began.
            short: the queues that have nothing more that is due.
        """
        if walked <= DEAR:
            self.forget()
            return
        self._everywhere = walked
        # A floored claim that was slow by chance is tried again.
        self._above *= _FORGETTING
        self.due = now + SHARE * walked
        self._note(jobs)
        for queue in short:
            self._queues[queue] = at - GRACE
            for lane in [lane for lane in self._lanes if lane[0] == queue]:
                del self._lanes[lane]

    def looked_above(self, walked: float, jobs: Sequence[ClaimedJob]) -> None:
        """Learn from a claim that began at the floor."""
        self._above = walked
        self._note(jobs)

    def forget(self) -> None:
        """Look everywhere, from now on."""
        self.due = self._everywhere = self._above = 0.0
        self._lanes.clear()
        self._queues.clear()

    def _note(self, jobs: Sequence[ClaimedJob]) -> None:
        last = {(job.queue, job.priority): job for job in jobs}
        for lane, job in last.items():
            latest = job.ran_at - GRACE
            self._lanes[lane] = Position(job.run_after, job.id) if job.run_after <= latest else Position(latest, 0)


def gaps(priorities: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (above, below) around and between some priorities: what is in none of these lanes is in one of those."""
    return pairwise([MAX_PRIORITY + 1, *sorted(set(priorities), reverse=True), MIN_PRIORITY - 1])
