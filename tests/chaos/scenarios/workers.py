"""What happens to worker processes: kill -9, SIGSTOP, and the signals that they obey."""

import signal
import time

from chaos.scenarios import SCENARIOS
from chaos.world import World, patiently


@SCENARIOS.add(
    "kill-once",
    promise="a dead worker's jobs run elsewhere within ten seconds",
    faults="kill -9 of one of two runners, at work",
    limit=10.0,
    smoke=True,
)
def kill_once(world: World) -> None:
    victim, _ = world.runner(), world.runner()
    world.produce(rate=150, seconds=0.1)
    world.await_starts(60)
    world.kill(victim)
    world.sleep(1)


@SCENARIOS.add(
    "kill-again-and-again",
    promise="a dead worker's jobs run elsewhere within ten seconds",
    faults="kill -9 of one of three runners every 2 s, each replaced by a new one",
    limit=10.0,
)
def kill_again_and_again(world: World) -> None:
    runners = [world.runner() for _ in range(3)]
    world.produce(rate=70, seconds=0.1)  # less than one runner can do: nothing waits behind a backlog
    world.await_starts(60)
    until = time.monotonic() + world.seconds
    while time.monotonic() < until:
        victim = runners.pop(0)
        world.kill(victim)
        runners.append(world.runner(ready=False))
        world.sleep(2)


@SCENARIOS.add(
    "frozen",
    promise="no outcome is taken from a run that lost its job",
    faults="SIGSTOP until another runner has finished half of its jobs and is at work on the others, then SIGCONT",
    limit=45.0,
)
def frozen(world: World) -> None:
    zombie = world.runner("-c", "20")
    short = world.enqueue("chaos:effect", 5, seconds=2.0) + world.enqueue("chaos:plain", 5, seconds=2.0)
    long = world.enqueue("chaos:effect", 5, seconds=8.0) + world.enqueue("chaos:plain", 5, seconds=8.0)
    world.await_started([*short, *long])
    zombie.freeze()
    world.injure()
    froze = time.monotonic()
    other = world.runner("-c", "20")
    patiently(lambda: {world.status(key) for key in short} == {"processed"}, within=60)
    world.recovered(time.monotonic() - froze)
    # The other one is in the middle of the rest: now the zombie's runs come to their ends.
    world.expect({world.status(key) for key in long} == {"running"}, "the long jobs are not running elsewhere")
    zombie.thaw()
    zombie.wait_for("declared dead", within=20)
    patiently(
        lambda: zombie.output.count("job lost") >= len(short + long), within=20, why=lambda: zombie.output[-3000:]
    )
    world.await_status(long, "processed", within=30)
    # And it works on, under a new name: with the other one gone there is nobody else.
    other.signal(signal.SIGTERM)
    other.wait(20)
    world.await_status(world.enqueue("chaos:effect", 3), "processed", within=20)


@SCENARIOS.add(
    "signals",
    promise="a stop, a deploy and a restart cost no job and no retry",
    faults="TERM; TERM twice; QUIT; HUP; TSTP then TERM, each to a runner with long jobs",
    limit=10.0,
)
def signals(world: World) -> None:
    world.runner("-q", "effects:5")  # who goes on
    for name, sent, timeout, code in (
        ("TERM", [signal.SIGTERM], "5", 0),
        ("TERM at its timeout", [signal.SIGTERM], "0.5", 1),
        ("TERM twice", [signal.SIGTERM, signal.SIGTERM], "20", 1),
        ("QUIT", [signal.SIGQUIT], "20", 1),
        ("TSTP and TERM", [signal.SIGTSTP, signal.SIGTERM], "20", 0),
        ("HUP", [signal.SIGHUP], "5", None),
    ):
        runner = world.runner("-q", "plain:5", "--shutdown-timeout", timeout)
        keys = world.enqueue("chaos:plain", 5, seconds=3.0)
        world.await_started(keys)
        began = time.monotonic()
        world.injure()
        for number in sent:
            runner.signal(number)
            world.sleep(0.3)
        if code is None:
            patiently(lambda at=runner: at.output.count("runner started") == 2, within=20)
        else:
            got = runner.wait(20)
            world.expect(got == code, f"{name}: exit code {got}, expected {code}")
        took = time.monotonic() - began
        world.recovered(took)
        world.expect(code != 1 or took < 3.0, f"{name}: forced, and took {took:.1f} s")
        if code is not None:
            helper = world.runner("-q", "plain:5")
            world.await_status(keys, "processed", within=30)
            helper.signal(signal.SIGTERM)
            helper.wait(20)
        rows = world.server.rows(
            "SELECT sum(crashes), sum(retries) FROM neoq_jobs WHERE (payload ->> 'key')::bigint = ANY(%s)", keys
        )
        world.expect(rows == [(0, 0)], f"{name}: crashes and retries of its jobs are {rows}")
