"""requeue(): a dead job put back in the caller's transaction, or kept out with an answer and never an exception."""

import asyncio
from datetime import UTC, datetime

import pytest
from sqlalchemy import create_engine, event, insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from sqla_neoq import (
    DeadJob,
    Enqueued,
    Job,
    cancel_async,
    enqueue,
    enqueue_async,
    producer,
    requeue,
    requeue_async,
    requeue_many,
    requeue_many_async,
)

BORN = datetime(2020, 1, 2, tzinfo=UTC)
NEVER = datetime(2031, 2, 3, tzinfo=UTC)


def dead(engine, id_=7, **columns) -> int:
    """Put a job into the dead table, as burying it would have."""
    row = {
        "id": id_,
        "queue": "q",
        "task": "m:f",
        "priority": 9,
        "payload": {"n": 1},
        "fingerprint": None,
        "run_after": BORN,
        "retries": 23,
        "max_retries": 23,
        "crashes": 3,
        "created_at": BORN,
        "ran_at": BORN,
        "reason": "crashed",
        "worker_id": 4,
        "error": "boom",
    }
    with engine.begin() as connection:
        connection.execute(insert(DeadJob), {**row, **columns})
    return id_


def everything(engine) -> tuple[list[int], list[int]]:
    """Return the ids in the queue and the ids of the dead."""
    with Session(engine) as session:
        return sorted(session.scalars(select(Job.id))), sorted(session.scalars(select(DeadJob.id)))


def test_a_dead_job_begins_anew_under_its_id(engine):
    dead(engine, fingerprint="key", deadline=NEVER)
    with engine.begin() as connection:
        assert requeue(connection, 7) == Enqueued(7, created=True)
    assert everything(engine) == ([7], [])
    with Session(engine) as session:
        job = session.scalars(select(Job)).one()
        assert (job.id, job.queue, job.task, job.priority, job.payload) == (7, "q", "m:f", 9, {"n": 1})
        assert (job.fingerprint, job.max_retries, job.created_at, job.deadline) == ("key", 23, BORN, NEVER)
        assert (job.status, job.retries, job.crashes) == ("new", 0, 0)
        assert (job.ran_at, job.worker_id, job.claim_token, job.error, job.finished_at) == (None,) * 5
        assert session.scalar(select(text("now() - run_after < interval '1 minute' FROM neoq_jobs")))


def test_a_deadline_that_has_passed_is_dropped(engine):
    dead(engine, deadline=BORN, reason="deadline")
    with engine.begin() as connection:
        requeue(connection, 7)
        assert connection.scalar(select(Job.deadline)) is None


def test_new_jobs_never_get_the_id_of_one_that_came_back(engine):
    with engine.begin() as connection:
        made = enqueue(connection, "q")
        connection.execute(text("DELETE FROM neoq_jobs"))
    dead(engine, made.id)
    with engine.begin() as connection:
        requeue(connection, made.id)
        assert enqueue(connection, "q").id > made.id


@pytest.mark.parametrize("status", ["new", "running", "failed"])
def test_an_unfinished_twin_keeps_it_dead_and_the_transaction_goes_on(engine, status):
    dead(engine, fingerprint="key")
    with engine.begin() as connection:
        twin = enqueue(connection, "q", fingerprint="key").id
        connection.execute(
            text("UPDATE neoq_jobs SET status = :status, claim_token = CASE :status WHEN 'running' THEN 1 END"),
            {"status": status},
        )
        assert requeue(connection, 7) == Enqueued(twin, created=False)
        assert enqueue(connection, "other").created
    assert everything(engine)[1] == [7]


@pytest.mark.parametrize("other", [{"queue": "another", "fingerprint": "key"}, {"queue": "q", "fingerprint": "lock"}])
def test_a_job_with_another_key_keeps_nothing_out(engine, other):
    dead(engine, fingerprint="key")
    with engine.begin() as connection:
        enqueue(connection, target=other["queue"], fingerprint=other["fingerprint"])
        assert requeue(connection, 7) == Enqueued(7, created=True)


@pytest.mark.parametrize("status", ["processed", "cancelled"])
def test_a_finished_twin_does_not_matter(engine, status):
    dead(engine, fingerprint="key")
    with engine.begin() as connection:
        enqueue(connection, "q", fingerprint="key")
        connection.execute(text("UPDATE neoq_jobs SET status = :status, finished_at = now()"), {"status": status})
        assert requeue(connection, 7) == Enqueued(7, created=True)


