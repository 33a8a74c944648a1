"""The public surface, the settings and the connection: S01-S16, S19, S20 and the rows about them."""

import asyncio
import dataclasses
import logging
import os
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import create_async_engine
from support.running import Gate

from sqla_neoq import (
    ConfigurationError,
    DatabaseUnavailable,
    DuplicateTask,
    Job,
    NoCurrentJob,
    Runner,
    RunnerConfig,
    current_job,
    enqueue,
    enqueue_async,
    handler,
    task,
)
from sqla_neoq.dialects import engine_of

NOBODY_LISTENS = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"


@handler("work")
def work(job):
    pass


@pytest.mark.neoq("S01", "T02", "T28")
def test_a_job_is_enqueued_from_synchronous_and_from_asynchronous_code(place):
    seen = []

    @handler("greetings", concurrency=1, timeout=timedelta(seconds=5))
    def greet(job):
        seen.append(job.payload["message"])

    async def later():
        engine = create_async_engine(place.url, execution_options=place.engine.get_execution_options())
        async with engine.begin() as connection:
            await enqueue_async(connection, "greetings", {"message": "from a coroutine"})
        await engine.dispose()

    place.enqueue("greetings", {"message": "from a function"})
    asyncio.run(later())
    assert place.drain(greet).processed == 2
    assert seen == ["from a function", "from a coroutine"]


@pytest.mark.neoq("S01")
def test_an_enqueue_that_has_to_wait_can_be_bounded_and_cancelled(place):
    async def cancelled():
        engine = create_async_engine(place.url, execution_options=place.engine.get_execution_options())
        async with engine.connect() as connection:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(enqueue_async(connection, "work", fingerprint="one"), 0.05)
        await engine.dispose()

    with place.begin() as first:
        enqueue(first, "work", fingerprint="one")
        with place.begin() as second:
            second.execute(text("SET LOCAL lock_timeout = '20ms'"))
            with pytest.raises(OperationalError, match="lock timeout"):
                enqueue(second, "work", fingerprint="one")
        asyncio.run(cancelled())
    assert len(place.rows(Job)) == 1


@pytest.mark.neoq("S02", "T01")
@pytest.mark.parametrize("form", ["text", "URL", "Engine"])
def test_a_runner_takes_a_url_or_the_applications_own_engine(place, form):
    place.enqueue("work")
    database = {"text": place.url, "URL": make_url(place.url), "Engine": place.engine}[form]
    assert place.drain(work, database=database, schema=place.schema).processed == 1


@pytest.mark.neoq("S03", "S09")
@pytest.mark.parametrize(
    "settings",
    [
        {"concurrency": 0},
        {"concurrency": "4"},
        {"poll_interval": 2},
        {"shutdown_timeout": timedelta(seconds=-1)},
        {"retention": 7},
        {"schema": ""},
    ],
    ids=str,
)
def test_settings_are_checked_when_they_are_made(settings):
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        RunnerConfig(**settings)


@pytest.mark.neoq("S03")
def test_settings_do_not_change_under_a_runner():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Runner(NOBODY_LISTENS, work).config.concurrency = 99


@pytest.mark.neoq("S04", "S05", "S19", "N19")
def test_the_runners_own_sessions_have_the_limits_that_are_promised(place):
    engine = place.make_engine()
    names = ("idle_in_transaction_session_timeout", "statement_timeout", "lock_timeout", "synchronous_commit")
    seen = set()

    @event.listens_for(engine, "before_cursor_execute")
    def read_back(connection, cursor, statement, *_):
        # The dispatcher's first, on each new connection; the claim goes past SQLAlchemy's cursors.
        if "claim_token" in statement:
            own = connection.connection.cursor()
            own.execute("SELECT " + ", ".join(f"current_setting('{name}')" for name in names))
            seen.add(own.fetchone())

    place.drain(work, database=engine)
    engine.dispose()
    assert seen == {("1min", "1min", "200ms", place.sql("SHOW synchronous_commit"))}


