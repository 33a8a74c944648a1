"""job.complete(): the completion in a transaction of the task's own, through whatever holds it."""

import asyncio

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from support.running import Database, claimant
from support.servers import libpq

from sqla_neoq import ClaimLost, Runner, current_job, handler, task
from sqla_neoq.claim import Want, claim
from sqla_neoq.transaction import AsyncRunTransaction, RunTransaction


@pytest.fixture
def database(engine):
    database = Database(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id bigint)"))
    yield database
    engine.dispose()
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        connection.execute(text("DROP TABLE effects"))


@pytest.fixture
def me(database):
    return claimant(database, database.worker())


@pytest.fixture
def job(database, me):
    database.add(queue="q")
    with database.begin() as connection:
        return claim(connection, me, [Want("q", 1, handler=True)], 1).jobs[0]


@pytest.fixture
def own(engine):
    """A connection of the task's own, that the runner knows nothing of."""
    with psycopg.connect(libpq(engine.url)) as connection:
        yield connection


def effects(database):
    with database.engine.connect() as connection:
        return list(connection.scalars(text("SELECT id FROM effects")))


def test_the_tasks_commit_is_the_completion(database, me, job, own, engine):
    transaction = RunTransaction(lambda: Session(engine), me.options)
    own.execute("INSERT INTO effects VALUES (1)")
    transaction.complete_in(own, job)
    assert (database.row(job.id).status, effects(database)) == ("running", [])
    own.commit()
    assert (database.row(job.id).status, effects(database)) == ("processed", [1])
    assert transaction.joined


def test_its_rollback_takes_the_completion_back(database, me, job, own, engine):
    own.execute("INSERT INTO effects VALUES (1)")
    RunTransaction(lambda: Session(engine), me.options).complete_in(own, job)
    own.rollback()
    assert (database.row(job.id).status, effects(database)) == ("running", [])


def test_a_run_that_lost_its_job_is_told_before_it_commits(database, me, job, own, engine):
    database.change(job.id, claim_token=job.token + 1)
    own.execute("INSERT INTO effects VALUES (1)")
    with pytest.raises(ClaimLost, match=f"job {job.id} was taken from this run"):
        RunTransaction(lambda: Session(engine), me.options).complete_in(own, job)
    own.rollback()
    assert (database.row(job.id).status, effects(database)) == ("running", [])


def test_outside_a_transaction_it_is_refused(database, me, job, own, engine):
    own.autocommit = True
    with pytest.raises(RuntimeError, match="on a connection in AUTOCOMMIT"):
        RunTransaction(lambda: Session(engine), me.options).complete_in(own, job)
    assert database.row(job.id).status == "running"


def test_it_and_the_session_exclude_each_other(me, job, own, engine):
    transaction = RunTransaction(lambda: Session(engine), me.options)
    assert transaction.session.scalar(text("SELECT 1"))
    with pytest.raises(RuntimeError, match=r"job\.session is in use"):
        transaction.complete_in(own, job)
    transaction.rollback()
    other = RunTransaction(lambda: Session(engine), me.options)
    other.complete_in(own, job)
    with pytest.raises(RuntimeError, match="was completed in a transaction of the task's own"):
        _ = other.session


def test_a_coroutine_awaits_it(database, me, job, engine):
    async def run():
        transaction = AsyncRunTransaction(pytest.fail, me.options)
        async with await psycopg.AsyncConnection.connect(libpq(engine.url)) as own:
            await own.execute("INSERT INTO effects VALUES (1)")
            await transaction.complete_in_async(own, job)
        with pytest.raises(RuntimeError, match=r"await job\.complete_async\(\)"):
            transaction.complete_in(own, job)
        assert transaction.joined

    asyncio.run(run())
    assert (database.row(job.id).status, effects(database)) == ("processed", [1])


@pytest.mark.parametrize("commit", [True, False])
def test_a_runner_counts_it_as_processed_whether_or_not_the_transaction_committed(database, database_url, commit):
    @handler("q")
    def work(job):
        with psycopg.connect(libpq(database.engine.url)) as own:
            own.execute("INSERT INTO effects VALUES (%s)", [job.id])
            job.complete(own)
            if not commit:
                own.rollback()

    job = database.add(queue="q")
    counts = Runner(database_url, work).drain()
    assert (counts.processed, counts.lost) == (1, 0)
    assert database.row(job).status == "processed"
    assert effects(database) == ([job] if commit else [])


def test_the_completion_goes_where_the_runner_has_its_tables(schema_engine, neoq_schema):
    @task(name="t:work", queue="q")
    def work():
        other = create_engine(schema_engine.url)
        with other.begin() as connection:
            connection.execute(text("SELECT 1"))
            current_job().complete(connection)
        other.dispose()

    with schema_engine.begin() as connection:
        work.enqueue(connection)
    counts = Runner(schema_engine, work).drain()
    assert (counts.processed, counts.lost) == (1, 0)
