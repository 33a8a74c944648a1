"""How many jobs to claim beyond the free slots: pure policy.

By time and not by count: only what the mean duration says will be started within a moment. So tiny jobs come in large
batches, one round trip for hundreds, while slow jobs are never hoarded by a runner that cannot start them.
"""

from __future__ import annotations

from typing import Final

HORIZON: Final = 0.020
"""Seconds of work to hold ready: about what two rounds with the database take on a busy machine."""
LIMIT: Final = 2000
"""The most jobs to hold ready: those that the threads run while a round is under way, and those it brings."""
BATCH: Final = 1000
"""The most jobs of one claim; beyond it a claim's cost grows as fast as the batch."""
PATIENCE: Final = 1.0
"""Seconds after which a job held ready is given back: the mean was wrong, and another runner may be idle."""
_WEIGHT: Final = 0.05
_TINY: Final = 0.001
_MOST_AMONG_TINY: Final = 0.0002


def ahead(slots: int, mean: float | None) -> int:
    """Return how many jobs ``slots`` slots will start within the horizon, given the mean seconds a job takes."""
    if mean is None:
        return 0
    # A tenth of a microsecond, so that a clock that did not tick divides nothing by zero.
    return min(LIMIT, int(slots * HORIZON / max(mean, 1e-7)))


def mean_of(mean: float | None, duration: float) -> float:
    """Return the running mean after one more duration: an exponential average over about twenty jobs.

    Among tiny jobs there are always some whose thread lost its turn of the interpreter for some milliseconds, often
    several in a row, and the next claims would be a hundredth as large. So there one counts for no more than a fifth of
    a millisecond or four times the mean; jobs that have truly become slow are known for it after some thirty.
    """
    if mean is None:
        return duration
    if mean < _TINY:
        duration = min(duration, max(_MOST_AMONG_TINY, 4 * mean))
    return mean + _WEIGHT * (duration - mean)
