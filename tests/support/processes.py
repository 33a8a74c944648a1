"""Child processes of a test: started in their own process group, with their output in files, never left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from support.waiting import eventually

ROOT = Path(__file__).parents[2]


class Process:
    """A running child. Its output goes to files, so it never waits for the test to read."""

    def __init__(self, command: list[str], *, directory: Path, cwd: Path, env: Mapping[str, str]) -> None:
        self._stdout, self._stderr = directory / "stdout", directory / "stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=env, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def stdout(self) -> str:
        """What it has written to its standard output so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written to its standard error so far."""
        return self._stderr.read_text(errors="replace")

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def wait(self, within: float = 20.0) -> int:
        """Return its exit code; fail with its output when it does not end in time."""
        try:
            return self.popen.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within:g} s:\n{self.output}") from None

    def wait_for(self, text: str, within: float = 20.0) -> str:
        """Return its output as soon as that contains ``text``; fail with the output when it ends without."""

        def said() -> bool:
            ended = self.popen.poll() is not None  # first: what it said before it ended counts
            found = text in self.output
            if ended and not found:
                raise AssertionError(f"ended ({self.popen.returncode}) without saying {text!r}:\n{self.output}")
            return found

        eventually(said, within=within, why=lambda: f"waiting for {text!r} in:\n{self.output}")
        return self.output

    def signal(self, number: signal.Signals) -> None:
        """Send the process itself a signal, not its children."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill its whole process group and reap it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()


def environment(extra: Mapping[str, str | None]) -> dict[str, str]:
    """Return a child's environment: this process's without what configures sqla_neoq; None in ``extra`` removes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEOQ_")}
    kept.pop("DATABASE_URL", None)
    # The child imports this checkout wherever it runs; its own directory comes first, as it does for a user.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    merged: dict[str, str | None] = {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}
    return {name: value for name, value in merged.items() if value is not None}


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
