"""A line on the terminal that says how far a burst has come."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol, Self, TextIO

if TYPE_CHECKING:
    from sqla_neoq.tally import Counts

INTERVAL = 0.2
"""Seconds between two looks at the counts."""


class Counting(Protocol):
    """What progress needs of a runner."""

    @property
    def counts(self) -> Counts:
        """What it has done so far."""


class Progress:
    """While entered, rewrites one line of ``stream`` with the runner's counts, or nothing where that is no terminal.

    The line ends with a carriage return, so that a log line which comes in between starts on top of it.
    """

    def __init__(self, runner: Counting, stream: TextIO = sys.stderr) -> None:
        self._runner = runner
        self._stream = stream
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neoq-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        while not self._ended.wait(INTERVAL):
            self._write(time.monotonic() - start, "\r")
        self._write(time.monotonic() - start, "\n")

    def _write(self, elapsed: float, end: str) -> None:
        self._stream.write(f"\x1b[K{describe(self._runner.counts, elapsed)}{end}")
        self._stream.flush()


def describe(counts: Counts, elapsed: float) -> str:
    """Say what was done in ``elapsed`` seconds: ``1,234 jobs in 5.2 s (237/s): 1,230 processed, 4 failed``."""
    numbers = {
        "processed": counts.processed,
        "failed": counts.failed,
        "dead": counts.dead,
        "snoozed": counts.snoozed,
        "released": counts.released,
        "cancelled": counts.cancelled,
        "lost": counts.lost,
    }
    parts = [f"{number:,} {name}" for name, number in numbers.items() if number or name == "processed"]
    rate = counts.total / elapsed if elapsed > 0 else 0.0
    return f"{counts.total:,} jobs in {elapsed:.1f} s ({rate:,.0f}/s): {', '.join(parts)}"
