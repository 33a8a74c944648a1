import os
import signal
import subprocess
import sys
import threading

import pytest
from support.running import in_thread, threads
from support.waiting import eventually

from sqla_neoq.signals import Signals

TAKEN = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers_as_before():
    before = {number: signal.getsignal(number) for number in TAKEN}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", TAKEN)
def test_a_workers_signals_are_passed_on(number):
    received = []
    with Signals(received.append):
        os.kill(os.getpid(), number)
        eventually(lambda: received)
    assert received == [number]


def test_signals_are_passed_on_in_their_order_and_none_is_dropped():
    received = []
    with Signals(received.append):
        for number in (signal.SIGTSTP, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        eventually(lambda: len(received) == 3)
    assert received == [signal.SIGTSTP, signal.SIGTERM, signal.SIGTERM]


def test_they_are_passed_on_outside_the_main_thread_which_may_hold_any_lock():
    lock, callers = threading.Lock(), []

    def on_signal(number):
        with lock:
            callers.append(threading.current_thread())

    with Signals(on_signal):
        with lock:
            signal.raise_signal(signal.SIGTERM)
        eventually(lambda: callers)
    assert callers != [threading.main_thread()]


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGQUIT else real(number))
    before = real(signal.SIGQUIT)
    with Signals(lambda number: None):
        assert real(signal.SIGQUIT) is before
        assert real(signal.SIGTERM) is not signal.SIG_DFL
    assert real(signal.SIGQUIT) is before


def test_the_handlers_of_before_are_back_afterwards():
    mine = lambda number, frame: None
    signal.signal(signal.SIGTERM, mine)
    with Signals(lambda number: None):
        assert signal.getsignal(signal.SIGTERM) is not mine
    assert signal.getsignal(signal.SIGTERM) is mine


def test_they_are_back_after_an_error_too():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError), Signals(lambda number: None):
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_was_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals(lambda number: None):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_outside_the_main_thread_the_signals_are_left_alone():
    before = [signal.getsignal(number) for number in TAKEN]
    seen = []

    def elsewhere():
        with Signals(lambda number: None):
            seen.extend(signal.getsignal(number) for number in TAKEN)

    in_thread(elsewhere).join(10)
    assert seen == before


def test_no_thread_is_left_behind():
    with Signals(lambda number: None):
        assert threads("neoq-signals")
    eventually(lambda: not threads("neoq-signals"))


def test_an_error_while_passing_one_on_does_not_lose_the_next(caplog):
    received = []

    def on_signal(number):
        received.append(number)
        if len(received) == 1:
            raise ValueError("a bug")

    with Signals(on_signal):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        eventually(lambda: len(received) == 2)
    assert "a bug" in caplog.text


def test_a_storm_of_signals_neither_deadlocks_nor_loses_one():
    # In a process of its own: a deadlock would take the whole run of the tests with it.
    program = """
import os, signal, threading
from sqla_neoq.signals import Signals
received = []
done = threading.Event()
def on_signal(number):
    received.append(number)
    if len(received) == 500: done.set()
with Signals(on_signal):
    for _ in range(500):
        signal.raise_signal(signal.SIGTERM)
    done.wait(20)
print(len(received))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (answer.stdout, answer.stderr) == ("500\n", "")


def test_a_signal_that_another_thread_receives_is_heard_while_the_main_thread_waits_on_a_lock():
    heard, end = threading.Event(), threading.Event()
    other = threading.Thread(target=end.wait)
    sender = threading.Timer(0.05, lambda: signal.pthread_kill(other.ident, signal.SIGTERM))
    other.start()
    with Signals(lambda number: heard.set()):
        sender.start()
        assert heard.wait(10)
    end.set()
    for thread in (other, sender):
        thread.join()
