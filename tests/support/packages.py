"""The package as users get it: built into a wheel, and installed into virtual environments of its own."""

import fcntl
import os
import subprocess
import sys
import venv
from pathlib import Path

import sqlalchemy

from support.processes import ROOT, environment


def build_wheel(tmp_path_factory):
    """Build the wheel, once a run for all of xdist's workers; returns its path."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(directory.glob("*.whl")):
            pip("wheel", "--no-deps", f"--wheel-dir={directory}", str(ROOT))
        (wheel,) = directory.glob("*.whl")
        return wheel


def make_venv(directory, *arguments, borrow=False):
    """Make a virtual environment and install into it; returns its interpreter.

    Args:
        directory: where.
        arguments: for ``pip install``.
        borrow: let it import this environment's packages too, behind its own, instead of installing what is needed.
    """
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    pip("--python", str(python), "install", *(["--no-deps", "--no-compile"] if borrow else []), *arguments)
    if borrow:
        (site,) = directory.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(str(Path(sqlalchemy.__file__).parents[1]) + "\n")
    return str(python)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=environment({"PYTHONPATH": None}), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def ask(python, code, *, cwd):
    """Run code with warnings as errors, away from the checkout; returns what it printed."""
    done = subprocess.run(
        [python, "-W", "error", "-c", code],
        cwd=cwd,
        env=environment({"PYTHONPATH": None}),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout
