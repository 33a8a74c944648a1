import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from psycopg.errors import LockNotAvailable
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from support.running import Database, ago, ahead, claimant
from support.waiting import eventually

from sqla_neoq.claim import Want, claim, claim_suspect, completion, settle
from sqla_neoq.floor import Position, View
from sqla_neoq.models import DeadJob, Worker
from sqla_neoq.outcomes import Outcome, Verb
from sqla_neoq.statements import array_literal, put_back_strays

TASKS = ("m:f", "m:g")


@pytest.fixture
def database(engine):
    return Database(engine)


@pytest.fixture
def me(database):
    """A registered worker that knows the two tasks."""
    return claimant(database, database.worker(), *TASKS)


def take(database, me, *wants, total=100):
    """Claim in a transaction of its own; a want is a queue, or (queue, slots), or (queue, slots, handler)."""
    with database.begin() as connection:
        return claim(connection, me, [full(want) for want in wants], total)


def take_suspects(database, me, *wants):
    with database.begin() as connection:
        return claim_suspect(connection, me, [full(want) for want in wants])


def full(want):
    queue, slots, handler = (want, 100, True) if isinstance(want, str) else (*want, True)[:3]
    return Want(queue, slots, handler)


def ids(claimed):
    return [job.id for job in claimed.jobs]


def queues(claimed):
    return [job.queue for job in claimed.jobs]


# Which jobs ----------------------------------------------------------------------------------------------------------


def test_a_claimed_job_is_running_under_its_worker_and_its_token(database, me):
    job = database.add(queue="q", payload={"ü": [1, None]}, max_retries=4)
    (got,) = take(database, me, "q").jobs
    row = database.row(job)
    assert (row.status, row.worker_id, row.claim_token, row.retries) == ("running", me.worker, got.token, 0)
    assert row.ran_at >= row.created_at
    assert (got.id, got.queue, got.task, got.max_retries) == (job, "q", None, 4)
    assert got.payload == '{"ü": [1, null]}'
    times = [row.created_at, row.run_after, row.ran_at]
    assert [got.created_at, got.run_after, got.ran_at] == [time.timestamp() for time in times]


def test_nothing_is_claimed_twice(database, me):
    first, second = database.add(queue="q"), database.add(queue="q")
    assert ids(take(database, me, "q", total=1)) == [first]
    assert ids(take(database, me, "q")) == [second]
    assert ids(take(database, me, "q")) == []


def test_only_the_queues_wanted_are_claimed_from(database, me):
    for queue in ("a", "b", "c"):
        database.add(queue=queue)
    assert sorted(queues(take(database, me, "a", "c"))) == ["a", "c"]
    assert database.statuses()[2] == "new"


@pytest.mark.parametrize("queue", ['"; DROP TABLE neoq_jobs; --', "ü" * 128, "it's-Ä", "\\", "%s :x {a}"])
def test_a_queues_name_is_only_a_name(database, me, queue):
    job = database.add(queue=queue)
    assert ids(take(database, me, queue)) == [job]


def test_a_higher_priority_goes_first_and_then_who_was_due_first(database, me):
    late = database.add(queue="q", priority=5, run_after=ago(10))
    early = database.add(queue="q", priority=5, run_after=ago(20))
    low = database.add(queue="q", priority=-100, run_after=ago(1000))
    top = database.add(queue="q", priority=100, run_after=ago(1))
    assert ids(take(database, me, "q")) == [top, early, late, low]


def test_jobs_due_at_the_same_moment_go_in_the_order_they_came(database, me):
    with database.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) SELECT 'q' FROM generate_series(1, 20)"))
    assert ids(take(database, me, "q")) == list(range(1, 21))


def test_priority_counts_over_all_queues(database, me):
    jobs = [database.add(queue=queue, priority=p) for queue in ("a", "b", "c") for p in (0, 5, -5)]
    by_priority = {p: {job for job, q in zip(jobs, (0, 5, -5) * 3, strict=True) if q == p} for p in (5, 0, -5)}
    assert set(ids(take(database, me, "a", "b", "c", total=3))) == by_priority[5]
    assert set(ids(take(database, me, "a", "b", "c", total=3))) == by_priority[0]
    assert set(ids(take(database, me, "a", "b", "c", total=3))) == by_priority[-5]


