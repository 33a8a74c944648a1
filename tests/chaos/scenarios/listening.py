"""What happens to wake-ups: the listening connection dies or goes silent, the server's queue of notifications fills."""

import time

from sqlalchemy.exc import SQLAlchemyError

from chaos.ledger import now
from chaos.scenarios import SCENARIOS
from chaos.world import World, patiently


def _pick_up(world: World, rounds: int, pause: float) -> list[float]:
    """Enqueue single jobs, and return the seconds that each took to begin."""
    waits = []
    for _ in range(rounds):
        at = now()
        (key,) = world.enqueue("chaos:plain")
        world.await_started([key])
        waits.append(next(line.at for line in world.ledger.lines() if line.kind == "start" and line.key == key) - at)
        world.sleep(pause)
    return waits


@SCENARIOS.add(
    "listener-terminated",
    promise="wake-ups only shorten the wait; polling finds every job",
    faults="the listening connection terminated by the server, eight times, jobs enqueued right after",
    limit=3.0,
    smoke=True,
)
def listener_terminated(world: World) -> None:
    world.runner()
    for _ in range(2 if world.smoke else 8):
        world.injure()
        world.server.terminate("application_name LIKE '%listen'")
        for wait in _pick_up(world, 3, 0.3):
            world.recovered(wait)
    _expect_listening_again(world)


def _expect_listening_again(world: World, within: float = 10.0) -> None:
    patiently(
        lambda: world.server.value("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%listen'") == 1,
        within=within,
    )
    world.sleep(3.0)  # until polls are two seconds apart
    waits = _pick_up(world, 5, 0.2)
    world.notes["pick-up afterwards, max s"] = round(max(waits), 3)
    world.expect(max(waits) < 1.0, f"wake-ups did not come back: {waits}")


@SCENARIOS.add(
    "listener-half-open",
    promise="a silent listening connection is noticed within 30 s; meanwhile polling works",
    faults="the listening connection swallowed without a word, three times",
    limit=30.0,
)
def listener_half_open(world: World) -> None:
    proxy, url = world.proxy()
    runner = world.runner(url=url)
    waits = []
    for number in range(1, 4):
        patiently(lambda: any(link.listens for link in proxy.links), within=30)
        world.injure()
        world.expect(proxy.half_open(listening=True) == 1, "there is not one listening connection")
        began = time.monotonic()
        while runner.output.count("the listening connection is down") < number and time.monotonic() < began + 60:
            waits += _pick_up(world, 1, 0.5)
        world.recovered(time.monotonic() - began)
    world.notes["pick-up meanwhile, max s"] = round(max(waits), 3)
    world.expect(max(waits) < 3.0, f"polling took {max(waits):.1f} s")
    proxy.cut(listening=True)
    world.sleep(1)
    patiently(lambda: sum(link.listens and not link.swallowed for link in proxy.links) == 1, within=30)


@SCENARIOS.add(
    "notify-queue-full",
    promise="wake-ups only shorten the wait; polling finds every job",
    faults="a listener that never reads, and 16 MB of notifications, on a server whose queue holds 2 MB",
    limit=None,
    settings={"max_notify_queue_pages": "256"},
)
def notify_queue_full(world: World) -> None:
    world.runner()
    with world.server.connect() as deaf, world.server.connect() as talker:
        # Inside a transaction nothing is delivered, and what cannot be delivered to one is kept for all.
        deaf.execute("LISTEN other")
        deaf.execute("BEGIN")
        deaf.execute("SELECT 1")
        world.injure()
        filled = 0
        try:
            for filled in range(4000):
                talker.execute("SELECT pg_notify('other', repeat('x', 7900) || %s)", [str(filled)])
        except Exception as error:
            world.notes["the server said"] = str(error).splitlines()[0]
        world.notes["queue used"] = round(world.server.value("SELECT pg_notification_queue_usage()"), 3)
        refused = 0
        keys = []
        for _ in range(20):
            try:
                keys += world.enqueue("chaos:plain")
            except SQLAlchemyError as error:
                refused += 1
                world.notes["an enqueue said"] = str(error).splitlines()[0]
            world.sleep(0.1)
        world.expect(refused == 0, f"{refused} of 20 enqueues were refused")
        world.await_started(keys)
        deaf.execute("ROLLBACK")
    world.await_status(world.enqueue("chaos:plain", 5), "processed", within=20)
