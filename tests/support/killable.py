"""Tasks with ``executor="process"``, for the tests of that: the children import them from here, and little else.

What they have to say they write to files.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from sqlalchemy import text

from sqla_neoq import Discard, Retry, Snooze, current_job, handler, task

LONG = timedelta(seconds=60)
BRIEF = timedelta(seconds=0.5)


@task(name="p:note", queue="q", executor="process", timeout=LONG)
def note(file: str, text: str) -> None:
    with Path(file).open("a") as out:
        out.write(f"{text} {os.getpid()}\n")


@task(name="p:typed", queue="q", executor="process", timeout=LONG)
def typed(file: str, key: UUID, wait: timedelta) -> None:
    job = current_job()
    assert isinstance(key, UUID)
    assert isinstance(wait, timedelta)
    Path(file).write_text(f"{job.id} {job.queue} {job.attempt} {job.payload['key']} {job.token} {job.run_after}")


@task(name="p:steer", queue="q", executor="process", timeout=LONG, max_retries=3)
def steer(how: str) -> None:
    match how:
        case "retry":
            raise Retry(after=timedelta(hours=1))
        case "snooze":
            raise Snooze(timedelta(hours=1))
        case "discard":
            raise Discard("not wanted")
        case "raise":
            _deep("the reason")
        case "exit":
            sys.exit(3)


def _deep(reason: str) -> None:
    raise LookupError(reason)


@task(name="p:die", queue="q", executor="process", timeout=LONG)
def die(how: str) -> None:
    match how:
        case "exit":
            os._exit(7)
        case "segv":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fork":
            # The fork keeps every descriptor of ours that nobody closes, and outlives us.
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            os._exit(8)


@task(name="p:hang", queue="q", executor="process", timeout=BRIEF)
def hang(file: str, how: str) -> None:
    helper = subprocess.Popen(["sleep", "600"])
    Path(file).write_text(f"{os.getpid()} {helper.pid}")
    _hang(how)


@task(name="p:wait", queue="q", executor="process", timeout=None)
def wait(file: str, how: str = "sleep") -> None:
    hang.function(file, how)


def _hang(how: str) -> None:
    match how:
        case "sleep":
            time.sleep(600)
        case "gate":
            while not Path("gate").exists():
                time.sleep(0.01)
        case "read":
            ours, _theirs = socket.socketpair()
            ours.recv(1)
        case "loop":
            while True:
                with suppress(BaseException):
                    time.sleep(0.001)
        case "c":  # with the interpreter's lock held: PyDLL does not let go of it
            ctypes.PyDLL(None).sleep(600)
        case "query":
            current_job().session.execute(text("SELECT pg_sleep(600)"))


@task(name="p:write", queue="q", executor="process", timeout=LONG)
def write(then: str = "return") -> None:
    job = current_job()
    job.session.execute(text("INSERT INTO effects VALUES (:id)"), {"id": job.id})
    if then == "raise":
        raise LookupError("after the write")
    if then == "die":
        os._exit(1)
    if then == "lose":  # somebody else takes the job, meanwhile
        with job.session.get_bind().connect() as other:
            other.execute(text("UPDATE neoq_jobs SET claim_token = claim_token + 1 WHERE id = :id"), {"id": job.id})
            other.commit()


@task(name="p:async", queue="q", executor="process", timeout=LONG)
async def coroutine(file: str) -> None:
    Path(file).write_text(f"{current_job().id} {os.getpid()}")  # noqa: ASYNC240 - the loop is this job's alone


@handler("handled", executor="process", timeout=LONG)
def handle(job):
    Path(job.payload["file"]).write_text(f"{job.id} {os.getpid()}")


@task(name="p:innocent", queue="q")
def innocent() -> None: ...


class Nested:
    @task(name="p:nested", queue="q", executor="process")
    def inside() -> None: ...


alias = task(name="p:alias", queue="q", executor="process")(_deep)

ALL = [note, typed, steer, die, hang, wait, write, coroutine, handle, innocent]


@task(name="p:log", queue="q", executor="process", timeout=LONG)
def log_something() -> None:
    logging.getLogger("app").info("said in a child")
    print("printed in a child")


@task(name="p:grow", queue="q")
def grow(megabytes: int) -> None:
    HOARD.append(bytearray(os.urandom(1024) * 1024 * megabytes))


HOARD: list[bytearray] = []