def test_a_long_backlog_in_one_queue_does_not_starve_another(database, me):
    with database.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) SELECT 'long' FROM generate_series(1, 200)"))
        connection.execute(text("INSERT INTO neoq_jobs (queue) SELECT 'short' FROM generate_series(1, 200)"))
    seen = [queue for _ in range(40) for queue in queues(take(database, me, "long", "short", total=1))]
    # By chance, so the bound is one that is missed once in 10^10 runs.
    assert 1 <= seen.count("short") <= 39


def test_no_queue_gets_more_than_its_slots(database, me):
    for queue in ("a", "b") * 5:
        database.add(queue=queue)
    assert sorted(queues(take(database, me, ("a", 2), ("b", 3)))) == ["a"] * 2 + ["b"] * 3


def test_slots_are_shared_by_all_priorities_of_a_queue_the_highest_first(database, me):
    jobs = {p: [database.add(queue="q", priority=p) for _ in range(3)] for p in (1, 2, 3)}
    assert ids(take(database, me, ("q", 5))) == [*jobs[3], *jobs[2][:2]]
    assert ids(take(database, me, ("q", 5))) == [*jobs[2][2:], *jobs[1]]


def test_no_more_than_the_total_is_claimed_the_best_of_all_queues(database, me):
    low = [database.add(queue="a", priority=0) for _ in range(3)]
    high = [database.add(queue="b", priority=1) for _ in range(3)]
    assert ids(take(database, me, ("a", 5), ("b", 5), total=4)) == [*high, low[0]]


@pytest.mark.parametrize("status", ["processed", "cancelled"])
def test_finished_jobs_are_not_claimed(database, me, status):
    database.add(queue="q", status=status, finished_at=ago(1))
    assert ids(take(database, me, "q")) == []


# Which tasks ---------------------------------------------------------------------------------------------------------


def test_a_task_this_runner_does_not_know_is_never_claimed_and_left_alone(database, me):
    unknown, known = database.add(queue="q", task="m:unknown"), database.add(queue="q", task="m:f")
    before = database.row(unknown)
    assert ids(take(database, me, "q")) == [known]
    assert database.row(unknown) == before


def test_many_unknown_jobs_ahead_do_not_hide_a_known_one(database, me):
    with database.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue, task) SELECT 'q', 'm:x' FROM generate_series(1, 500)"))
    job = database.add(queue="q", task="m:g")
    assert ids(take(database, me, ("q", 1), total=1)) == [job]


def test_a_job_without_a_task_needs_the_queues_handler(database, me):
    plain, named = database.add(queue="q"), database.add(queue="q", task="m:f")
    assert ids(take(database, me, ("q", 9, False))) == [named]
    assert ids(take(database, me, ("q", 9, True))) == [plain]


def test_handlers_count_for_each_queue_alone(database, me):
    with_handler, without = database.add(queue="a"), database.add(queue="b")
    assert ids(take(database, me, ("a", 9, True), ("b", 9, False))) == [with_handler]
    assert database.row(without).status == "new"


def test_a_runner_without_tasks_claims_what_its_handlers_take(database):
    nobody = claimant(database, database.worker())
    plain, named = database.add(queue="q"), database.add(queue="q", task="m:f")
    assert ids(take(database, nobody, "q")) == [plain]
    assert database.row(named).status == "new"


# When ----------------------------------------------------------------------------------------------------------------


def test_a_future_job_is_not_claimed_before_its_time(database, me):
    job = database.add(queue="q", run_after=ahead(60))
    assert ids(take(database, me, "q")) == []
    database.change(job, run_after=ago(0.001))
    assert ids(take(database, me, "q")) == [job]


def test_with_nothing_to_claim_it_says_in_how_many_seconds_the_next_is_due(database, me):
    database.add(queue="q", run_after=ahead(600))
    database.add(queue="q", priority=-7, run_after=ahead(60))
    database.add(queue="other", run_after=ahead(5))
    assert 55 < take(database, me, "q").next_due <= 60
    assert take(database, me, "empty").next_due is None


def test_with_something_to_claim_it_does_not(database, me):
    database.add(queue="q")
    database.add(queue="q", run_after=ahead(60))
    assert take(database, me, "q").next_due is None


def test_future_jobs_of_a_high_priority_do_not_hide_due_ones_of_a_low_one(database, me):
    for _ in range(5):
        database.add(queue="q", priority=100, run_after=ahead(60))
    job = database.add(queue="q", priority=-100)
    assert ids(take(database, me, ("q", 1), total=1)) == [job]


def test_a_job_past_its_deadline_is_not_claimed(database, me):
    database.add(queue="q", deadline=ago(0.001))
    job = database.add(queue="q", deadline=ahead(60))
    assert ids(take(database, me, "q")) == [job]


