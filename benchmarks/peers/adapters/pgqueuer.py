"""pgqueuer, on asyncpg and uvloop."""

from __future__ import annotations

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries


class Peer:
    uvloop = True

    def __init__(self, dsn, settings):
        self.dsn = dsn
        self.batch_size = settings["batch_size"]

    async def __aenter__(self):
        self.connection = await asyncpg.connect(self.dsn)
        self.queries = Queries(AsyncpgDriver(self.connection))
        return self

    async def __aexit__(self, *_):
        await self.connection.close()

    async def install(self):
        await self.queries.install()

    async def bulk(self, count):
        payloads = [b'{"number":%d}' % number for number in range(count)]
        await self.queries.enqueue(["noop"] * count, payloads, [0] * count)

    async def singles(self, count):
        async with self.connection.transaction():
            for number in range(count):
                await self.queries.enqueue("noop", b'{"number":%d}' % number)

    async def single(self, number):
        await self.queries.enqueue("noop", b'{"number":%d}' % number)

    async def work(self, job):
        import json

        queuer = PgQueuer(AsyncpgDriver(self.connection))

        @queuer.entrypoint("noop")
        async def noop(received):
            await job(json.loads(received.payload)["number"])

        await queuer.run(batch_size=self.batch_size)
