"""What clocks say: the application's an hour off and stepping, and a server in another time zone."""

import time
from pathlib import Path

from chaos.scenario import NotRunError
from chaos.scenarios import SCENARIOS
from chaos.verdict import Record
from chaos.world import World


def _false_clock(file: Path) -> dict[str, str]:
    """Return the environment in which a process reads its wall clock from ``file``, again each time."""
    library = next(Path("/usr").glob("lib*/**/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        raise NotRunError("no libfaketime")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        # A machine whose date is wrong still counts seconds.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@SCENARIOS.add(
    "wrong-clock",
    promise="every time that decides anything is the database's",
    faults="the clocks of a producer and of one of two runners an hour fast, then slow, back and forth; then kill -9",
    limit=10.0,
)
def wrong_clock(world: World) -> None:
    file = world.directory / "clock"
    file.write_text("+3600s\n")
    env = _false_clock(file)
    world.runner()
    wrong = world.runner(env=env)
    world.produce(rate=40, seconds=0.1, env=env)
    later = world.produce("chaos:plain", rate=10, env=env, using={"run_after": 2.0, "deadline": 30.0})
    for offset in ("+3600s", "-3600s", "+86400s", "-60s", "+0s", "-3600s"):
        file.write_text(f"{offset}\n")
        world.injure()
        world.sleep(min(world.seconds / 10, 4.0))
    world.expect(later.popen.poll() is None, "the producer with the wrong clock ended")
    world.kill(wrong)
    world.sleep(8)
    record = Record(world.ledger)
    committed = {line.key: line.at for line in world.ledger.lines() if line.kind == "committed"}
    waits = [
        line.at - committed[line.key] for line in record.starts if line.key // 10**9 == 2 and line.key in committed
    ]
    world.notes["run_after=2 s was s"] = [round(min(waits), 2), round(max(waits), 2)]
    world.expect(min(waits) > 1.5, f"a job began {min(waits):.1f} s after its enqueue, and was due after 2")


@SCENARIOS.add(
    "other-time-zone",
    promise="time zones change nothing",
    faults="a server at +5:45, a role at -9:30, runners and producers in a third zone; a restart between",
    limit=10.0,
    settings={"timezone": "Asia/Kathmandu", "log_timezone": "Asia/Kathmandu"},
)
def other_time_zone(world: World) -> None:
    world.server.execute("ALTER ROLE postgres SET timezone = 'Pacific/Marquesas'")
    env = {"TZ": "America/St_Johns"}
    victim = world.runner(env=env)
    world.runner(env=env)
    world.produce("chaos:effect", "chaos:plain", "chaos:fails", rate=100, seconds=0.1, env=env)
    world.produce("chaos:plain", rate=10, env=env, using={"run_after": 1.0, "deadline": 30.0})
    world.await_starts(100)
    world.kill(victim)
    world.sleep(2)
    began = time.monotonic()
    world.injure()
    world.server.stop()
    world.server.start_again()
    world.repaired()
    world.go_on()
    world.notes["restart_seconds"] = round(time.monotonic() - began, 1)
