"""A scenario's world: the server, the proxy, runners, producers, the ledger, and the watch on recovery times."""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from sqlalchemy import make_url
from support import waiting
from support.processes import Process, environment, python

from chaos import verdict
from chaos.ledger import VARIABLE, Ledger, now
from chaos.proxy import Proxy
from chaos.scenario import Result, Scenario
from chaos.server import Server
from chaos.tasks import AGAIN  # noqa: F401 - imported once here, so that a mistake in the tasks fails before any start
from sqla_neoq import enqueue_many
from sqla_neoq.dialects import engine_of

TESTS = Path(__file__).parents[1]
_READY_WITHIN = 60.0


def patiently(look: Callable[[], Any], *, within: float, why: str | Callable[[], object] = "") -> Any:
    """Wait as ``eventually`` does, and look less often: each look reads the ledger, or opens a connection."""

    def rested() -> Any:
        value = look()
        if not value:
            time.sleep(0.1)
        return value

    return waiting.eventually(rested, within=within, why=why)


class Runner(Process):
    """A runner process: ``python -m sqla_neoq.run chaos.tasks``."""

    def freeze(self) -> None:
        """SIGSTOP."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    @property
    def rss(self) -> int:
        """Its resident memory in KiB."""
        with suppress(OSError, IndexError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1])
        return 0


class World:
    """Everything that a scenario needs; a context manager that leaves nothing behind.

    Args:
        scenario: whose world it is.
        seed: of :attr:`random`.
        seconds: how long scenarios that can be of any length last.
        smoke: whether this is the short form.
        keep: whether the directory with ledger and logs stays.
    """

    def __init__(self, scenario: Scenario, *, seed: int, seconds: float, smoke: bool, keep: bool = False) -> None:
        self.random = random.Random(f"{seed}/{scenario.name}")
        self.seconds = seconds
        self.smoke = smoke
        self.scenario = scenario
        self.directory = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.ledger = Ledger(self.directory / "ledger")
        self.server = Server(scenario.settings)
        self.runners: list[Runner] = []
        self.notes: dict[str, Any] = {}
        self.complaints: list[str] = []
        self.recoveries: list[float] = []
        self.injected = 0
        self._keep = keep
        self._producers: list[Process] = []
        self._kills: list[tuple[int, float]] = []
        self._repairs: list[tuple[float, list[int], int]] = []
        self._proxies: list[Proxy] = []
        self._keys = 0
        self._processes = 0
        self._settled = False

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._producers, *self.runners]:
            process.kill()
        for proxy in self._proxies:
            proxy.stop()
        self.server.close()
        self.ledger.close()
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    # --- parts ---

    @property
    def url(self) -> str:
        """The server's URL, without a proxy."""
        return self.server.url

    def proxy(self) -> tuple[Proxy, str]:
        """Start a proxy; returns it and the URL through it."""
        proxy = Proxy(self.server.socket)
        proxy.start()
        self._proxies.append(proxy)
        url = make_url(self.url).set(query={}, host="127.0.0.1", port=proxy.port)
        return proxy, url.render_as_string(hide_password=False)

    def runner(
        self, *flags: str, url: str | None = None, env: Mapping[str, str] | None = None, ready: bool = True
    ) -> Runner:
        """Start a runner process, by default with ten slots; returns it once it is registered."""
        arguments = ["-m", "sqla_neoq.run", "chaos.tasks", "-c", "10", "--shutdown-timeout", "5", *flags]
        runner = Runner(
            python(*arguments),
            directory=self._directory(),
            cwd=self.directory,
            env=self._environment({"NEOQ_DATABASE_URL": url or self.url, **(env or {})}),
        )
        self.runners.append(runner)
        if ready:
            runner.wait_for("runner started", within=_READY_WITHIN)
        return runner

    def produce(
        self, *tasks: str, rate: float, url: str | None = None, env: Mapping[str, str] | None = None, **more: Any
    ) -> Process:
        """Start a producer process of jobs of these tasks; it goes on until :meth:`settle`, or to ``jobs``."""
        options = {
            "url": url or self.url,
            "number": len(self._producers) + 1,
            "rate": rate,
            "tasks": list(tasks or ("chaos:effect", "chaos:plain")),
            **more,
        }
        producer = Process(
            python("-m", "chaos.producer", json.dumps(options)),
            directory=self._directory(),
            cwd=self.directory,
            env=self._environment(env or {}),
        )
        self._producers.append(producer)
        return producer

    def enqueue(
        self, task: str, count: int = 1, *, url: str | None = None, how: Any = None, **arguments: Any
    ) -> list[int]:
        """Enqueue jobs in one transaction of this process; returns their keys. Raises what the database raises."""
        from chaos.producer import TASKS

        keys = [self._keys + number for number in range(1, count + 1)]
        self._keys += count
        target = TASKS[task] if how is None else TASKS[task].using(**how)
        engine = engine_of(url or self.url, pool=False)
        try:
            with engine.connect() as connection:
                transaction = connection.begin()
                enqueue_many(connection, [target.job(key=key, **arguments) for key in keys])
                try:
                    transaction.commit()
                except Exception:
                    self.ledger.note_all("unknown", keys)
                    raise
            self.ledger.note_all("committed", keys)
        finally:
            engine.dispose()
        return keys

    # --- faults, as the watch sees them ---

    def kill(self, runner: Runner) -> None:
        """Kill -9; the jobs that it was running must begin elsewhere within the limit."""
        self.injected += 1
        at = now()
        runner.popen.kill()
        runner.popen.wait()
        self._kills.append((runner.pid, at))

    def repaired(self) -> None:
        """The fault is over: from now on every runner that lives must begin a job within the limit."""
        pids = [runner.pid for runner in self.runners if runner.alive]
        self._repairs.append((now(), pids, self.ledger.size))

    def go_on(self) -> None:
        """Let the load go on until every runner is seen to work again after the last repair, at most for the limit."""
        at, pids, size = self._repairs[-1]

        def all_work() -> bool:
            return set(pids) <= {line.pid for line in self.ledger.lines(size) if line.kind == "start" and line.at > at}

        with suppress(AssertionError):  # the verdict will say so
            patiently(all_work, within=(self.scenario.limit or 10.0) + 1.0)
        self.sleep(1.0)

    def injure(self) -> None:
        """Count one more fault."""
        self.injected += 1

    def recovered(self, seconds: float) -> None:
        """A recovery that the scenario timed itself."""
        self.recoveries.append(seconds)

    def expect(self, holds: object, otherwise: str) -> None:
        """Complain unless it holds."""
        if not holds:
            self.complaints.append(otherwise)

    def sleep(self, seconds: float) -> None:
        """Let the world go on: for load to build up and for faults to last, never to wait for an outcome."""
        time.sleep(seconds)

    # --- looking ---

    def started(self, keys: Collection[int]) -> set[int]:
        """Return those of the keys that have begun."""
        wanted = set(keys)
        return {line.key for line in self.ledger.lines() if line.kind == "start" and line.key in wanted}

    def await_started(self, keys: Collection[int], within: float = 30.0) -> None:
        """Wait until all of these jobs have begun."""
        patiently(lambda: self.started(keys) == set(keys), within=within)

    def await_starts(self, count: int, within: float = 60.0) -> None:
        """Wait until so many starts are in the ledger."""
        patiently(lambda: sum(line.kind == "start" for line in self.ledger.lines()) >= count, within=within)

    def status(self, key: int) -> str:
        """Return a job's state; ``dead:REASON`` for a dead one."""
        rows = self.server.rows(
            "SELECT status FROM neoq_jobs WHERE payload ->> 'key' = %s UNION ALL "
            "SELECT 'dead:' || reason FROM neoq_dead_jobs WHERE payload ->> 'key' = %s",
            str(key),
            str(key),
        )
        return str(rows[0][0]) if rows else "gone"

    def await_status(self, keys: Collection[int], status: str, within: float = 60.0) -> None:
        """Wait until all of these jobs are in that state."""
        patiently(
            lambda: {self.status(key) for key in keys} == {status},
            within=within,
            why=lambda: f"waiting for {status}: {[(key, self.status(key)) for key in keys]}",
        )

    # --- the end ---

    def settle(self, within: float) -> None:
        """Stop the producers, wait until every job has ended, and stop the runners. Once: later calls do nothing."""
        if self._settled:
            return
        self._settled = True
        for producer in self._producers:
            if producer.popen.poll() is None:
                producer.signal(signal.SIGTERM)
        for producer in self._producers:
            code = producer.wait(60)
            self.expect(code == 0, f"a producer ended with {code}: {producer.output[-2000:]}")
        unfinished = "SELECT count(*) FROM neoq_jobs WHERE status IN ('new', 'running', 'failed')"
        with suppress(AssertionError):  # what has not ended is lost, and the verdict says so
            patiently(lambda: self.server.value(unfinished) == 0, within=within)
        began = time.monotonic()
        living = [runner for runner in self.runners if runner.alive]
        for runner in living:
            if "runner started" not in runner.output:  # under --log-level error it says nothing, and is old enough
                with suppress(AssertionError):
                    runner.wait_for("runner started", within=10)
            runner.signal(signal.SIGTERM)
        for runner in living:
            code = runner.wait(30)
            self.expect(code == 0, f"a runner ended with {code}: {runner.output[-2000:]}")
        self.notes["stop_seconds"] = round(time.monotonic() - began, 2)

    def judge(self, result: Result) -> None:
        """Fill in the result."""
        record = verdict.Record(self.ledger)
        found = verdict.compare(self.server, record, self.scenario.may_end)
        recoveries = list(self.recoveries)
        for pid, at in self._kills:
            interrupted = record.interrupted(pid, at)
            again = record.next_starts(interrupted, at, pid)
            recoveries += again.values()
        for at, pids, _ in self._repairs:
            firsts = [record.first_start_by(pid, at) for pid in pids]
            recoveries += [first for first in firsts if first is not None]
            if None in firsts:
                self.complaints.append("a runner began no job any more after the fault was over")
        result.injected = self.injected
        result.jobs, result.starts, result.reruns = found.jobs, found.starts, found.reruns
        result.lost, result.doubled, result.fence_broken = len(found.lost), len(found.doubled), len(found.fence)
        result.recoveries = [round(seconds, 3) for seconds in recoveries]
        result.notes = self.notes
        result.complaints += [*self.complaints, *found.complaints]
        slowest = result.quantile(1.0)
        if result.limit is not None:
            if slowest is None:
                result.complaints.append("no recovery was seen")
            elif slowest > result.limit:
                result.complaints.append(f"a recovery took {slowest:.1f} s, and the limit is {result.limit:g} s")
        for runner in self.runners:
            if "Traceback" in runner.output and "stopped on an error" in runner.output:
                result.complaints.append(f"a runner's service met an error that it should know:\n{_error_of(runner)}")

    def _directory(self) -> Path:
        self._processes += 1
        directory = self.directory / f"process-{self._processes}"
        directory.mkdir()
        return directory

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        extra = dict(extra)
        if "PYTHONPATH" in extra:
            path = os.pathsep.join([extra.pop("PYTHONPATH"), path])
        return environment({"PYTHONPATH": path, VARIABLE: str(self.ledger.path), **extra})


def _error_of(runner: Runner) -> str:
    output = runner.output
    at = output.find("stopped on an error")
    return output[max(0, at - 200) : at + 3000]
