"""Jobs with a time: S56-S60, N02, N06 and the rows about them."""

from datetime import timedelta

import pytest
from sqlalchemy import text
from support import eventually
from support.running import Gate, ago, in_thread

from sqla_neoq import enqueue, handler

HOUR = timedelta(hours=1)
OFTEN = timedelta(milliseconds=100)


@handler("work")
def work(job):
    pass


@pytest.mark.neoq("S29", "N02")
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_a_job_is_due_at_one_moment_in_every_time_zone_however_that_is_said(place, zone):
    table = place.prefix.replace(":", r"\:") + "neoq_jobs"
    insert = text(f"INSERT INTO {table} (queue, run_after) VALUES ('work', now() + :after) RETURNING id")
    now = place.sql("SELECT now()")
    with place.begin() as connection:
        connection.execute(text("SELECT set_config('TimeZone', :zone, true)"), {"zone": zone})
        due, later = (
            [
                enqueue(connection, "work", run_after=after).id,
                enqueue(connection, "work", run_after=now + after).id,
                connection.scalar(insert, {"after": after}),
            ]
            for after in (timedelta(0), HOUR)
        )
    assert place.drain(work).processed == 3
    assert place.statuses() == dict.fromkeys(due, "processed") | dict.fromkeys(later, "new")
    for id_ in later:
        assert HOUR <= place.job(id_).run_after - now < HOUR + timedelta(minutes=1)


@pytest.mark.neoq("S57", "T08", "T23")
def test_a_job_waits_in_the_table_until_its_time_and_runs_then(place, start, done):
    early = []

    @handler("work")
    def note(job):
        early.append(place.sql("SELECT clock_timestamp()") < job.run_after)

    start(note, poll_interval=HOUR)
    id_ = place.enqueue("work", run_after=timedelta(milliseconds=250)).id
    assert place.job(id_).status == "new"
    done(1)
    assert early == [False]


@pytest.mark.neoq("S56", "N14")
def test_more_future_jobs_than_a_hundred_are_no_more_trouble_than_one(place, start, done):
    place.sql(
        "INSERT INTO {}neoq_jobs (queue, run_after)"
        " SELECT 'work', now() + interval '200 ms' FROM generate_series(1, 250)"
    )
    start(work)
    done(250)


@pytest.mark.neoq("S58", "S59", "T09")
def test_future_jobs_of_two_queues_enqueued_by_many_threads_reach_their_own_handlers(place, start, done):
    ran = []
    handlers = [handler(name)(lambda job, name=name: ran.append((name, job.payload))) for name in ("one", "two")]
    start(*handlers)

    def enqueue_fifty(name):
        with place.begin() as connection:
            for _ in range(50):
                enqueue(connection, name, name, run_after=timedelta(milliseconds=1))

    threads = [in_thread(lambda name=name: enqueue_fifty(name)) for name in ("one", "two") * 2]
    for thread in threads:
        thread.join()
    done(200)
    assert sorted(ran) == [("one", "one")] * 100 + [("two", "two")] * 100


@pytest.mark.neoq("S60", "S42")
def test_several_runners_find_jobs_that_nobody_announced_and_run_each_once(place, start, done):
    ran = []
    for _ in range(2):
        start(handler("work")(lambda job: ran.append(job.id)), poll_interval=timedelta(milliseconds=20))
    for run_after in (timedelta(0), timedelta(milliseconds=50)):
        with place.begin() as connection:
            connection.execute(text("SET LOCAL neoq.notify = 'off'"))
            for _ in range(5):
                enqueue(connection, "work", run_after=run_after)
    done(10)
    assert sorted(ran) == sorted(place.statuses())


@pytest.mark.neoq("S42", "T27")
def test_jobs_enqueued_before_anybody_listened_run(place, start, done):
    for queue in ("one", "two"):
        place.enqueue(queue)
    start(*(handler(queue)(lambda job: None) for queue in ("one", "two")))
    done(2)


@pytest.mark.neoq("N06", "N17", "T25", "T32", "S38")
@pytest.mark.parametrize("status", ["new", "failed"])
def test_past_its_deadline_a_job_is_dead_once_and_was_never_started(place, start, status):
    ran = []
    note = handler("work")(lambda job: ran.append(job.id))
    late = place.enqueue("work", deadline=timedelta(0)).id
    if status == "failed":
        place.change(late, status="failed", retries=1)
    start(note, heartbeat_interval=OFTEN, concurrency=1)
    eventually(lambda: place.dead() == {late: "deadline"})
    good = place.enqueue("work", deadline=HOUR).id
    eventually(lambda: place.statuses() == {good: "processed"})
    assert ran == [good]
    assert place.dead_job(late).deadline is not None


@pytest.mark.neoq("N06")
def test_a_job_that_runs_when_its_deadline_passes_may_finish(place, start, done):
    gate = Gate()
    start(handler("work")(lambda job: gate()), heartbeat_interval=OFTEN)
    id_ = place.enqueue("work", deadline=HOUR).id
    gate.await_arrived(1)
    place.change(id_, deadline=ago(1))
    other = place.enqueue("work", deadline=timedelta(0)).id
    eventually(lambda: place.dead() == {other: "deadline"})
    gate.open()
    done(1)
