"""A process at a terminal of its own, as a user starts one."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

# The leader of a new session that opens a terminal makes it the session's; forkpty() would do so too, but must not be
# called where threads run.
_LAUNCH = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"


class Terminal:
    """Runs a command at a new terminal; a context manager that leaves no process behind.

    What the command writes to stderr goes to the terminal too, or to ``errors_to``, a file that outlives it.
    """

    def __init__(self, command: list[str], *, cwd: Path, env: Mapping[str, str], errors_to: Path | None = None) -> None:
        self._shown = b""
        self._open = True
        self._master, slave = pty.openpty()
        errors = slave if errors_to is None else os.open(errors_to, os.O_WRONLY | os.O_CREAT)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, os.ttyname(slave), *command],
            stdin=slave,
            stdout=slave,
            stderr=errors,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        for descriptor in {slave, errors}:
            os.close(descriptor)

    @property
    def shown(self) -> str:
        """What the terminal has shown so far."""
        while self._open and select.select([self._master], [], [], 0)[0]:
            try:
                self._shown += os.read(self._master, 4096)
            except OSError:  # nobody has the other end any more
                break
        return self._shown.decode(errors="replace")

    def close(self) -> None:
        """Close the terminal, as closing its window does."""
        if self._open:
            self._open = False
            os.close(self._master)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, 9)
        self.popen.wait()
