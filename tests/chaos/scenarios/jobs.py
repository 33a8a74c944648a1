"""What jobs do to their runners: poison that kills the process, and tasks that hang where nobody can stop them."""

import time

from chaos.scenarios import SCENARIOS
from chaos.world import World, patiently


@SCENARIOS.add(
    "poison",
    promise="a job that kills its workers ends dead after three; innocents beside it complete",
    faults="jobs that end their process (os._exit, SIGSEGV, all memory), each among 40 innocents; three at once among "
    "6,000; two runners",
    limit=90.0,
    ends={"chaos:poison": {"dead:crashed"}},
    quiet_within=120.0,
)
def poison(world: World) -> None:
    # --processes, so that whoever is killed is started again, as in production.
    flags = ("-q", "poison:5,effects:10,plain:10", "--processes", "2")
    world.runner(*flags, ready=False).wait_for("runner started", within=60)
    for way in ("exit", "segv", "memory"):
        world.injure()
        began = time.monotonic()
        innocents = world.enqueue("chaos:effect", 20, seconds=0.5) + world.enqueue("chaos:plain", 20, seconds=0.5)
        bad = world.enqueue("chaos:poison", way=way)
        world.await_status(bad, "dead:crashed", within=100)
        world.recovered(time.monotonic() - began)
        world.await_status(innocents, "processed", within=60)
    # All three at once, among so many small ones that runners hold hundreds ready: those die with them unstarted.
    began = time.monotonic()
    innocents = world.enqueue("chaos:plain", 3000)
    bad = [key for way in ("exit", "segv", "exit") for key in world.enqueue("chaos:poison", way=way)]
    innocents += world.enqueue("chaos:plain", 3000)
    for _ in bad:
        world.injure()
    world.await_status(bad, "dead:crashed", within=100)
    world.recovered(time.monotonic() - began)
    world.notes["crashes of innocents"] = dict(
        world.server.rows("SELECT crashes::text, count(*) FROM neoq_jobs GROUP BY 1 ORDER BY 1")
    )


@SCENARIOS.add(
    "hangs",
    promise="a timeout frees its slot; capacity does not shrink",
    faults="tasks that hang in time.sleep, in C, in a socket, on a lock, in a query, in a loop; timeout 2 s",
    limit=8.0,
    ends={"chaos:hang": {"dead:exhausted"}},
)
def hangs(world: World) -> None:
    runner = world.runner("-q", "hangs:4,effects:4", "-c", "4", "--shutdown-timeout", "3")
    for way in ("sleep", "c", "socket", "lock", "query", "polite"):
        world.injure()
        began = time.monotonic()
        keys = world.enqueue("chaos:hang", 4 if way in {"query", "polite"} else 1, way=way)
        world.await_status(keys, "dead:exhausted", within=30)
        # All four slots work.
        world.await_status(world.enqueue("chaos:effect", 8, seconds=0.2), "processed", within=30)
        world.recovered(time.monotonic() - began)
    world.injure()
    began = time.monotonic()
    world.await_status(world.enqueue("chaos:hang", 1, way="loop"), "dead:exhausted", within=60)
    world.recovered(time.monotonic() - began)
    # Four threads hung for good, which is as many as this runner puts up with: it has begun anew by itself, once.
    patiently(lambda: runner.output.count("runner started") == 2, within=60, why=lambda: runner.output[-3000:])
    world.await_status(world.enqueue("chaos:effect", 8), "processed", within=30)
    world.expect(
        world.server.value("SELECT coalesce(max(crashes), 0) FROM neoq_jobs") == 0, "a hanging job counted as a crash"
    )


@SCENARIOS.add(
    "gil-held",
    promise="a process that is stuck loses its jobs to others, and changes nothing when it comes to",
    faults="a task holds the GIL for 12 s; another for 40 s, past the lease; a regular expression backtracks",
    limit=45.0,
    ends={"chaos:gil": {"processed", "dead:exhausted"}, "chaos:regex": {"processed", "dead:exhausted"}},
    quiet_within=120.0,
)
def gil_held(world: World) -> None:
    world.runner("-q", "hangs:2")
    world.runner("-q", "effects:4,plain:4")
    other = world.produce(rate=20)
    for seconds in (12, 40):
        world.injure()
        began = time.monotonic()
        (key,) = world.enqueue("chaos:gil", seconds=seconds)
        patiently(lambda key=key: world.status(key) in {"processed", "dead:exhausted"}, within=100)
        world.recovered(time.monotonic() - began)
    world.injure()
    world.enqueue("chaos:regex")
    world.expect(other.popen.poll() is None, "the producer ended")