def test_what_is_due_is_decided_at_the_statement_and_not_at_the_begin(database, me):
    with database.begin() as connection:
        connection.execute(text("SELECT 1"))
        job = database.add(queue="q")
        assert ids(claim(connection, me, [Want("q", 1, handler=True)], 1)) == [job]


# Who -----------------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_not_registered_claims_nothing(database, me):
    job = database.add(queue="q")
    database.remove(me.worker, model=Worker)
    got = take(database, me, "q")
    assert (got.jobs, got.next_due) == ([], None)
    assert take_suspects(database, me, "q") == []
    assert database.row(job).status == "new"


def test_two_sessions_at_once_claim_different_jobs_and_neither_waits(database, me):
    jobs = [database.add(queue="q") for _ in range(4)]
    other = claimant(database, database.worker(), *TASKS)
    with database.begin() as one, database.begin() as two:
        two.execute(text("SET LOCAL lock_timeout = '2s'"))
        first = claim(one, me, [Want("q", 2, handler=True)], 2)
        second = claim(two, other, [Want("q", 4, handler=True)], 4)
    assert (ids(first), ids(second)) == (jobs[:2], jobs[2:])
    assert [row.worker_id for row in database.rows()] == [me.worker] * 2 + [other.worker] * 2


def test_a_claim_that_is_rolled_back_took_nothing(database, me):
    job = database.add(queue="q")
    with database.engine.connect() as connection:
        assert ids(claim(connection, me, [Want("q", 1, handler=True)], 1)) == [job]
        connection.rollback()
    assert ids(take(database, me, "q")) == [job]


def test_each_claim_has_a_token_of_its_own_higher_than_all_before(database, me):
    for _ in range(6):
        database.add(queue="q")
    tokens = [{job.token for job in take(database, me, ("q", 2)).jobs} for _ in range(3)]
    assert [len(group) for group in tokens] == [1, 1, 1]
    assert sorted(map(min, tokens)) == list(map(min, tokens))
    assert len(set.union(*tokens)) == 3


def test_an_empty_claim_draws_no_token(database, me):
    database.add(queue="q")
    (before,) = take(database, me, "q").jobs
    for _ in range(5):
        take(database, me, "q")
    database.add(queue="q")
    (after,) = take(database, me, "q").jobs
    assert after.token == before.token + 1


# Retries -------------------------------------------------------------------------------------------------------------


def test_a_retry_is_counted_when_it_is_claimed(database, me):
    database.add(queue="q", status="failed", retries=2)
    (got,) = take(database, me, "q").jobs
    assert got.retries == 3
    assert database.rows()[0].retries == 3


def test_a_job_that_was_put_back_used_up_no_retry(database, me):
    database.add(queue="q", status="new", retries=2)
    assert take(database, me, "q").jobs[0].retries == 2


# Suspects ------------------------------------------------------------------------------------------------------------


def test_suspects_are_claimed_apart_and_one_at_a_time(database, me):
    suspects = [database.add(queue="q", status="failed", crashes=2) for _ in range(2)]
    plain = database.add(queue="q")
    assert ids(take(database, me, "q")) == [plain]
    assert [job.id for job in take_suspects(database, me, "q")] == [suspects[0]]
    assert [job.id for job in take_suspects(database, me, "q")] == [suspects[1]]
    assert take_suspects(database, me, "q") == []


def test_a_job_whose_worker_died_once_is_claimed_like_any_other(database, me):
    jobs = [database.add(queue="q", status="failed", crashes=1), database.add(queue="q")]
    assert sorted(ids(take(database, me, "q"))) == jobs
    assert take_suspects(database, me, "q") == []


def test_a_suspect_must_be_due_known_wanted_and_before_its_deadline(database, me):
    database.add(queue="q", crashes=2, run_after=ahead(60))
    database.add(queue="q", crashes=2, task="m:unknown")
    database.add(queue="other", crashes=2)
    database.add(queue="q", crashes=2, deadline=ago(1))
    assert take_suspects(database, me, "q") == []
    job = database.add(queue="q", crashes=2, task="m:f")
    (got,) = take_suspects(database, me, ("q", 1, False))
    assert (got.id, got.crashes) == (job, 2)


