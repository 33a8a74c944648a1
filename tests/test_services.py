import threading
from types import SimpleNamespace

import pytest

from sqla_neoq import services as module
from sqla_neoq.context import StopReason
from sqla_neoq.services import Services


class Part:
    """Stands for one part of a runner, and notes what is done to it in the journal of all."""

    def __init__(self, name, journal):
        self.name, self.journal = name, journal
        self.stopping = threading.Event()

    def __getattr__(self, what):
        def note(*args):
            self.journal.append(f"{self.name}.{what}")
            return True

        return note


class FakeDispatcher(Part):
    """Ends after it was waited for so many times; None: never."""

    def __init__(self, journal, ends_after):
        super().__init__("dispatcher", journal)
        self.claiming = True
        self._ends_after = ends_after

    @property
    def alive(self):
        return self._ends_after is None or self._ends_after > 0

    def join(self, timeout):
        if self._ends_after:
            self._ends_after -= 1

    def give_up(self):
        self.journal.append("dispatcher.give_up")
        self._ends_after = 0


class FakePool(Part):
    def __init__(self, journal, running, dispatcher):
        super().__init__("pool", journal)
        self.running = running
        self._dispatcher = dispatcher

    def give_up_running(self, reason):
        assert reason is StopReason.SHUTDOWN
        self.journal.append("pool.give_up_running")
        if self._dispatcher._ends_after is not None:
            self._dispatcher._ends_after = 1
        return self.running


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(module, "_FORCED_GRACE", 0.05)

    def make(ends_after, running=0, *, listener=True):
        journal = []
        dispatcher = FakeDispatcher(journal, ends_after)
        pool = FakePool(journal, running, dispatcher)
        others = {name: Part(name, journal) for name in ("loop", "lease", "housekeeper", "timekeeper")}
        listening = Part("listener", journal) if listener else None
        services = Services(pool=pool, dispatcher=dispatcher, listener=listening, **others)
        return SimpleNamespace(services=services, journal=journal, dispatcher=dispatcher)

    return make


def place(journal, what):
    return journal.index(what)


def test_the_dispatcher_starts_last_for_it_hands_work_to_the_others(make):
    made = make(1)
    made.services.start()
    assert made.journal[-1] == "dispatcher.start"
    assert {"pool.start", "listener.start", "lease.start", "timekeeper.start", "housekeeper.start"} < set(made.journal)


def test_without_a_listener_the_others_start_and_stop(make):
    made = make(1, listener=False)
    made.services.start()
    assert made.services.stop(1.0, threading.Event())
    assert not [what for what in made.journal if what.startswith("listener")]


def test_a_stop_that_drains_cuts_nothing_short(make):
    made = make(3)
    assert made.services.stop(10.0, threading.Event()) is True
    assert made.dispatcher.claiming is False
    assert made.dispatcher.stopping.is_set()
    assert "pool.give_up_running" not in made.journal


def test_the_heartbeat_goes_on_until_everything_is_written_and_the_row_goes_last(make):
    made = make(3)
    made.services.stop(10.0, threading.Event())
    journal = made.journal
    assert place(journal, "pool.close") < place(journal, "lease.stop")
    assert place(journal, "listener.stop") < place(journal, "lease.unregister")
    assert journal[-2:] == ["lease.unregister", "timekeeper.stop"]  # which cuts what would wait for ever


def test_what_outlasts_the_time_is_cut_short_and_said(make, caplog):
    made = make(10**9, running=2)
    assert made.services.stop(0.0, threading.Event()) is False
    assert "2 jobs did not finish in time and are given back" in caplog.text
    assert "dispatcher.give_up" not in made.journal


def test_nothing_to_cut_short_is_clean_however_short_the_time(make, caplog):
    made = make(10**9, running=0)
    assert made.services.stop(0.0, threading.Event()) is True
    assert caplog.text == ""


def test_forced_it_waits_no_longer(make):
    made, forced = make(10**9, running=1), threading.Event()
    forced.set()
    assert made.services.stop(3600.0, forced) is False
    assert "pool.give_up_running" in made.journal


def test_what_cannot_be_written_is_given_up_and_everything_else_stops_all_the_same(make):
    made = make(None)
    assert made.services.stop(0.0, threading.Event()) is False
    journal = made.journal
    assert place(journal, "pool.give_up_running") < place(journal, "dispatcher.give_up") < place(journal, "pool.close")
    assert journal[-2:] == ["lease.unregister", "timekeeper.stop"]  # which cuts what would wait for ever
