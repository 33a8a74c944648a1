"""What happens on the way to the database: delays, cuts, silence, and answers that are lost."""

import itertools
import time

from chaos.proxy import Link, Proxy, Verdict
from chaos.scenarios import SCENARIOS
from chaos.world import World, patiently


@SCENARIOS.add(
    "slow-network",
    promise="slowness costs time, never a job",
    faults="50 ms more each way; then 300 ms",
    limit=None,
)
def slow_network(world: World) -> None:
    proxy, url = world.proxy()
    world.runner(url=url)
    world.runner(url=url)
    world.produce(rate=50)
    for delay in (0.05, 0.3):
        world.injure()
        proxy.delay(delay)
        world.sleep(min(world.seconds, 15.0))
    proxy.delay(0.0)


@SCENARIOS.add(
    "connections-cut",
    promise="connections that break cost no job",
    faults="all connections of runners and producers reset, at random, several times a second; some refused for 2 s",
    limit=10.0,
    smoke=True,
)
def connections_cut(world: World) -> None:
    proxy, url = world.proxy()
    world.runner(url=url)
    world.runner(url=url)
    world.produce(rate=80, seconds=0.02, url=url)
    world.await_starts(50)
    until = time.monotonic() + world.seconds
    while time.monotonic() < until:
        proxy.cut()
        world.injure()
        if world.random.random() < 0.1:
            proxy.refuse()
            world.sleep(2)
            proxy.refuse(False)
        world.sleep(world.random.uniform(0.05, 1.0))
    world.repaired()
    world.go_on()


@SCENARIOS.add(
    "every-transaction",
    promise="exactly once, in job.session, its connections, job.async_session() and job.complete()",
    faults="all connections reset, every seventh COMMIT's answer lost, while tasks write through each; then kill -9",
    limit=10.0,
)
def every_transaction(world: World) -> None:
    proxy, url = world.proxy()
    commits = itertools.count(1)

    def lose(_link: Link, request: bytes) -> Verdict:
        return Verdict.CUT_AFTER if b"COMMIT" in request and next(commits) % 7 == 0 else Verdict.PASS

    victim = world.runner(url=url)
    world.runner(url=url)
    world.produce("chaos:effect", "chaos:core", "chaos:driver", "chaos:coroutine", "chaos:own", rate=60)
    world.await_starts(50)
    proxy.judge = lose
    until = time.monotonic() + world.seconds
    while time.monotonic() < until:
        world.sleep(world.random.uniform(0.2, 2.0))
        proxy.cut()
        world.injure()
    _pass_all(proxy)
    world.injected += proxy.cuts
    world.repaired()
    world.go_on()
    world.kill(victim)
    world.sleep(1)


@SCENARIOS.add(
    "commit-answer-lost",
    promise="exactly once, in job.session; a claim whose answer is lost is put back",
    faults="every third COMMIT, and every tenth other answer, lost after the server did it",
    limit=10.0,
    smoke=True,
)
def commit_answer_lost(world: World) -> None:
    proxy, url = world.proxy()
    world.runner(url=url)
    world.runner(url=url)
    world.produce("chaos:effect", rate=40, url=url)
    world.await_starts(50)

    def judge(_link: Link, request: bytes) -> Verdict:
        share = 1 / 3 if b"COMMIT" in request else 1 / 10
        return Verdict.CUT_AFTER if world.random.random() < share else Verdict.PASS

    proxy.judge = judge
    world.sleep(world.seconds)
    _pass_all(proxy)
    world.injected += proxy.cuts
    world.repaired()
    world.go_on()


@SCENARIOS.add(
    "claim-commits-late",
    promise="a claim whose answer is lost is put back, also when it commits long after the connection broke",
    faults="connections cut while the server is in the middle of a claim, which it finishes 1 to 3 s later",
    limit=20.0,
)
def claim_commits_late(world: World) -> None:
    world.server.execute(
        "CREATE FUNCTION chaos_slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(1 + 2 * random()); RETURN NEW; END $$",
        "CREATE TRIGGER chaos_slow BEFORE UPDATE ON neoq_jobs FOR EACH ROW "
        "WHEN (NEW.status = 'running' AND NEW.priority = 7) EXECUTE FUNCTION chaos_slow()",
    )
    proxy, url = world.proxy()
    world.runner(url=url)
    for _ in range(1 if world.smoke else 4):
        keys = world.enqueue("chaos:effect", 1, how={"priority": 7})
        patiently(lambda: world.server.value(_CLAIMING) > 0, within=20)
        world.injure()
        began = time.monotonic()
        proxy.cut()
        world.await_status(keys, "processed", within=60)
        world.recovered(time.monotonic() - began)


_CLAIMING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"


@SCENARIOS.add(
    "partition",
    promise="a network that goes silent is noticed, and waited for",
    faults="all bytes swallowed, without a word, for 60 s, for one of two runners; the other takes its jobs over",
    limit=40.0,
    quiet_within=120.0,
)
def partition(world: World) -> None:
    proxy, url = world.proxy()
    victim = world.runner(url=url)
    world.runner()
    world.produce(rate=140, seconds=0.1)  # more than one runner can do
    world.await_starts(100)
    for _ in range(2):
        world.injure()
        proxy.black_hole()
        world.sleep(max(world.seconds, 45.0))
        proxy.black_hole(False)
        world.repaired()
        world.go_on()
    world.expect(victim.alive, "the runner behind the silence ended")


def _pass_all(proxy: Proxy) -> None:
    proxy.judge = lambda _link, _request: Verdict.PASS
