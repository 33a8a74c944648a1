"""Several runner processes under one parent: what ``--processes`` and ``--reload`` start.

The parent imports none of the application's code. It starts children that run the parent's own command line, and each
child finds one end of a socket in its environment, its *line* to the parent. The line carries

* orders to the child, a byte each, which stand for the parent's signals. They are not sent on as signals, because a
  service manager that signals every process of the group would make a child count two, and force what should drain;
* the child's state to the parent: ready, not ready, not live, or "start me again";
* the parent's death: end of file, and the child drains.

Children have process groups of their own, so that Ctrl-C at a terminal reaches the parent alone. The parent is one
thread with one place to wait: a selector over the lines and over the socket that every signal, a child's end included,
writes to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import selectors
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from sqla_neoq import systemd
from sqla_neoq.runner import Ended

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping, Sequence
    from types import FrameType

    from sqla_neoq.health import State

log = logging.getLogger(__name__)

LINE_VARIABLE: Final = "NEOQ_SUPERVISOR_FD"
DRAIN, FORCE, QUIET, RESTART = b"d", b"f", b"q", b"r"
READY, NOT_READY, NOT_LIVE, AGAIN = b"+", b"-", b"!", b"a"
STATES: Final = {READY: "ready", NOT_READY: "not ready", NOT_LIVE: "not live"}

CANNOT_START: Final = frozenset({2, 3, 4})
"""Exit codes by which a child says that starting it again would change nothing."""
CANNOT_CONNECT: Final = 3

SETTLED: Final = 30.0
"""Seconds after which a child that dies was a healthy one: the waits before its restarts begin anew."""


ECHO: Final = 0.2
"""Seconds in which a second TERM or INT is the first one again: ``timeout`` and some launchers signal both the process
and its group, and mean one end."""
QUIT_GRACE: Final = 2.0
"""Seconds that QUIT leaves the children to give their jobs back; killed ones are rescued, and count as crashed."""


def restart_delay(failures: int, chance: float) -> float:
    """Return the seconds to wait before the start after ``failures`` in a row: 0.5 doubling to 30, give or take half.

    ``chance`` is a random number from 0 to 1: children that died of one cause should not come back as one herd.
    """
    return min(30.0, 0.25 * 2.0 ** min(failures, 10)) * (0.5 + chance)


def has_terminal() -> bool:
    """Return whether the process has a controlling terminal that still exists."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


@dataclass(eq=False, slots=True)
class _Child:
    """One place for a child process, and the process that fills it now."""

    number: int
    due: float | None = None  # when to start it, on the monotonic clock
    process: subprocess.Popen[bytes] | None = None
    line: socket.socket | None = None
    state: str = "waiting"
    started: float = 0.0
    failures: int = 0
    again: bool = False

    def order(self, order: bytes) -> None:
        if self.line is not None:
            # One that is just ending no longer listens, and needs no order.
            with contextlib.suppress(OSError):
                self.line.send(order)


@dataclass(frozen=True, slots=True)
class _Health:
    live: bool
    ready: bool
    detail: Mapping[str, object]


