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
