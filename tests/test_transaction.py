import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from support.running import Database, claimant, in_thread
from support.waiting import eventually

from sqla_neoq import enqueue
from sqla_neoq import transaction as module
from sqla_neoq.claim import Want, claim, settle
from sqla_neoq.dialects import DATABASE_ERRORS, engine_of
from sqla_neoq.errors import ClaimLost, JobCancelled
from sqla_neoq.models import Job
from sqla_neoq.outcomes import Outcome, Verb
from sqla_neoq.transaction import AsyncRunTransaction, AsyncSessions, RunSession, RunTransaction


@pytest.fixture
def database(engine):
    database = Database(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id int PRIMARY KEY)"))
    yield database
    engine.dispose()
    with engine.begin() as connection:
        # What a failed test left open must fail it, and not hang the run.
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


@pytest.fixture(params=[RunSession, Session], ids=["the runner's session", "the application's"])
def transaction(request, engine, database, me):
    """The transaction of one run; what it leaves open is closed after the test."""
    transaction = RunTransaction(lambda: request.param(engine), me.options)
    yield transaction
    transaction.rollback()


def open_session(transaction):
    return transaction.session


def write_effect(session, number=1):
    session.execute(text("INSERT INTO effects VALUES (:number)"), {"number": number})


def effects(database):
    with database.begin() as connection:
        return list(connection.scalars(text("SELECT id FROM effects ORDER BY id")))


def waits_for_a_lock(database):
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    # In a transaction of its own: within one, the answer stays the same.
    with database.engine.connect() as connection:
        return connection.scalar(text(query))


def take_away(database, me, job):
    """Do what a rescue does: put the job back, so that this run does not own it any more."""
    with database.begin() as connection:
        assert settle(connection, [Outcome(job, Verb.PUT_BACK)], me.options) == set()


def test_a_session_that_nobody_asks_for_is_never_opened(me):
    transaction = RunTransaction(lambda: pytest.fail("opened"), me.options)
    assert not transaction.used
    transaction.cancel()
    transaction.rollback()


def test_the_session_is_opened_once(transaction):
    assert transaction.session is transaction.session
    assert transaction.used


def test_the_work_and_the_completion_commit_together(database, transaction, job):
    write_effect(transaction.session)
    assert (effects(database), database.statuses()) == ([], {job.id: "running"})
    transaction.complete(job)
    assert (effects(database), database.statuses()) == ([1], {job.id: "processed"})


def test_pending_objects_are_flushed_before_the_completion(database, transaction, job):
    transaction.session.add(Job(queue="next"))
    transaction.complete(job)
    assert sorted(row.queue for row in database.rows()) == ["next", "q"]


def test_a_job_enqueued_through_it_exists_only_if_the_job_completes(database, transaction, job):
    enqueue(transaction.session, "next")
    assert [row.queue for row in database.rows()] == ["q"]
    transaction.complete(job)
    assert sorted(row.queue for row in database.rows()) == ["next", "q"]


def test_a_failure_rolls_the_work_back(database, transaction, job):
    write_effect(transaction.session)
    transaction.rollback()
    assert (effects(database), database.statuses()) == ([], {job.id: "running"})


def test_a_run_that_lost_its_job_rolls_its_work_back(database, me, transaction, job):
    write_effect(transaction.session)
    take_away(database, me, job)
    with pytest.raises(ClaimLost, match=f"job {job.id} was taken"):
        transaction.complete(job)
    transaction.rollback()
    assert (effects(database), database.statuses()) == ([], {job.id: "new"})


# Its connections -----------------------------------------------------------------------------------------------------

INSERT = "INSERT INTO effects VALUES (1)"
WAYS = {
    "connection": lambda transaction: transaction.connection.exec_driver_sql(INSERT),
    "driver_connection": lambda transaction: transaction.driver_connection.execute(INSERT),
}


@pytest.fixture(params=WAYS)
def write(request):
    return WAYS[request.param]


def test_what_its_connections_write_commits_with_the_completion(database, transaction, job, write):
    write(transaction)
    assert (transaction.used, effects(database)) == (True, [])
    transaction.complete(job)
    assert (effects(database), database.statuses()) == ([1], {job.id: "processed"})


