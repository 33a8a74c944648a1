"""Enqueue, duplicates and announcements: S28-S38 and the rows about them."""

from datetime import timedelta

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from support import eventually
from support.running import MOMENT, Gate, in_thread
from support.wakeups import ears

from sqla_neoq import NewJob, cancel, constant, enqueue, enqueue_many, handler

NOBODY_LISTENS = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
HOUR = timedelta(hours=1)
NAMES = [
    "send-email",
    "MixedCase",
    "mixedcase",
    'it\'s "quoted"; DROP TABLE neoq_jobs; --',
    "größte 队列 🐘",
    "two words, a comma: a colon %s %(x)s $1 \\ {}",
    "-1",
    "x" * 127 + "a",
    "x" * 127 + "b",
]
"""Two share their first 63 bytes, which is all that PostgreSQL keeps of an identifier."""


@handler("work")
def work(job):
    pass


# What an enqueue is ---------------------------------------------------------------------------------------------------


@pytest.mark.neoq("S28")
@pytest.mark.parametrize("queue", ["", "q" * 129, "nul\x00", None])
def test_a_queue_that_cannot_be_is_refused_before_anything_connects(queue):
    engine = create_engine(NOBODY_LISTENS)
    with Session(engine) as session, pytest.raises((TypeError, ValueError), match=r"queue|target"):
        enqueue(session, queue)


@pytest.mark.neoq("S37", "S38", "T35")
def test_a_job_exists_if_and_only_if_the_callers_transaction_commits(place, session, ledger):
    for ending in (session.rollback, session.commit):
        session.execute(text("INSERT INTO ledger (entry) VALUES (1)"))
        enqueue(session, "work")
        enqueue(session, "work", run_after=timedelta(0))
        assert session.in_transaction()
        assert place.drain(work).total == 0
        ending()
    assert place.drain(work).processed == 2
    assert place.sql("SELECT count(*) FROM ledger") == 1


@pytest.mark.neoq("S38")
def test_many_jobs_are_one_statement_with_results_in_their_order(place):
    jobs = [NewJob.of("work", number, fingerprint="third" if number == 2 else None) for number in range(5)]
    with place.begin() as connection:
        first = enqueue_many(connection, jobs)
        again = enqueue_many(connection, jobs)
    assert [place.job(result.id).payload for result in first] == [0, 1, 2, 3, 4]
    assert [result.created for result in again] == [True, True, False, True, True]
    assert again[2].id == first[2].id


@pytest.mark.neoq("S38", "S39")
def test_jobs_run_by_priority_then_by_due_time_then_by_id(place):
    order = []

    @handler("work")
    def note(job):
        order.append(job.payload)

    for payload, priority, seconds in [("c", 0, 5), ("e", 0, 9), ("f", 0, 9), ("a", 9, 9), ("g", -9, 0), ("b", 0, 0)]:
        place.add(queue="work", payload=payload, priority=priority, run_after=MOMENT + timedelta(seconds=seconds))
    place.drain(note, concurrency=1)
    assert order == ["a", "b", "c", "e", "f", "g"]


# Duplicates -----------------------------------------------------------------------------------------------------------


@pytest.mark.neoq("S30")
def test_the_same_payload_has_the_same_fingerprint_however_it_is_written(place):
    first = place.enqueue("work", {"a": 1, "b": ["<&>", "ü", None]}, unique=True)
    again = place.enqueue("work", {"b": ["<&>", "ü", None], "a": 1}, unique=True)
    other = place.enqueue("work", {"a": 1, "b": ["<&>", "u", None]}, unique=True)
    assert (again.id, other.created) == (first.id, True)
    assert place.enqueue("work", unique=True).id == place.enqueue("work", {}, unique=True).id


@pytest.mark.neoq("S31", "T14")
def test_a_duplicate_is_a_result_with_the_id_of_the_job_already_there(place, session):
    first = enqueue(session, "work", {"a": 1}, unique=True)
    second = enqueue(session, "work", {"a": 1}, unique=True)
    assert (first.created, second.created, second.id) == (True, False, first.id)
    enqueue(session, "work", {"a": 2}, unique=True)
    session.commit()
    assert [job.payload for job in place.rows()] == [{"a": 1}, {"a": 2}]


@pytest.mark.neoq("S33")
def test_without_being_asked_for_nothing_is_a_duplicate(place):
    assert place.enqueue("work", {"a": 1}).id != place.enqueue("work", {"a": 1}).id


