"""A worker's signals, for as long as a runner runs in the main thread.

SIGTERM and SIGINT stop it: no more claims, running jobs finish. A second one forces: they are cancelled and given back.
SIGQUIT forces at once. SIGTSTP makes it quiet before a deploy; SIGHUP ends it cleanly for a restart.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

log = logging.getLogger("sqla_neoq.runner")

_NAMES = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGHUP", "SIGBREAK")


class Signals:
    """Takes the signals over on entry and gives them back on exit; does nothing outside the main thread.

    A handler interrupts the main thread anywhere, also where it holds a lock. So it only puts the signal's number into
    a ``SimpleQueue``, whose ``put`` is made for that, and ``on_signal`` is called with it in a thread of its own.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}
        self._received: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.debug("not in the main thread: the signals are left alone")
            return
        threading.Thread(target=self._pass_on, name="neoq-signals", daemon=True).start()
        for name in _NAMES:
            number = getattr(signal, name, None)
            # Who started the process with SIGHUP ignored (nohup) means it.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._received.put(None)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._received.put(number)

    def _pass_on(self) -> None:
        while (number := self._received.get()) is not None:
            try:
                self._on_signal(number)
            except Exception:
                # A worker that has stopped hearing signals can only be killed.
                log.exception("signal %d could not be obeyed", number)