def test_a_job_already_there_under_its_id_keeps_it_out(engine):
    dead(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (id, queue) VALUES (7, 'by hand')"))
        assert requeue(connection, 7) == Enqueued(7, created=False)
        assert connection.scalar(select(Job.queue)) == "by hand"
    assert everything(engine) == ([7], [7])


@pytest.mark.parametrize("job_id", [999, 0, -1, 2**63, 2**100])
def test_an_unknown_job_is_none_to_put_back(engine, job_id):
    dead(engine)
    with engine.begin() as connection:
        assert requeue(connection, job_id) is None
        assert enqueue(connection, "q").created
    assert everything(engine)[1] == [7]


def test_a_living_job_is_none_to_put_back(engine):
    with engine.begin() as connection:
        made = enqueue(connection, "q")
        assert requeue(connection, made.id) is None


def test_it_is_undone_with_its_transaction(engine):
    dead(engine)
    with engine.connect() as connection:
        assert requeue(connection, 7)
        assert requeue(connection, 7) is None
        connection.rollback()
    assert everything(engine) == ([], [7])


def test_many_are_put_back_each_on_its_own_terms(engine):
    for id_, key in ((11, "b"), (12, "a"), (13, "b"), (14, None), (15, "taken")):
        dead(engine, id_, fingerprint=key)
    with Session(engine) as session, session.begin():
        twin = enqueue(session, "q", fingerprint="taken").id
        results = requeue_many(session, (id_ for id_ in (15, 14, 13, 12, 11, 99, 14, -1)))
    back = [Enqueued(id_, created=True) for id_ in (14, 12, 11)]
    assert results == [
        Enqueued(twin, created=False),
        back[0],
        # Of two dead jobs with one key only the elder comes back.
        Enqueued(11, created=False),
        *back[1:],
        None,
        back[0],
        None,
    ]
    assert everything(engine) == (sorted([11, 12, 14, twin]), [13, 15])
    with Session(engine) as session:
        assert requeue_many(session, []) == []


def test_a_twin_that_finishes_between_the_two_looks_does_not_keep_it_out(engine):
    dead(engine, fingerprint="key")
    other = create_engine(engine.url, poolclass=NullPool)
    with engine.begin() as connection:
        enqueue(connection, "q", fingerprint="key")

    @event.listens_for(engine, "after_cursor_execute")
    def finish(connection, cursor, statement, *rest):
        if "INSERT INTO neoq_jobs" in statement:
            with other.begin() as second:
                second.execute(text("UPDATE neoq_jobs SET status = 'processed', finished_at = now() WHERE id <> 7"))

    with engine.begin() as connection:
        assert requeue(connection, 7) == Enqueued(7, created=True)


def test_a_twin_that_comes_and_goes_for_ever_does_not_hang_the_caller(engine, monkeypatch):
    monkeypatch.setattr(producer, "MOST_ROUNDS", 5)
    dead(engine, fingerprint="key")
    other = create_engine(engine.url, poolclass=NullPool)

    @event.listens_for(engine, "before_cursor_execute")
    def come(connection, cursor, statement, *rest):
        if "INSERT INTO neoq_jobs" in statement:
            with other.begin() as second:
                enqueue(second, "q", fingerprint="key")

    @event.listens_for(engine, "after_cursor_execute")
    def go(connection, cursor, statement, *rest):
        if "INSERT INTO neoq_jobs" in statement:
            with other.begin() as second:
                second.execute(text("UPDATE neoq_jobs SET status = 'processed', finished_at = now()"))

    with engine.connect() as connection, pytest.raises(RuntimeError, match="came and went 5 times during one requeue"):
        requeue(connection, 7)


def test_it_flushes_nothing_of_the_caller(engine):
    dead(engine)
    with Session(engine) as session:
        session.add(Job(queue="pending"))
        requeue(session, 7)
        assert session.new


def test_a_dead_job_in_another_schema_is_put_back_there(schema_engine):
    with schema_engine.connect() as connection:
        schema = connection.get_execution_options()["neoq_schema"]
    mapped = schema_engine.execution_options(schema_translate_map={None: schema})
    dead(mapped, fingerprint="key")
    with schema_engine.begin() as connection:
        assert requeue(connection, 7) == Enqueued(7, created=True)
        assert requeue(connection, 7) is None


def test_asynchronous_code_puts_back_and_cancels(engine):
    for id_ in (11, 12, 13):
        dead(engine, id_)

    async def work():
        async_engine = create_async_engine(engine.url, poolclass=NullPool)
        async with AsyncSession(async_engine) as session, session.begin():
            assert await requeue_async(session, 11) == Enqueued(11, created=True)
            assert await requeue_many_async(session, (n for n in (12, 11))) == [Enqueued(12, created=True), None]
            made = await enqueue_async(session, "q")
            assert await cancel_async(session, made.id) is True
        async with async_engine.begin() as connection:
            assert await requeue_async(connection, 13) == Enqueued(13, created=True)
            assert await cancel_async(connection, 2**63) is False

    asyncio.run(work())
    assert everything(engine)[1] == []


@pytest.mark.parametrize("job_id", [True, "1", 1.0, None])
def test_an_id_is_a_number(engine, job_id):
    with engine.connect() as connection:
        with pytest.raises(TypeError, match=r"^job_id=.*: expected int, got"):
            requeue(connection, job_id)
        with pytest.raises(TypeError, match=r"^job_ids\[1\]=.*: expected int, got"):
            requeue_many(connection, [1, job_id])
        assert not connection.in_transaction()


def test_what_cannot_hold_the_transaction_is_refused_with_the_remedy(engine):
    with pytest.raises(TypeError, match="pass a Session, or a Connection"):
        requeue(engine, 7)
    with pytest.raises(TypeError, match=r"await requeue_async\(\) instead"):
        requeue(AsyncSession(create_async_engine(engine.url)), 7)
    with pytest.raises(TypeError, match=r"await requeue_many_async\(\) instead"):
        requeue_many(AsyncSession(create_async_engine(engine.url)), [7])
    with pytest.raises(TypeError, match=r"for one call requeue\(\)"):
        requeue_many(Session(engine), 7)
    with pytest.raises(TypeError, match=r"in synchronous code call requeue\(\)"):
        asyncio.run(requeue_async(Session(engine), 7))
    with pytest.raises(TypeError, match=r"in synchronous code call cancel\(\)"):
        asyncio.run(cancel_async(Session(engine), 7))