def test_a_retry_of_a_suspect_is_counted(database, me):
    database.add(queue="q", status="failed", crashes=2, retries=1)
    assert take_suspects(database, me, "q")[0].retries == 2


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("total", [1, 2, 9])
def test_what_somebody_holds_takes_no_slot_from_the_lanes_below(database, me, slots, total):
    held = [database.add(queue="q", priority=10) for _ in range(2)]
    free = [database.add(queue="q", priority=number) for number in (5, 0)]
    with database.begin() as holder:
        holder.execute(text("SELECT 1 FROM neoq_jobs WHERE id = ANY (:ids) FOR UPDATE"), {"ids": held})
        assert ids(take(database, me, ("q", slots), total=total)) == free[: min(slots, total)]


# Outcomes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(database, me):
    """Add and claim a number of jobs."""

    def make(number=1, **values):
        for _ in range(number):
            database.add(queue="q", **values)
        return take(database, me, ("q", number)).jobs

    return make


def write(database, me, *outcomes, **how):
    with database.begin() as connection:
        return settle(connection, outcomes, me.options, **how)


def test_a_completed_job_is_processed(database, me, running):
    (job,) = running()
    assert write(database, me, Outcome(job, Verb.COMPLETE)) == set()
    row = database.row(job.id)
    assert (row.status, row.claim_token, row.error, row.worker_id) == ("processed", None, None, me.worker)
    assert row.finished_at >= row.ran_at


def test_success_at_the_last_retry_is_success(database, me):
    database.add(queue="q", status="failed", retries=22, max_retries=23, error="the last one")
    (job,) = take(database, me, "q").jobs
    write(database, me, Outcome(job, Verb.COMPLETE))
    row = database.row(job.id)
    assert (row.status, row.retries, row.error) == ("processed", 23, None)


def test_a_completed_job_can_be_deleted_at_once(database, me, running):
    first, second = running(2)
    assert write(database, me, Outcome(first, Verb.COMPLETE), delete=True) == set()
    assert [row.id for row in database.rows()] == [second.id]


def test_a_failed_job_waits_for_its_retry_and_leaves_a_trace(database, me, running):
    (job,) = running()
    failed = Outcome(job, Verb.FAIL, delay=3600.0, kind="error", message="ValueError: x", traceback="Traceback")
    assert write(database, me, failed) == set()
    row = database.row(job.id)
    assert (row.status, row.claim_token, row.error, row.finished_at) == ("failed", None, "ValueError: x", None)
    assert timedelta(minutes=59) < row.run_after - row.ran_at < timedelta(minutes=61)
    (noted,) = database.failures()
    assert (noted.job_id, noted.attempt, noted.worker_id) == (job.id, 1, me.worker)
    assert (noted.kind, noted.message, noted.traceback) == ("error", "ValueError: x", "Traceback")
    assert noted.started_at == row.ran_at <= noted.failed_at


def test_a_dead_job_moves_to_the_other_table_with_all_that_was_known(database, me, running):
    (job,) = running(payload={"a": 1}, priority=3, max_retries=0, fingerprint="key", deadline=ahead(60))
    row = database.row(job.id)
    dead = Outcome(job, Verb.BURY, reason="exhausted", kind="error", message="ValueError: x", traceback="Traceback")
    assert write(database, me, dead) == set()
    assert database.rows() == []
    (buried,) = database.rows(DeadJob)
    shared = set(row._fields) & set(buried._fields) - {"error"}
    assert {name: getattr(buried, name) for name in shared} == {name: getattr(row, name) for name in shared}
    assert (buried.reason, buried.error) == ("exhausted", "ValueError: x")
    assert buried.died_at >= row.ran_at
    assert [noted.message for noted in database.failures()] == ["ValueError: x"]


def test_a_job_buried_by_its_deadline_is_no_failed_attempt(database, me, running):
    (job,) = running()
    write(database, me, Outcome(job, Verb.BURY, reason="deadline", message="the deadline passed"))
    assert database.dead() == {job.id: "deadline"}
    assert database.failures() == []


def test_a_snoozed_job_is_new_again_with_its_retries_and_another_time(database, me):
    database.add(queue="q", status="failed", retries=1)
    (job,) = take(database, me, "q").jobs
    write(database, me, Outcome(job, Verb.PUT_BACK, delay=600.0))
    row = database.row(job.id)
    assert (row.status, row.retries, row.claim_token) == ("new", 2, None)
    assert row.run_after > row.ran_at + timedelta(minutes=9)
    assert database.failures() == []
    database.change(job.id, run_after=ago(1))
    assert take(database, me, "q").jobs[0].retries == 2