def test_what_its_connections_wrote_for_a_job_that_was_lost_is_rolled_back(database, me, transaction, job, write):
    write(transaction)
    take_away(database, me, job)
    with pytest.raises(ClaimLost):
        transaction.complete(job)
    transaction.rollback()
    assert (effects(database), database.statuses()) == ([], {job.id: "new"})


def test_session_and_connections_are_of_one_transaction(transaction):
    pids = [
        transaction.session.connection().connection.driver_connection.info.backend_pid,
        transaction.connection.scalar(text("SELECT pg_backend_pid()")),
        transaction.driver_connection.execute("SELECT pg_backend_pid()").fetchone()[0],
    ]
    assert len(set(pids)) == 1
    write_effect(transaction.session)
    assert transaction.driver_connection.execute("SELECT id FROM effects").fetchall() == [(1,)]


def test_a_transaction_of_the_drivers_is_a_savepoint_also_as_the_first_thing_done(database, transaction):
    connection = transaction.driver_connection
    with connection.transaction():
        connection.execute(INSERT)
    transaction.rollback()
    assert effects(database) == []


def test_after_a_rollback_there_is_a_connection_again(database, transaction, job, write):
    write(transaction)
    transaction.session.rollback()
    write(transaction)
    transaction.complete(job)
    assert effects(database) == [1]


# Of a coroutine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_loop(database_url, me):
    """Run a scenario with an asynchronous transaction; the pool must have its connections back after it."""

    def run(scenario, **engine_options):
        async def main():
            engine = create_async_engine(database_url, **engine_options)
            try:
                return await scenario(AsyncRunTransaction(lambda: AsyncSession(engine), me.options))
            finally:
                checked_out = engine.pool.checkedout()
                await engine.dispose()
                assert checked_out == 0

        return asyncio.run(main())

    return run


async def insert_effect(transaction):
    session = await transaction.async_session()
    await session.execute(text(INSERT))


def test_what_an_asynchronous_session_writes_commits_with_the_completion(database, in_loop, job):
    async def scenario(transaction):
        assert not transaction.used
        await insert_effect(transaction)
        assert transaction.used
        await asyncio.to_thread(lambda: effects(database) == [] or pytest.fail("committed too early"))
        await transaction.complete(job)

    in_loop(scenario)
    assert (effects(database), database.statuses()) == ([1], {job.id: "processed"})


def test_an_asynchronous_run_that_lost_its_job_rolls_its_work_back(database, in_loop, me, job):
    async def scenario(transaction):
        await insert_effect(transaction)
        await asyncio.to_thread(take_away, database, me, job)
        with pytest.raises(ClaimLost, match=f"job {job.id} was taken"):
            await transaction.complete(job)
        await transaction.rollback()

    in_loop(scenario)
    assert (effects(database), database.statuses()) == ([], {job.id: "new"})


def test_coroutines_that_ask_at_once_share_one_session(in_loop):
    async def scenario(transaction):
        first, second = await asyncio.gather(transaction.async_session(), transaction.async_session())
        await transaction.rollback()
        return first is second

    assert in_loop(scenario)


def test_a_coroutine_cancelled_in_a_statement_leaves_nothing_open(database, in_loop, job):
    async def scenario(transaction):
        async def work():
            await insert_effect(transaction)
            await (await transaction.async_session()).execute(text("SELECT pg_sleep(30)"))

        running = asyncio.create_task(work())
        await asyncio.to_thread(eventually, lambda: sleeps(database))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await transaction.rollback()
        await asyncio.to_thread(eventually, lambda: not sleeps(database))

    in_loop(scenario)
    assert (effects(database), database.statuses()) == ([], {job.id: "running"})


def test_a_coroutine_that_was_asked_to_stop_opens_no_session(in_loop):
    async def scenario(transaction):
        transaction.cancel()
        with pytest.raises(JobCancelled, match="asked to stop"):
            await transaction.async_session()
        await transaction.rollback()

    in_loop(scenario)


def test_an_asynchronous_session_in_autocommit_is_refused(in_loop):
    async def scenario(transaction):
        with pytest.raises(RuntimeError, match=r"async_session\(\) is on an AUTOCOMMIT engine"):
            await transaction.async_session()

    in_loop(scenario, isolation_level="AUTOCOMMIT")


