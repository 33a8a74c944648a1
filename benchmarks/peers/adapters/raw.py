"""psycopg alone on our own tables: no queue at all."""

from __future__ import annotations

import asyncio

from psycopg import connect
from sqlalchemy import create_engine, make_url

from benchmarks import raw
from benchmarks.database import Database
from sqla_neoq import migrations


class Peer:
    def __init__(self, dsn, settings):
        self.url = make_url(dsn).set(drivername="postgresql+psycopg")
        self.database = Database(self.url.render_as_string(hide_password=False), dsn, {})
        self.connection = None

    def _connected(self):
        if self.connection is None:
            self.connection = connect(self.database.dsn, autocommit=True)
        return self.connection

    async def install(self):
        with create_engine(self.url).begin() as connection:
            migrations.upgrade(connection)

    async def bulk(self, count):
        raw.copy(self._connected(), count)

    async def singles(self, count):
        raw.insert_one_by_one(self._connected(), count)

    async def single(self, number):
        connection = self._connected()
        with connection.transaction():
            connection.execute(
                "INSERT INTO neoq_jobs (queue, task, payload) VALUES (%s, 'raw', jsonb_build_object('number', %s))",
                (raw.QUEUE, number),
            )
            connection.execute("SELECT pg_notify(%s, '')", (raw.CHANNEL,))

    async def drain(self):
        """The loop by hand, to the end: there is no job function that could take the times."""
        raw.drain(self.database)

    async def work(self, job):
        waiter = raw.Waiter(self.database)
        waiter.start()
        number = 0
        while True:
            # In the order of their commits: one at a time, each long after the other.
            await asyncio.to_thread(waiter.arrivals.get)
            await job(number)
            number += 1
