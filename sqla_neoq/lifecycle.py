"""The shape that everything with a thread of its own shares: start, stop, and staying alive in between."""

from __future__ import annotations

import logging
import threading
from typing import Final

log = logging.getLogger("sqla_neoq.runner")

_PAUSE: Final = 1.0
_MOST_ERRORS_AT_THE_END: Final = 3


class Service:
    """One thread that serves until it is stopped.

    ``stop`` may be called before ``start``, twice, and from any thread. An error that ``serve`` lets through is a bug:
    it is logged, and the service starts again, because a runner without its heartbeat is worse than a noisy one.
    """

    name = "service"

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        # Under a lock, or a stop() in another thread could see a thread that cannot be joined yet.
        with self._starting:
            if self._thread is None and not self.stopping.is_set():
                thread = threading.Thread(target=self._main, name=f"neoq-{self.name}", daemon=True)
                thread.start()
                self._thread = thread

    def stop(self, timeout: float | None = 10.0) -> bool:
        """Ask the thread to end, and wait for it. Returns whether it has ended."""
        self.stopping.set()
        self.interrupt()
        with self._starting:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, at most that many seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def interrupt(self) -> None:
        """Wake ``serve`` from whatever it waits on, once ``stopping`` is set."""

    def serve(self) -> None:
        """Work until ``stopping`` is set."""
        raise NotImplementedError

    def _main(self) -> None:
        errors_at_the_end = 0
        while not self.stopping.is_set() or 0 < errors_at_the_end < _MOST_ERRORS_AT_THE_END:
            try:
                self.serve()
                errors_at_the_end = 0
            except Exception:
                log.exception("the %s stopped on an error and starts again", self.name)
                # What it has in hand is still to be finished.
                errors_at_the_end += self.stopping.is_set()
                self.stopping.wait(_PAUSE)
