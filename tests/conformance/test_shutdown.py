"""A runner's end: S65 and the rows about it."""

import pytest
from support import eventually

from sqla_neoq import handler


@handler("work")
def work(job):
    pass


@pytest.mark.neoq("N16", "T47")
def test_a_stopped_runner_leaves_no_connection_behind(place):
    place.enqueue("work")
    runner = place.runner(work)
    assert runner.drain().processed == 1
    eventually(lambda: place.backends() == 0)
    assert place.workers() == []
