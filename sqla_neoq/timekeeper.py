"""Ends what takes too long: runs past their timeout, and calls to a database that does not answer."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

from sqla_neoq.lifecycle import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqla_neoq.pool import WorkPool

log = logging.getLogger("sqla_neoq.runner")

_LONGEST_SLEEP: Final = 1.0
_TIME_TO_OBEY: Final = 5.0
"""Seconds for which too many runs must have been stuck: those that ask ``job.cancelled``, or wait for a statement that
is being cancelled, end a moment after their timeout, and many may have the same."""


class Cuttable(Protocol):
    """A connection that can be cut from outside when its use takes too long."""

    def cut_if_late(self, now: float) -> bool:
        """Cut it if it is late at this ``monotonic()`` time; return whether it was."""
        ...


class Timekeeper(Service):
    """Looks at the clock for everybody.

    Args:
        pool: the runs.
        timeouts: every timeout, in seconds, that a run can have.
        cuttable: the connections.
        stuck_limit: how many given-up runs may still hold their threads.
        on_stuck: called, once, when there are that many.
        chores: called with each look, with the ``monotonic()`` time; they wait for nothing.
    """

    name = "timekeeper"

    def __init__(
        self,
        pool: WorkPool,
        timeouts: Iterable[float],
        cuttable: Iterable[Cuttable],
        *,
        stuck_limit: int,
        on_stuck: Callable[[], None],
        chores: Iterable[Callable[[float], object]] = (),
    ) -> None:
        super().__init__()
        self._pool = pool
        self._cuttable = list(cuttable)
        self._stuck_limit = stuck_limit
        self._chores = list(chores)
        self._on_stuck: Callable[[], None] | None = on_stuck
        self._stuck_since: float | None = None
        # A run that starts after a look expires no sooner than the shortest timeout later: no look comes too late.
        self._longest_sleep = min([_LONGEST_SLEEP, *timeouts])

    def serve(self) -> None:
        """Look, and sleep until something can be late, until stopped."""
        while not self.stopping.is_set():
            now = time.monotonic()
            soonest = self._pool.expire(now)
            for cuttable in self._cuttable:
                if cuttable.cut_if_late(now):
                    log.error("a connection was cut: the database did not answer in time")
            self._look_for_stuck(now)
            for chore in self._chores:
                chore(now)
            self.stopping.wait(max(0.001, min(self._longest_sleep, soonest - now)))

    def _look_for_stuck(self, now: float) -> None:
        if self._on_stuck is None:
            return
        if self._pool.stuck < self._stuck_limit:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= _TIME_TO_OBEY:
            log.error("%d timed-out jobs still hold their threads; the runner ends for a restart", self._pool.stuck)
            self._on_stuck()
            self._on_stuck = None
