"""A runner's end: S65 and the rows about it."""

from datetime import timedelta

import pytest
from support import eventually
from support.running import Gate, in_thread

from sqla_neoq import Worker, handler


@handler("work")
def work(job):
    pass


@pytest.mark.neoq("N16", "T47")
def test_a_stopped_runner_leaves_no_connection_behind(place):
    place.enqueue("work")
    runner = place.runner(work)
    assert runner.drain().processed == 1
    eventually(lambda: not place.backends())
    assert place.rows(Worker) == []


@pytest.mark.neoq("S65")
def test_a_stop_lasts_as_long_as_the_running_jobs_and_no_longer(place):
    """The limit of ten seconds stands for the hour that an idle dispatcher may sleep."""
    gate = Gate()

    @handler("work")
    def wait(job):
        gate()

    runner = place.runner(wait, poll_interval=timedelta(hours=1))
    runner.start()
    place.enqueue("work")
    gate.await_arrived(1)
    ended = []
    stopping = in_thread(lambda: ended.append(runner.stop(timedelta(seconds=10))))
    eventually(lambda: runner.health().detail["state"] != "running")
    gate.open()
    stopping.join()
    assert ended == [True]
    assert place.all_processed(1)


@pytest.mark.neoq("S01", "S65")
def test_a_stop_gives_back_what_does_not_end_in_time_and_uses_up_no_retry(place, start, done):
    gate = Gate()

    @handler("work", timeout=None)
    def deaf(job):
        if job.attempt == 1 and not gate.arrived:
            gate()

    id_ = place.enqueue("work").id
    runner = start(deaf)
    gate.await_arrived(1)
    assert runner.stop(timedelta(0)) is False
    job = place.job(id_)
    assert (job.status, job.retries, job.crashes, job.claim_token) == ("new", 0, 0, None)
    assert place.failures_of(id_) == []
    start(deaf)
    done(1)
    gate.open()


@pytest.mark.neoq("S65")
def test_a_stop_asks_handlers_to_stop_when_their_time_is_over(place, start):
    seen = []

    @handler("work", timeout=None)
    def polite(job):
        seen.append(None)
        eventually(lambda: job.cancelled)
        seen.append(job.stop_reason.value)

    place.enqueue("work")
    runner = start(polite)
    eventually(lambda: seen)
    runner.stop(timedelta(0))
    eventually(lambda: seen == [None, "shutdown"])


@pytest.mark.neoq("S65")
def test_a_stopping_runner_claims_nothing_more(place, start):
    gate = Gate()
    runner = start(handler("work")(lambda job: gate()), concurrency=1)
    first, second = place.enqueue("work").id, place.enqueue("work").id
    gate.await_arrived(1)
    stopping = in_thread(runner.stop)
    eventually(lambda: runner.health().detail["state"] == "stopping")
    gate.open()
    stopping.join()
    assert place.statuses() == {first: "processed", second: "new"}


@pytest.mark.neoq("S65")
def test_a_stop_is_safe_twice_from_anywhere_and_before_the_start(place):
    runner = place.runner(work)
    assert runner.stop()
    runner = place.runner(work)
    runner.start()
    threads = [in_thread(runner.stop) for _ in range(3)]
    for thread in threads:
        thread.join(10)
    assert runner.stop()
    assert not runner.health().live
