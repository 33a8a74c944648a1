"""How much memory a process holds, and a limit to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE: Final = 1.0
_MEGABYTE: Final = 2**20


def resident(pid: int | None = None) -> int | None:
    """Return the bytes of memory that a process, by default this one, has resident; None where nobody says.

    The figure is the present one, not the peak: what was given back is not in it.
    """
    try:
        fields = Path(f"/proc/{pid or 'self'}/statm").read_bytes().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def megabytes(size: int) -> str:
    """Write a size for people: ``512 MB``, of 2**20 bytes each."""
    return f"{size / _MEGABYTE:,.0f} MB"


class MemoryLimit:
    """Notices that the process holds more than its limit after a job, and still a second later.

    What a job frees at its end is often not given back at once, and one look in the middle of another job's peak would
    start a healthy process anew.

    Args:
        limit: in bytes.
        measure: returns the bytes held now.
    """

    def __init__(self, limit: int, measure: Callable[[], int | None] = resident) -> None:
        self._limit = limit
        self._measure = measure
        self._job_ended = False
        self._over_since: float | None = None

    def job_ended(self) -> None:
        """Say that a job has ended, which is when memory should have been freed; from any thread."""
        self._job_ended = True

    def exceeded(self, now: float) -> int | None:
        """Look, if a job has ended; return the bytes held if they are too many for good, by this ``monotonic()``."""
        if not self._job_ended:
            return None
        held = self._measure()
        if held is None or held <= self._limit:
            self._job_ended = False
            self._over_since = None
            return None
        if self._over_since is None:
            self._over_since = now
        return held if now - self._over_since >= _PATIENCE else None
