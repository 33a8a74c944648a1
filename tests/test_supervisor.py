"""The supervisor over children that are not runners: they say what they are told, and end as their name says.

``tests/test_run.py`` has the same with real runners.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import eventually
from support.processes import environment, python
from support.terminals import Terminal

from sqla_neoq import supervisor
from sqla_neoq.supervisor import Supervisor

PARENT = """
import json, logging, os, signal, sys
from sqla_neoq import logs, supervisor
from sqla_neoq.health import HealthServer

logs.configure()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # before and after, so that a test may send it until the end
options = json.loads(os.environ.get("OPTIONS", "{}"))
several = supervisor.Supervisor([sys.executable, "child.py"], int(sys.argv[1]), **options)
with HealthServer(several.health, 0, "127.0.0.1"):
    print("parent", os.getpid(), flush=True)
    sys.exit(several.run())
"""

# A child imports no runner: it is up in a moment, and that is all that the supervisor sees of one.
CHILD = """
import os, signal, socket, subprocess, sys, threading

def say(*words):
    os.write(1, " ".join(["child", str(os.getpid()), *map(str, words), "\\n"]).encode())  # at once, unlike print()

line = socket.socket(fileno=int(os.environ.pop("NEOQ_SUPERVISOR_FD")))
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: say("was signalled"))

script = open("script").read().split() if os.path.exists("script") else []
if script:
    code, *rest = script
    open("script", "w").write(" ".join(rest))
    if code == "hang":
        say("hangs")
        signal.pause()
    if code.startswith("late"):
        line.send(b"+")
    if not code.startswith("ok"):
        say("exits")
        sys.exit(int(code.removeprefix("late")))

line.send(b"+")
say("ready", "NOTIFY_SOCKET" in os.environ)
while order := line.recv(1):
    say("told", order.decode())
    if order == b"f":
        os._exit(1)
    if order == b"r":
        line.send(b"a")
    if order in b"dr" and not os.path.exists("busy"):
        sys.exit(0)
