"""What enqueue() writes and announces, what it refuses before any I/O, and cancel()."""

import asyncio
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from zoneinfo import ZoneInfo

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, make_url, select, text
from sqlalchemy.exc import NotSupportedError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from support.databases import truncate
from support.servers import libpq
from support.wakeups import ears

from sqla_neoq import Job, NewJob, cancel, enqueue, enqueue_async, enqueue_many, enqueue_many_async, payloads, task
from sqla_neoq.models import DEFAULT_MAX_RETRIES

SOON = datetime(2031, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)
NAMES = [
    "it's",
    'the "best"',
    "Mixed-Case_and.dots",
    "größe-ß",
    "🚀🧑‍🚀",
    "100%",
    "%s %(x)s",
    ":colon ::text",
    "back\\slash \\n",
    "new\nline\ttab",
    " spaces ",
    "{}",
    "$1",
    "--;'",
    "null",
    "x" * 128,
    "🚀" * 128,
]


@task(queue="emails", priority=7, max_retries=5, name="m:send")
def send(user_id: int, *, at: datetime | None = None, price: Decimal = Decimal(1)): ...


@task(name="m:plain")
def plain(): ...


@pytest.fixture(scope="module")
def one_engine(worker_database):
    truncate(worker_database)
    engine = create_engine(worker_database)
    yield engine
    engine.dispose()


@pytest.fixture
def undone(one_engine):
    """A session on empty tables; what it does is undone, so it must not commit."""
    with Session(one_engine) as session:
        session.execute(text("DELETE FROM neoq_jobs"))
        yield session


def only(session) -> Job:
    session.expire_all()
    return session.scalars(select(Job)).one()


# What is written -----------------------------------------------------------------------------------------------------


def test_a_queue_and_a_payload_are_a_job_due_now_with_the_tasks_defaults_to_come(undone):
    enqueue(undone, "greetings", {"message": "hello"})
    job = only(undone)
    assert (job.queue, job.task, job.payload, job.status) == ("greetings", None, {"message": "hello"}, "new")
    assert (job.priority, job.max_retries, job.fingerprint, job.deadline) == (0, None, None, None)
    assert job.run_after == job.created_at == undone.scalar(text("SELECT now()"))


@pytest.mark.parametrize("payload", [None, {}])
def test_no_payload_is_an_empty_object(undone, payload):
    enqueue(undone, "q", payload)
    assert only(undone).payload == {}


@pytest.mark.parametrize("payload", ["text", 5, 1.5, True, [], [{"a": [None]}], "", {"": ""}])
def test_a_payload_for_a_queue_is_any_json_value(undone, payload):
    enqueue(undone, "q", payload)
    assert only(undone).payload == payload


def test_every_option_reaches_its_column(undone):
    options = {"run_after": SOON, "deadline": SOON + timedelta(days=1), "priority": -100, "max_retries": 0}
    enqueue(undone, "q", [1], task="m:f", fingerprint="key", **options)
    job = only(undone)
    assert (job.task, job.priority, job.max_retries, job.fingerprint) == ("m:f", -100, 0, "key")
    assert (job.run_after, job.deadline) == (SOON, SOON + timedelta(days=1))


def test_a_task_brings_its_queue_and_its_policy(undone):
    send.enqueue(undone, 5, at=SOON)
    job = only(undone)
    assert (job.queue, job.task, job.priority, job.max_retries) == ("emails", "m:send", 7, 5)
    assert job.payload == {"user_id": 5, "at": "2031-02-03T04:05:06.789012Z"}


WAYS = pytest.mark.parametrize(
    "way",
    [
        lambda session, **options: enqueue(session, send, {"user_id": 5}, **options),
        lambda session, **options: send.using(**options).enqueue(session, user_id=5),
        lambda session, **options: enqueue_many(session, [send.using(**options).job(5)]),
        lambda session, **options: enqueue(session, send.using(**options), {"user_id": 5}),
        lambda session, **options: enqueue(session, "emails", {"user_id": 5}, task=send, **options),
    ],
    ids=["enqueue", "using", "many", "enqueue-using", "by-queue"],
)


