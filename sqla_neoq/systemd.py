"""What systemd wants to hear of a ``Type=notify`` service: ready, stopping, still alive.

The protocol is one datagram to the socket that ``NOTIFY_SOCKET`` names. Without that variable nothing here does
anything, so callers need not ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqla_neoq.health import State

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send one state, such as ``READY=1``; a service manager that cannot be reached is logged and never an error."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), address)
    except OSError as error:
        log.warning("systemd cannot be told %s: %s", state, error)


def watchdog_interval() -> float | None:
    """Return how often to send ``WATCHDOG=1``, in seconds: half of what systemd allows. None when it does not watch."""
    allowed = os.environ.get("WATCHDOG_USEC", "")
    watched = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return int(allowed) / 2_000_000 if allowed.isdigit() and watched == str(os.getpid()) else None


@contextlib.contextmanager
def reporting(probe: Callable[[], State]) -> Iterator[Callable[[], None]]:
    """While entered, tell systemd that the process is ready once ``probe`` is, then that it lives; then that it stops.

    A thread does it. Outside systemd there is none.

    Yields a function to call before leaving when the process will start anew under its own id. systemd then hears of a
    reload: ``STOPPING=1`` it takes for the end of the service, no longer listens to the ``READY=1`` that follows, and
    kills the new process when the time to stop is over.
    """
    if not os.environ.get("NOTIFY_SOCKET"):
        yield lambda: None
        return
    ended = threading.Event()
    last_words = "STOPPING=1"

    def begin_anew() -> None:
        nonlocal last_words
        last_words = f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"

    def report() -> None:
        ready = False
        beat = watchdog_interval()
        while not ended.wait(beat if ready else 0.05):
            state = probe()
            if state.ready and not ready:
                ready = True
                notify("READY=1")
            if beat is not None and state.live:
                notify("WATCHDOG=1")

    thread = threading.Thread(target=report, name="neoq-systemd", daemon=True)
    thread.start()
    try:
        yield begin_anew
    finally:
        ended.set()
        thread.join()
        notify(last_words)
