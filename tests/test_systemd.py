import os
import re
import socket
import threading
from dataclasses import dataclass, field

import pytest

from sqla_neoq import systemd


@dataclass
class State:
    live: bool = True
    ready: bool = True
    detail: dict = field(default_factory=dict)


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    """A socket such as systemd's, which the environment names."""
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    name = str(tmp_path / "notify") if request.param == "path" else f"@neoq-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield manager


def test_a_state_is_one_datagram(manager):
    systemd.notify("READY=1")
    assert manager.recv(100) == b"READY=1"


def test_without_systemd_nothing_is_sent_and_no_thread_started(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    threads = threading.active_count()
    systemd.notify("READY=1")
    with systemd.reporting(State):
        assert threading.active_count() == threads


def test_a_manager_that_is_gone_is_logged_and_no_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    systemd.notify("READY=1")
    assert "systemd cannot be told READY=1" in caplog.text


def test_reporting_says_ready_once_it_is_and_stopping_at_the_end(manager):
    states = iter([State(ready=False), State(ready=True)])
    with systemd.reporting(lambda: next(states)):
        assert manager.recv(100) == b"READY=1"
    assert manager.recv(100) == b"STOPPING=1"
    assert next(states, None) is None  # not ready was seen, and said nothing


def test_a_process_that_starts_anew_says_so_and_not_that_it_stops(manager):
    with systemd.reporting(State) as begin_anew:
        assert manager.recv(100) == b"READY=1"
        begin_anew()
    assert re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=\d+", manager.recv(100))


def test_the_watchdog_hears_from_a_live_process_at_half_its_time(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    assert systemd.watchdog_interval() == 0.02
    with systemd.reporting(State):
        assert [manager.recv(100) for _ in range(4)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"]


def test_the_watchdog_does_not_hear_from_a_process_that_is_not_live(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    asked = threading.Semaphore(0)

    def probe():
        asked.release()
        return State(live=False)

    with systemd.reporting(probe):
        for _ in range(5):
            assert asked.acquire(timeout=10)
    assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


@pytest.mark.parametrize(
    ("usec", "pid", "interval"),
    [
        ("30000000", None, 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        (None, None, None),
        ("x", None, None),
    ],
)
def test_the_watchdog_watches_only_whom_it_names(usec, pid, interval, monkeypatch):
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value.replace("own", str(os.getpid())))
    assert systemd.watchdog_interval() == interval
