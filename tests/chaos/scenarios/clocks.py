"""What clocks say: the application's an hour off and stepping, and a server in another time zone."""

import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

from chaos.scenario import NotRunError
from chaos.scenarios import SCENARIOS
from chaos.verdict import Record
from chaos.world import World

_FALSE_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int64_t offset(void) {
    static volatile int64_t *shared;
    if (!shared) {
        int file = open(getenv("CHAOS_CLOCK"), O_RDONLY);
        shared = mmap(0, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(clock, at);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) at->tv_sec += offset();
    return answer;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class FalseClock:
    """Makes processes read a wrong date, which may step under them; they count seconds as before.

    libfaketime would do the same and breaks ``time.sleep()``, whose monotonic deadline it shifts as well.
    """

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None or sys.platform != "linux":
            raise NotRunError("no C compiler to make the false clock with")
        source, self._library, self._offset = directory / "clock.c", directory / "clock.so", directory / "offset"
        source.write_text(_FALSE_CLOCK)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"], check=True)
        self.step(0)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment."""
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._offset)}

    def step(self, seconds: int) -> None:
        """Set the clock so far off, for all at once."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))


@SCENARIOS.add(
    "wrong-clock",
    promise="every time that decides anything is the database's",
    faults="the clocks of a producer and of one of two runners an hour fast, then slow, back and forth; then kill -9",
    limit=10.0,
)
def wrong_clock(world: World) -> None:
    clock = FalseClock(world.directory)
    clock.step(3600)
    env = clock.environment
    world.runner()
    wrong = world.runner(env=env)
    world.produce(rate=140, seconds=0.1, env=env)
    later = world.produce("chaos:plain", rate=10, env=env, using={"run_after": 2.0, "deadline": 30.0})
    for offset in (3600, -3600, 86_400, -60, 0, -3600):
        clock.step(offset)
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
    world.produce("chaos:effect", "chaos:plain", "chaos:fails", rate=140, seconds=0.1, env=env)
    world.produce("chaos:plain", rate=10, env=env, using={"run_after": 1.0, "deadline": 30.0})
    world.await_starts(100)
    world.kill(victim)
    world.sleep(10)  # an outage now would put the verdict on the dead off
    began = time.monotonic()
    world.injure()
    world.server.stop()
    world.server.start_again()
    world.repaired()
    world.go_on()
    world.notes["restart_seconds"] = round(time.monotonic() - began, 1)
