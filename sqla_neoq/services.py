"""A started runner's parts, and the order in which they start and stop."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqla_neoq.context import StopReason

if TYPE_CHECKING:
    import threading

    from sqla_neoq.dispatcher import Dispatcher
    from sqla_neoq.eventloop import EventLoop
    from sqla_neoq.listener import Listener
    from sqla_neoq.maintenance import Housekeeper, Lease
    from sqla_neoq.pool import WorkPool
    from sqla_neoq.processes import Children
    from sqla_neoq.timekeeper import Timekeeper

log = logging.getLogger("sqla_neoq.runner")

_FORCED_GRACE: Final = 5.0
"""Seconds for what was cancelled at a forced stop to be written."""


@dataclass(frozen=True, slots=True)
class Services:
    """All that a started runner consists of."""

    pool: WorkPool
    loop: EventLoop
    dispatcher: Dispatcher
    lease: Lease
    housekeeper: Housekeeper
    timekeeper: Timekeeper
    listener: Listener | None
    children: Children | None = None

    def start(self) -> None:
        """Start everything; the dispatcher last, for it hands work to the others."""
        self.pool.start()
        if self.listener is not None:
            self.listener.start()
        self.lease.start()
        self.timekeeper.start()
        self.housekeeper.start()
        self.dispatcher.start()

    def stop(self, timeout: float, forced: threading.Event) -> bool:
        """Drain, then force; returns whether everything ended by itself. The heartbeat goes on until the end."""
        until = time.monotonic() + timeout
        self.dispatcher.claiming = False
        self.dispatcher.stopping.set()
        self.pool.poke()
        self.housekeeper.stopping.set()
        self.housekeeper.interrupt()
        clean = self._await_dispatcher(until, forced)
        if not clean:
            cut_short = self.pool.give_up_running(StopReason.SHUTDOWN)
            if cut_short:
                log.warning("%d jobs did not finish in time and are given back", cut_short)
            self.pool.poke()
            written = self._await_dispatcher(time.monotonic() + _FORCED_GRACE, None)
            if not written:
                self.dispatcher.give_up()
            self.pool.cancel_given_up()
            clean = written and not cut_short
        self.pool.close()
        self.loop.close()
        if self.children is not None:
            self.children.close()
        self.housekeeper.stop(2.0)
        if self.listener is not None:
            self.listener.stop(2.0)
        if not self.lease.stop(5.0):
            self.lease.cut()
        if self.lease.stop(2.0):
            self.lease.unregister()
        else:
            self.lease.abandon()
        # Last: it alone cuts a call to a database that does not answer.
        self.timekeeper.stop(2.0)
        return clean

    def _await_dispatcher(self, until: float, forced: threading.Event | None) -> bool:
        while self.dispatcher.alive:
            if time.monotonic() >= until or (forced is not None and forced.is_set()):
                return False
            self.dispatcher.join(min(0.1, max(0.0, until - time.monotonic())))
        return True
