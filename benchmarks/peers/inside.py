"""What runs in a peer's own interpreter: ``python -m benchmarks.peers.inside ADAPTER ACTION DSN SETTINGS [COUNT]``.

It says what happened in lines of JSON. All times are ``time.monotonic()``, which the processes of a machine share.

``install``  makes the tables.
``bulk``     enqueues COUNT jobs, at most 10,000 a call; says the seconds.
``singles``  enqueues COUNT jobs one by one in a transaction; says the seconds.
``paced``    commits COUNT jobs with pauses between them; says when each commit was answered.
``drain``    works; says when it began the first of COUNT jobs, and when it ended the last.
``mark``     works; says when it began each job.
``hold``     works; says when it began each job, and never ends one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import sys
import threading
import time
from contextlib import AsyncExitStack

CALL = 10_000


def say(**facts):
    print(json.dumps(facts), flush=True)


class Counter:
    """The job of ``drain``: the least that tells the first from the last."""

    def __init__(self, count):
        self.count = count
        self.begun = 0
        self.lock = threading.Lock()

    def _note(self):
        self.begun += 1
        if self.begun == 1:
            say(event="first", at=time.monotonic())
        if self.begun == self.count:
            say(event="last", at=time.monotonic())

    async def alone(self, number):
        self._note()

    def among_threads(self, number):
        with self.lock:
            self._note()


async def _mark(number):
    say(event="began", number=number, at=time.monotonic())


async def _hold(number):
    await _mark(number)
    await asyncio.sleep(3600)


def _mark_in_thread(number):
    say(event="began", number=number, at=time.monotonic())


def _hold_in_thread(number):
    _mark_in_thread(number)
    time.sleep(3600)


def _job(action, count, *, threads):
    if action == "drain":
        counter = Counter(count)
        return counter.among_threads if threads else counter.alone
    if action == "mark":
        return _mark_in_thread if threads else _mark
    return _hold_in_thread if threads else _hold


async def _bulk(peer, count):
    started = time.monotonic()
    for begin in range(0, count, CALL):
        await peer.bulk(min(CALL, count - begin))
    say(event="done", seconds=time.monotonic() - started)


async def _singles(peer, count):
    started = time.monotonic()
    await peer.singles(count)
    say(event="done", seconds=time.monotonic() - started)


async def _paced(peer, count):
    chance = random.Random(2)
    for number in range(count):
        # Long enough to be idle again, and in step with nothing.
        await asyncio.sleep(chance.uniform(0.02, 0.18))
        await peer.single(number)
        say(event="committed", number=number, at=time.monotonic())


async def main(adapter, action, dsn, settings, count=0):
    peer = importlib.import_module(f"benchmarks.peers.adapters.{adapter}").Peer(dsn, settings)
    async with AsyncExitStack() as stack:
        if hasattr(peer, "__aenter__"):
            await stack.enter_async_context(peer)
        if action == "install":
            await peer.install()
        elif action == "bulk":
            await _bulk(peer, count)
        elif action == "singles":
            await _singles(peer, count)
        elif action == "paced":
            await _paced(peer, count)
        elif action == "drain" and hasattr(peer, "drain"):
            say(event="first", at=time.monotonic())
            await peer.drain()
            say(event="last", at=time.monotonic())
        else:
            say(event="started", at=time.monotonic())
            await peer.work(_job(action, count, threads=getattr(peer, "threads", False)))


if __name__ == "__main__":
    adapter, action, dsn, settings, *rest = sys.argv[1:]
    # An adapter is named as what it drives: with its folder in the path it would import itself.
    sys.path[:] = [entry for entry in sys.path if not entry.endswith("adapters")]
    runner = asyncio.run
    if adapter == "pgqueuer":
        import uvloop

        runner = uvloop.run
    runner(main(adapter, action, dsn, json.loads(settings), *map(int, rest)))
    os._exit(0)
