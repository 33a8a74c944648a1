"""A worker's signals, for as long as a runner runs in the main thread.

SIGTERM and SIGINT stop it: no more claims, running jobs finish. A second one forces: they are cancelled and given back.
SIGQUIT forces at once. SIGTSTP makes it quiet before a deploy; SIGHUP ends it cleanly for a restart.
"""

from __future__ import annotations

import logging
import os
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

    They come through Python's wake-up descriptor, and ``on_signal`` is called with them in a thread of its own. A
    Python handler would not do: it runs in the main thread, which waits on a lock, and the kernel may give the signal
    to another thread, one that is just starting a third. The main thread then sleeps on: with a health probe at the
    wrong moment, every second or third SIGTERM was not heard.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}
        self._descriptor_before = -1
        self._sender: int | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.debug("not in the main thread: the signals are left alone")
            return
        # A pipe: it holds 65,536 signals, where a socket is full after fewer than 300.
        receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        threading.Thread(target=self._pass_on, args=[receiver], name="neoq-signals", daemon=True).start()
        self._descriptor_before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        for name in _NAMES:
            number = getattr(signal, name, None)
            # Who started the process with SIGHUP ignored (nohup) means it. And None is the handler of a program that
            # Python is embedded in: it could not be put back.
            if number is not None and signal.getsignal(number) not in {signal.SIG_IGN, None}:
                self._before[number] = signal.signal(number, _only_wake)

    def __exit__(self, *_: object) -> None:
        if self._sender is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._descriptor_before)
        os.close(self._sender)
        self._sender = None

    def _pass_on(self, receiver: int) -> None:
        with open(receiver, "rb", buffering=0) as numbers:
            while received := numbers.read(64):
                for number in received:
                    if number in self._before:  # the application may handle others
                        self._obey(number)

    def _obey(self, number: int) -> None:
        try:
            self._on_signal(number)
        except Exception:
            # A worker that has stopped hearing signals can only be killed.
            log.exception("signal %d could not be obeyed", number)


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """Leave it to the byte that Python has written to the wake-up descriptor."""
