import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert

from sqla_neoq import handler, status, task
from sqla_neoq.models import DeadJob, Job, Worker


@task(name="m:send")
def send(): ...


@handler("greetings")
def greet(job): ...


def job(queue, **more):
    return {"queue": queue, "task": None, "status": "new", "run_after": datetime.now(UTC), "finished_at": None,
            "claim_token": None, "worker_id": None} | more  # fmt: skip


@pytest.fixture
def connection(engine, neoq_schema):
    with engine.connect() as connection:
        now = datetime.now(UTC)
        worker = {"name": "w", "host": "h", "pid": 7, "queues": ["a", "ü"], "version": "1"}
        connection.execute(insert(Worker), [worker | {"heartbeat_at": now - timedelta(seconds=90)}])
        done = {"status": "processed", "finished_at": now}
        rows = [
            job("a", run_after=now - timedelta(minutes=5)),
            job("a", run_after=now - timedelta(minutes=1)),
            job("a", run_after=now + timedelta(days=1)),
            job("a", task="m:send", status="failed", run_after=now - timedelta(hours=3)),
            job("a", task="m:gone"),
            job("a", task="m:gone", **done),
            job("a", task="m:send", status="running", claim_token=1, worker_id=1),
            job("greetings"),
            job("greetings", task="m:send"),
            job("nobody\nhere"),
        ]
        connection.execute(insert(Job), rows)
        dead = {"queue": "b", "priority": 0, "payload": {}, "run_after": now, "retries": 1, "crashes": 0}
        dead |= {"created_at": now}
        reasons = ["exhausted", "exhausted", "crashed"]
        rows = [dead | {"id": number, "reason": reason} for number, reason in enumerate(reasons)]
        connection.execute(insert(DeadJob), rows)
        yield connection


def test_jobs_are_counted_by_queue_and_status_with_the_age_of_the_oldest_due(connection):
    jobs = {(row["queue"], row["status"]): row for row in status.collect(connection)["jobs"]}
    assert {key: row["jobs"] for key, row in jobs.items()} == {
        ("a", "new"): 4,
        ("a", "failed"): 1,
        ("a", "processed"): 1,
        ("a", "running"): 1,
        ("greetings", "new"): 2,
        ("nobody\nhere", "new"): 1,
    }
    assert jobs["a", "new"]["oldest_due"] == pytest.approx(300, abs=30)
    assert jobs["a", "failed"]["oldest_due"] == pytest.approx(10800, abs=30)
    assert jobs["a", "processed"]["oldest_due"] is None
    assert jobs["a", "running"]["oldest_due"] is None


def test_dead_jobs_are_counted_by_reason(connection):
    assert status.collect(connection)["dead"] == [
        {"queue": "b", "reason": "crashed", "jobs": 1},
        {"queue": "b", "reason": "exhausted", "jobs": 2},
    ]


def test_workers_have_the_age_of_their_heartbeat_and_their_running_jobs(connection):
    (worker,) = status.collect(connection)["workers"]
    assert worker["heartbeat"] == pytest.approx(90, abs=30)
    assert (worker["name"], worker["host"], worker["pid"], worker["queues"]) == ("w", "h", 7, ["a", "ü"])
    assert worker["running"] == 1


def test_waiting_jobs_that_no_module_could_run_are_unclaimable(connection):
    assert "unclaimable" not in status.collect(connection)
    assert status.collect(connection, [send, greet])["unclaimable"] == [
        {"queue": "a", "task": "m:gone", "jobs": 1},
        {"queue": "a", "task": None, "jobs": 3},
        {"queue": "nobody\nhere", "task": None, "jobs": 1},
    ]


def test_looking_changes_and_locks_nothing(engine):
    with engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        status.collect(connection, [send])


def test_the_report_is_json(connection):
    report = json.loads(status.as_json(status.collect(connection, [send])))
    assert set(report) == {"jobs", "dead", "workers", "unclaimable"}


def test_the_report_is_plain_tables(connection):
    text = status.as_text(status.collect(connection, [send, greet]))
    queues, workers, unclaimable = ([line.split() for line in table.splitlines()] for table in text.split("\n\n"))
    assert queues[0] == ["QUEUE", "NEW", "FAILED", "RUNNING", "PROCESSED", "CANCELLED", "DEAD", "OLDEST", "DUE"]
    assert queues[1] == ["a", "4", "1", "1", "1", "0", "0", "3h"]
    assert queues[2] == ["b", "0", "0", "0", "0", "0", "3", "-"]
    assert queues[4][0] == r'"nobody\nhere"'
    assert workers[1][1:6] == ["w", "h", "7", "a,ü", "1"]
    assert workers[1][-2:] == ["90s", "ago"]
    assert [line[1:] for line in unclaimable[1:3]] == [
        ["m:gone", "1", "unclaimable"],
        ["(handler)", "3", "unclaimable"],
    ]


def test_an_empty_database_is_said_in_words(engine):
    with engine.connect() as connection:
        text = status.as_text(status.collect(connection, [send]))
    assert text == "no jobs\n\nno workers\n\nevery waiting job can be run by these modules"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([], "-"),
        ([-0.2], "0.0s"),
        ([0.84, 0.1], "0.8s"),
        ([42], "42s"),
        ([119], "119s"),
        ([720], "12m"),
        ([10800], "3h"),
    ],
)
def test_ages_are_short(seconds, text):
    assert status._age(seconds) == text