say("orphaned")
"""


@pytest.fixture
def start(run_process, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)

    def start(processes, *, script="", options="{}", env=None, until=None):
        """Start a supervisor; the children take one word each of the script, then just run."""
        if script:
            (tmp_path / "script").write_text(script)
        process = run_process(str(processes), module="parent", env={"OPTIONS": options} | (env or {}))
        ready = processes if until is None else until
        eventually(lambda: len(children(process)) >= ready or process.popen.poll() is not None)
        assert len(children(process)) >= ready, process.output
        return process

    return start


def children(process, word="ready"):
    """The process ids of all children that said the word, in order."""
    return [int(pid) for pid in re.findall(rf"^child (\d+) {word}", process.stdout, re.MULTILINE)]


def force(process):
    """Send a second signal until it counts as one."""
    eventually(lambda: process.popen.poll() is not None or process.signal(signal.SIGINT))


def alive(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_the_first_child_goes_ahead_and_the_others_follow(start):
    process = start(3, script="hang", until=0)
    process.wait_for("hangs")
    assert process.stderr.count("process started") == 1
    os.kill(children(process, "hangs")[0], signal.SIGKILL)
    eventually(lambda: len(children(process)) == 3)


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_child_that_cannot_start_ends_the_whole_with_its_code_and_is_not_repeated(start, code):
    process = start(3, script=str(code), until=0)
    assert process.wait() == code
    assert len(children(process, "exits")) == 1


def test_a_later_child_that_cannot_start_ends_the_others_too(start):
    process = start(2, script="ok 2", until=0)
    assert process.wait() == 2
    assert len(children(process, "told d")) == 1


def test_a_connection_lost_later_is_tried_again(start):
    process = start(1, script="late3", until=0)
    process.wait_for(" ready ")
    assert "starting it again" in process.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_the_children(start, number):
    process = start(2)
    process.signal(number)
    assert process.wait() == 0
    assert sorted(children(process, "told d")) == sorted(children(process))
    assert "told f" not in process.stdout


def test_the_second_signal_forces_them(start, tmp_path):
    (tmp_path / "busy").touch()
    process = start(2)
    process.signal(signal.SIGTERM)
    eventually(lambda: len(children(process, "told d")) == 2)
    force(process)
    assert process.wait() == 1
    assert sorted(children(process, "told f")) == sorted(children(process))


def test_the_second_signal_ends_a_child_that_is_still_coming_up(start):
    process = start(1, script="hang", until=0)
    process.wait_for("hangs")
    process.signal(signal.SIGTERM)
    force(process)
    assert process.wait() == 1


def test_two_signals_at_once_are_one(start, tmp_path):
    (tmp_path / "busy").touch()
    process = start(1)
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGINT)
    process.wait_for("told d")
    process.signal(signal.SIGTSTP)  # what comes after both
    process.wait_for("told q")
    assert "told f" not in process.stdout


def test_quit_forces_the_children_and_kills_those_that_do_not_listen(start):
    process = start(2, script="ok hang", until=1)
    process.wait_for("hangs")
    os.kill(children(process, "hangs")[0], signal.SIGSTOP)
    process.signal(signal.SIGQUIT)
    assert process.wait() == 1
    assert children(process, "told f") == children(process)
    assert "told d" not in process.stdout


def test_tstp_quiets_them(start):
    process = start(2)
    process.signal(signal.SIGTSTP)
    eventually(lambda: sorted(children(process, "told q")) == sorted(children(process)))
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_hup_starts_them_anew_without_a_wait(start):
    process = start(2)
    first = children(process)
    process.signal(signal.SIGHUP)
    eventually(lambda: len(children(process)) == 4)
    assert sorted(children(process, "told r")) == sorted(first)
    assert "unexpectedly" not in process.stderr


def test_a_child_that_dies_is_started_again(start):
    process = start(2)
    first = children(process)
    os.kill(first[0], signal.SIGKILL)
    eventually(lambda: len(children(process)) == 3)
    said = r"WARNING process ended unexpectedly; starting it again in \d.\d s process=\d pid=\d+ exit_code=-9"
    assert re.search(said, process.stderr)
    assert alive(first[1])


def test_a_child_that_ends_by_itself_is_started_again(start):
    process = start(1, script="0", until=0)
    process.wait_for(" ready ")
    assert "process ended unexpectedly" in process.stderr


def test_hup_does_not_wait_for_a_back_off(start):
    process = start(1, script="1 1 1 1 1 1 1 1 1", until=0)
    for done in range(1, 10):
        eventually(lambda done=done: process.stderr.count("unexpectedly") >= done)
        process.signal(signal.SIGHUP)
    eventually(lambda: len(children(process)) >= 1)


def test_children_drain_when_the_parent_is_killed(start):
    process = start(2)
    process.signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: sorted(children(process, "orphaned")) == sorted(children(process)))


def test_ctrl_c_at_a_terminal_reaches_the_parent_alone(start):
    process = start(2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 0
    assert len(children(process, "told d")) == 2
    assert "was signalled" not in process.stdout


def test_a_burst_ends_when_every_child_has_ended_and_starts_a_crashed_one_again(start):
    process = start(2, script="late1 late0 late0", options='{"burst": true}', until=0)
    assert process.wait() == 0
    assert len(children(process, "exits")) == 3


def test_when_code_is_edited_a_broken_child_waits_for_the_next_change(start):
    process = start(1, script="2 2", options='{"reload": true}', until=0)
    process.wait_for("waiting for a change")
    process.signal(signal.SIGHUP)
    eventually(lambda: process.stderr.count("waiting for a change") == 2)
    process.signal(signal.SIGHUP)
    eventually(lambda: len(children(process)) >= 1)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_health_is_ready_when_every_child_is(start, tmp_path):
    process = start(2, script="ok hang", until=1)
    port = re.search(r"health at port (\d+)", process.stderr)[1]

    def ready():
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
                return json.load(answer)
        except HTTPError as answer:
            with answer:
                return json.load(answer)

    process.wait_for("hangs")
    assert ready() == {"live": True, "ready": False, "processes": {"1": "ready", "2": "starting"}}
    os.kill(children(process, "hangs")[0], signal.SIGKILL)
    eventually(lambda: ready()["ready"])


def test_systemd_hears_that_all_are_ready_from_the_parent_alone(start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        process = start(2, env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert manager.recv(100) == b"READY=1"
        assert process.stdout.count("ready False") == 2  # the children know of no socket
        process.signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert process.wait() == 0


def test_systemds_watchdog_hears_that_the_parent_lives(start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        start(1, env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"})
        heard = [manager.recv(100) for _ in range(4)]
    assert heard.count(b"READY=1") <= 1
    assert heard.count(b"WATCHDOG=1") >= 3


def test_a_hup_from_the_terminals_closing_is_an_end_and_no_restart(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    said = tmp_path / "said"
    command = ["/bin/sh", "-c", 'exec "$@" >&2', "sh", *python("parent.py", "1")]
    with Terminal(command, cwd=tmp_path, env=environment({}), errors_to=said) as terminal:
        eventually(lambda: " ready " in said.read_text())
        terminal.close()
        assert terminal.popen.wait(20) == 0
    assert " told d" in said.read_text()
    assert " told r" not in said.read_text()


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_waits_before_a_restart_grow_from_a_quarter_second_to_45(failures, chance):
    delay = supervisor.restart_delay(failures, chance)
    assert 0.25 <= delay <= 45.0
    assert supervisor.restart_delay(failures + 1, chance) >= delay


class Followed:
    """What a line needs of a runner."""

    def __init__(self):
        self.live, self.ready, self.detail, self.heard = True, False, {}, []
        self.told = threading.Condition()

    def health(self):
        return self

    def _note(self, what):
        with self.told:
            self.heard.append(what)
            self.told.notify_all()

    def quiet(self):
        self._note("quiet")

    def request_stop(self, ended=supervisor.Ended.CLEAN):
        self._note(ended)

    def force_stop(self):
        self._note("force")


@pytest.fixture
def line():
    """A child's line in an environment, with the supervisor's end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    number = theirs.detach()
    values = {"NEOQ_SUPERVISOR_FD": str(number), "OTHER": "x"}
    taken = supervisor.Line.from_environment(values)
    assert values == {"OTHER": "x"}
    assert not os.get_inheritable(number)
    with ours:
        yield taken, ours
    for thread in threading.enumerate():
        if thread.name == "neoq-line":
            thread.join(10)
    taken._end.close()