def test_a_job_given_back_keeps_its_time(database, me, running):
    (job,) = running(run_after=ago(77))
    before = database.row(job.id).run_after
    write(database, me, Outcome(job, Verb.PUT_BACK))
    row = database.row(job.id)
    assert (row.status, row.run_after, row.claim_token) == ("new", before, None)


def test_a_cancelled_job_is_finished(database, me, running):
    (job,) = running()
    write(database, me, Outcome(job, Verb.CANCEL))
    row = database.row(job.id)
    assert (row.status, row.claim_token) == ("cancelled", None)
    assert row.finished_at is not None


@pytest.mark.parametrize("verb", [Verb.FAIL, Verb.PUT_BACK])
def test_a_job_that_was_called_off_meanwhile_does_not_run_again(database, me, running, verb):
    (job,) = running()
    database.change(job.id, cancel_requested_at=ago(1))
    assert write(database, me, outcome(job, verb)) == set()
    row = database.row(job.id)
    assert (row.status, row.cancel_requested_at, row.claim_token) == ("cancelled", None, None)
    assert row.finished_at >= row.ran_at
    assert len(database.failures()) == (1 if verb is Verb.FAIL else 0)


@pytest.mark.parametrize("verb", [Verb.COMPLETE, Verb.BURY])
def test_a_job_that_was_called_off_when_it_was_over_already_is_over(database, me, running, verb):
    (job,) = running()
    database.change(job.id, cancel_requested_at=ago(1))
    assert write(database, me, outcome(job, verb)) == set()
    assert [(row.status, row.cancel_requested_at) for row in database.rows()] == (
        [("processed", None)] if verb is Verb.COMPLETE else []
    )


def outcome(job, verb):
    return Outcome(job, verb, delay=1.0, reason="exhausted", kind="error", message="x", traceback="y")


WRITTEN = [Verb.COMPLETE, Verb.FAIL, Verb.BURY, Verb.PUT_BACK, Verb.CANCEL]


@pytest.mark.parametrize("verb", WRITTEN)
@pytest.mark.parametrize("delete", [False, True])
def test_the_fence_refuses_the_outcome_of_an_earlier_claim(database, me, running, verb, delete):
    (job,) = running()
    late = outcome(job._replace(token=job.token - 1), verb)
    before = database.rows()
    assert write(database, me, late, delete=delete) == {job.id}
    assert (database.rows(), database.rows(DeadJob), database.failures()) == (before, [], [])


@pytest.mark.parametrize("verb", WRITTEN)
@pytest.mark.parametrize("status", ["new", "failed", "processed", "cancelled"])
def test_the_fence_refuses_what_does_not_run_any_more(database, me, running, verb, status):
    (job,) = running()
    finished = ago(1) if status in {"processed", "cancelled"} else None
    database.change(job.id, status=status, claim_token=None, finished_at=finished)
    before = database.rows()
    assert write(database, me, outcome(job, verb)) == {job.id}
    assert (database.rows(), database.rows(DeadJob), database.failures()) == (before, [], [])


@pytest.mark.parametrize("verb", WRITTEN)
def test_the_fence_refuses_what_is_gone(database, me, running, verb):
    (job,) = running()
    database.remove(job.id)
    assert write(database, me, outcome(job, verb)) == {job.id}
    assert database.rows(DeadJob) == []


def test_a_claim_after_the_job_was_given_back_shuts_the_earlier_run_out(database, me, running):
    (first,) = running()
    write(database, me, Outcome(first, Verb.PUT_BACK))
    (second,) = take(database, me, "q").jobs
    assert second.token > first.token
    assert write(database, me, Outcome(first, Verb.COMPLETE)) == {first.id}
    assert write(database, me, Outcome(second, Verb.COMPLETE)) == set()


def test_a_batch_of_all_verbs_is_written_and_the_lost_ones_are_told_apart(database, me, running):
    jobs = running(12)
    verbs = [*WRITTEN, *WRITTEN]
    mixed = [outcome(job, verb) for job, verb in zip(jobs, verbs, strict=False)]
    for late in mixed[5:]:
        late.job = late.job._replace(token=1_000_000)
    mixed += [Outcome(jobs[10], Verb.COMPLETE, written=True), Outcome(jobs[11], Verb.LOST)]
    assert write(database, me, *reversed(mixed)) == {job.id for job in jobs[5:10]}
    assert database.statuses() == {
        jobs[0].id: "processed",
        jobs[1].id: "failed",
        jobs[3].id: "new",
        jobs[4].id: "cancelled",
    } | {job.id: "running" for job in jobs[5:]}
    assert database.dead() == {jobs[2].id: "exhausted"}
    assert len(database.failures()) == 2


