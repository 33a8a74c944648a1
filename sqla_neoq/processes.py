"""Child processes, for the jobs of tasks with ``executor="process"``: they can be killed, as no thread can.

A worker thread of the pool takes a child, gives it one job, and waits for its report. To stop the run, whoever decides
so kills the child, and the thread finds the end of the file. Children are kept for the next job: a thread holds at most
one, so there are never more of them than slots. They are started when they are needed, closed when they were idle for
long, and die with the runner, however that dies: see :mod:`sqla_neoq.child`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from sqla_neoq.errors import JobCrashed
from sqla_neoq.memory import megabytes, resident
from sqla_neoq.outcomes import failure, judge
from sqla_neoq.wire import Assignment, Channel, Ready, Report, Setup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqla_neoq.outcomes import Outcome
    from sqla_neoq.pool import Run
    from sqla_neoq.tasks import Definition

log = logging.getLogger("sqla_neoq.runner")

Message = TypeVar("Message", Ready, Report)

START_LIMIT: Final = 60.0
"""Seconds a child may take to import the tasks' modules. A job's own time begins after that."""
IDLE_LIMIT: Final = 60.0
"""Seconds after which a child that nobody needed is closed."""
_CLOSE_LIMIT: Final = 2.0
_LOOK_EVERY: Final = 1.0

# The path first: the runner may have found this very package where a new interpreter would not look.
_BOOTSTRAP: Final = (
    "import sys; control, life, *sys.path = sys.argv[1:]; del sys.argv[1:]; "
    "from sqla_neoq.child import main; main(int(control), int(life))"
)


class _CannotStartError(Exception):
    """A child could not import the tasks; holds what it said."""

    def __init__(self, ready: Ready) -> None:
        super().__init__(ready.error)
        self.ready = ready


class _Child:
    """One child process, used by one thread at a time."""

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        # Nothing is ever written to this pipe: the child dies when the kernel closes our end.
        life, self._life = os.pipe()
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                    [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), str(life), *map(str, sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), life],
                    # What the task starts is in this group too, and dies with it. And Ctrl-C is the runner's to obey.
                    process_group=0,
                )
            except BaseException:
                ours.close()
                os.close(self._life)
                raise
            finally:
                os.close(life)
        self._channel = Channel(ours)
        self._setup: Setup | None = setup
        self._started = monotonic()
        self.idle_since = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process runs; not to be asked while another thread may kill it."""
        return self._process.poll() is None

    @property
    def usable(self) -> bool:
        """Whether it can take a job: it has not died while nobody looked."""
        self._channel.end.settimeout(0.0)
        try:
            self._channel.end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self.alive
        except OSError:
            pass
        return False

    @property
    def memory(self) -> int:
        """The bytes it holds, 0 if nobody can say."""
        return resident(self._process.pid) or 0

    def await_ready(self) -> None:
        """Wait until it has imported the tasks.

        Raises:
            _CannotStartError: they cannot be imported there, or not in time.
            EOFError, OSError: it died.
        """
        if self._setup is not None:
            self._send(self._setup)
            ready = self._receive(Ready, until=self._started + START_LIMIT)
            self._setup = None
            if ready.error is not None:
                raise _CannotStartError(ready)

    def run(self, assignment: Assignment) -> Report:
        """Run a job.

        Raises:
            EOFError, OSError: it died.
        """
        self._send(assignment)
        return self._receive(Report)

    def kill(self) -> None:
        """Kill the process and all it has started; not after :meth:`end`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill what is left of it and return its exit code, negative for a signal, as it ended by itself if it did."""
        # A process that is exiting keeps the code it exits with, and one that is not reaped keeps its number.
        self.kill()
        code = self._process.wait()
        self._channel.close()
        os.close(self._life)
        return code

    def hang_up(self) -> None:
        """Ask an idle process to end."""
        self._channel.close()

    def wait(self, timeout: float) -> bool:
        """Wait for the process to end; return whether it has."""
        try:
            self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, message: Setup | Assignment) -> None:
        self._channel.end.settimeout(None)
        self._channel.send(message)
        self._channel.end.settimeout(_LOOK_EVERY)

    def _receive(self, kind: type[Message], until: float = float("inf")) -> Message:
        while True:
            try:
                text = self._channel.receive()
            except TimeoutError:
                # What the task forked may hold the line open after its parent's death.
                if not self.alive:
                    raise EOFError from None
                if monotonic() > until:
                    late = f"a child process took more than {START_LIMIT:g} s to import its tasks"
                    raise _CannotStartError(Ready(late)) from None
                continue
            if text is None:
                raise EOFError
            return msgspec.msgpack.decode(text, type=kind)


