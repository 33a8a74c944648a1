"""A worker's signals, for as long as a runner runs in the main thread.

SIGTERM and SIGINT stop it: no more claims, running jobs finish. A second one forces: they are cancelled and given back.
SIGQUIT forces at once. SIGTSTP makes it quiet before a deploy; SIGHUP ends it cleanly for a restart.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger("sqla_neoq.runner")


class Stoppable(Protocol):
    """What signals are passed on to."""

    def on_signal(self, number: int) -> None:
        """Do what the signal asks for; must not block."""
        ...


class Signals:
    """Takes the signals over on entry and gives them back on exit; does nothing outside the main thread."""

    def __init__(self, target: Stoppable) -> None:
        self._target = target
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.debug("not in the main thread: the signals are left alone")
            return
        for name in ("SIGTERM", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGHUP", "SIGBREAK"):
            number = getattr(signal, name, None)
            # Who started the process with SIGHUP ignored (nohup) means it.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._target.on_signal(number)
