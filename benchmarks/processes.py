"""Processes beside the benchmark's own: workers as one starts them, producers, and pgbench."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from benchmarks import jobs
from benchmarks.bench import PATIENCE, THREADS
from sqla_neoq import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench

ROOT: Final = Path(__file__).parents[1]


def spawn(bench: Bench, *command: str) -> subprocess.Popen[str]:
    """Start a Python command at the top of this checkout, with no settings but where the database is."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NEOQ_", "DATABASE_URL"))}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=inherited | {"NEOQ_DATABASE_URL": bench.database.url},
        stdout=subprocess.PIPE,
        text=True,
    )


def worker(bench: Bench, *flags: str) -> subprocess.Popen[str]:
    """Start a worker of all tasks, as its user would, but one that logs failures only."""
    settings = ("-q", jobs.QUEUE, "-c", str(THREADS), "--retention", "none", "--log-level", "warning")
    return spawn(bench, "-m", "sqla_neoq.run", "benchmarks.jobs", *settings, *flags)


@contextmanager
def workers(bench: Bench, *commands: tuple[str, ...], runners: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield workers, one for each tuple of flags, once all their runners are registered."""
    (since,) = bench.row("SELECT clock_timestamp()")
    started = [worker(bench, *flags) for flags in commands]
    try:
        limit = time.monotonic() + PATIENCE
        while bench.row("SELECT count(*) FROM neoq_workers WHERE started_at >= %s", (since,)) != (runners,):
            if time.monotonic() > limit or any(process.poll() is not None for process in started):
                raise RuntimeError("the workers do not start")
            time.sleep(0.05)
        yield started
    finally:
        for process in started:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Stop a process in order, or at once if it does not."""
    process.terminate()
    try:
        process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


class Producer:
    """A process that inserts jobs of :func:`~benchmarks.jobs.mark` at an even rate, one a transaction."""

    def __init__(self, bench: Bench, rate: int, seconds: float, *, channel: str | None = None) -> None:
        flags = (bench.database.dsn, str(rate), str(seconds), *([] if channel is None else [channel]))
        self._process = spawn(bench, "-m", "benchmarks.producer", *flags)
        self._seconds = seconds

    def answers(self) -> dict[int, float]:
        """Wait for its end; return when each job's COMMIT was answered, on the clock that processes share."""
        output, _ = self._process.communicate(timeout=self._seconds + PATIENCE)
        if self._process.returncode:
            raise RuntimeError(f"the producer ended with {self._process.returncode}")
        return {int(number): moment for number, moment in json.loads(output).items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class Rush(NamedTuple):
    """What pgbench did: how many transactions, and how many a second."""

    commits: int
    rate: float


def pgbench(bench: Bench, script: str, *, clients: int, seconds: int, **environment: str) -> Rush:
    """Run a script from many connections, one transaction each time.

    A producer in Python would be the bottleneck, and take from the runner the processor that it is to be measured on.
    """
    directory = embedded.wheel_binaries() or embedded.system_binaries()
    program = shutil.which("pgbench", path=directory) if directory else None
    program = program or shutil.which("pgbench")
    if program is None:
        raise RuntimeError("there is no pgbench: neither in the embedded PostgreSQL, nor on the PATH")
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        flags = ["-n", "-M", "prepared", "-c", str(clients), "-j", "2", "-T", str(seconds), "-f", file.name]
        ended = subprocess.run(
            [program, *flags, bench.database.dsn],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=seconds + PATIENCE,
        )
    commits = re.search(r"transactions actually processed: (\d+)", ended.stdout)
    rate = re.search(r"^tps = ([\d.]+)", ended.stdout, re.MULTILINE)
    if ended.returncode or not commits or not rate:
        raise RuntimeError(f"pgbench: {ended.stdout}{ended.stderr}")
    return Rush(int(commits[1]), float(rate[1]))