@pytest.mark.neoq("S06")
def test_a_job_has_every_field_that_neoqs_has(place):
    id_ = place.enqueue("work", {"a": 1}, unique=True).id
    job = place.job(id_)
    assert (job.id, job.queue, job.status, job.payload, job.retries) == (id_, "work", "new", {"a": 1}, 0)
    assert (job.ran_at, job.error, job.max_retries) == (None, None, None)
    assert len(job.fingerprint) > 0
    assert job.run_after == job.created_at


@pytest.mark.neoq("S07", "T12", "S34")
def test_every_option_of_an_enqueue_reaches_the_row(place):
    when = datetime(2199, 1, 2, 3, 4, 5, tzinfo=UTC)
    enqueued = place.enqueue(
        "work",
        ["any", "JSON"],
        task="somebody:elses",
        run_after=when,
        priority=-7,
        deadline=when + timedelta(days=1),
        max_retries=5,
        fingerprint="mine",
    )
    job = place.job(enqueued.id)
    assert (job.payload, job.task, job.run_after, job.priority) == (["any", "JSON"], "somebody:elses", when, -7)
    assert (job.deadline, job.max_retries, job.fingerprint) == (when + timedelta(days=1), 5, "mine")


@pytest.mark.neoq("S07")
def test_an_option_that_does_not_exist_is_refused(place):
    with place.begin() as connection, pytest.raises(TypeError, match="retires"):
        enqueue(connection, "work", retires=5)


@pytest.mark.neoq("S08")
def test_other_options_for_a_task_are_a_copy(place):
    @task(queue="emails", max_retries=5, name="send")
    def send(to: str) -> None: ...

    urgent = send.using(queue="urgent", max_retries=1)
    assert (send.job(to="a").queue, send.job(to="a").max_retries) == ("emails", 5)
    assert (urgent.job(to="a").queue, urgent.job(to="a").max_retries) == ("urgent", 1)


