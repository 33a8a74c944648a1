"""Several runner processes on one database: the rows about nodes, clocks, crashes and other people's shutdowns."""

import re
import signal
from datetime import timedelta

import pytest
from support import eventually
from support.processes import ROOT

from sqla_neoq import handler

pytestmark = pytest.mark.parametrize("place", ["odd_schema_tokyo"], indirect=True)
"""Processes take their time: the harder place is enough."""

TASKS = """
import os, pathlib, time
from datetime import timedelta
from sqla_neoq import constant, handler

os.write(1, f"clock {time.time()}\\n".encode())

def meet():
    # Until another process is here as well, so that both are known to work.
    pathlib.Path(f"met-{os.getpid()}").touch()
    until = time.monotonic() + 20
    while len(list(pathlib.Path().glob("met-*"))) < 2:
        assert time.monotonic() < until, "nobody came"
        time.sleep(0.005)

@handler("Work of 2", backoff=constant(timedelta(hours=1)))
def work(job):
    os.write(1, f"ran {job.id}\\n".encode())
    match job.payload:
        case "meet":
            meet()
        case "hang":
            time.sleep(60)
        case "fail":
            raise ValueError("no")

@handler("other")
def other(job):
    os.write(1, f"ran {job.id}\\n".encode())
"""
# A clock that everything in the process believes: the interpreter runs this before anything else.
WRONG_CLOCK = """
import datetime, os, time

OFF = float(os.environ["CLOCK_IS_OFF_BY"])
right = time.time

class Wrong(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=OFF)

    @classmethod
    def utcnow(cls):
        raise AssertionError("nobody calls this")

datetime.datetime = Wrong
time.time = lambda: right() + OFF
time.time_ns = lambda: int(time.time() * 1e9)
"""
QUEUE = "Work of 2"


@pytest.fixture
def pair(start_process):
    """Two runner processes."""
    return [start_process(TASKS, "-c", "1") for _ in range(2)]


def ran(processes):
    """The ids of the jobs that the processes started, each as often as it was."""
    return sorted(int(id_) for process in processes for id_ in re.findall(r"^ran (\d+)$", process.stdout, re.MULTILINE))


@pytest.mark.neoq("T13", "T20", "S40", "S60", "S61", "N09", "N14")
def test_two_processes_share_the_jobs_that_a_third_enqueues_on_two_queues(place, pair, done):
    for _ in range(2):
        place.enqueue(QUEUE, "meet")
    done(2)
    for number in range(30):
        place.enqueue((QUEUE, "other")[number % 2], run_after=timedelta(milliseconds=10 * (number % 10)))
    done(32)
    assert ran(pair) == sorted(place.statuses())
    assert all(ran([process]) for process in pair)


@pytest.mark.neoq("N07", "T45", "T46", "S65")
def test_a_process_that_is_told_to_stop_stops_alone(place, pair, done):
    leaving, staying = pair
    leaving.signal(signal.SIGTERM)
    assert leaving.wait() == 0
    place.sql("SELECT pg_notify('neoq', '-1')")
    place.enqueue(QUEUE)
    done(1)
    assert ran([staying]) == sorted(place.statuses())
    staying.signal(signal.SIGTERM)
    assert staying.wait() == 0
    assert place.backends() == []


@pytest.mark.neoq("S43", "S44", "S55", "S46")
def test_a_killed_process_loses_no_job_and_the_attempt_counts(place, start, start_process, done):
    victim = start_process(TASKS)
    id_ = place.enqueue(QUEUE, "hang").id
    victim.wait_for(f"ran {id_}")
    attempts = []
    start(handler(QUEUE)(lambda job: attempts.append(job.attempt)), heartbeat_interval=timedelta(milliseconds=100))
    victim.kill()
    done(1)
    job, [failure] = place.job(id_), place.failures_of(id_)
    assert (attempts, job.retries, job.crashes) == ([2], 1, 1)
    assert (failure.kind, failure.attempt) == ("crashed", 1)


@pytest.mark.neoq("S29")
def test_processes_whose_clocks_are_two_days_apart_go_by_the_databases(place, start_process, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    day = 86_400
    processes = [
        start_process(TASKS, "-c", "1", env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "CLOCK_IS_OFF_BY": str(off)})
        for off in (-day, day)
    ]
    clocks = [float(re.search(r"^clock (\S+)$", process.stdout, re.MULTILINE)[1]) for process in processes]
    assert day < clocks[1] - clocks[0] - day < 2 * day
    due = [place.enqueue(QUEUE, "meet").id for _ in range(2)]
    later = place.enqueue(QUEUE, run_after=timedelta(hours=1)).id
    failing = [place.enqueue(QUEUE, "fail", deadline=timedelta(hours=1)).id for _ in range(4)]
    eventually(lambda: all(place.statuses()[id_] == "failed" for id_ in failing), why=place.statuses)
    assert ran(processes) == sorted(due + failing)
    assert place.job(later).status == "new"
    for id_ in failing:
        [failure] = place.failures_of(id_)
        waits = place.job(id_).run_after - failure.failed_at
        assert abs(waits - timedelta(hours=1)) < timedelta(minutes=1)
        assert abs(place.sql("SELECT now()") - failure.failed_at) < timedelta(minutes=10)
