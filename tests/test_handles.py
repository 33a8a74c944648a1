"""Conformance of the handles: whatever holds the caller's transaction, an enqueue in it does the same.

The kinds are in support/handles/; test_insertion.py has what concerns SQLAlchemy's alone.
"""

import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.pool import NullPool
from support import eventually
from support.databases import migrate, truncate
from support.handles import KINDS, Undo
from support.wakeups import ears

from sqla_neoq import Enqueued, Job, NewJob, configure, task

SCHEMA = "The Queue's 100% :x"


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request):
    return request.param


@pytest.fixture
def drive(kind, engine):
    """Return a function that runs ``work(caller)`` with a caller of the kind, and returns its result."""
    return lambda work, url=None: kind.drive(url or engine.url, work)


def stored(engine, *columns):
    """Return the committed jobs as others see them."""
    with engine.connect() as connection:
        query = select(*(getattr(Job, column) for column in columns or ("id", "queue", "payload"))).order_by(Job.id)
        return [tuple(row) for row in connection.execute(query)]


@asynccontextmanager
async def undone():
    """Leave whatever is inside by an exception."""
    try:
        yield
    except Undo:
        return
    raise AssertionError("nothing was undone")


def test_a_commit_makes_exactly_the_jobs_and_one_wake_up_at_once(drive, engine):
    async def work(caller):
        with ears(engine.url, "q") as listening:
            async with caller.transaction() as handle:
                first = await caller.call("enqueue", handle, "q", {"n": 1})
                more = await caller.call("enqueue_many", handle, [NewJob.of("q", {"n": n}) for n in (2, 3)])
                assert stored(engine) == []
                assert listening.heard() == []
            # What was committed before is announced before: no polling, and no waiting, but for the server's word.
            assert listening.heard() == ["q"]
        return [first, *more]

    assert drive(work) == [Enqueued(n, created=True) for n in (1, 2, 3)]
    assert stored(engine) == [(n, "q", {"n": n}) for n in (1, 2, 3)]


def test_a_rollback_makes_neither_jobs_nor_wake_ups_and_the_next_transaction_works(drive, engine):
    async def work(caller):
        with ears(engine.url, "q") as listening:
            async with undone(), caller.transaction() as handle:
                await caller.call("enqueue", handle, "q", {"n": 1})
                raise Undo
            assert listening.heard() == []
            async with caller.transaction() as handle:
                await caller.call("enqueue", handle, "q", {"n": 2})
            assert listening.heard() == ["q"]

    drive(work)
    assert stored(engine, "payload") == [({"n": 2},)]


def test_a_savepoint_s_rollback_undoes_what_was_enqueued_in_it_and_no_more(drive, engine):
    async def work(caller):
        async with caller.transaction() as handle:
            await caller.call("enqueue", handle, "q", {"n": 1})
            async with undone(), caller.savepoint(handle):
                assert (await caller.call("enqueue", handle, "q", {"n": 2}, unique=True)).created
                raise Undo
            async with caller.savepoint(handle):
                assert (await caller.call("enqueue", handle, "q", {"n": 2}, unique=True)).created

    drive(work)
    assert stored(engine, "payload") == [({"n": 1},), ({"n": 2},)]


def test_a_duplicate_is_named_and_the_caller_s_later_statements_work(drive, engine, host_table):
    async def work(caller):
        async with caller.transaction() as handle:
            there = await caller.call("enqueue", handle, "q", {"n": 1}, unique=True)
        async with caller.transaction() as handle:
            await caller.run(handle, "INSERT INTO host_orders VALUES ('before it')")
            again = await caller.call("enqueue", handle, "q", {"n": 1}, unique=True)
            await caller.run(handle, "INSERT INTO host_orders VALUES ('after it')")
            jobs = [NewJob.of("q", {"n": n}, unique=True) for n in (2, 1, 2)]
            many = await caller.call("enqueue_many", handle, jobs)
            await caller.run(handle, "INSERT INTO host_orders VALUES ('at the end')")
        return there, again, many

    there, again, many = drive(work)
    assert again == Enqueued(there.id, created=False)
    assert [result.created for result in many] == [True, False, False]
    assert [many[1].id, many[2].id] == [there.id, many[0].id]
    assert sorted(payload["n"] for (payload,) in stored(engine, "payload")) == [1, 2]
    with engine.connect() as connection:
        titles = connection.execute(text("SELECT title FROM host_orders")).scalars().all()
    assert titles == ["before it", "after it", "at the end"]


