"""The ledger: one file, to which every producer and every task appends a line for what it did.

A line is ``MONOTONIC_NS KIND FIELD…``, written with one ``write()`` to a descriptor in append mode, so lines of
different processes never mix and a process that is killed loses none that it had written. The clock is the machine's
monotonic one: the same in all processes, and not the one that some scenarios falsify.

=================================  ======================================================================
``committed KEY``                  a producer's COMMIT was answered
``unknown KEY``                    a producer's COMMIT was sent and its answer never came
``start KEY TOKEN PID``            a task began
``end KEY TOKEN PID``              a task is about to return
=================================  ======================================================================
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "CHAOS_LEDGER"


class Line(NamedTuple):
    """One line; token and pid are 0 where the kind has none."""

    at: float
    kind: str
    key: int
    token: int
    pid: int


class Ledger:
    """Appends to the file, and reads it.

    Args:
        path: the file, made if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, kind: str, *fields: int) -> None:
        """Append a line; it is with the kernel when this returns."""
        words = " ".join(map(str, (time.monotonic_ns(), kind, *fields)))
        os.write(self._file, f"{words}\n".encode())

    def note_all(self, kind: str, keys: list[int]) -> None:
        """Append a line for each key."""
        at = time.monotonic_ns()
        os.write(self._file, "".join([f"{at} {kind} {key}\n" for key in keys]).encode())

    @property
    def size(self) -> int:
        """How many bytes were written so far."""
        return self.path.stat().st_size

    def lines(self, start: int = 0) -> Iterator[Line]:
        """Read what was written so far, from that byte on."""
        with self.path.open("rb") as file:
            file.seek(start)
            for text in file:
                at, kind, *fields = text.decode().split()
                key, token, pid = ([int(field) for field in fields] + [0, 0])[:3]
                yield Line(int(at) / 1e9, kind, key, token, pid)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._file)


def here() -> Ledger:
    """Return the ledger that this process was given."""
    return Ledger(Path(os.environ[VARIABLE]))


def now() -> float:
    """Return the ledger's time, in seconds."""
    return time.monotonic_ns() / 1e9