def test_asynchronous_sessions_are_made_from_a_url_alone(database_url, engine):
    with pytest.raises(RuntimeError, match=r"pass Runner\(\.\.\., async_sessionmaker=\.\.\.\)"):
        AsyncSessions(None, engine, size=1)()

    async def isolation():
        made = engine_of(database_url)
        sessions = AsyncSessions(None, made.execution_options(isolation_level="REPEATABLE READ"), size=1)
        async with sessions() as session:
            level = await session.scalar(text("SHOW transaction_isolation"))
        await sessions.dispose()
        return level

    assert asyncio.run(isolation()) == "repeatable read"


# Two runs, isolation, sessions of the application --------------------------------------------------------------------


def test_of_two_runs_of_one_job_only_the_owner_commits(engine, database, me, job):
    first, second = (RunTransaction(lambda: Session(engine), me.options) for _ in range(2))
    write_effect(first.session, 1)
    take_away(database, me, job)
    with database.begin() as connection:
        (again,) = claim(connection, me, [Want("q", 1, handler=True)], 1).jobs
    write_effect(second.session, 2)
    with ThreadPoolExecutor(2) as threads:
        late, owner = threads.submit(first.complete, job), threads.submit(second.complete, again)
    assert owner.exception() is None
    assert isinstance(late.exception(), ClaimLost)
    first.rollback()
    assert effects(database) == [2]


def test_a_job_that_is_taken_while_its_completion_waits_is_lost_and_rolled_back(database, me, transaction, job):
    write_effect(transaction.session)
    with ThreadPoolExecutor(1) as threads:
        with database.begin() as connection:
            settle(connection, [Outcome(job, Verb.PUT_BACK)], me.options)
            completing = threads.submit(transaction.complete, job)
            eventually(lambda: waits_for_a_lock(database))
        assert isinstance(completing.exception(), ClaimLost)
    transaction.rollback()
    assert (effects(database), database.statuses()) == ([], {job.id: "new"})


def test_work_that_breaks_a_constraint_at_the_flush_does_not_complete_the_job(database, transaction, job):
    write_effect(transaction.session)
    with pytest.raises(IntegrityError):
        write_effect(transaction.session)
    with pytest.raises(DATABASE_ERRORS):
        transaction.complete(job)
    transaction.rollback()
    assert (effects(database), database.statuses()) == ([], {job.id: "running"})


