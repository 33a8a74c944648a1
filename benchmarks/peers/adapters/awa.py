"""awa, with its queue storage as a fresh install has it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import awa
import psycopg
from awa import bridge


@dataclass
class Noop:
    number: int


class Peer:
    def __init__(self, dsn, settings):
        self.dsn = dsn
        self.workers = settings["workers"]

    async def __aenter__(self):
        self.client = awa.AsyncClient(self.dsn)
        return self

    async def __aexit__(self, *_):
        await self.client.close()

    async def install(self):
        await awa.migrate(self.dsn)

    async def bulk(self, count):
        await self.client.enqueue_many_copy([Noop(number) for number in range(count)], queue="bench")

    async def singles(self, count):
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            for number in range(count):
                await bridge.insert_job(connection, Noop(number), queue="bench")

    async def single(self, number):
        await self.client.insert(Noop(number), queue="bench")

    async def work(self, job):
        @self.client.task(Noop, queue="bench")
        async def noop(received):
            await job(received.args.number)

        await self.client.start([("bench", self.workers)])
        await asyncio.Event().wait()