@WAYS
def test_a_task_can_be_enqueued_in_every_way_with_the_same_result(undone, way):
    way(undone)
    job = only(undone)
    assert (job.queue, job.task, job.priority, job.max_retries, job.payload) == (
        "emails",
        "m:send",
        7,
        5,
        {"user_id": 5},
    )


@WAYS
def test_an_explicit_zero_goes_before_the_task_s_own(undone, way):
    way(undone, priority=0, max_retries=0)
    job = only(undone)
    assert (job.priority, job.max_retries) == (0, 0)


@WAYS
def test_none_leaves_it_to_the_task(undone, way):
    way(undone, priority=None, max_retries=None, run_after=None, deadline=None, fingerprint=None)
    job = only(undone)
    assert (job.priority, job.max_retries) == (7, 5)


@WAYS
def test_unique_means_task_and_arguments(undone, way):
    way(undone, unique=True)
    assert only(undone).fingerprint == payloads.fingerprint("m:send", {"user_id": 5})
    assert not enqueue(undone, send, {"user_id": 5}, unique=True).created
    assert enqueue(undone, send, {"user_id": 6}, unique=True).created


def test_the_call_s_options_go_before_those_of_using(undone):
    base = send.using(priority=1, max_retries=1, queue="other")
    enqueue(undone, base, {"user_id": 5}, priority=2)
    job = only(undone)
    assert (job.queue, job.priority, job.max_retries) == ("other", 2, 1)


def test_a_queue_named_beside_a_task_goes_before_the_task_s_own(undone):
    enqueue(undone, "urgent", {"user_id": 5}, task=send.using(queue="other"))
    job = only(undone)
    assert (job.queue, job.task) == ("urgent", "m:send")


def test_who_says_nothing_of_retries_leaves_them_open(undone):
    plain.enqueue(undone)
    assert only(undone).max_retries is None
    assert plain.retries_of(None) == DEFAULT_MAX_RETRIES


@pytest.mark.parametrize(
    "zone", [UTC, timezone(timedelta(hours=-23)), timezone(timedelta(hours=5, minutes=45)), ZoneInfo("Asia/Tokyo")]
)
def test_a_time_in_any_zone_is_its_instant(undone, zone):
    enqueue(undone, "q", run_after=SOON.astimezone(zone), deadline=SOON.astimezone(zone))
    job = only(undone)
    assert job.run_after == job.deadline == SOON


def test_the_ends_of_the_calendar_can_be_stored(undone):
    undone.execute(text("SET LOCAL timezone = 'UTC'"))
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    enqueue(undone, "q", run_after=first, deadline=last)
    job = only(undone)
    assert (job.run_after, job.deadline) == (first, last)


def test_a_timedelta_counts_from_the_statement_and_not_from_the_transaction_s_begin(undone):
    begun = undone.scalar(text("SELECT now()"))
    undone.execute(text("SELECT pg_sleep(0.06)"))
    before = undone.scalar(text("SELECT clock_timestamp()"))
    enqueue(undone, "q", run_after=timedelta(0), deadline=timedelta(hours=1))
    after = undone.scalar(text("SELECT clock_timestamp()"))
    job = only(undone)
    assert begun + timedelta(seconds=0.06) <= before <= job.run_after <= after
    assert job.deadline - job.run_after == timedelta(hours=1)


def test_this_machine_s_clock_decides_nothing(undone, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    enqueue(undone, "q", run_after=timedelta(minutes=1))
    late = undone.scalar(text("SELECT run_after - statement_timestamp() FROM neoq_jobs"))
    assert timedelta(0) < late <= timedelta(minutes=1)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
def test_any_name_is_only_a_name(undone, name):
    first = enqueue(undone, name, {name: name}, task=name, fingerprint=name)
    again = enqueue(undone, name, {name: name}, task=name, fingerprint=name)
    assert (first.created, again.created, again.id) == (True, False, first.id)
    job = only(undone)
    assert (job.queue, job.task, job.fingerprint, job.payload) == (name, name, name, {name: name})


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=128)
zones = st.sampled_from([UTC, timezone(timedelta(hours=14)), timezone(-timedelta(hours=11, minutes=59, seconds=59))])
times = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=zones)
delays = st.timedeltas(timedelta(0), timedelta(days=36_525))
scalars = st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


