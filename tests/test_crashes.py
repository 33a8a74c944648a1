"""What the worst does to a runner: kill -9, a frozen process, a database that goes away, connections cut at random."""

import logging
import signal
import threading
from datetime import timedelta
from random import Random

import pytest
from sqlalchemy import create_engine, text
from support.databases import migrate
from support.running import Database, Gate, ago, in_thread
from support.waiting import eventually

from sqla_neoq import Runner, RunnerConfig, enqueue, handler, retries, task
from sqla_neoq.embedded import EmbeddedServer
from sqla_neoq.models import Worker

MODULE = """
import time
from pathlib import Path
from sqla_neoq import current_job, task

@task(name="app:hold", queue="q", timeout=None)
def hold():
    job = current_job()
    Path(f"started-{job.id}").touch()
    while not Path("go-on").exists():
        time.sleep(0.01)

@task(name="app:after", queue="q")
def after():
    pass
"""


@pytest.fixture
def database(engine):
    database = Database(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (job bigint)"))
    yield database
    engine.dispose()
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        connection.execute(text("DROP TABLE effects"))


def effects(database):
    with database.engine.connect() as connection:
        return sorted(connection.scalars(text("SELECT job FROM effects")))


def write(job):
    job.session.execute(text("INSERT INTO effects VALUES (:id)"), {"id": job.id})


def put(database, number=1, **how):
    with database.engine.begin() as connection:
        return [enqueue(connection, "q", **how).id for _ in range(number)]


def clock(database):
    with database.engine.connect() as connection:
        return connection.scalar(text("SELECT clock_timestamp()"))


@pytest.fixture
def process(run_process, tmp_path, database_url):
    """A runner in a process of its own, whose jobs run until the file ``go-on`` is there."""
    (tmp_path / "app_tasks.py").write_text(MODULE)
    return run_process("app_tasks", "-c", "10", env={"NEOQ_DATABASE_URL": database_url})


def test_the_jobs_of_a_killed_process_run_elsewhere_within_ten_seconds(process, database, engine):
    jobs = put(database, 6, task="app:hold")
    eventually(lambda: set(database.statuses().values()) == {"running"}, within=30)
    # Such as they are in the other process, but for being done at once.
    hold = task(name="app:hold", queue="q")(lambda: None)
    with Runner(engine, hold, config=RunnerConfig(concurrency=10)) as runner:
        killed = clock(database)
        process.popen.kill()
        eventually(lambda: runner.counts.processed == 6, within=30)
    rows = [database.row(job) for job in jobs]
    assert {(row.status, row.crashes, row.retries) for row in rows} == {("processed", 1, 1)}
    assert max(row.ran_at for row in rows) - killed <= timedelta(seconds=10)
    assert {(noted.kind, noted.attempt) for noted in database.failures()} == {("crashed", 1)}


def test_a_frozen_process_is_declared_dead_and_when_it_thaws_its_outcome_is_refused(
    process, database, engine, tmp_path
):
    (job,) = put(database, task="app:hold")
    eventually((tmp_path / f"started-{job}").exists, within=30)
    (frozen,) = database.rows(Worker)
    process.signal(signal.SIGSTOP)
    gate = Gate()
    hold = task(name="app:hold", queue="q")(lambda: gate())  # noqa: PLW0108 - a task is made of a function
    config = RunnerConfig(heartbeat_interval=timedelta(milliseconds=100), poll_interval=timedelta(milliseconds=100))
    with Runner(engine, hold, config=config) as runner:
        # Half a minute of silence, without the wait.
        eventually(lambda: database.change(frozen.id, model=Worker, heartbeat_at=ago(31)) is None)
        gate.await_arrived(1)
        mine = database.row(job)
        (tmp_path / "go-on").touch()
        process.signal(signal.SIGCONT)
        process.wait_for("job lost")
        assert database.row(job) == mine
        gate.open()
        eventually(lambda: runner.counts.processed == 1)
    assert (database.row(job).status, database.row(job).crashes) == ("processed", 1)
    # And it lives on, under a new name.
    (after,) = put(database, task="app:after")
    eventually(lambda: database.row(after).status == "processed", within=20)
    (worker,) = database.rows(Worker)
    assert worker.id > frozen.id
    assert worker.pid == frozen.pid


def test_a_runner_survives_the_restart_of_its_database_and_writes_what_ended_meanwhile(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    gate = Gate()
    server = EmbeddedServer(tmp_path / "postgresql", durable=False)
    try:
        server.start()
        migrate(server.url, None)
        engine = create_engine(server.url, pool_pre_ping=True)
        database = Database(engine)
        (job,) = put(database)
        config = RunnerConfig(poll_interval=timedelta(milliseconds=200), heartbeat_interval=timedelta(milliseconds=200))
        with Runner(server.url, handler("q")(lambda job: gate()), config=config) as runner:
            gate.await_arrived(1)
            server.stop()
            gate.open()
            eventually(lambda: runner._services.dispatcher.away)
            health = runner.health()
            assert (health.live, health.ready, health.detail["database"]) == (True, False, "away")
            server.start()
            eventually(lambda: runner.counts.processed == 1, within=30)
            row = database.row(job)
            assert (row.status, row.crashes, row.retries) == ("processed", 0, 0)
            (second,) = put(database)
            eventually(lambda: database.row(second).status == "processed")
            eventually(lambda: runner.health().ready and runner.health().detail["listening"], within=20)
        assert database.rows(Worker) == []
        engine.dispose()
    finally:
        gate.open()
        server.stop()


def test_connections_cut_at_random_neither_lose_a_job_nor_run_one_twice_in_effect(database, database_url, caplog):
    caplog.set_level(logging.CRITICAL)
    with database.engine.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) SELECT 'q' FROM generate_series(1, 2000)"))
    random = Random(20)
    done = threading.Event()
    cut = [0]

    def cut_everything():
        other = create_engine(database_url, isolation_level="AUTOCOMMIT")
        query = text(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND application_name <> 'the test'"
        )
        with other.connect() as connection:
            while not done.wait(random.uniform(0.02, 0.3)):
                cut[0] += connection.scalar(query)
        other.dispose()

    watching = create_engine(database_url, connect_args={"application_name": "the test"}, isolation_level="AUTOCOMMIT")
    again = handler("q", backoff=retries.constant(timedelta(0)), max_retries=1000)
    config = RunnerConfig(concurrency=6, heartbeat_interval=timedelta(milliseconds=500))
    with Runner(database_url, again(write), config=config) as runner:
        eventually(lambda: runner.counts.processed >= 50)
        cutting = in_thread(cut_everything)
        left = text("SELECT count(*) FROM neoq_jobs WHERE status <> 'processed'")
        with watching.connect() as connection:
            eventually(lambda: connection.scalar(left) < 700, within=40)
            done.set()
            cutting.join(10)
            eventually(lambda: connection.scalar(left) == 0, within=40)
        eventually(lambda: runner.health().ready, within=20)
    watching.dispose()
    database.engine.dispose()
    assert cut[0] >= 10
    assert effects(database) == list(range(1, 2001))
    assert {(row.status, row.crashes) for row in database.rows()} == {("processed", 0)}
