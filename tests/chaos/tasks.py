"""What the runners of the scenarios run. Every task notes its start, and its end as the last thing it does."""

import ctypes
import os
import re
import resource
import signal
import socket
import threading
import time
from datetime import timedelta

import psycopg
from sqlalchemy import text

from chaos.ledger import Ledger, here
from sqla_neoq import constant, current_job, task

# Retries come soon and never end: a scenario waits for all of its jobs, and attempts are what faults use up.
AGAIN = constant(timedelta(milliseconds=200))
# A frozen process comes to after half a minute, and its runs shall then end as if nothing had been.
LONG = timedelta(minutes=5)
_ledgers: dict[int, Ledger] = {}


def _note(kind: str, key: int) -> None:
    pid = os.getpid()
    if pid not in _ledgers:
        _ledgers[pid] = here()
    _ledgers[pid].note(kind, key, current_job().token, pid)


def _effect(key: int) -> None:
    job = current_job()
    job.session.execute(
        text("INSERT INTO chaos_effects (key, token) VALUES (:key, :token)"), {"key": key, "token": job.token}
    )


@task(name="chaos:effect", queue="effects", max_retries=100_000, backoff=AGAIN, timeout=LONG)
def effect(key: int, seconds: float = 0.0) -> None:
    """Write one row, exactly once."""
    _note("start", key)
    _effect(key)
    time.sleep(seconds)
    _note("end", key)


_INSERT = text("INSERT INTO chaos_effects (key, token) VALUES (:key, :token)")
_DRIVERS_INSERT = "INSERT INTO chaos_effects (key, token) VALUES (%s, %s)"


@task(name="chaos:core", queue="effects", max_retries=100_000, backoff=AGAIN, timeout=LONG)
def core(key: int) -> None:
    """Write the row through the Core connection."""
    _note("start", key)
    current_job().connection.execute(_INSERT, {"key": key, "token": current_job().token})
    _note("end", key)


@task(name="chaos:driver", queue="effects", max_retries=100_000, backoff=AGAIN, timeout=LONG)
def driver(key: int) -> None:
    """Write the row through the driver's connection, within a savepoint."""
    _note("start", key)
    connection = current_job().driver_connection
    with connection.transaction():
        connection.execute(_DRIVERS_INSERT, [key, current_job().token])
    _note("end", key)


@task(name="chaos:coroutine", queue="effects", max_retries=100_000, backoff=AGAIN, timeout=LONG)
async def coroutine(key: int) -> None:
    """Write the row through the asynchronous session."""
    _note("start", key)
    session = await current_job().async_session()
    await session.execute(_INSERT, {"key": key, "token": current_job().token})
    _note("end", key)


@task(name="chaos:own", queue="effects", max_retries=100_000, backoff=AGAIN, timeout=LONG)
def own(key: int) -> None:
    """Write the row in a transaction that the runner knows nothing of, and complete the job in it."""
    _note("start", key)
    job = current_job()
    with psycopg.connect(os.environ["NEOQ_DATABASE_URL"].replace("+psycopg", "")) as connection:
        connection.execute(_DRIVERS_INSERT, [key, job.token])
        job.complete(connection)
        _note("end", key)  # before the commit, whose answer may be lost


@task(name="chaos:plain", queue="plain", max_retries=100_000, backoff=AGAIN, timeout=LONG)
def plain(key: int, seconds: float = 0.0) -> None:
    """Do nothing in the database."""
    _note("start", key)
    time.sleep(seconds)
    _note("end", key)


@task(name="chaos:async", queue="plain", max_retries=100_000, backoff=AGAIN)
async def plain_async(key: int) -> None:
    """Do nothing, on the event loop."""
    _note("start", key)
    _note("end", key)


@task(name="chaos:fails", queue="effects", max_retries=100_000, backoff=AGAIN)
def fails(key: int, times: int = 1) -> None:
    """Write, and fail that many times after it."""
    _note("start", key)
    _effect(key)
    if current_job().attempt <= times:
        current_job().session.flush()
        raise RuntimeError("as it was told to")
    _note("end", key)


@task(name="chaos:doomed", queue="effects", max_retries=1, backoff=AGAIN)
def doomed(key: int) -> None:
    """Fail for good, twice."""
    _note("start", key)
    _effect(key)
    raise RuntimeError("as it always does")


@task(name="chaos:victim", queue="plain")
def victim(key: int) -> None:
    """Run only where the answer to its enqueue was lost: all others are made orphans, once too often."""
    _note("start", key)
    _note("end", key)


@task(name="chaos:poison", queue="poison", timeout=timedelta(seconds=60))
def poison(key: int, way: str) -> None:
    """End the process that runs it."""
    _note("start", key)
    time.sleep(0.2)  # so that others are running beside it
    match way:
        case "exit":
            os._exit(3)
        case "segv":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        case "memory":
            # What the kernel does to a process that takes all memory, without taking it from the machine.
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
            hoard = []
            try:
                while True:
                    hoard.append(bytearray(16 << 20))
            except MemoryError:
                os.kill(os.getpid(), signal.SIGKILL)


@task(name="chaos:hang", queue="hangs", timeout=timedelta(seconds=2), max_retries=0)
def hang(key: int, way: str) -> None:
    """Run past its timeout, in a way that few can stop."""
    _note("start", key)
    match way:
        case "sleep":
            time.sleep(3600)
        case "c":
            ctypes.CDLL(None).sleep(3600)  # CDLL lets go of the GIL
        case "socket":
            one, other = socket.socketpair()
            with one, other:
                one.recv(1)
        case "lock":
            lock = threading.Lock()
            with lock:
                lock.acquire()
        case "query":
            current_job().session.execute(text("SELECT pg_sleep(3600)"))
        case "loop":
            while True:
                pass
        case "polite":
            while True:
                current_job().raise_if_cancelled()
                time.sleep(0.01)


@task(name="chaos:gil", queue="hangs", timeout=timedelta(seconds=2), max_retries=0)
def hold_the_gil(key: int, seconds: int) -> None:
    """Keep every thread of the process from running for so long."""
    _note("start", key)
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL keeps the GIL
    _note("end", key)


@task(name="chaos:regex", queue="hangs", timeout=timedelta(seconds=2), max_retries=0)
def backtrack(key: int) -> None:
    """The way in which it happens in real life: a regular expression that backtracks for a minute or so."""
    _note("start", key)
    re.match(r"(a+)+$", "a" * 28 + "b")
    _note("end", key)
