"""A child process of a runner: runs the jobs of tasks with ``executor="process"``, one at a time, in its main thread.

It is started by :mod:`sqla_neoq.processes`, not by hand, with two descriptors. The *control* socket brings jobs and
takes reports. The *life* pipe brings nothing: only the runner holds its other end, and when the runner is gone, however
it died, so is this process and everything that its task has started:

* On Linux the kernel does it. The pipe is asked to signal its hang-up to the process group, and the signal is SIGKILL:
  that also ends a task that holds the interpreter's lock in C. (PR_SET_PDEATHSIG would not do: it fires when the
  *thread* that started the child ends.)
* Elsewhere a guard thread does it, which reads the control socket and finds the end of the file, as soon as the task
  lets it run.

TERM, INT and HUP are left to the runner: service managers send them to every process of a group, and the runner then
lets its jobs finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session, sessionmaker

from sqla_neoq import logs, targets
from sqla_neoq.context import JobContext
from sqla_neoq.dialects import engine_of, read_committed
from sqla_neoq.errors import ConfigurationError
from sqla_neoq.executor import execute
from sqla_neoq.payloads import clean_text
from sqla_neoq.transaction import RunSession, RunTransaction
from sqla_neoq.wire import Assignment, Channel, Ready, Report, Setup

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

_LEFT_TO_THE_RUNNER: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXIT_LIMIT: Final = 5.0
"""Seconds that an idle process may take for its ``atexit`` functions and threads once the runner has hung up."""
_LIKELY_VICTIM: Final = b"500"


def main(control: int, life: int) -> None:
    """Serve one runner until it hangs up."""
    os.set_inheritable(control, False)
    os.set_inheritable(life, False)
    _die_with_runner(life)
    _be_the_likely_victim()
    channel = Channel(socket.socket(fileno=control))
    guard = Guard(channel)
    _leave_signals_to_the_runner(channel)
    guard.start()
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # stderr may be anything
            faulthandler.enable()  # a crash says where, in the runner's log
    setup = guard.next(Setup)
    if setup is None:
        return
    try:
        if setup.logs is not None:
            level, form, file = setup.logs
            logs.configure(level, form, None if file is None else Path(file))
        runnables = {home: _load(home) for home in setup.homes}
    except BaseException as error:  # noqa: BLE001 - a module may fail in any way, each its author's to see
        what = clean_text(f"a child process cannot import its tasks: {type(error).__name__}: {error}", 2_000)
        channel.send(Ready(what, clean_text("".join(traceback.format_exception(error)), 20_000)))
        return
    sessions = Sessions(setup)
    channel.send(Ready())
    guard.done()
    while (assignment := guard.next(Assignment)) is not None:
        report = _run(assignment, runnables[assignment.home], sessions, setup)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the next job may be killed, and what this one printed is not its
                stream.flush()
        channel.send(report)
        guard.done()


def _run(assignment: Assignment, runnable: targets.Runnable, sessions: Sessions, setup: Setup) -> Report:
    job = assignment.job
    transaction = RunTransaction(sessions, sessions.options, delete=setup.delete)
    context = JobContext(job, transaction)
    # In a copy of the context: what one job sets must not be there for the next.
    return Report.of(copy_context().run(execute, job, Awaited(runnable), context, transaction))


def _load(home: str) -> targets.Runnable:
    (runnable,) = targets.load(home)
    return runnable


class Awaited:
    """A task as the executor wants it: an ``async def`` runs to its end, on an event loop of its own."""

    on_loop = False
    in_process = True

    def __init__(self, runnable: targets.Runnable) -> None:
        self._runnable = runnable
        self.name = runnable.name
        self.queue = runnable.queue
        self.timeout = runnable.timeout
        self.backoff: Callable[[int], timedelta] = runnable.backoff
        self.retries_of = runnable.retries_of

    def run(self, job: JobContext) -> Any:
        """Call the function for this job."""
        result = self._runnable.run(job)
        return asyncio.run(result) if self._runnable.is_async else result


class Sessions:
    """Makes the sessions of ``job.session``; the engine is there from the first use on."""

    def __init__(self, setup: Setup) -> None:
        self._database = setup.database
        self._schema = setup.schema
        self.options: dict[str, Any] = {} if setup.schema is None else {"schema_translate_map": {None: setup.schema}}
        self._make: Callable[[], Session] | None = None

    def __call__(self) -> Session:
        """Return a new session.

        Raises:
            RuntimeError: the runner could not say where the database is.
            ConfigurationError: what it named is no engine and makes no sessions.
        """
        if self._make is None:
            self._make = self._maker()
        return self._make()

    def _maker(self) -> Callable[[], Session]:
        named = self._database
        if named is None:
            raise RuntimeError(
                "job.session: the runner was given an Engine or a sessionmaker, which cannot be sent to a child "
                'process; name it for executor="process": RunnerConfig(child_database="myapp.db:engine")'
            )
        if "://" in named:
            return self._on(engine_of(named, size=1))
        value = targets.load_object(named)
        if isinstance(value, Engine):
            return self._on(value)
        if isinstance(value, sessionmaker):
            return value
        made = value() if callable(value) else value
        if isinstance(made, Engine):
            return self._on(made)
        raise ConfigurationError(
            f"child_database={named!r} is no Engine, function that returns one, or sessionmaker, "
            f"but a {type(value).__name__}"
        )

    def _on(self, engine: Engine) -> Callable[[], Session]:
        event.listen(engine, "connect", _notice_a_dead_client)
        if self._schema is not None:
            engine = engine.execution_options(neoq_schema=self._schema)
        committed = read_committed(engine)
        return lambda: RunSession(committed)


def _notice_a_dead_client(connection: Any, _record: object) -> None:
    """Have the server end the statement of a killed child, which otherwise it would run to its end."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET client_connection_check_interval = '1s'")
        connection.commit()
    except Exception:  # noqa: BLE001 - before PostgreSQL 14, or on a system where it cannot tell
        connection.rollback()


class Guard:
    """Reads the control socket in a thread of its own, and ends the process when the runner is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Two numbers, each written by one thread: the next job may arrive before the main thread is done with the last.
        self._received = 0
        self._dealt_with = 0

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._read, name="neoq-guard", daemon=True).start()

    def next(self, kind: type[Any]) -> Any:
        """Wait for the next message; None when the runner has hung up."""
        text = self._inbox.get()
        return None if text is None else msgspec.msgpack.decode(text, type=kind)

    def done(self) -> None:
        """Say that one more message is dealt with."""
        self._dealt_with += 1

    def _read(self) -> None:
        while True:
            try:
                text = self._channel.receive()
            except OSError:
                text = None
            if text is None:
                break
            self._received += 1
            self._inbox.put(text)
        if self._received == self._dealt_with:
            self._inbox.put(None)
            time.sleep(_EXIT_LIMIT)
        with contextlib.suppress(OSError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _die_with_runner(life: int) -> None:
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


def _be_the_likely_victim() -> None:
    """When memory runs out, a task that may be killed goes before the runner and everybody else's jobs."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_LIKELY_VICTIM)


def _leave_signals_to_the_runner(channel: Channel) -> None:
    for number in _LEFT_TO_THE_RUNNER:
        # Not SIG_IGN: the programs that a task starts would inherit that.
        signal.signal(number, lambda *_: None)

    def become_an_ordinary_process() -> None:
        """What the task forks can be terminated, as multiprocessing does, and does not hold the line open."""
        channel.close()
        for number in _LEFT_TO_THE_RUNNER:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=become_an_ordinary_process)
