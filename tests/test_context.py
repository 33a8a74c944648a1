"""What a running job knows of itself, and where current_job() finds it."""

import asyncio
import contextvars
import threading
from datetime import UTC, datetime, timedelta

import pytest
from support.running import MOMENT, claimed

from sqla_neoq import JobCancelled, JobContext, JobTimeout, NoCurrentJob, current_job, handler, task
from sqla_neoq.context import ClaimedJob, StopReason, enter, leave


class NoTransaction:
    @property
    def session(self):
        raise AssertionError("nobody asked for a session")


class ATransaction:
    session = object()


def context(transaction=None, **row):
    return JobContext(claimed(**row), transaction or NoTransaction())


def test_a_job_shows_its_row():
    later = MOMENT + timedelta(days=1)
    row = {"id": 5, "token": 9, "queue": "emails", "task": "m:send", "priority": -3, "retries": 2, "max_retries": 7}
    times = {"run_after": MOMENT.timestamp(), "deadline": later.timestamp(), "created_at": MOMENT.timestamp()}
    job = context(**row, **times, fingerprint="key")
    assert {name: getattr(job, name) for name in row} == row
    assert (job.run_after, job.deadline, job.created_at, job.fingerprint) == (MOMENT, later, MOMENT, "key")
    assert repr(job) == "<JobContext id=5 task='m:send' queue='emails' attempt=3>"


def test_times_that_only_postgresql_knows_are_the_last_and_the_first_of_all():
    job = context(run_after=float("-inf"), deadline=float("inf"), created_at=9e12)
    assert job.run_after == datetime.min.replace(tzinfo=UTC)
    assert job.deadline == job.created_at == datetime.max.replace(tzinfo=UTC)


def test_every_column_of_the_claim_has_its_property_or_none_that_matters():
    shown = set(ClaimedJob._fields) & set(dir(JobContext))
    assert set(ClaimedJob._fields) - shown == {"crashes", "ran_at"}


@pytest.mark.parametrize(("retries", "attempt"), [(0, 1), (1, 2), (23, 24)])
def test_attempts_count_from_one(retries, attempt):
    assert context(retries=retries).attempt == attempt


def test_the_payload_is_parsed_once_and_only_when_asked_for():
    job = context(payload='{"a": [1, 2.0, null, "ü"], "big": 123456789012345678901234567890}')
    assert job.payload == {"a": [1, 2.0, None, "ü"], "big": 123456789012345678901234567890}
    assert job.payload is job.payload
    unreadable = context(payload="1" * 5000)
    assert unreadable.id == 1
    with pytest.raises(ValueError, match="the payload cannot be read as JSON"):
        _ = unreadable.payload


def test_a_payload_of_null_is_none_and_not_unread():
    job = context(payload="null")
    assert job.payload is None
    assert job.payload is None


def test_the_session_is_that_of_the_run_and_only_when_asked_for():
    assert context(ATransaction()).session is ATransaction.session
    job = context()
    assert (job.id, job.payload, job.cancelled) == (1, {}, False)


def test_a_job_nobody_asked_to_stop_goes_on():
    job = context()
    assert not job.cancelled
    assert job.stop_reason is None
    job.raise_if_cancelled()


@pytest.mark.parametrize(
    ("reason", "error", "sentence"),
    [
        (StopReason.TIMEOUT, JobTimeout, "job 1 ran past its timeout"),
        (StopReason.CANCELLED, JobCancelled, "job 1 was asked to stop"),
        (StopReason.SHUTDOWN, JobCancelled, "job 1 was asked to stop"),
        (StopReason.LOST, JobCancelled, "job 1 was asked to stop"),
    ],
)
def test_a_job_asked_to_stop_stops_where_it_looks(reason, error, sentence):
    job = context()
    job.ask_to_stop(reason)
    assert job.cancelled
    assert job.stop_reason is reason
    with pytest.raises(error, match=sentence):
        job.raise_if_cancelled()


def test_the_first_reason_to_stop_stays():
    job = context()
    job.ask_to_stop(StopReason.TIMEOUT)
    job.ask_to_stop(StopReason.SHUTDOWN)
    assert job.stop_reason is StopReason.TIMEOUT


def test_another_thread_can_ask():
    job = context()
    thread = threading.Thread(target=job.ask_to_stop, args=(StopReason.CANCELLED,))
    thread.start()
    thread.join()
    assert job.cancelled


def test_a_job_is_for_reading():
    job = context()
    for name in ("id", "queue", "payload", "session", "cancelled", "colour"):
        with pytest.raises(AttributeError):
            setattr(job, name, 1)


def test_there_is_no_current_job_outside_one():
    with pytest.raises(NoCurrentJob, match=r"current_job\(\) was called outside a job; in a test, .*drain\(\)"):
        current_job()


def test_the_current_job_is_the_entered_one_until_it_is_left():
    outer, inner = context(id=1), context(id=2)
    mark = enter(outer)
    assert current_job() is outer
    inner_mark = enter(inner)
    assert current_job() is inner
    leave(inner_mark)
    assert current_job() is outer
    leave(mark)
    with pytest.raises(NoCurrentJob):
        current_job()


def test_each_thread_has_its_own():
    mark = enter(context())
    seen = []

    def look():
        try:
            seen.append(current_job())
        except NoCurrentJob:
            seen.append(None)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    copied = threading.Thread(target=contextvars.copy_context().run, args=(look,))
    copied.start()
    copied.join()
    leave(mark)
    assert seen[0] is None
    # A context handed on is handed on with its job.
    assert seen[1].id == 1


def test_each_asyncio_task_has_its_own():
    async def run(id_, all_entered):
        mark = enter(context(id=id_))
        await all_entered.wait()
        found = current_job().id
        leave(mark)
        return found

    async def main():
        all_entered = asyncio.Event()
        running = asyncio.gather(*(asyncio.create_task(run(id_, all_entered)) for id_ in (1, 2, 3)))
        asyncio.get_running_loop().call_soon(all_entered.set)
        return await running

    assert asyncio.run(main()) == [1, 2, 3]


def test_a_task_or_handler_called_directly_is_just_its_function():
    @task(name="t")
    def tells():
        return current_job().id

    @handler("q")
    def handles(job):
        return job.id

    with pytest.raises(NoCurrentJob):
        tells()
    assert handles(context(id=8)) == 8
    mark = enter(context(id=7))
    assert tells() == 7
    leave(mark)
