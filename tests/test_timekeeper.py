import threading
from types import SimpleNamespace

import pytest
from support.running import threads
from support.waiting import eventually

from sqla_neoq import timekeeper
from sqla_neoq.timekeeper import Timekeeper


class FakePool:
    """Says how many runs are stuck, and remembers when it was asked to look."""

    def __init__(self, soonest=float("inf")):
        self.stuck = 0
        self.looks = []
        self.looked = threading.Event()
        self._soonest = soonest

    def expire(self, now):
        self.looks.append(now)
        self.looked.set()
        return self._soonest


@pytest.fixture
def start():
    """Factory of started timekeepers, stopped after the test."""
    made = []

    def start(pool, timeouts=(), cuttable=(), *, stuck_limit=2, on_stuck=lambda: None):
        keeper = Timekeeper(pool, timeouts, cuttable, stuck_limit=stuck_limit, on_stuck=on_stuck)
        made.append(keeper)
        keeper.start()
        return keeper

    yield start
    for keeper in made:
        assert keeper.stop()
    assert not threads("neoq-timekeeper")


def test_it_looks_again_no_later_than_the_shortest_timeout_after(start):
    pool = FakePool()
    start(pool, [3600.0, 0.01])
    eventually(lambda: len(pool.looks) >= 5)


def test_it_looks_again_when_the_next_run_expires(start):
    pool = FakePool(soonest=0.0)  # long ago
    start(pool, [3600.0])
    eventually(lambda: len(pool.looks) >= 5)


def test_without_timeouts_it_looks_now_and_then(start):
    pool = FakePool()
    keeper = start(pool)
    assert pool.looked.wait(10)
    assert keeper._longest_sleep == 1.0


def test_every_connection_is_looked_at_and_what_was_cut_is_said(start, caplog):
    asked = []

    def connection(number, late):
        return SimpleNamespace(cut_if_late=lambda now: asked.append(number) or late)

    start(FakePool(), [0.01], [connection(1, late=False), connection(2, late=True), connection(3, late=False)])
    eventually(lambda: len(asked) >= 6)
    assert asked[:6] == [1, 2, 3, 1, 2, 3]
    assert "a connection was cut: the database did not answer in time" in caplog.text


def test_too_many_stuck_runs_are_told_of_once(start, caplog, monkeypatch):
    monkeypatch.setattr(timekeeper, "_TIME_TO_OBEY", 0.01)
    pool, told = FakePool(), []
    start(pool, [0.001], stuck_limit=2, on_stuck=lambda: told.append(pool.stuck))
    pool.stuck = 1
    looks = len(pool.looks)
    eventually(lambda: len(pool.looks) > looks + 2)
    assert told == []
    pool.stuck = 2
    eventually(lambda: told)
    looks = len(pool.looks)
    eventually(lambda: len(pool.looks) > looks + 5)
    assert told == [2]
    assert "2 timed-out jobs still hold their threads" in caplog.text


def test_runs_that_end_soon_after_their_timeout_are_not_stuck_however_many(start):
    pool, told = FakePool(), []
    keeper = start(pool, [0.001], stuck_limit=2, on_stuck=lambda: told.append(pool.stuck))
    for _ in range(3):
        pool.stuck = 5
        eventually(lambda: keeper._stuck_since is not None)
        pool.stuck = 0
        eventually(lambda: keeper._stuck_since is None)
    assert told == []
