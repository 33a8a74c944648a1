import io
import threading
from dataclasses import dataclass

import pytest

from sqla_neoq import progress
from sqla_neoq.progress import Progress


@dataclass
class Counts:
    processed: int = 0
    failed: int = 0
    dead: int = 0
    snoozed: int = 0
    released: int = 0
    cancelled: int = 0
    lost: int = 0
    total: int = 0


class Runner:
    def __init__(self, counts):
        self.counts = counts


class Terminal(io.StringIO):
    """A terminal that tells when a line has been written to it."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def isatty(self):
        return True

    def flush(self):
        self.written.set()


@pytest.mark.parametrize(
    ("counts", "seconds", "text"),
    [
        (Counts(), 0.0, "0 jobs in 0.0 s (0/s): 0 processed"),
        (Counts(processed=1230, failed=4, total=1234), 5.2, "1,234 jobs in 5.2 s (237/s): 1,230 processed, 4 failed"),
        (Counts(dead=1, lost=2, total=3), 1.0, "3 jobs in 1.0 s (3/s): 0 processed, 1 dead, 2 lost"),
    ],
)
def test_what_was_done_is_said_in_one_line(counts, seconds, text):
    assert progress.describe(counts, seconds) == text


def test_a_terminal_shows_one_line_that_is_written_over_and_kept_at_the_end():
    runner, terminal = Runner(Counts(processed=1, total=1)), Terminal()
    with Progress(runner, terminal):
        assert terminal.written.wait(10)
        runner.counts = Counts(processed=2, total=2)
    *rewritten, last = terminal.getvalue().split("\r")
    assert rewritten
    assert all("1 processed" in line for line in rewritten[:1])
    assert last.startswith("\x1b[K2 jobs in ")
    assert last.endswith("2 processed\n")


def test_what_is_no_terminal_is_left_alone():
    stream = io.StringIO()
    threads = threading.active_count()
    with Progress(Runner(Counts()), stream):
        assert threading.active_count() == threads
    assert stream.getvalue() == ""
