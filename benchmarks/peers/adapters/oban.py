"""oban-py, with its own pool."""

from __future__ import annotations

import asyncio

from oban import Oban, worker
from oban.schema import install

call = None


@worker(queue="bench")
class Noop:
    async def process(self, job):
        await call(job.args["number"])


class Peer:
    def __init__(self, dsn, settings):
        self.dsn = dsn
        self.limit = settings["limit"]

    async def __aenter__(self):
        self.pool = await Oban.create_pool(self.dsn, max_size=10)
        self.oban = Oban(pool=self.pool)
        return self

    async def __aexit__(self, *_):
        await self.pool.close()

    async def install(self):
        await install(self.pool)

    async def bulk(self, count):
        await self.oban.enqueue_many([Noop.new({"number": number}) for number in range(count)])

    async def singles(self, count):
        async with self.pool.connection() as connection:
            for number in range(count):
                await self.oban.enqueue(Noop.new({"number": number}), conn=connection)

    async def single(self, number):
        await self.oban.enqueue(Noop.new({"number": number}))

    async def work(self, job):
        global call
        call = job
        async with Oban(pool=self.pool, queues={"bench": self.limit}):
            await asyncio.Event().wait()