@pytest.fixture
def host_table(engine):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS host_orders (title text)"))
    yield
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE host_orders"))


def test_ten_thousand_jobs_are_one_statement_and_their_results_stand_in_their_order(drive, engine):
    jobs = [NewJob.of("q", {"n": n}, fingerprint=f"key {n % 1_000}" if n % 3 == 0 else None) for n in range(10_000)]
    with engine.begin() as connection:
        # A statement-level trigger tells how many INSERTs there were.
        connection.execute(text("CREATE TABLE host_inserts (n serial)"))
        connection.execute(
            text(
                "CREATE FUNCTION host_count() RETURNS trigger LANGUAGE plpgsql AS "
                "'BEGIN INSERT INTO host_inserts DEFAULT VALUES; RETURN NULL; END'"
            )
        )
        connection.execute(text("CREATE TRIGGER host_count AFTER INSERT ON neoq_jobs EXECUTE FUNCTION host_count()"))

    async def work(caller):
        async with caller.transaction() as handle:
            return await caller.call("enqueue_many", handle, jobs)

    try:
        results = drive(work)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM host_inserts")) == 1
    finally:
        with engine.begin() as connection:
            connection.execute(text("DROP TRIGGER host_count ON neoq_jobs"))
            connection.execute(text("DROP FUNCTION host_count"))
            connection.execute(text("DROP TABLE host_inserts"))
    rows = {id_: payload["n"] for id_, _, payload in stored(engine)}
    first_with = {}
    for n, (result, job) in enumerate(zip(results, jobs, strict=True)):
        first = n if job.fingerprint is None else first_with.setdefault(job.fingerprint, n)
        assert result.created == (first == n)
        assert rows[result.id] == first
    assert len(rows) == sum(result.created for result in results)