@pytest.mark.neoq("S32")
@pytest.mark.parametrize("commits", [True, False])
def test_two_that_enqueue_one_fingerprint_at_once_make_one_job(place, commits):
    second = []
    with place.engine.connect() as connection:
        first = enqueue(connection, "work", fingerprint="one")
        waiting = in_thread(lambda: second.append(place.enqueue("work", fingerprint="one")))
        here = "pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())"
        eventually(lambda: place.sql(f"SELECT count(*) FROM pg_locks WHERE NOT granted AND {here}") == 1)
        connection.commit() if commits else connection.rollback()
    waiting.join()
    assert second[0].created is not commits
    assert [job.id for job in place.rows()] == [first.id if commits else second[0].id]


@pytest.mark.neoq("S33")
def test_a_fingerprint_is_its_queues_own(place):
    assert place.enqueue("one", fingerprint="key").created
    assert place.enqueue("two", fingerprint="key").created


@pytest.mark.neoq("S31", "S33", "T36", "N03")
@pytest.mark.parametrize(
    ("state", "blocks"),
    [("new", True), ("running", True), ("failed", True), ("processed", False), ("cancelled", False), ("dead", False)],
)
def test_a_fingerprint_blocks_while_its_job_is_unfinished(place, start, state, blocks):
    gate = Gate()

    @handler("work", max_retries=0 if state == "dead" else 1)
    def end(job):
        match state:
            case "failed" | "dead":
                raise ValueError(state)
            case "running":
                gate()

    first = place.enqueue("work", fingerprint="key")
    if state == "cancelled":
        with place.begin() as connection:
            assert cancel(connection, first.id)
    elif state == "running":
        start(end)
        gate.await_arrived(1)
    elif state != "new":
        place.drain(end)
    second = place.enqueue("work", fingerprint="key")
    gate.open()
    assert second.created is not blocks
    assert (second.id == first.id) is blocks


@pytest.mark.neoq("N03")
def test_a_job_fails_as_often_as_it_may_whatever_is_enqueued_beside_it(place):
    created = []

    @handler("work", backoff=constant(timedelta(0)), max_retries=5)
    def fail(job):
        created.append(place.enqueue("work", {"a": 1}, unique=True).created)
        raise ValueError("no")

    id_ = place.enqueue("work", {"a": 1}, unique=True).id
    counts = place.drain(fail)
    assert (counts.failed, counts.dead) == (5, 1)
    assert created == [False] * 6
    assert [row.attempt for row in place.failures_of(id_)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.neoq("T37", "T38")
def test_a_queued_job_is_replaced_by_cancelling_it_in_the_same_transaction(place):
    ran = []

    @handler("work")
    def note(job):
        ran.append(job.payload)

    for number in range(6):
        with place.begin() as connection:
            enqueued = enqueue(connection, "work", number, fingerprint="latest", run_after=HOUR)
            if not enqueued.created:
                assert cancel(connection, enqueued.id)
                last = enqueue(connection, "work", number, fingerprint="latest")
                assert last.created
    assert place.drain(note).processed == 1
    assert ran == [5]


# Announcements --------------------------------------------------------------------------------------------------------


@pytest.mark.neoq("S35", "N02")
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_what_is_due_at_the_commit_is_announced_and_nothing_else_in_any_time_zone(place, zone):
    now = place.sql("SELECT now()")
    with ears(place.url, "work", table=f"{place.prefix}neoq_jobs") as listening:
        for run_after, announced in [
            (None, True),
            (timedelta(0), True),
            (now, True),
            (now - HOUR, True),
            (HOUR, False),
            (now + HOUR, False),
        ]:
            with place.begin() as connection:
                connection.execute(text("SELECT set_config('TimeZone', :zone, true)"), {"zone": zone})
                enqueue(connection, "work", run_after=run_after)
                assert listening.heard() == []
            assert listening.heard() == (["work"] if announced else []), run_after


@pytest.mark.neoq("S36", "N12")
def test_an_announcement_says_any_queues_whole_name(place):
    with ears(place.url, *NAMES, table=f"{place.prefix}neoq_jobs") as listening:
        for name in NAMES:
            place.enqueue(name)
            assert listening.heard() == [name]


@pytest.mark.neoq("S36", "S41", "N12", "T20")
def test_queues_of_any_name_run_end_to_end_and_each_jobs_handler_is_its_queues(place, start, done):
    ran = []

    def handler_of(name):
        return handler(name)(lambda job: ran.append((name, job.queue, job.payload)))

    start(*map(handler_of, NAMES))
    for name in NAMES:
        place.enqueue(name, name)
    done(len(NAMES))
    assert sorted(ran) == sorted((name, name, name) for name in NAMES)
