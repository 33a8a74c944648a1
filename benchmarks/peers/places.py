"""Where a peer runs: a throw-away venv with pinned versions, and a database of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL

    from benchmarks.peers.catalogue import Entry

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = ROOT / ".bench"


class UnavailableError(Exception):
    """A peer that cannot be installed, or breaks."""


def interpreter(entry: Entry) -> str:
    """Return the peer's interpreter; its venv is made, or made again when the pinned versions have changed."""
    if not entry.requirements:
        return sys.executable
    folder = CACHE / entry.venv
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(entry.requirements) + "\n"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    _run([_python_for(entry), "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", *entry.requirements])
    stamp.write_text(wanted, encoding="utf-8")
    return str(python)


def _python_for(entry: Entry) -> str:
    if sys.version_info >= entry.python:
        return sys.executable
    names = [f"{entry.python[0]}.{minor}" for minor in range(entry.python[1], entry.python[1] + 4)]
    # pyenv has a command on the path for a version that is not switched on: what counts is whether it runs.
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path / "bin" / "python") for name in names for path in sorted(pyenv.glob(f"{name}.*"))]
    for python in [*(f"python{name}" for name in names), *found]:
        if shutil.which(python) and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    raise UnavailableError(f"needs Python {entry.python[0]}.{entry.python[1]}, and there is none")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UnavailableError((lines or ["could not be installed"])[-1])


@contextmanager
def own_database(server: URL) -> Iterator[str]:
    """Yield the DSN of a new database; it is gone afterwards."""
    name = f"neoq_bench_{uuid.uuid4().hex[:8]}"
    dsn = server.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield server.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


class Inside:
    """A process of a peer, doing one thing, and the facts that it says."""

    def __init__(self, entry: Entry, action: str, dsn: str, count: int = 0) -> None:
        command = [interpreter(entry), "-m", "benchmarks.peers.inside", entry.adapter, action, dsn]
        command += [json.dumps(entry.settings), str(count)]
        self._said: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self._errors: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._keep_errors, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"event"'):
                self._said.put(json.loads(line))
        self._said.put(None)

    def _keep_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors = [*self._errors[-20:], line.rstrip()]

    def wait_for(self, event: str, until: float) -> dict[str, Any] | None:
        """Return the next fact of that name; None when it has not come by that ``monotonic()`` time."""
        while True:
            try:
                said = self._said.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return None
            if said is None:
                self.process.wait()
                raise UnavailableError((self._errors or ["ended without a word"])[-1])
            if said["event"] == event:
                return said

    def finish(self, limit: float) -> None:
        """Wait for its end, which must be a good one."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"did not end within {limit:.0f} s") from None
        if code:
            raise UnavailableError((self._errors or [f"ended with {code}"])[-1])

    def kill(self) -> None:
        """End it as kill -9 does."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