def test_of_several_who_enqueue_the_same_at_once_one_makes_the_job(kind, engine):
    number = 3
    start = threading.Barrier(number)
    results = []

    async def work(caller):
        async with caller.transaction() as handle:
            await caller.run(handle, "SELECT 1")
            start.wait(20)
            jobs = [NewJob.of("q", {}, fingerprint=f"{n}") for n in range(20)]
            results.append(await caller.call("enqueue_many", handle, jobs))

    # Django, Peewee and Pony keep a connection for each thread, and so does everything else here.
    threads = [threading.Thread(target=kind.drive, args=(engine.url, work)) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == number
    assert len({tuple(result.id for result in outcome) for outcome in results}) == 1
    assert sum(result.created for outcome in results for result in outcome) == 20
    assert len(stored(engine)) == 20


UNUSUAL = "' \" \\ %s %(x)s % :x $1 {} [] \n\t ü 🚀 \u2028"


def test_unusual_names_and_payloads_arrive_as_they_are(drive, engine):
    payload = {UNUSUAL: [UNUSUAL, 1.5, None, True, 10**30], "": {}}
    large = "ü" * (512 * 1024 - 1)
    options = {"task": UNUSUAL, "fingerprint": UNUSUAL, "priority": -100, "max_retries": 0}

    async def work(caller):
        async with caller.transaction() as handle:
            first = await caller.call("enqueue", handle, UNUSUAL, payload, **options)
            again = await caller.call("enqueue", handle, UNUSUAL, payload, **options)
            await caller.call("enqueue", handle, "large", large)
            await caller.call("enqueue", handle, "null", task="m:f")
        return first, again

    first, again = drive(work)
    assert again == Enqueued(first.id, created=False)
    assert stored(engine, "queue", "payload", "task", "fingerprint", "priority", "max_retries") == [
        (UNUSUAL, payload, UNUSUAL, UNUSUAL, -100, 0),
        ("large", large, None, None, 0, None),
        ("null", {}, "m:f", None, 0, None),
    ]


def test_times_are_what_they_are_in_a_session_of_any_time_zone(drive, engine):
    when = datetime(2030, 1, 31, 12, 30, 15, 123456, tzinfo=UTC)

    async def work(caller):
        async with caller.transaction() as handle:
            await caller.run(handle, "SET LOCAL TIME ZONE 'Asia/Kolkata'")
            await caller.call("enqueue", handle, "q", run_after=when, deadline=when + timedelta(microseconds=1))
            await caller.call("enqueue", handle, "q", run_after=timedelta(hours=1), deadline=timedelta(hours=2))

    drive(work)
    absolute, relative = stored(engine, "run_after", "deadline", "created_at")
    assert absolute[:2] == (when, when + timedelta(microseconds=1))
    assert relative[1] - relative[0] == timedelta(hours=1)
    assert timedelta(0) <= relative[0] - relative[2] - timedelta(hours=1) < timedelta(minutes=1)


@pytest.fixture(scope="module")
def database_elsewhere(databases):
    url = databases.create()
    migrate(url, SCHEMA)
    yield url
    databases.drop(url)


@pytest.fixture
def elsewhere(database_elsewhere):
    """An engine on a database whose tables are in a schema that is on no search_path."""
    truncate(database_elsewhere)
    engine = create_engine(database_elsewhere, poolclass=NullPool)
    yield engine
    engine.dispose()


def test_the_tables_may_be_in_a_schema_that_is_on_no_search_path(drive, elsewhere):
    async def work(caller):
        async with caller.transaction() as handle:
            there = configure(handle, schema=SCHEMA, max_payload=100)
            first = await caller.call("enqueue", there, "q", {"n": 1}, unique=True)
            again = await caller.call("enqueue", there, "q", {"n": 1}, unique=True)
            with pytest.raises(ValueError, match="payload: 101 bytes of JSON, the most are 100"):
                await caller.call("enqueue", there, "q", "x" * 99)
            assert await caller.call("cancel", there, first.id)
        return first, again

    first, again = drive(work, elsewhere.url)
    assert again == Enqueued(first.id, created=False)
    with elsewhere.connect() as connection:
        quoted = f'"{SCHEMA}"'
        query = f"SELECT queue, payload, status FROM {quoted}.neoq_jobs"
        rows = connection.exec_driver_sql(query, execution_options={"no_parameters": True}).all()
    assert rows == [("q", {"n": 1}, "cancelled")]


def test_a_job_can_be_cancelled_and_a_dead_one_put_back(drive, engine):
    async def work(caller):
        async with caller.transaction() as handle:
            made = await caller.call("enqueue", handle, "q")
            assert await caller.call("cancel", handle, made.id)
            assert not await caller.call("cancel", handle, made.id)
            await caller.run(
                handle,
                "INSERT INTO neoq_dead_jobs (id, queue, priority, payload, run_after, retries, crashes, created_at,"
                " reason) VALUES (1000, 'q', 0, '{}', now(), 0, 0, now(), 'discarded')",
            )
            return await caller.call("requeue_many", handle, [1000, 2000])

    assert drive(work) == [Enqueued(1000, created=True), None]
    assert stored(engine, "status") == [("cancelled",), ("new",)]


@task(queue="emails")
def send(user_id: int) -> None: ...


def test_a_task_enqueues_itself(drive, engine):
    async def work(caller):
        async with caller.transaction() as opened:
            handle = _django_other() if opened is None else opened
            if caller.is_async:
                await send.using(priority=5).enqueue_async(handle, user_id=1)
            else:
                send.using(priority=5).enqueue(handle, user_id=1)
            await caller.call("enqueue", handle, send, {"user_id": 2}, unique=True)

    drive(work)
    assert stored(engine, "queue", "task", "priority", "payload") == [
        ("emails", send.name, 5, {"user_id": 1}),
        ("emails", send.name, 0, {"user_id": 2}),
    ]


def _django_other():
    from django.db import connections

    return connections["other"]


def test_many_enqueues_on_one_connection_go_on_working(drive, engine):
    # psycopg prepares a statement at its sixth use, PostgreSQL takes the generic plan at that one's sixth.
    async def work(caller):
        async with caller.transaction() as handle:
            return [(await caller.call("enqueue", handle, "q", unique=True)).id for _ in range(15)]

    assert drive(work) == [1] * 15
    eventually(lambda: len(stored(engine)) == 1)