def test_an_empty_batch_says_nothing(database, me):
    assert write(database, me) == set()


def test_many_outcomes_go_in_one_statement(database, me):
    with database.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) SELECT 'q' FROM generate_series(1, 2000)"))
    jobs = take(database, me, ("q", 2000), total=2000).jobs
    assert len(jobs) == 2000
    assert write(database, me, *(Outcome(job, Verb.COMPLETE) for job in jobs)) == set()
    assert set(database.statuses().values()) == {"processed"}


def test_texts_of_any_kind_arrive_as_they_are(database, me, running):
    (job,) = running()
    message = "'; DROP TABLE neoq_jobs; -- \" \\ %s :x {} ü 🐘 \x1b\t\n"
    write(database, me, Outcome(job, Verb.FAIL, delay=0.0, kind="error", message=message, traceback=message))
    assert database.rows()[0].error == message
    assert database.failures()[0].traceback == message


def test_the_completion_of_one_job_says_whether_it_was_lost(database, me, running):
    first, second = running(2)
    with database.begin() as connection:
        statement, parameters = completion(first)
        assert connection.execute(statement, parameters).first() is None
        assert connection.execute(statement, parameters).first() is not None
        statement, parameters = completion(second, delete=True)
        assert connection.execute(statement, parameters).first() is None
    assert database.statuses() == {first.id: "processed"}


# Completions that ride in a claim -------------------------------------------------------------------------------------


def test_a_claim_completes_other_jobs_in_the_same_statement(database, me, running):
    done = running(2)
    waiting = database.add(queue="q")
    with database.begin() as connection:
        got = claim(connection, me, [full("q")], 9, completed=[Outcome(job, Verb.COMPLETE) for job in done])
    assert (ids(got), got.lost) == ([waiting], frozenset())
    assert database.statuses() == {done[0].id: "processed", done[1].id: "processed", waiting: "running"}
    row = database.row(done[0].id)
    assert (row.claim_token, row.error, row.cancel_requested_at) == (None, None, None)
    assert row.finished_at >= row.ran_at


@pytest.mark.parametrize("waiting", [0, 3])
def test_a_claim_says_which_completions_the_fence_refused_with_and_without_jobs(database, me, running, waiting):
    done = [Outcome(job, Verb.COMPLETE) for job in running(3)]
    database.change(done[0].job.id, claim_token=99)
    database.remove(done[2].job.id)
    added = [database.add(queue="q") for _ in range(waiting)]
    with database.begin() as connection:
        got = claim(connection, me, [full("q")], 9, completed=done)
    assert (ids(got), got.lost) == (added, {done[0].job.id, done[2].job.id})
    assert database.row(done[0].job.id).status == "running"
    assert database.row(done[1].job.id).status == "processed"


def test_a_worker_that_was_declared_dead_completes_what_is_still_its_own_and_claims_nothing(database, me, running):
    (job,) = running()
    waiting = database.add(queue="q")
    database.remove(me.worker, model=Worker)
    with database.begin() as connection:
        got = claim(connection, me, [full("q")], 9, completed=[Outcome(job, Verb.COMPLETE)])
    assert (got.jobs, got.lost) == ([], frozenset())
    assert database.statuses() == {job.id: "processed", waiting: "new"}


def test_a_completion_that_waits_for_a_row_too_long_takes_the_claim_back_with_it(database, me, running):
    held, free = running(2)
    waiting = database.add(queue="q")
    done = [Outcome(job, Verb.COMPLETE) for job in (held, free)]
    with database.begin() as holder, database.begin() as connection:
        holder.execute(text("SELECT 1 FROM neoq_jobs WHERE id = :id FOR UPDATE"), {"id": held.id})
        connection.execute(text("SET LOCAL lock_timeout = '20ms'"))
        with pytest.raises(LockNotAvailable):
            claim(connection, me, [full("q")], 9, completed=done)
        connection.rollback()
    assert database.statuses() == {held.id: "running", free.id: "running", waiting: "new"}


