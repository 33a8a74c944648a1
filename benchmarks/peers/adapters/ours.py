"""sqla_neoq: a runner in this process, sessions of SQLAlchemy for the producer."""

from __future__ import annotations

import asyncio

from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import Session

from sqla_neoq import Runner, RunnerConfig, enqueue_many, migrations, task

call = None


@task(queue="bench", name="noop")
def noop(number: int) -> None:
    call(number)


class Peer:
    # Its tasks are plain functions in threads, and so is the job.
    threads = True

    def __init__(self, dsn, settings):
        self.engine = create_engine(make_url(dsn).set(drivername="postgresql+psycopg"))
        self.concurrency = settings["concurrency"]

    async def install(self):
        with self.engine.begin() as connection:
            migrations.upgrade(connection)

    async def bulk(self, count):
        with Session(self.engine) as session, session.begin():
            enqueue_many(session, [noop.job(number=number) for number in range(count)])

    async def singles(self, count):
        with Session(self.engine) as session, session.begin():
            for number in range(count):
                noop.enqueue(session, number=number)

    async def single(self, number):
        with Session(self.engine) as session, session.begin():
            noop.enqueue(session, number=number)

    async def work(self, job):
        global call
        call = job
        config = RunnerConfig(concurrency=self.concurrency, retention=None)
        with Runner(self.engine.url, noop, queues={"bench": None}, config=config):
            await asyncio.Event().wait()