class Supervisor:
    """Keeps a number of children alive until told to stop.

    TERM and INT drain the children, a second one forces them, QUIT does so and soon kills them; TSTP quiets them, HUP
    restarts them (or, when it came because the terminal was closed, drains them). A child that dies is started again
    after a jittered back-off. One that exits with 2, 3 or 4 ends the whole with that code, except for a lost connection
    (3) once any child has run: that is tried again. The first child goes ahead of the others, so that a wrong flag, a
    broken module or a missing table is reported once.

    Args:
        command: the command line of a child.
        processes: how many.
        environment: the children's environment, by default the parent's.
        burst: a child that exits with 0 is done, and the supervisor ends when all are.
        reload: the code is being edited: a child that cannot start waits for the next :meth:`restart`.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        *,
        environment: Mapping[str, str] | None = None,
        burst: bool = False,
        reload: bool = False,
    ) -> None:
        inherited = os.environ if environment is None else environment
        # The service manager watches the parent; a child must not answer for it.
        own = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
        self._environment = {key: value for key, value in inherited.items() if key not in own}
        self._command = list(command)
        self._burst = burst
        self._reload = reload
        self._children = [_Child(number) for number in range(1, processes + 1)]
        self._proven = False  # some child has been ready
        self._announced = False  # systemd has heard that all were
        self._stopping_since: float | None = None
        self._kill_at = float("inf")
        self._exit_code = 0
        self._had_terminal = has_terminal()
        self._waker: socket.socket | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Start the children, look after them until all have ended, and return the exit code; main thread only."""
        self._children[0].due = time.monotonic()
        with self._signals() as woken:
            try:
                while self._unfinished():
                    self._start_due()
                    self._wait(woken)
            finally:
                self._kill()
                for child in self._children:
                    self._hang_up(child)
        return self._exit_code

    def restart(self) -> None:
        """Restart every child, as SIGHUP does; from any thread."""
        waker = self._waker
        if waker is not None:  # else no child runs old code
            with contextlib.suppress(OSError):  # full of wake-ups, so it is about to look anyway; or at its end
                waker.send(bytes([signal.SIGHUP]))

    def health(self) -> State:
        """Return how the children are; ready means that every one of them is."""
        states = {child.number: child.state for child in self._children}
        return _Health(
            live="not live" not in states.values(),
            ready=self._stopping_since is None and set(states.values()) == {"ready"},
            detail={"processes": states},
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Take the signals over, and yield the socket that their numbers come out of."""

        def wake_only(_number: int, _frame: FrameType | None) -> None:
            """Leave it to the byte that Python writes to the wake-up socket."""

        handled = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            handled.remove(signal.SIGHUP)  # nohup's wish
        woken, waker = socket.socketpair()
        with woken, waker, self._selector:
            woken.setblocking(False)
            waker.setblocking(False)
            self._waker = waker
            self._selector.register(woken, selectors.EVENT_READ)
            former = {number: signal.signal(number, wake_only) for number in handled}
            former_waker = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            try:
                yield woken
            finally:
                signal.set_wakeup_fd(former_waker)
                for number, handler in former.items():
                    signal.signal(number, handler)

    def _unfinished(self) -> bool:
        busy = any(child.process is not None or child.due is not None for child in self._children)
        return busy or (self._reload and self._stopping_since is None)

    def _wait(self, woken: socket.socket) -> None:
        """Wait for the next signal, message, due start or watchdog beat, and act on it."""
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill()
            return
        waits = [max(0.0, child.due - now) for child in self._children if child.due is not None]
        if self._kill_at < float("inf"):
            waits.append(self._kill_at - now)
        if (beat := systemd.watchdog_interval()) is not None:
            systemd.notify("WATCHDOG=1")
            waits.append(beat)
        for key, _ in self._selector.select(min(waits, default=None)):
            if key.data is not None:
                self._listen(key.data)
            else:
                for number in woken.recv(4096):
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._had_terminal and not has_terminal():
            number = signal.SIGTERM
        match number:
            case signal.SIGCHLD:
                for child in self._children:
                    if child.process is not None and (code := child.process.poll()) is not None:
                        self._on_end(child, code)
            case signal.SIGTERM | signal.SIGINT:
                if self._stopping_since is None:
                    self._stop(DRAIN)
                elif time.monotonic() - self._stopping_since > ECHO:
                    self._stop(FORCE)
            case signal.SIGQUIT:
                self._stop(FORCE)
                self._kill_at = time.monotonic() + QUIT_GRACE
            case signal.SIGTSTP:
                for child in self._children:
                    child.order(QUIET)
            case signal.SIGHUP if self._stopping_since is None:
                for child in self._children:
                    child.order(RESTART)
                    # Neither a back-off nor a repair of the code is waited for any longer.
                    if child.due is not None or child.state == "broken":
                        child.due = time.monotonic()

    def _stop(self, order: bytes) -> None:
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            log.info("stopping")
            systemd.notify("STOPPING=1")
        for child in self._children:
            child.due = None
            child.order(order)
            # One that is still coming up holds no job, and may never come to read its line.
            if order == FORCE and child.state == "starting" and child.process is not None:
                child.process.kill()

    def _kill(self) -> None:
        for child in self._children:
            if child.process is not None:
                child.process.kill()
                self._on_end(child, child.process.wait())

    def _start_due(self) -> None:
        for child in self._children:
            if child.due is not None and child.due <= time.monotonic():
                self._start(child)

    def _start(self, child: _Child) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, child)
        child.line, child.state, child.again = ours, "starting", False
        child.due, child.started = None, time.monotonic()
        with theirs:
            child.process = subprocess.Popen(  # noqa: S603 - the parent's own command line
                self._command,
                env=self._environment | {LINE_VARIABLE: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        log.info("process started", extra=_fields(child))

    def _listen(self, child: _Child) -> None:
        """Take what a child says; at the end of the file, leave its end to SIGCHLD."""
        if child.line is None:
            return
        try:
            said = child.line.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        for message in (bytes([byte]) for byte in said):
            child.again = child.again or message == AGAIN
            child.state = STATES.get(message, child.state)
        if not said:
            self._hang_up(child)
        if child.state == "ready":
            self._on_ready()

    def _hang_up(self, child: _Child) -> None:
        if child.line is not None:
            self._selector.unregister(child.line)
            child.line.close()
            child.line = None

    def _on_ready(self) -> None:
        if not self._proven and self._stopping_since is None:
            for child in self._children:
                if child.state == "waiting":
                    child.due = time.monotonic()
        self._proven = True
        if not self._announced and self.health().ready:
            self._announced = True
            systemd.notify("READY=1")

    def _on_end(self, child: _Child, code: int) -> None:
        """Decide what the end of a child means, and start it again if it should not have ended."""
        self._listen(child)  # its last words
        self._hang_up(child)
        fields = _fields(child, exit_code=code)
        child.process, child.state = None, "ended"
        if self._stopping_since is not None:
            self._exit_code = self._exit_code or int(code != 0)
        elif child.again or (self._burst and code == 0):
            child.due = time.monotonic() if child.again else None
        elif code in CANNOT_START and self._reload:
            child.state = "broken"
            log.warning("process could not start; waiting for a change", extra=fields)
            return
        elif code in CANNOT_START and not (code == CANNOT_CONNECT and self._proven):
            self._exit_code = code
            self._stop(DRAIN)
        else:
            child.failures = 1 if time.monotonic() - child.started > SETTLED else child.failures + 1
            delay = restart_delay(child.failures, random.random())  # noqa: S311 - spreads, protects nothing
            child.due, child.state = time.monotonic() + delay, "restarting"
            log.warning("process ended unexpectedly; starting it again in %.1f s", delay, extra=fields)
            return
        log.info("process ended", extra=fields)


def _fields(child: _Child, **more: object) -> dict[str, dict[str, object]]:
    assert child.process is not None
    return {"neoq": {"process": child.number, "pid": child.process.pid, **more}}


class Followed(Protocol):
    """What a line needs of a runner."""

    def health(self) -> State:
        """Return how it is, without waiting for anything."""

    def quiet(self) -> None:
        """Claim no more."""

    def request_stop(self, ended: Ended = ...) -> None:
        """Drain and end, as named; from any thread."""

    def force_stop(self) -> None:
        """End without draining; from any thread."""


class Line:
    """A child's end of the line to its supervisor."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Line | None:
        """Take the line out of the environment, so that no process started from here mistakes it for its own."""
        number = environment.pop(LINE_VARIABLE, None)
        if number is None:
            return None
        os.set_inheritable(int(number), False)
        return cls(socket.socket(fileno=int(number)))

    def follow(self, runner: Followed) -> None:
        """Obey the supervisor's orders and tell it the runner's state, in a thread, until the line ends."""
        threading.Thread(target=self._follow, args=[runner], name="neoq-line", daemon=True).start()

    def ask_restart(self) -> None:
        """Ask to be started again once this process has ended."""
        with contextlib.suppress(OSError):  # the supervisor is gone, and nobody will
            self._end.send(AGAIN)

    def _follow(self, runner: Followed) -> None:
        told, order = b"", DRAIN
        while order:
            health = runner.health()
            state = NOT_LIVE if not health.live else READY if health.ready else NOT_READY
            try:
                self._end.settimeout(1.0 if state == READY else 0.05)
                if state != told:
                    self._end.send(state)
                    told = state
                order = self._end.recv(1)
            except TimeoutError:
                continue
            except OSError:
                order = b""
            match order:
                case b"f":
                    runner.force_stop()
                case b"q":
                    runner.quiet()
                case b"r":
                    runner.request_stop(Ended.RESTART)
                case _:
                    runner.request_stop(Ended.CLEAN)
        self._end.close()
