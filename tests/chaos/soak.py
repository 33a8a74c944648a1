"""Very many jobs, with a fault every few seconds, and the memory of the runners all the while.

Runners are killed, frozen for a moment and stopped; connections are cut, answers lost, backends terminated; the server
is restarted. At the end the ledger must balance as after any scenario, and the runner that lived through it must not
have grown.
"""

import signal
import time

from chaos.proxy import Link, Verdict
from chaos.scenario import Scenario
from chaos.world import Process, Runner, World

_RUNNERS = 3
_PRODUCERS = 2
_EVERY = (2.0, 6.0)
"""Seconds between two faults, at least and at most."""
_GROWTH = 1.25
"""A runner may end with so many times the memory that it had after a third of its life."""


def scenario(jobs: int) -> Scenario:
    """Return the soak of so many jobs, as a scenario."""
    return Scenario(
        "soak",
        promise="all of them, for long",
        faults="every 2 to 6 s one of: kill -9, SIGSTOP for 1 s, TERM of a runner; all connections cut; answers lost "
        "for a second; backends terminated; the server restarted",
        limit=None,
        play=lambda world: _Soak(world, jobs).play(),
        quiet_within=300.0,
    )


class _Soak:
    def __init__(self, world: World, jobs: int) -> None:
        self._world = world
        self._jobs = jobs
        self._proxy, self._url = world.proxy()
        # The first lives to the end, for its memory; the others are who is killed.
        self._survivor = self._start()
        self._mortals = [self._start() for _ in range(_RUNNERS - 1)]
        self._faults = {
            "kill -9": self._kill,
            "freeze": self._freeze,
            "stop": self._stop,
            "cut": self._cut,
            "lost answers": self._lose_answers,
            "terminate": self._terminate,
            "restart": self._restart,
        }
        self._counts = dict.fromkeys(self._faults, 0)
        self._samples: dict[int, list[tuple[float, int]]] = {}

    def play(self) -> None:
        """Produce, break, and wait until every job was begun."""
        world = self._world
        producers: list[Process] = [
            world.produce(
                "chaos:plain",
                "chaos:plain",
                "chaos:plain",
                "chaos:effect",
                url=self._url,
                rate=1e9,
                jobs=self._jobs // _PRODUCERS,
                batch=400,
            )
            for _ in range(_PRODUCERS)
        ]
        began = time.monotonic()
        next_fault, next_sample = began + 3, began
        left = self._jobs
        while any(producer.popen.poll() is None for producer in producers) or left:
            now = time.monotonic()
            if now >= next_sample:
                next_sample = now + 2
                self._sample(now - began)
                left = self._left()
            if now >= next_fault:
                name = world.random.choice([name for name in self._faults if name != "restart"] * 3 + ["restart"])
                self._faults[name]()
                self._counts[name] += 1
                next_fault = time.monotonic() + world.random.uniform(*_EVERY)
            time.sleep(0.1)
        seconds = time.monotonic() - began
        world.notes |= {
            "faults": self._counts,
            "seconds": round(seconds),
            "jobs a second": round(self._jobs / seconds),
            "rss": {str(pid): _thinned(samples) for pid, samples in self._samples.items() if len(samples) > 5},
        }
        self._judge_memory()

    def _start(self) -> Runner:
        return self._world.runner("-c", "8", "--log-level", "error", url=self._url, ready=False)

    def _left(self) -> int:
        return int(
            self._world.server.value("SELECT count(*) FROM neoq_jobs WHERE status IN ('new', 'running', 'failed')")
        )

    def _sample(self, at: float) -> None:
        for runner in [self._survivor, *self._mortals]:
            if runner.alive:
                self._samples.setdefault(runner.pid, []).append((round(at), runner.rss))

    def _judge_memory(self) -> None:
        samples = self._samples[self._survivor.pid]
        early, late = samples[len(samples) // 3][1], max(rss for _, rss in samples[-5:])
        self._world.notes["rss of the survivor, KiB"] = {"after a third": early, "at the end": late}
        self._world.expect(late <= early * _GROWTH, f"the runner that lived to the end grew from {early} to {late} KiB")

    # --- the faults ---

    def _replace(self, runner: Runner) -> None:
        self._mortals.remove(runner)
        self._mortals.append(self._start())

    def _kill(self) -> None:
        runner = self._world.random.choice(self._mortals)
        self._world.kill(runner)
        self._replace(runner)

    def _stop(self) -> None:
        runner = self._world.random.choice(self._mortals)
        self._world.injure()
        runner.signal(signal.SIGTERM)
        self._replace(runner)

    def _freeze(self) -> None:
        runner = self._world.random.choice(self._mortals)
        self._world.injure()
        runner.freeze()
        time.sleep(1)
        runner.thaw()

    def _cut(self) -> None:
        self._world.injure()
        self._proxy.cut()

    def _lose_answers(self) -> None:
        self._world.injure()
        before = self._proxy.judge
        self._proxy.judge = self._sometimes
        time.sleep(1)
        self._proxy.judge = before

    def _sometimes(self, _link: Link, _request: bytes) -> Verdict:
        return Verdict.CUT_AFTER if self._world.random.random() < 0.1 else Verdict.PASS

    def _terminate(self) -> None:
        self._world.injure()
        self._world.server.terminate(limit=5)

    def _restart(self) -> None:
        self._world.injure()
        self._world.server.stop(self._world.random.choice([signal.SIGINT, signal.SIGQUIT]))
        self._world.server.start_again()


def _thinned(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return samples[:: max(1, len(samples) // 40)]