def test_no_line_without_a_supervisor():
    assert supervisor.Line.from_environment({}) is None


def test_a_line_hands_orders_on_and_ends_with_the_supervisor(line):
    child, parent = line
    runner = Followed()
    child.follow(runner)
    assert parent.recv(10) == b"-"
    parent.send(b"qrdf")
    parent.close()
    with runner.told:
        assert runner.told.wait_for(lambda: len(runner.heard) == 5, timeout=10)
    ended = supervisor.Ended
    assert runner.heard == ["quiet", ended.RESTART, ended.CLEAN, "force", ended.CLEAN]


def test_a_line_tells_each_change_of_the_runners_state_once(line):
    child, parent = line
    runner = Followed()
    child.follow(runner)
    assert parent.recv(10) == b"-"
    runner.ready = True
    assert parent.recv(10) == b"+"
    runner.live = False
    assert parent.recv(10) == b"!"
    child.ask_restart()
    assert parent.recv(10) == b"a"


def test_asking_for_a_restart_when_the_supervisor_is_gone_does_no_harm(line):
    child, parent = line
    parent.close()
    child.ask_restart()


def test_signals_are_the_callers_again_afterwards():
    former = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    assert Supervisor([sys.executable, "-c", "raise SystemExit(2)"], 1).run() == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)] == former
    assert signal.set_wakeup_fd(-1) == -1


def test_a_command_that_does_not_exist_is_the_callers_error_and_leaves_nothing_behind():
    with pytest.raises(FileNotFoundError):
        Supervisor(["/neoq/no/such/program"], 1).run()
    with suppress(ChildProcessError):
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)