class _Hold:
    """A run's hold on its child: a kill that comes late must not hit the child's next job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._killed = False

    def take(self, child: _Child) -> None:
        with self._lock:
            self._child = child
            if self._killed:  # before there was anything to kill
                child.kill()

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def release(self) -> bool:
        """Let go; return whether the child was killed."""
        with self._lock:
            self._child = None
            return self._killed


class Children:
    """Runs jobs in child processes. Threads call ``execute``; the timekeeper calls ``tidy``.

    Args:
        setup: what each child is told at its start.
        homes: each task and handler that runs here, and its ``module:name``.
        max_memory: a child that holds more bytes after a job is replaced; None: none is.
    """

    def __init__(self, setup: Setup, homes: Mapping[Definition, str], *, max_memory: int | None = None) -> None:
        self._setup = setup
        self._homes = homes
        self._max_memory = max_memory
        self._lock = threading.Lock()
        self._idle: list[_Child] = []  # the last one used is the first to be used again
        self._ending: list[tuple[_Child, float]] = []
        self._closed = False

    def execute(self, run: Run) -> Outcome:
        """Run a job in a child and return its outcome. Never raises; never returns before the child lets go of it."""
        hold = _Hold()
        # Its time begins when the child is ready: a slow import must not fail every first job.
        run.expires = float("inf")
        run.interrupt = hold.kill
        if run.context.stop_reason is not None:  # given before there was somebody to tell
            hold.kill()
        try:
            child = self._take()
        except Exception as error:  # noqa: BLE001 - no process, no memory, no descriptor left
            return judge(error, run.job, run.definition, run.context.stop_reason)
        hold.take(child)
        try:
            child.await_ready()
            run.start_clock()
            report = child.run(Assignment(self._homes[run.definition], run.job))
        except _CannotStartError as error:
            hold.release()
            child.end()
            return _cannot_start(run, error)
        except (EOFError, OSError, msgspec.DecodeError):
            hold.release()
            return _died(run, child.end())
        if hold.release():
            child.end()
        else:
            self._give_back(child)
        return report.outcome(run.job)

    def tidy(self, now: float) -> None:
        """Close the children that were idle for long, and see off those that are ending; waits for nothing."""
        with self._lock:
            while self._idle and now - self._idle[0].idle_since > IDLE_LIMIT:
                self._let_go(self._idle.pop(0))
            ending, self._ending = self._ending, []
        # Outside the lock: reaping a killed process can take the kernel a moment, and nobody else knows these.
        left = [(child, kill_at) for child, kill_at in ending if not _ended(child, kill_at, now)]
        with self._lock:
            self._ending += left

    def close(self) -> None:
        """Let every child end; for good."""
        with self._lock:
            self._closed = True
            for child in self._idle:
                self._let_go(child)
            self._idle.clear()
            ending, self._ending = self._ending, []
        for child, kill_at in ending:
            child.wait(kill_at - monotonic())
            child.end()

    def _take(self) -> _Child:
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None:
                return _Child(self._setup)
            if child.usable:
                return child
            log.warning("an idle child process is gone (%s)", _exit(child.end()))

    def _give_back(self, child: _Child) -> None:
        too_large = self._max_memory is not None and child.memory > self._max_memory
        if too_large:
            log.info("a child process holds %s after its job and is replaced", megabytes(child.memory))
        with self._lock:
            closed = self._closed
            if too_large and not closed:
                self._let_go(child)
            elif not closed:
                child.idle_since = monotonic()
                self._idle.append(child)
        if closed:  # nobody will tidy up any more
            child.end()

    def _let_go(self, child: _Child) -> None:
        child.hang_up()
        self._ending.append((child, monotonic() + _CLOSE_LIMIT))


def _ended(child: _Child, kill_at: float, now: float) -> bool:
    if child.alive and now < kill_at:
        return False
    child.end()
    return True


def _cannot_start(run: Run, error: _CannotStartError) -> Outcome:
    outcome = failure(error, run.job, run.definition)
    outcome.message, outcome.traceback = error.ready.error, error.ready.traceback
    return outcome


def _died(run: Run, code: int) -> Outcome:
    error = JobCrashed(f"the child process that ran job {run.job.id} {_exit(code)}")
    if run.context.stop_reason is not None:
        return judge(error, run.job, run.definition, run.context.stop_reason)
    return failure(error, run.job, run.definition, kind="crashed")


def _exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
