"""What something costs: processor time and memory of processes, WAL and commits of the server, queries of a runner."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import psycopg
from psycopg.pq import Trace
from sqlalchemy import create_engine, event

from benchmarks.bench import PATIENCE, THREADS

if TYPE_CHECKING:
    from types import TracebackType

    from sqlalchemy import Engine

    from benchmarks.bench import Bench

_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_OURS: Final = "datname = current_database() AND application_name LIKE 'sqla\\_neoq %%'"


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken so far; 0 once it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def resident_mb(pid: int) -> float:
    """Return how many megabytes of memory a process holds; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


class Cpu(NamedTuple):
    """Processor seconds so far: of this process, and of the server's processes that serve the runner."""

    runner: float
    server: float

    @classmethod
    def now(cls, bench: Bench) -> Cpu:
        """Read them. The server's are those of the connections that are open now."""
        pids = bench.admin.execute(f"SELECT pid FROM pg_stat_activity WHERE {_OURS}", ()).fetchall()
        return cls(time.process_time(), sum(cpu_seconds(pid) for (pid,) in pids))

    def since(self, before: Cpu) -> float:
        """Return the seconds of both together since another reading."""
        return self.runner - before.runner + self.server - before.server


class ServerMeter:
    """Counts WAL and commits within a ``with`` block; from another database, so as not to count itself."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.wal = 0.0
        self.commits = 0

    def __enter__(self) -> Self:
        self._connection = psycopg.connect(self._bench.database.dsn, dbname="postgres", autocommit=True)
        (self._database,) = self._bench.row("SELECT current_database()")
        self._before = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        with self._connection:
            if kind is not None:
                return
            # A server process writes its counts down at the latest when it ends.
            limit = time.monotonic() + PATIENCE
            others = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
            while self._connection.execute(others, (self._database,)).fetchone() != (self._own,):
                if time.monotonic() > limit:
                    raise RuntimeError("connections stay open")
                time.sleep(0.05)
            wal, commits = self._read()
            self.wal, self.commits = float(wal - self._before[0]), commits - self._before[1]

    @property
    def _own(self) -> int:
        return 1  # the bench's own

    def _read(self) -> tuple[Any, ...]:
        row = self._connection.execute(
            "SELECT pg_current_wal_insert_lsn() - '0/0', (SELECT xact_commit FROM pg_stat_database WHERE datname = %s)",
            (self._database,),
        ).fetchone()
        assert row is not None
        return row


class TracedEngine:
    """An engine whose connections write down what they send; a context manager."""

    def __init__(self, bench: Bench) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.engine: Engine = create_engine(bench.database.url, pool_size=THREADS + 5)
        self._files: list[int] = []
        event.listen(self.engine, "connect", self._trace)

    def queries(self) -> int:
        """Return how many queries were sent so far, BEGIN and COMMIT included."""
        found = 0
        for path in Path(self._directory.name).iterdir():
            with path.open("rb") as lines:
                found += sum(
                    line.startswith((b"F\t",)) and line.split(b"\t")[2] in {b"Query", b"Execute"} for line in lines
                )
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.dispose()
        self._directory.cleanup()

    def _trace(self, driver_connection: psycopg.Connection[Any], _: object) -> None:
        # A file each: two connections that write into one would tear each other's lines apart.
        file = os.open(Path(self._directory.name, str(len(self._files))), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._files.append(file)
        driver_connection.pgconn.trace(file)
        driver_connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