def test_a_deferred_constraint_that_fails_at_the_commit_completes_nothing(engine, database, transaction, job):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE later (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    try:
        transaction.session.execute(text("INSERT INTO later VALUES (1), (1)"))
        with pytest.raises(IntegrityError):
            transaction.complete(job)
        transaction.rollback()
        assert database.statuses() == {job.id: "running"}
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE later"))


def test_a_retention_of_zero_deletes_the_job_in_the_same_transaction(engine, database, me, job):
    transaction = RunTransaction(lambda: Session(engine), me.options, delete=True)
    write_effect(transaction.session)
    transaction.complete(job)
    assert (effects(database), database.rows()) == ([1], [])


def test_a_task_that_commits_on_its_own_still_completes(database, transaction, job):
    write_effect(transaction.session, 1)
    transaction.session.commit()
    write_effect(transaction.session, 2)
    transaction.complete(job)
    assert (effects(database), database.statuses()) == ([1, 2], {job.id: "processed"})


def test_a_savepoint_that_was_left_open_is_committed_with_the_rest(database, transaction, job):
    write_effect(transaction.session, 1)
    transaction.session.begin_nested()
    write_effect(transaction.session, 2)
    transaction.complete(job)
    assert (effects(database), database.statuses()) == ([1, 2], {job.id: "processed"})


@pytest.mark.parametrize("end", ["complete", "rollback"])
def test_its_connection_goes_back_to_the_pool(engine, transaction, job, end):
    write_effect(transaction.session)
    assert engine.pool.checkedout() == 1
    transaction.complete(job) if end == "complete" else transaction.rollback()
    assert engine.pool.checkedout() == 0


def test_rolling_back_never_raises(engine, database, transaction, caplog):
    with database.begin() as connection:
        pid = transaction.session.connection().connection.driver_connection.info.backend_pid
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    transaction.rollback()
    assert engine.pool.checkedout() == 0


def test_a_completion_on_a_broken_connection_fails_as_any_statement_of_the_session_would(
    engine, database, transaction, job
):
    with database.begin() as connection:
        pid = transaction.session.connection().connection.driver_connection.info.backend_pid
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    with pytest.raises(OperationalError):
        transaction.complete(job)
    transaction.rollback()
    assert engine.pool.checkedout() == 0
    assert database.row(job.id).status == "running"


@pytest.mark.parametrize("name", ["session", "connection", "driver_connection"])
def test_a_coroutine_is_refused_what_would_block_its_loop_with_the_way_out(name):
    with pytest.raises(RuntimeError, match=r"would block the event loop .* await job\.async_session\(\)"):
        getattr(AsyncRunTransaction(None, {}), name)


def test_a_thread_is_refused_the_asynchronous_session_with_the_way_out(transaction):
    with pytest.raises(RuntimeError, match=r"use job\.session"):
        transaction.async_session()


def test_a_session_in_autocommit_is_refused(database_url, me):
    engine = create_engine(database_url, isolation_level="AUTOCOMMIT")
    transaction = RunTransaction(lambda: Session(engine), me.options)
    with pytest.raises(RuntimeError, match="AUTOCOMMIT"):
        open_session(transaction)
    assert engine.pool.checkedout() == 0
    engine.dispose()


@pytest.mark.parametrize("kind", [RunSession, Session])
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_fence_holds_in_every_isolation_level(database_url, database, me, job, level, kind):
    engine = create_engine(database_url, isolation_level=level)
    transaction = RunTransaction(lambda: kind(engine), me.options)
    write_effect(transaction.session)
    take_away(database, me, job)
    with pytest.raises((ClaimLost, *DATABASE_ERRORS)):
        transaction.complete(job)
    transaction.rollback()
    engine.dispose()
    assert (effects(database), database.statuses()) == ([], {job.id: "new"})


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_completion_works_in_every_isolation_level(database_url, database, me, job, level):
    engine = create_engine(database_url, isolation_level=level)
    transaction = RunTransaction(lambda: Session(engine), me.options)
    write_effect(transaction.session)
    transaction.complete(job)
    engine.dispose()
    assert (effects(database), database.statuses()) == ([1], {job.id: "processed"})


@pytest.mark.parametrize("kind", [sessionmaker, lambda bind: scoped_session(sessionmaker(bind))])
def test_sessions_of_the_application_will_do(engine, database, me, job, kind):
    transaction = RunTransaction(kind(bind=engine), me.options)
    write_effect(transaction.session)
    transaction.complete(job)
    assert (effects(database), database.statuses()) == ([1], {job.id: "processed"})
    assert engine.pool.checkedout() == 0


def test_work_that_reads_with_server_side_cursors_completes(engine, database, me, job):
    streaming = engine.execution_options(stream_results=True)
    transaction = RunTransaction(lambda: Session(streaming), me.options)
    assert len(transaction.session.execute(text("SELECT generate_series(1, 3)")).all()) == 3
    transaction.complete(job)
    assert database.statuses() == {job.id: "processed"}


# Cancelling ----------------------------------------------------------------------------------------------------------


def sleeping(transaction, engine):
    """Start a statement that takes a minute; return its thread and where its error will be."""
    session = transaction.session
    pid = session.connection().connection.driver_connection.info.backend_pid
    errors = []

    def run():
        try:
            session.execute(text("SELECT pg_sleep(60)"))
        except DBAPIError as error:
            errors.append(error.orig)

    def runs():
        query = text("SELECT state = 'active' FROM pg_stat_activity WHERE pid = :pid AND query LIKE '%pg_sleep%'")
        with engine.connect() as connection:
            return connection.scalar(query, {"pid": pid})

    thread = in_thread(run)
    eventually(runs)
    return thread, errors


def test_a_running_statement_is_cancelled_from_another_thread(engine, transaction):
    thread, errors = sleeping(transaction, engine)
    transaction.cancel()
    thread.join(10)
    assert [type(error) for error in errors] == [psycopg.errors.QueryCanceled]


def test_whoever_cancels_does_not_wait_for_a_server_that_does_not_answer(engine, transaction, monkeypatch):
    asked, answer = [], threading.Event()

    def ask(connection):
        asked.append(threading.current_thread())
        answer.wait(30)

    monkeypatch.setattr(module, "cancel_statement", ask)
    transaction.session.execute(text("SELECT 1"))
    try:
        transaction.cancel()
        transaction.cancel()  # as the timekeeper does with each look
        eventually(lambda: asked)
        transaction.cancel()
        assert len(asked) == 1
        assert asked != [threading.current_thread()]
    finally:
        answer.set()
    eventually(lambda: not transaction._cancelling)
    transaction.cancel()
    eventually(lambda: len(asked) == 2)


def test_a_connection_that_was_cancelled_is_not_given_to_the_next_job(engine, database, transaction):
    connection = transaction.session.connection().connection.driver_connection
    thread, _ = sleeping(transaction, engine)
    transaction.cancel()
    thread.join(10)
    transaction.rollback()
    assert connection.closed
    assert engine.pool.checkedout() == 0


def test_cancelling_after_the_end_cancels_nothing(engine, database, transaction, job):
    connection = transaction.session.connection().connection.driver_connection
    transaction.complete(job)
    transaction.cancel()
    assert not connection.closed
    with Session(engine) as session:
        session.execute(text("SELECT pg_sleep(0.01)"))


def test_a_run_that_is_asked_to_stop_while_it_opens_its_session_gets_none(engine, me):
    def make_session():
        transaction.cancel()
        return Session(engine)

    transaction = RunTransaction(make_session, me.options)
    with pytest.raises(JobCancelled, match="asked to stop"):
        open_session(transaction)
    transaction.rollback()
    assert engine.pool.checkedout() == 0


def test_a_run_that_was_asked_to_stop_before_it_opened_its_session_gets_none(engine, transaction):
    transaction.cancel()
    with pytest.raises(JobCancelled, match="asked to stop"):
        open_session(transaction)
    assert engine.pool.checkedout() == 0


def test_cancels_and_ends_at_the_same_time_never_hit_the_next_user_of_the_connection(database_url, me):
    # One connection for all: a cancellation that comes late would cancel the statement after it.
    engine = create_engine(database_url, pool_size=1, max_overflow=0)
    for number in range(15):
        transaction = RunTransaction(lambda: Session(engine), me.options)
        transaction.session.execute(text("SELECT 1"))
        start = threading.Barrier(2)

        def cancel(transaction=transaction, start=start):
            start.wait(10)
            transaction.cancel()

        thread = in_thread(cancel)
        start.wait(10)
        transaction.rollback()
        with engine.connect() as connection:
            assert (
                connection.scalar(
                    text("SELECT :number + 0 * count(*) FROM generate_series(1, 10000)"), {"number": number}
                )
                == number
            )
        thread.join(10)
    engine.dispose()


def test_a_session_that_was_rolled_back_leaves_no_connection_to_cancel(database, transaction):
    transaction.session.execute(text("SELECT 1"))
    before = transaction._driver_connection
    assert before is not None
    transaction.session.rollback()
    assert transaction._driver_connection is None
    with transaction.session.begin_nested():
        transaction.session.execute(text("SELECT 1"))
    assert transaction._driver_connection is not None


def test_a_statement_after_a_rollback_can_be_cancelled_as_well(database, transaction):
    transaction.session.rollback()
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(transaction.session.execute, text("SELECT pg_sleep(30)"))
        eventually(lambda: sleeps(database))
        transaction.cancel()
        with pytest.raises(DBAPIError, match="canceling statement"):
            sleeping.result(10)


def test_after_a_cancellation_no_new_transaction_begins(database, transaction):
    transaction.session.rollback()
    transaction.cancel()
    with pytest.raises(JobCancelled):
        transaction.session.execute(text("SELECT 1"))


def sleeps(database):
    query = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT pg_sleep(30)%'"
    with database.engine.connect() as connection:
        return connection.scalar(text(query))
