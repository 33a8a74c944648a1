"""The whole application at once: migrate, enqueue, let runners work, report. Run again, it goes on where it ended."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from threading import Timer
from typing import TYPE_CHECKING

import click
from sqlalchemy import extract, func, select
from sqlalchemy.orm import Session

from catalog.app import enqueue_files, migrate
from catalog.report import UNFINISHED, compare
from catalog.tasks import count_file
from sqla_neoq import Job

if TYPE_CHECKING:
    from sqlalchemy import Engine

APP_DIR = Path(__file__).parents[1]

# A runner outlives a lost database, as it should. So that it does not outlive this process, however that ends, a shell
# waits for the end of its standard input, a pipe whose other end is here, and then tells the runner to drain.
GUARD = """
exec 3<&0 </dev/null
"$@" 3<&- & runner=$!
{ read -r _ <&3; kill -TERM $runner 2>/dev/null; } & guard=$!
wait $runner; status=$?
kill -KILL $guard 2>/dev/null
exit $status
"""
KILLED = (128 + SIGKILL, -SIGKILL)  # the runner, or the guard with it


def demo(engine: Engine, root: Path, logs: Path, runners: int, kills: int = 0) -> bool:
    """Bring every Python file under ``root`` through the queue; return whether the report finds everything equal.

    Args:
        engine: the database; its tables are made if they are missing.
        root: the folder to catalogue.
        logs: the folder for the runners' logs.
        runners: how many processes share the work.
        kills: how many times all of them are killed in the middle of it.
    """
    migrate(engine)
    click.echo(f"{enqueue_files(engine, root):,} new files under {root}, each added with its job in one transaction")
    jobs, started = _unfinished(engine), time.monotonic()
    if not jobs:
        click.echo("every job was finished before")
    else:
        click.echo(f"{runners} runners at work on {jobs:,} jobs; their logs are in {logs}")
    while _unfinished(engine):
        time.sleep(_seconds_to_next(engine))
        run(engine, logs, runners, kill=kills > 0)
        kills -= 1
    if jobs:
        seconds = time.monotonic() - started
        click.echo(
            f"{jobs:,} jobs in {seconds:.1f} s by {runners} runners, {jobs / seconds:.0f} jobs/s, back-offs included"
        )
    click.echo("counting once more without the queue")
    return compare(engine, root).show()


def run(engine: Engine, logs: Path, runners: int, *, kill: bool = False) -> None:
    """Let ``runners`` processes run all jobs that are due; with ``kill``, kill each of them after some seconds."""
    command = [sys.executable, "-m", "sqla_neoq.run", "catalog.tasks", "--burst"]
    # Two threads, because parsing holds the interpreter's lock; five seconds, because no job takes as long.
    command += ["--concurrency", "2", "--shutdown-timeout", "5s"]
    # Not as --url: a command line can be read by everybody on the machine.
    env = {**os.environ, "NEOQ_DATABASE_URL": engine.url.render_as_string(hide_password=False)}
    with ExitStack() as stack:
        processes = []
        for number in range(1, runners + 1):
            log = stack.enter_context((logs / f"runner-{number}.log").open("a"))
            process = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", *command, "--name", f"runner-{number}"],
                cwd=APP_DIR,
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
            # Closes the pipe and waits for the end, also after Ctrl-C: the runner drains while its database is there.
            stack.callback(process.communicate)
            processes.append(process)
            if kill:
                timer = Timer(random.uniform(1, 4), _kill, [process])
                timer.start()
                stack.callback(timer.cancel)
        codes = [process.wait() for process in processes]
    for number, code in enumerate(codes, 1):
        if code in KILLED:
            click.echo("a runner was killed; what it was at will be done by another")
        elif code:
            raise click.ClickException(f"a runner ended with exit code {code}; see {logs}/runner-{number}.log")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, SIGKILL)


def _unfinished(engine: Engine) -> int:
    mine = Job.queue == count_file.queue
    with Session(engine) as session:
        return session.scalar(select(func.count()).where(mine, Job.status.in_(UNFINISHED))) or 0


def _seconds_to_next(engine: Engine) -> float:
    """Return how long the next job waits for its back-off, on the database's clock.

    If none waits, what is left was with a runner that was killed, and falls to the next one within ten seconds: look
    every second.
    """
    mine = Job.queue == count_file.queue
    wait = extract("epoch", func.min(Job.run_after) - func.statement_timestamp())
    with Session(engine) as session:
        seconds = session.scalar(select(wait).where(mine, Job.status.in_(("new", "failed"))))
    return 1.0 if seconds is None else max(0.0, float(seconds))
