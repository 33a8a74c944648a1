"""procrastinate, through its asynchronous psycopg connector."""

from __future__ import annotations

import procrastinate


class Peer:
    def __init__(self, dsn, settings):
        self.app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
        self.concurrency = settings["concurrency"]
        self.dsn = dsn
        self.job = None

        @self.app.task(queue="bench", name="noop")
        async def noop(number):
            await self.job(number)

        self.noop = noop

    async def __aenter__(self):
        await self.app.open_async()
        return self

    async def __aexit__(self, *_):
        await self.app.close_async()

    async def install(self):
        await self.app.schema_manager.apply_schema_async()

    async def bulk(self, count):
        await self.noop.batch_defer_async(*({"number": number} for number in range(count)))

    async def singles(self, count):
        import psycopg

        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            deferrer = self.noop.configure(connection=connection)
            for number in range(count):
                await deferrer.defer_async(number=number)

    async def single(self, number):
        await self.noop.defer_async(number=number)

    async def work(self, job):
        self.job = job
        await self.app.run_worker_async(concurrency=self.concurrency, install_signal_handlers=False)
