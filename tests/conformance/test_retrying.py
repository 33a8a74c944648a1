"""Retries and dead jobs: S08, S50-S54 and the rows about them."""

import random
from datetime import timedelta

import pytest
from support import eventually
from support.running import MOMENT

from sqla_neoq import DeadJob, Discard, Snooze, constant, exponential, handler, requeue, sidekiq

AT_ONCE = constant(timedelta(0))


def failing(**options):
    ran = []

    @handler("work", **options)
    def fail(job):
        ran.append(job.attempt)
        raise ValueError("no")

    fail.ran = ran
    return fail


@handler("work")
def work(job):
    pass


@pytest.mark.neoq("S50", "N01")
def test_the_first_failure_already_waits_and_nothing_brings_the_retry_forward(place, start):
    fail = failing()
    id_ = place.enqueue("work").id
    other = handler("other")(lambda job: None)
    start(fail, other, poll_interval=timedelta(milliseconds=10))
    eventually(lambda: place.failures_of(id_))
    for number in range(1, 21):
        place.enqueue("other")
        eventually(lambda number=number: list(place.statuses().values()).count("processed") == number)
    job, [failure] = place.job(id_), place.failures_of(id_)
    assert (job.status, fail.ran) == ("failed", [1])
    assert timedelta(seconds=15) <= job.run_after - failure.failed_at < timedelta(seconds=45)


@pytest.mark.neoq("S50", "N01")
def test_a_retry_runs_at_its_time_and_not_before(place, start, done):
    due = []

    @handler("work", backoff=constant(timedelta(milliseconds=60)))
    def third_time(job):
        due.append((job.attempt, place.sql("SELECT clock_timestamp()") >= job.run_after))
        if job.attempt < 3:
            raise ValueError("not yet")

    place.enqueue("work")
    start(third_time)
    done(1)
    assert due == [(1, True), (2, True), (3, True)]


@pytest.mark.neoq("S51")
@pytest.mark.parametrize("retries", [0, 1, 2, 5, 10, 22])
def test_the_curve_is_sidekiqs_with_jitter_at_every_retry(retries):
    delay = sidekiq(rng=random.Random(1))
    seconds = {delay(retries).total_seconds() for _ in range(500)}
    base = retries**4 + 15
    assert (min(seconds), max(seconds)) == (base, base + 29 * (retries + 1))


@pytest.mark.neoq("S51")
@pytest.mark.parametrize("policy", [sidekiq(cap=timedelta(hours=1)), exponential(cap=timedelta(hours=1))])
def test_no_delay_is_longer_than_its_cap_however_many_retries_there_were(policy):
    assert policy(10**6) == timedelta(hours=1)


@pytest.mark.neoq("S51")
def test_a_policy_of_ones_own_decides(place):
    id_ = place.add(queue="work", retries=7)
    place.drain(failing(backoff=lambda retries: timedelta(days=retries)))
    job, [failure] = place.job(id_), place.failures_of(id_)
    assert abs(job.run_after - failure.failed_at - timedelta(days=7)) < timedelta(minutes=1)


@pytest.mark.neoq("S08", "S52", "N18", "T11", "T33")
@pytest.mark.parametrize(
    ("handlers", "jobs", "attempts"), [(2, None, 3), (2, 4, 5), (2, 0, 1), (0, None, 1), (0, 1, 2)]
)
def test_a_handler_says_how_often_it_is_tried_and_a_job_can_say_otherwise(place, handlers, jobs, attempts):
    fail = failing(max_retries=handlers, backoff=AT_ONCE)
    id_ = place.enqueue("work", max_retries=jobs).id
    counts = place.drain(fail)
    assert (counts.failed, counts.dead) == (attempts - 1, 1)
    assert fail.ran == list(range(1, attempts + 1))
    assert place.dead_job(id_).reason == "exhausted"


@pytest.mark.neoq("S52", "N05")
def test_whoever_says_nothing_gets_twenty_three_retries(place):
    last, last_but_one = place.add(queue="work", retries=23), place.add(queue="work", retries=22)
    place.drain(failing())
    assert place.dead() == {last: "exhausted"}
    assert place.statuses() == {last_but_one: "failed"}


@pytest.mark.neoq("S53", "N04")
@pytest.mark.parametrize(("retries", "max_retries"), [(0, 0), (5, 5), (6, 5), (23, None)])
def test_success_is_success_at_the_last_retry_too(place, retries, max_retries):
    id_ = place.add(queue="work", retries=retries, max_retries=max_retries)
    assert place.drain(work).processed == 1
    assert place.job(id_).status == "processed"
    assert place.rows(DeadJob) == []


@pytest.mark.neoq("S54")
def test_a_dead_job_can_be_put_back_and_keeps_the_time_of_its_birth(place):
    id_ = place.add(queue="work", max_retries=0, created_at=MOMENT)
    place.drain(failing())
    dead = place.dead_job(id_)
    assert (dead.created_at, dead.retries, dead.reason) == (MOMENT, 0, "exhausted")
    with place.begin() as connection:
        assert requeue(connection, id_) == (id_, True)
    assert (place.job(id_).created_at, place.rows(DeadJob)) == (MOMENT, [])
    assert place.drain(work).processed == 1


@pytest.mark.neoq("T19", "T21")
def test_one_queues_failing_job_dies_by_its_own_handler_and_leaves_the_other_queue_alone(place):
    ran = []
    fine = handler("fine")(lambda job: ran.append(job.id))
    fail = failing(max_retries=1, backoff=AT_ONCE)
    good, bad = place.enqueue("fine").id, place.enqueue("work").id
    place.drain(fine, fail)
    assert (ran, fail.ran) == ([good], [1, 2])
    assert place.statuses() == {good: "processed"}
    assert place.dead() == {bad: "exhausted"}


@pytest.mark.neoq("S53")
@pytest.mark.parametrize("outcome", [Snooze(timedelta(hours=1)), Discard("never")])
def test_a_handler_that_steers_its_outcome_uses_up_no_retry(place, outcome):
    @handler("work", max_retries=0)
    def steer(job):
        raise outcome

    id_ = place.enqueue("work").id
    place.drain(steer)
    if isinstance(outcome, Snooze):
        assert (place.job(id_).status, place.job(id_).retries) == ("new", 0)
    else:
        assert place.dead_job(id_).reason == "discarded"
