"""Memory is measured as the system sees it, and a limit counts only what stays after a job."""

import os

import pytest

from sqla_neoq import memory
from sqla_neoq.memory import MemoryLimit


def test_resident_memory_is_that_of_now_in_bytes():
    before = memory.resident()
    hoard = bytearray(os.urandom(1024) * 1024 * 64)
    during = memory.resident()
    assert during - before > 50 * 2**20
    del hoard
    assert memory.resident() < during - 50 * 2**20
    assert memory.resident(os.getpid()) == pytest.approx(memory.resident(), rel=0.1)


def test_of_a_process_that_is_gone_nobody_knows():
    assert memory.resident(2**30) is None


def test_sizes_are_written_for_people():
    assert memory.megabytes(1536 * 2**20) == "1,536 MB"


@pytest.fixture
def limit():
    held = {"now": 0}
    limit = MemoryLimit(100, lambda: held["now"])

    def look(at, holding):
        held["now"] = holding
        return limit.exceeded(at)

    limit.look = look
    return limit


def test_it_does_not_look_before_a_job_has_ended(limit):
    assert limit.look(0.0, 500) is None
    assert limit.look(9.0, 500) is None


def test_what_is_held_after_a_job_and_a_second_later_exceeds_it(limit):
    limit.job_ended()
    assert limit.look(10.0, 101) is None
    assert limit.look(10.9, 150) is None
    assert limit.look(11.0, 160) == 160


def test_what_is_freed_meanwhile_does_not(limit):
    limit.job_ended()
    assert limit.look(10.0, 101) is None
    assert limit.look(10.5, 100) is None
    assert limit.look(20.0, 500) is None  # no job has ended since
    limit.job_ended()
    assert limit.look(30.0, 500) is None  # the second begins anew
    assert limit.look(31.0, 500) == 500


def test_where_nobody_can_measure_it_is_never_exceeded():
    limit = MemoryLimit(100, lambda: None)
    limit.job_ended()
    assert limit.exceeded(0.0) is None
    assert limit.exceeded(9.0) is None
