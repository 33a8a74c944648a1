"""awa, as a fresh install is: its faster bulk call needs another storage engine to be switched on first."""

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
        # Its client refuses a URL without a host, and finds a socket's folder in the query all the same.
        self.url = dsn.replace("@/", "@localhost/", 1)
        self.workers = settings["workers"]

    async def __aenter__(self):
        self.client = awa.AsyncClient(self.url)
        return self

    async def __aexit__(self, *_):
        await self.client.close()

    async def install(self):
        await awa.migrate(self.url)

    async def bulk(self, count):
        await self.client.insert_many_copy([Noop(number) for number in range(count)], queue="bench")

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