def test_each_outcome_is_fenced_by_its_own_token_wherever_it_stands(database, me, running):
    jobs = [*running(3), *running(2), *running(4)]
    stale = {jobs[0].id, jobs[4].id, jobs[8].id}
    given = [
        job._replace(token=jobs[(place + 4) % 9].token) if job.id in stale else job for place, job in enumerate(jobs)
    ]
    done = [Outcome(job, Verb.COMPLETE) for job in given]
    Random(5).shuffle(done)
    with database.begin() as connection:
        assert claim(connection, me, [], 0, completed=done).lost == stale
    assert {id_ for id_, status in database.statuses().items() if status == "running"} == stale


def test_of_two_runs_of_one_job_the_later_completes_it(database, me, running):
    (first,) = running()
    write(database, me, Outcome(first, Verb.PUT_BACK))
    (again,) = take(database, me, "q").jobs
    done = [Outcome(again, Verb.COMPLETE), Outcome(first, Verb.COMPLETE)]
    with database.begin() as connection:
        claim(connection, me, [], 0, completed=done)
    assert database.statuses() == {first.id: "processed"}


# A row that moves -----------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_look(migrated_database):
    """An own database in which a look at the jobs waits for a lock first, and the role for which it does."""
    engine = create_engine(migrated_database(), poolclass=NullPool)
    role = f"neoq_slow_{uuid.uuid4().hex[:8]}"
    with engine.begin() as connection:
        for statement in (
            f"CREATE ROLE {role}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}",
            """CREATE FUNCTION wait_first() RETURNS bool VOLATILE LANGUAGE plpgsql SECURITY DEFINER
            AS 'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN true; END'""",
            "ALTER TABLE neoq_jobs ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY slow ON neoq_jobs USING (wait_first())",
        ):
            connection.execute(text(statement))
    yield Database(engine), role
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_row_that_was_written_to_while_the_claim_looked_at_it_is_due_at_once(slow_look):
    database, role = slow_look
    me = claimant(database, database.worker(), *TASKS)
    job, later = database.add(queue="q"), database.add(queue="q", run_after=ahead(60))
    with database.engine.connect() as other, ThreadPoolExecutor() as threads:
        other.execute(text("SELECT pg_advisory_lock(1)"))
        other.commit()

        def look():
            with database.begin() as connection:
                connection.execute(text(f"SET LOCAL ROLE {role}"))
                return claim(connection, me, [full("q")], 9)

        looking = threads.submit(look)
        waits = text(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        eventually(lambda: other.execute(waits).scalar_one())
        database.change(job, payload={"changed": True})
        other.execute(text("SELECT pg_advisory_unlock(1)"))
        other.commit()
        missed = looking.result(10)
    # Neither claimed nor forgotten: there is something to look for at once, and not only in a minute.
    assert (missed.jobs, missed.next_due) == ([], 0.0)
    found = take(database, me, "q")
    assert (ids(found), found.jobs[0].payload) == ([job], '{"changed": true}')
    assert database.row(later).status == "new"


# Strays --------------------------------------------------------------------------------------------------------------


def test_a_claim_whose_answer_was_lost_is_put_back_and_what_is_held_is_not(database, me):
    other = claimant(database, database.worker(), *TASKS)
    for _ in range(4):
        database.add(queue="q", status="failed", retries=1)
    (held,) = take(database, me, ("q", 1)).jobs
    strays = take(database, me, ("q", 2)).jobs
    (others,) = take(database, other, ("q", 1)).jobs
    with database.begin() as connection:
        parameters = {"worker": me.worker, "tokens": array_literal({held.token})}
        rows = connection.execute(put_back_strays(), parameters).all()
    assert {row.id for row in rows} == {job.id for job in strays}
    assert database.statuses() == {held.id: "running", others.id: "running"} | {job.id: "new" for job in strays}
    assert {row.retries for row in database.rows()} == {2}


def test_a_stray_that_was_called_off_meanwhile_does_not_run_again(database, me):
    database.add(queue="q")
    (stray,) = take(database, me, "q").jobs
    database.change(stray.id, cancel_requested_at=ago(1))
    with database.begin() as connection:
        connection.execute(put_back_strays(), {"worker": me.worker, "tokens": array_literal({0})})
    assert database.statuses() == {stray.id: "cancelled"}


# Another schema ------------------------------------------------------------------------------------------------------


def test_everything_works_in_a_schema_of_its_own(schema_engine):
    database = Database(schema_engine)
    me = claimant(database, database.worker(), *TASKS)
    for _ in range(5):
        database.add(queue="q")
    with schema_engine.begin() as connection:
        assert me.options
        jobs = claim(connection, me, [Want("q", 5, handler=True)], 5).jobs
        assert (
            settle(connection, [outcome(job, verb) for job, verb in zip(jobs, WRITTEN, strict=True)], me.options)
            == set()
        )
    assert sorted(database.statuses().values()) == ["cancelled", "failed", "new", "processed"]
    assert list(database.dead().values()) == ["exhausted"]


# Where it looks ------------------------------------------------------------------------------------------------------


def look(database, me, *wants, total=100, lanes=None, queues=None):
    """Claim above a floor."""
    with database.begin() as connection:
        view = View(lanes or {}, queues or {}, everywhere=False)
        return claim(connection, me, [full(want) for want in wants], total, view=view)


def moment(database, job):
    return Position(database.row(job).run_after.timestamp(), job)


def test_a_claim_above_a_floor_takes_what_is_due_behind_it(database, me):
    jobs = [database.add(queue="q", run_after=ago(100 - n)) for n in range(10)]
    assert ids(look(database, me, "q", lanes={("q", 0): moment(database, jobs[3])}, total=3)) == jobs[4:7]
    assert ids(look(database, me, "q", lanes={("q", 0): moment(database, jobs[6])})) == jobs[7:]
    assert ids(take(database, me, "q")) == jobs[:4]


@pytest.mark.parametrize("year", [1850, 2026])
def test_a_floor_tells_microseconds_and_then_ids_apart(database, me, year):
    time = datetime(year, 3, 4, 5, 6, 7, 123_456, tzinfo=UTC)
    jobs = [database.add(queue="q", run_after=time + timedelta(microseconds=n // 2)) for n in range(6)]
    lanes, order = {}, []
    while got := look(database, me, "q", lanes=lanes, total=1).jobs:
        order.append(got[0].id)
        lanes = {("q", 0): Position(got[0].run_after, got[0].id)}
        # It waits again, just where the floor is.
        database.change(got[0].id, status="new", claim_token=None)
    assert order == jobs


def test_a_claim_above_a_floor_finds_the_priorities_that_are_not_known(database, me):
    jobs = {p: database.add(queue="q", priority=p) for p in (100, 7, 6, 5, 0, -100)}
    lanes = {("q", 6): moment(database, jobs[6]), ("q", 0): moment(database, jobs[0]), ("other", 7): Position(1e10, 1)}
    assert ids(look(database, me, "q", lanes=lanes)) == [jobs[p] for p in (100, 7, 5, -100)]


def test_a_floor_of_a_queue_counts_in_the_lanes_that_are_not_known(database, me):
    early, late = database.add(queue="q", priority=3, run_after=ago(60)), database.add(queue="q", priority=3)
    old, known = database.add(queue="q", priority=4, run_after=ago(60)), database.add(queue="q", priority=5)
    floor = moment(database, late).since - 30
    got = look(database, me, "q", "p", lanes={("q", 5): Position(None, 0)}, queues={"q": floor})
    assert ids(got) == [known, late]
    assert ids(take(database, me, "q")) == [old, early]


def test_slots_are_shared_out_above_a_floor_as_anywhere(database, me):
    jobs = {p: [database.add(queue="q", priority=p, run_after=ago(100 - n)) for n in range(3)] for p in (1, 2, 3)}
    lanes = {("q", 3): moment(database, jobs[3][0]), ("q", 1): moment(database, jobs[1][0])}
    assert ids(look(database, me, ("q", 6), lanes=lanes)) == [*jobs[3][1:], *jobs[2], jobs[1][1]]


def test_a_claim_above_a_floor_takes_what_any_would_leave_to_others_no_more(database, me):
    for values in ({"task": "m:unknown"}, {"deadline": ago(1)}, {"crashes": 2}, {"run_after": ahead(60)}):
        database.add(queue="q", **values)
    got = look(database, me, "q", lanes={("q", 0): Position(None, 0)})
    assert got.jobs == []
    assert got.next_due == pytest.approx(60, abs=5)
    database.remove(me.worker, model=Worker)
    database.add(queue="q")
    assert look(database, me, "q", lanes={("q", 0): Position(None, 0)}).jobs == []


def test_a_claim_says_when_it_looked_and_how_long_it_took_to_find(database, me):
    with database.begin() as connection:
        before = connection.scalar(text("SELECT date_part('epoch', statement_timestamp())"))
        nothing = claim(connection, me, [full("q")], 9)
    database.add(queue="q")
    some = take(database, me, "q")
    assert before <= nothing.at <= some.at == some.jobs[0].ran_at
    assert 0 < nothing.walked < 60
    assert 0 < some.walked < 60