@settings(deadline=None, max_examples=60)
@given(
    queue=texts,
    payload=json_values.filter(lambda value: value is not None),
    options=st.fixed_dictionaries(
        {},
        optional={
            "task": texts,
            "run_after": times | delays,
            "deadline": times | delays,
            "priority": st.integers(-100, 100),
            "max_retries": st.integers(0, 2**31 - 1),
            "fingerprint": texts,
        },
    ),
)
def test_whatever_can_be_said_of_a_job_reads_back_as_it_was_said(one_engine, queue, payload, options):
    with Session(one_engine) as session:
        enqueue(session, queue, payload, **options)
        row = session.execute(select(Job.__table__, text("statement_timestamp() AS now"))).one()
    said = {name: value for name, value in options.items() if name not in {"run_after", "deadline"}}
    assert {name: getattr(row, name) for name in said} == said
    assert row.queue == queue
    assert row.payload == payload
    for name in ("run_after", "deadline"):
        value = options.get(name)
        if isinstance(value, datetime):
            assert getattr(row, name) == value
        elif value is not None:
            # From a statement that was after the begin and before the one that reads.
            assert row.created_at <= getattr(row, name).astimezone(UTC) - value <= row.now


# What is refused, before any I/O -------------------------------------------------------------------------------------


@pytest.fixture
def nowhere():
    """A session whose first contact with its database would fail."""
    with Session(create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere", poolclass=NullPool)) as session:
        yield session


def test_a_good_job_is_where_the_database_is_asked(nowhere):
    with pytest.raises(OperationalError):
        enqueue(nowhere, "q")


REFUSED = [
    ({"run_after": datetime(2030, 1, 1)}, ValueError, "run_after=.*naive"),
    ({"deadline": datetime(2030, 1, 1)}, ValueError, "deadline=.*naive"),
    ({"run_after": -timedelta(seconds=1)}, ValueError, "run_after=.*negative"),
    ({"run_after": timedelta.max}, ValueError, "run_after=.*longer than 36525 days"),
    ({"deadline": timedelta.max}, ValueError, "deadline=.*longer than 36525 days"),
    ({"run_after": 1e18}, TypeError, r"run_after=1e\+18: .*timedelta\(seconds="),
    ({"run_after": float("nan")}, TypeError, "run_after=nan: expected an aware datetime or a timedelta"),
    ({"priority": 101}, ValueError, "priority=101"),
    ({"priority": True}, TypeError, "priority=True"),
    ({"max_retries": -1}, ValueError, "max_retries=-1"),
    ({"unique": "yes"}, TypeError, "unique='yes'"),
    ({"fingerprint": ""}, ValueError, "fingerprint=''"),
    ({"fingerprint": "\0"}, ValueError, "fingerprint=.*NUL"),
    ({"colour": "red"}, TypeError, "colour"),
]


@pytest.mark.parametrize(("options", "error", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_option_that_cannot_be_is_refused_before_anything_connects(nowhere, options, error, sentence):
    for call in (
        lambda: enqueue(nowhere, "q", **options),
        lambda: enqueue(nowhere, send, {"user_id": 1}, **options),
        lambda: enqueue(nowhere, "q", {"user_id": 1}, task=send, **options),
        lambda: send.using(**options),
        lambda: asyncio.run(enqueue_async(None, "q", **options)),
    ):
        with pytest.raises(error, match=sentence):
            call()


@pytest.mark.parametrize(
    ("target", "payload", "error", "sentence"),
    [
        ("", None, ValueError, "queue='': cannot be empty"),
        ("q" * 129, None, ValueError, "queue=.*129 characters, the most are 128"),
        ("a\0b", None, ValueError, "queue=.*NUL"),
        ("\ud800", None, ValueError, "queue=.*lone surrogate"),
        (5, None, TypeError, "target=5: expected a Task or the name of a queue, got int"),
        (None, None, TypeError, "target=None: expected a Task or the name of a queue, got NoneType"),
        (print, None, TypeError, "target=<built-in function print>: expected a Task or the name of a queue"),
        ("q", float("nan"), ValueError, "payload is nan"),
        ("q", {"a": "\0"}, ValueError, r"payload\['a'\] has a NUL"),
        ("q", {"\ud800": 1}, ValueError, "lone surrogate"),
        ("q", {1: 1}, TypeError, "JSON keys are str"),
        ("q", {"at": SOON}, TypeError, r"payload\['at'\] is .*: pass its .isoformat"),
        ("q", "x" * (1024 * 1024), ValueError, "payload: 1,048,578 bytes of JSON, the most are 1,048,576"),
        (send, None, TypeError, "missing 1 required positional argument: 'user_id'"),
        (send, {"user_id": "5"}, TypeError, "argument 'user_id' must be int, not '5'"),
        (send, {"user_id": 5, "colour": 1}, TypeError, "unexpected keyword argument 'colour'"),
        (send, [5], TypeError, r"payload=\[5\]: expected a dict of m:send's keyword arguments"),
        (send, {5: 5}, TypeError, r"payload=\{5: 5\}: expected a dict of m:send's keyword arguments"),
        (send, {"user_id": 5, "at": SOON.date()}, TypeError, "argument 'at' must be"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_job_that_cannot_be_is_refused_before_anything_connects(nowhere, target, payload, error, sentence):
    with pytest.raises(error, match=sentence):
        enqueue(nowhere, target, payload)


def test_a_task_is_named_once(nowhere):
    with pytest.raises(TypeError, match=r"task=.*: the target <Task 'm:send' .* is a task already; name a queue"):
        enqueue(nowhere, send, {"user_id": 5}, task="m:other")


@pytest.mark.parametrize(
    ("jobs", "sentence"),
    [
        ([NewJob.of("q", {}), "q"], r"jobs\[1\]='q': expected what Task.job\(...\) makes, got str"),
        ([{"queue": "q"}], r"jobs\[0\]=.*got dict"),
        ([plain], r"jobs\[0\]=<Task 'm:plain' .*got Task"),
    ],
    ids=["str", "dict", "Task"],
)
def test_what_is_no_new_job_is_refused_with_its_place(nowhere, jobs, sentence):
    with pytest.raises(TypeError, match=sentence):
        enqueue_many(nowhere, jobs)
    with pytest.raises(TypeError, match=sentence):
        asyncio.run(enqueue_many_async(None, jobs))


# Who is woken --------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening(engine):
    with ears(engine.url) as listening:
        yield listening


def test_nobody_is_told_when_nobody_is_hungry(listening, engine):
    with Session(engine) as session, session.begin():
        enqueue(session, "q")
    assert listening.heard() == []
    listening.be_hungry("q")
    with Session(engine) as session, session.begin():
        enqueue(session, "q")
    assert listening.heard() == ["q"]


def test_only_the_queues_that_somebody_is_hungry_for_are_announced_each_once(listening, engine):
    listening.be_hungry("a", "b", "nothing")
    with Session(engine) as session, session.begin():
        enqueue_many(session, [NewJob.of(queue, {}) for queue in "abcabc"])
        enqueue(session, "a")
    assert sorted(listening.heard()) == ["a", "b"]


def test_any_number_of_runners_may_be_hungry(listening, engine):
    listening.be_hungry("q")
    with ears(engine.url, "q") as other:
        with Session(engine) as session, session.begin():
            enqueue(session, "q")
        assert listening.heard() == other.heard() == ["q"]


def test_asking_who_is_hungry_leaves_no_lock_behind(listening, engine):
    with Session(engine) as session:
        enqueue_many(session, [NewJob.of(f"q{n}", {}) for n in range(20)])
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert session.scalar(text(held)) == 0


def test_jobs_due_within_five_seconds_are_announced_and_later_ones_are_not(listening, engine):
    listening.be_hungry("soon", "later", "past")
    with Session(engine) as session, session.begin():
        enqueue(session, "soon", run_after=timedelta(seconds=4))
        enqueue(session, "later", run_after=timedelta(seconds=60))
        enqueue(session, "past", run_after=datetime(2020, 1, 1, tzinfo=UTC))
    assert sorted(listening.heard()) == ["past", "soon"]


def test_a_duplicate_announces_nothing(listening, engine):
    listening.be_hungry("q")
    for heard in (["q"], []):
        with Session(engine) as session, session.begin():
            enqueue(session, "q", unique=True)
        assert listening.heard() == heard


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
def test_a_queue_of_any_name_is_announced_by_it(listening, engine, name):
    listening.be_hungry(name)
    with Session(engine) as session, session.begin():
        enqueue(session, name)
    assert listening.heard() == [name]


def test_plain_sql_copy_and_the_orm_wake_as_well(listening, engine):
    listening.be_hungry("sql", "orm", "copy")
    with closing(psycopg.connect(libpq(engine.url), autocommit=True)) as connection:
        connection.execute("INSERT INTO neoq_jobs (queue) VALUES ('sql'), ('sql')")
        with connection.cursor().copy("COPY neoq_jobs (queue, payload) FROM STDIN") as copy:
            copy.write_row(("copy", "{}"))
    with Session(engine) as session, session.begin():
        session.add_all([Job(queue="orm") for _ in range(3)])
    assert listening.heard() == ["sql", "copy", "orm"]


def test_rows_that_wait_for_nobody_announce_nothing(listening, engine):
    listening.be_hungry("q")
    with Session(engine) as session, session.begin():
        session.add(Job(queue="q", status="processed", finished_at=text("now()")))
        session.add(Job(queue="q", status="running", claim_token=1))
    assert listening.heard() == []


def test_another_installation_s_hunger_is_not_this_one_s(listening, engine):
    connection = psycopg.connect(libpq(engine.url), autocommit=True)
    with closing(connection):
        connection.execute("SELECT pg_advisory_lock_shared(hashtextextended('queue:q', 1))")
        with Session(engine) as session, session.begin():
            enqueue(session, "q")
        assert listening.heard() == []


def test_wake_ups_can_be_switched_off_for_a_transaction(listening, engine):
    listening.be_hungry("q")
    with Session(engine) as session:
        session.execute(text("SET LOCAL neoq.notify = 'off'"))
        enqueue(session, "q")
        session.commit()
        assert listening.heard() == []
        enqueue(session, "q")
        session.commit()
        assert listening.heard() == ["q"]


def prepares_transactions(engine):
    with engine.connect() as connection:
        if connection.scalar(text("SHOW max_prepared_transactions")) == "0":
            pytest.skip("the server that --pg names has two-phase commit switched off (max_prepared_transactions = 0)")
    return engine


def test_two_phase_commit_works_with_the_wake_ups_off(listening, engine):
    prepares_transactions(engine)
    listening.be_hungry("q")
    with Session(engine, twophase=True) as session:
        session.execute(text("SET LOCAL neoq.notify = 'off'"))
        enqueue(session, "q", {"n": 1})
        session.commit()
    with Session(engine, twophase=True) as session:
        session.execute(text("SET LOCAL neoq.notify = 'off'"))
        enqueue(session, "q", {"n": 2})
        session.prepare()
        session.rollback()
    with Session(engine) as session:
        assert session.scalars(select(Job.payload)).all() == [{"n": 1}]
    assert listening.heard() == []


def test_two_phase_commit_with_the_wake_ups_on_fails_when_somebody_is_hungry(listening, engine):
    # What the documentation warns of: PostgreSQL refuses it, and the transaction is lost.
    prepares_transactions(engine)
    listening.be_hungry("q")
    with engine.connect() as connection:
        enqueue(connection, "q")
        with pytest.raises(NotSupportedError, match="cannot PREPARE a transaction that has executed"):
            connection.execute(text("PREPARE TRANSACTION 'neoq'"))


def test_a_producer_needs_no_more_than_to_insert_and_to_select(listening, engine):
    listening.be_hungry("q")
    with engine.begin() as connection:
        connection.execute(text("CREATE ROLE neoq_test_producer"))
        schema = connection.scalar(
            text("SELECT relnamespace::regnamespace FROM pg_class WHERE oid = 'neoq_jobs'::regclass")
        )
        connection.execute(text(f"GRANT USAGE ON SCHEMA {schema} TO neoq_test_producer"))
        connection.execute(text("GRANT INSERT, SELECT ON neoq_jobs TO neoq_test_producer"))
        connection.execute(text("SET LOCAL ROLE neoq_test_producer"))
        assert enqueue(connection, "q", unique=True).created
        assert not enqueue(connection, "q", unique=True).created
        connection.execute(text("RESET ROLE"))
        connection.execute(text("DROP OWNED BY neoq_test_producer"))
        connection.execute(text("DROP ROLE neoq_test_producer"))
    assert listening.heard() == ["q"]


# Cancelling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["new", "failed"])
def test_a_waiting_job_is_cancelled(undone, status):
    made = enqueue(undone, "q", unique=True, run_after=timedelta(days=1))
    undone.execute(text("UPDATE neoq_jobs SET status = :status"), {"status": status})
    assert cancel(undone, made.id)
    job = only(undone)
    assert (job.status, job.cancel_requested_at, job.claim_token) == ("cancelled", None, None)
    assert job.finished_at is not None
    assert not cancel(undone, made.id)
    # It is finished, so its like can be enqueued again.
    assert enqueue(undone, "q", unique=True).created


def test_a_running_job_is_asked_to_stop(undone):
    made = enqueue(undone, "q", unique=True)
    undone.execute(text("UPDATE neoq_jobs SET status = 'running', claim_token = 1"))
    assert cancel(undone, made.id)
    job = only(undone)
    assert (job.status, job.claim_token, job.finished_at) == ("running", 1, None)
    assert job.cancel_requested_at is not None
    assert cancel(undone, made.id)
    assert not enqueue(undone, "q", unique=True).created


@pytest.mark.parametrize("status", ["processed", "cancelled"])
def test_a_finished_job_cannot_be_cancelled(undone, status):
    made = enqueue(undone, "q")
    undone.execute(text("UPDATE neoq_jobs SET status = :status, finished_at = now()"), {"status": status})
    assert not cancel(undone, made.id)
    assert only(undone).status == status


@pytest.mark.parametrize("job_id", [999, 0, -1, 2**63, 2**100])
def test_an_unknown_job_is_none_to_cancel_and_the_transaction_goes_on(undone, job_id):
    assert cancel(undone, job_id) is False
    assert enqueue(undone, "q").created


@pytest.mark.parametrize("job_id", [True, "1", 1.0, None])
def test_an_id_is_a_number(nowhere, job_id):
    with pytest.raises(TypeError, match=r"job_id=.*: expected int, got"):
        cancel(nowhere, job_id)


def test_a_cancellation_is_undone_with_its_transaction(engine):
    with engine.begin() as connection:
        made = enqueue(connection, "q")
    with engine.connect() as connection:
        assert cancel(connection, made.id)
        connection.rollback()
    with Session(engine) as session:
        assert only(session).status == "new"


def test_asynchronous_code_cancels_through_run_sync(engine):
    async def work():
        async_engine = create_async_engine(engine.url, poolclass=NullPool)
        async with AsyncSession(async_engine) as session, session.begin():
            made = await enqueue_async(session, "q")
            return await session.run_sync(cancel, made.id)

    assert asyncio.run(work()) is True
    with Session(engine) as session:
        assert only(session).status == "cancelled"


def test_a_job_in_another_schema_is_cancelled_there(schema_engine):
    with schema_engine.begin() as connection:
        made = enqueue(connection, "q")
        assert cancel(connection, made.id)


def test_a_url_with_a_password_is_not_in_any_refusal():
    engine = create_engine(make_url("postgresql+psycopg://me:secret@127.0.0.1:1/nowhere"), poolclass=NullPool)
    with pytest.raises(TypeError) as refusal:
        enqueue(engine, "q")
    assert "secret" not in str(refusal.value)