@pytest.mark.neoq("S09")
def test_a_machine_with_one_processor_runs_jobs_too(place, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    place.enqueue("work")
    assert place.drain(work).processed == 1


@pytest.mark.neoq("S09")
def test_a_queue_on_which_nothing_could_run_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        handler("work", concurrency=0)(lambda job: None)
    with pytest.raises(ValueError, match="at least 1"):
        Runner(NOBODY_LISTENS, work, queues={"work": 0})


@pytest.mark.neoq("S10")
def test_a_timeout_is_a_timedelta_of_thirty_seconds_unless_said_otherwise():
    assert work.timeout == 30.0
    with pytest.raises(TypeError, match="timeout=200"):
        handler("work", timeout=200)(work.function)


@pytest.mark.neoq("S11")
def test_a_job_is_passed_to_its_handler_and_found_from_within(place):
    seen = []

    @handler("work")
    def look(job):
        seen.append(current_job() is job)

    place.enqueue("work")
    place.drain(look)
    assert seen == [True]
    with pytest.raises(NoCurrentJob):
        current_job()


@pytest.mark.neoq("S11")
def test_what_a_handler_writes_through_the_jobs_session_commits_with_the_job(place, ledger):
    @handler("work")
    def write(job):
        job.session.execute(text("INSERT INTO ledger (entry) VALUES (:entry)"), {"entry": job.payload})
        if job.payload == 2:
            raise RuntimeError("not this one")

    for payload in (1, 2):
        place.enqueue("work", payload)
    counts = place.drain(write)
    assert (counts.processed, counts.failed) == (1, 1)
    assert place.sql("SELECT array_agg(entry) FROM ledger") == [1]


@pytest.mark.neoq("S13")
def test_a_second_handler_for_a_queue_is_an_error():
    @handler("work")
    def other(job):
        pass

    with pytest.raises(DuplicateTask, match="'work' has two handlers"):
        Runner(NOBODY_LISTENS, [work, other])


@pytest.mark.neoq("S14", "T04")
def test_the_applications_logging_gets_structured_records(place, caplog):
    caplog.set_level(logging.INFO, "sqla_neoq")
    id_ = place.enqueue("work").id
    place.drain(work)
    [record] = [record for record in caplog.records if record.name == "sqla_neoq.jobs"]
    assert record.getMessage() == "job processed"
    assert record.neoq.items() >= {"event": "processed", "job_id": id_, "queue": "work", "attempt": 1}.items()


@pytest.mark.neoq("S14", "S17")
def test_a_database_that_is_not_there_is_an_exception_and_is_not_created(place):
    missing = make_url(place.url).set(database="neoq_of_another_name")
    with pytest.raises(DatabaseUnavailable, match="neoq_of_another_name"):
        Runner(missing, work).start()
    assert place.sql("SELECT count(*) FROM pg_database WHERE datname = 'neoq_of_another_name'") == 0


@pytest.mark.neoq("S15", "T24")
def test_a_parameter_that_is_not_the_servers_is_named_before_anything_connects():
    with pytest.raises(DatabaseUnavailable, match='"pool_max_conns"'):
        Runner(f"{NOBODY_LISTENS}?pool_max_conns=3", work).check()


@pytest.mark.neoq("S16", "T24")
@pytest.mark.parametrize("text", ["", "neoq", "host=localhost dbname=neoq", "mysql://localhost/neoq", "sqlite://"])
def test_what_is_no_url_of_such_a_database_is_refused_before_anything_connects(text):
    with pytest.raises(ConfigurationError, match="database"):
        Runner(text, work)


@pytest.mark.neoq("T24")
@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("host/name", {"host": "host", "dbname": "name"}),
        ("user@host:5433/name", {"host": "host", "port": 5433, "user": "user"}),
        ("user:p%40ss%2Fw%25rd@host/name", {"user": "user", "password": "p@ss/w%rd"}),
        ("/name?host=one:5432&host=two:5433", {"host": "one,two", "port": "5432,5433"}),
        *(
            (f"host/name?sslmode={mode}", {"sslmode": mode})
            for mode in ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
        ),
    ],
)
def test_a_url_means_what_libpq_means_by_it(scheme, rest, expected):
    engine = engine_of(f"{scheme}://{rest}")
    _, connect = engine.dialect.create_connect_args(engine.url)
    assert connect.items() >= expected.items()


@pytest.mark.neoq("S20", "N20")
def test_a_runner_takes_four_connections_whatever_its_queues_and_its_concurrency(place, start):
    gate = Gate()
    handlers = [handler(f"queue {number}")(lambda job: gate()) for number in range(5)]
    for number in range(5):
        place.enqueue(f"queue {number}")
    try:
        start(*handlers, concurrency=50)
        gate.await_arrived(5)
        assert len(place.backends()) <= 4
    finally:
        gate.open()


@pytest.mark.neoq("S20", "N20", "T15")
def test_a_tiny_pool_serves_enqueuers_and_the_handlers_of_two_queues(place, start, done):
    engine = place.make_engine(pool_size=1, max_overflow=0, pool_timeout=10)
    gate = Gate()
    one, two = (handler(queue)(lambda job: gate()) for queue in ("one", "two"))
    start(one, two, database=engine, concurrency=4)
    for number in range(4):
        with engine.begin() as connection:
            enqueue(connection, ("one", "two")[number % 2])
    gate.await_arrived(4)
    with engine.begin() as connection:
        enqueue(connection, "one")
    gate.open()
    done(5)
    engine.dispose()


@pytest.mark.neoq("T22")
def test_an_application_bounds_how_long_it_waits_for_a_connection(place):
    engine = place.make_engine(pool_size=1, max_overflow=0, pool_timeout=0.01)
    with engine.connect(), pytest.raises(PoolTimeout), engine.begin() as connection:
        enqueue(connection, "work")
    engine.dispose()
    assert place.rows() == []
