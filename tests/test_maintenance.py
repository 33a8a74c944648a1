import logging
import os
import socket
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from time import monotonic
from types import SimpleNamespace

import psycopg
import pytest
from sqlalchemy import make_url, text
from support.running import Database, ago, ahead, claimant, in_thread, threads
from support.servers import libpq
from support.waiting import eventually

from sqla_neoq import maintenance, statements
from sqla_neoq._version import __version__
from sqla_neoq.claim import Want, claim, claim_suspect, settle
from sqla_neoq.config import RunnerConfig
from sqla_neoq.dialects import PostgresDialect
from sqla_neoq.link import Link
from sqla_neoq.maintenance import DEAD_AFTER, SILENT_AFTER, Housekeeper, Lease, LeaseEvents
from sqla_neoq.models import DeadJob, Failure, Worker
from sqla_neoq.outcomes import Outcome, Verb
from sqla_neoq.payloads import encode
from sqla_neoq.statements import jobs_oid

WANTS = [Want("q", 1, handler=True)]


@pytest.fixture
def database(engine):
    return Database(engine)


@pytest.fixture
def oid(database):
    with database.engine.connect() as connection:
        return connection.scalar(jobs_oid(), {"table": "neoq_jobs"})


class Events:
    """What the lease told."""

    def __init__(self):
        self.registered = []
        self.lost = self.rescued = self.suspects = self.overdue = 0
        self.cancels = []

    def events(self):
        def count(name):
            return lambda: setattr(self, name, getattr(self, name) + 1)

        return LeaseEvents(
            self.registered.append,
            count("lost"),
            count("rescued"),
            count("suspects"),
            count("overdue"),
            self.cancels.extend,
        )


@pytest.fixture
def make_lease(engine, database, oid):
    """Factory of leases; ``told`` is what each one told."""
    made = []

    def make(*, listening=False, register=True, **config):
        told = Events()
        lease = Lease(
            Link(engine, PostgresDialect(), "lease"),
            RunnerConfig(**config),
            {"q": 3},
            asking=(WANTS, encode(["m:f"])),
            oid=oid,
            listening=listening,
            options=claimant(database, 0).options,
            events=told.events(),
        )
        lease.told = told
        made.append(lease)
        if register:
            lease.register()
        return lease

    yield make
    for lease in made:
        lease.stop()
        lease.unregister()


@pytest.fixture
def lease(make_lease):
    return make_lease()


@pytest.fixture
def alive(database_url, oid):
    """Factory of the lock that lives with a worker's process; returns how to let it go."""
    held = []

    def hold(worker):
        connection = psycopg.connect(libpq(make_url(database_url)), autocommit=True)
        held.append(connection)
        connection.execute("SELECT pg_advisory_lock(hashtextextended(%s, %s))", [f"worker:{worker}", oid])
        return connection.close

    yield hold
    for connection in held:
        connection.close()


def take(database, worker, number=1, **values):
    """Add jobs and claim them for a worker."""
    for _ in range(number):
        database.add(queue="q", **values)
    with database.begin() as connection:
        return claim(connection, claimant(database, worker), [Want("q", number, handler=True)], number).jobs


def silent(database, worker, seconds):
    database.change(worker, model=Worker, heartbeat_at=ago(seconds))


def workers(database):
    return [row.id for row in database.rows(Worker)]


# The row -------------------------------------------------------------------------------------------------------------


def test_a_runner_enters_itself_and_says_under_which_id(make_lease, database):
    lease = make_lease(name="me", listening=True)
    (row,) = database.rows(Worker)
    assert lease.told.registered == [row.id]
    assert (row.name, row.host, row.pid) == ("me", socket.gethostname(), os.getpid())
    assert (row.queues, row.listening, row.version) == ({"q": 3}, True, __version__)


def test_a_runner_without_a_name_is_called_after_its_process(lease, database):
    assert database.rows(Worker)[0].name == f"{socket.gethostname()}:{os.getpid()}"


def test_a_beat_renews_the_lease_by_the_databases_clock(lease, database):
    silent(database, lease._worker, 3)
    before = database.rows(Worker)[0].heartbeat_at
    assert lease._beat()
    assert database.rows(Worker)[0].heartbeat_at > before + timedelta(seconds=2)


def test_signing_off_removes_the_row(lease, database):
    lease.unregister()
    assert workers(database) == []
    lease.unregister()


def test_signing_off_does_not_fail_for_a_connection_that_broke_since_the_last_beat(lease, database, caplog):
    with lease._link.use() as connection:
        name = connection.exec_driver_sql("SHOW application_name").scalar_one()
    database.cut_backends(name)
    lease.unregister()
    assert workers(database) == []
    assert caplog.records == []


def test_it_beats_in_its_thread_until_stopped(make_lease, database):
    lease = make_lease(heartbeat_interval=timedelta(milliseconds=100))
    silent(database, lease._worker, 3)
    before = database.rows(Worker)[0].heartbeat_at
    lease.start()
    eventually(lambda: database.rows(Worker)[0].heartbeat_at > before)
    assert lease.stop()
    assert not threads("neoq-heartbeat")


def test_it_beats_again_after_its_connection_was_ended(make_lease, database, caplog):
    lease = make_lease(heartbeat_interval=timedelta(milliseconds=100))
    lease.start()
    database.cut_backends("sqla_neoq lease")
    eventually(lambda: "the heartbeat failed" in caplog.text)
    silent(database, lease._worker, 3)
    before = database.rows(Worker)[0].heartbeat_at
    eventually(lambda: database.rows(Worker)[0].heartbeat_at > before)


# Who is dead ---------------------------------------------------------------------------------------------------------


def test_a_silent_worker_whose_lock_is_free_is_dead_and_its_jobs_run_again(lease, database):
    dead = database.worker(listening=True)
    (job,) = take(database, dead)
    silent(database, dead, SILENT_AFTER + 0.1)
    lease._beat()
    assert workers(database) == [lease._worker]
    row = database.row(job.id)
    assert (row.status, row.crashes, row.retries, row.claim_token) == ("failed", 1, 0, None)
    assert row.error == "the worker died while it ran this job"
    assert lease.told.rescued == 1
    (noted,) = database.failures()
    assert (noted.job_id, noted.kind, noted.attempt, noted.worker_id) == (job.id, "crashed", 1, dead)
    assert noted.started_at == datetime.fromtimestamp(job.ran_at, UTC)
    with database.begin() as connection:
        (again,) = claim(connection, claimant(database, lease._worker), WANTS, 1).jobs
    assert (again.id, again.retries) == (job.id, 1)


@pytest.mark.parametrize(
    ("listening", "seconds"), [(True, SILENT_AFTER - 1), (False, SILENT_AFTER + 1), (False, DEAD_AFTER - 1)]
)
def test_a_worker_that_may_be_alive_is_let_be(lease, database, listening, seconds):
    other = database.worker(listening=listening)
    (job,) = take(database, other)
    silent(database, other, seconds)
    lease._beat()
    assert other in workers(database)
    assert database.row(job.id).status == "running"


def test_a_silent_worker_that_holds_its_lock_is_not_dead_until_it_lets_go(lease, database, alive):
    other = database.worker(listening=True)
    take(database, other)
    let_go = alive(other)
    silent(database, other, DEAD_AFTER - 1)
    lease._beat()
    assert other in workers(database)
    let_go()
    eventually(lambda: lease._beat() and other not in workers(database))


@pytest.mark.parametrize("listening", [True, False])
def test_a_worker_silent_for_too_long_is_dead_lock_or_no_lock(lease, database, alive, listening):
    frozen = database.worker(listening=listening)
    (job,) = take(database, frozen)
    alive(frozen)
    silent(database, frozen, DEAD_AFTER + 0.1)
    lease._beat()
    assert frozen not in workers(database)
    assert database.row(job.id).status == "failed"


def test_no_worker_declares_itself_dead(lease, database):
    (job,) = take(database, lease._worker)
    silent(database, lease._worker, 1000)
    assert lease._beat()
    assert lease.told.lost == 0
    assert database.row(job.id).status == "running"


def test_the_lock_of_another_installation_means_nothing_here(lease, database, database_url, oid):
    dead = database.worker(listening=True)
    silent(database, dead, SILENT_AFTER + 1)
    with closing(psycopg.connect(libpq(make_url(database_url)), autocommit=True)) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended(%s, %s))", [f"worker:{dead}", oid + 1])
        lease._beat()
    assert dead not in workers(database)


# Rescue --------------------------------------------------------------------------------------------------------------


def test_the_jobs_of_a_worker_that_signed_off_are_rescued_at_once(lease, database):
    gone = database.worker()
    (job,) = take(database, gone)
    database.remove(gone, model=Worker)
    lease._beat()
    assert (database.row(job.id).status, database.row(job.id).crashes) == ("failed", 1)


def test_a_job_that_workers_keep_dying_under_is_dead(lease, database):
    job = database.add(queue="q", crashes=2, retries=5, status="failed", payload={"a": 1})
    gone = database.worker()
    with database.begin() as connection:
        claim_suspect(connection, claimant(database, gone), WANTS)
    database.remove(gone, model=Worker)
    lease._beat()
    assert database.rows() == []
    (dead,) = database.rows(DeadJob)
    assert (dead.id, dead.reason, dead.crashes, dead.retries, dead.payload) == (job, "crashed", 3, 6, {"a": 1})
    assert [(noted.kind, noted.attempt) for noted in database.failures()] == [("crashed", 7)]


def test_a_job_that_was_called_off_before_its_worker_died_does_not_run_again(lease, database):
    gone = database.worker()
    (job,) = take(database, gone)
    database.change(job.id, cancel_requested_at=ago(1))
    database.remove(gone, model=Worker)
    lease._beat()
    row = database.row(job.id)
    assert (row.status, row.crashes, row.cancel_requested_at) == ("cancelled", 1, None)
    assert row.finished_at is not None


def test_how_many_crashes_are_too_many_is_a_setting(make_lease, database):
    lease = make_lease(crash_limit=1)
    gone = database.worker()
    (job,) = take(database, gone)
    database.remove(gone, model=Worker)
    lease._beat()
    assert database.dead() == {job.id: "crashed"}


@pytest.mark.parametrize(("retries", "max_retries"), [(2, 2), (0, 0), (23, None)])
def test_a_crash_at_the_last_retry_exhausts_the_job(lease, database, retries, max_retries):
    gone = database.worker()
    (job,) = take(database, gone, retries=retries, max_retries=max_retries)
    database.remove(gone, model=Worker)
    lease._beat()
    assert database.dead() == {job.id: "exhausted"}


def test_the_outcome_of_a_worker_that_was_declared_dead_is_refused(lease, database):
    frozen = database.worker()
    (job,) = take(database, frozen)
    silent(database, frozen, DEAD_AFTER + 1)
    lease._beat()
    me = claimant(database, frozen)
    with database.begin() as connection:
        assert settle(connection, [Outcome(job, Verb.COMPLETE)], me.options) == {job.id}
        assert claim(connection, me, WANTS, 1).jobs == []
    assert database.row(job.id).status == "failed"


def test_a_runner_that_was_declared_dead_gives_up_what_it_ran_and_registers_anew(lease, database, caplog):
    first = lease._worker
    (job,) = take(database, first)
    database.remove(first, model=Worker)
    lease._beat()
    second = lease._worker
    assert second != first
    assert (lease.told.lost, lease.told.registered) == (1, [first, second])
    assert workers(database) == [second]
    assert "this runner was declared dead" in caplog.text
    assert database.row(job.id).status == "failed"
    lease._beat()
    assert lease.told.lost == 1


def test_two_rescuers_at_once_count_each_crash_once(make_lease, database):
    gone = database.worker(listening=True)
    take(database, gone, number=60)
    silent(database, gone, SILENT_AFTER + 1)
    leases = [make_lease() for _ in range(3)]
    start = threading.Barrier(3)
    errors = []

    def beat(lease):
        try:
            start.wait(10)
            for _ in range(3):
                lease._beat()
        except Exception as error:
            errors.append(error)

    for thread in [in_thread(lambda lease=lease: beat(lease)) for lease in leases]:
        thread.join(20)
    assert errors == []
    assert {(row.status, row.crashes) for row in database.rows()} == {("failed", 1)}
    assert len(database.rows(Failure)) == 60
    assert sum(lease.told.rescued > 0 for lease in leases) >= 1


def test_more_orphans_than_one_batch_are_rescued_without_waiting_for_the_next_beat(lease, database):
    gone = database.worker()
    take(database, gone, number=1)
    with database.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO neoq_jobs (queue, status, worker_id, claim_token) "
                "SELECT 'q', 'running', :gone, 1 FROM generate_series(1, 250)"
            ),
            {"gone": gone},
        )
    database.remove(gone, model=Worker)
    assert [lease._beat() for _ in range(3)] == [False, False, True]
    assert set(database.statuses().values()) == {"failed"}


def test_a_job_that_cannot_be_rescued_stops_no_other(lease, database, caplog):
    gone = database.worker()
    jobs = take(database, gone, number=3)
    database.remove(gone, model=Worker)
    with database.begin() as connection:
        connection.execute(
            text(f"ALTER TABLE neoq_jobs ADD CONSTRAINT stubborn CHECK (id <> {jobs[1].id} OR crashes = 0) NOT VALID")
        )
    try:
        lease._beat()
        assert database.statuses() == {jobs[0].id: "failed", jobs[1].id: "running", jobs[2].id: "failed"}
        assert f"job {jobs[1].id} could not be rescued" in caplog.text
    finally:
        with database.begin() as connection:
            connection.execute(text("ALTER TABLE neoq_jobs DROP CONSTRAINT stubborn"))
    lease._beat()
    assert set(database.statuses().values()) == {"failed"}


def test_nothing_is_rescued_from_the_living(lease, database):
    other = database.worker()
    jobs = [*take(database, other), *take(database, lease._worker)]
    lease._beat()
    assert database.statuses() == dict.fromkeys([job.id for job in jobs], "running")
    assert lease.told.rescued == 0


# What else a beat sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"crashes": 2}, 1),
        ({"crashes": 2, "task": "m:f"}, 1),
        ({"crashes": 1}, 0),
        ({"crashes": 2, "run_after": ahead(60)}, 0),
        ({"crashes": 2, "task": "m:unknown"}, 0),
        ({"crashes": 2, "queue": "other"}, 0),
        ({"crashes": 2, "deadline": ago(1)}, 0),
    ],
)
def test_a_suspect_that_this_runner_could_run_is_told_of(lease, database, values, told):
    database.add(**{"queue": "q"} | values)
    lease._beat()
    assert lease.told.suspects == told


def test_own_jobs_that_somebody_cancelled_are_told_of(lease, database):
    mine, _untouched = take(database, lease._worker, number=2)
    other = database.worker()
    (others,) = take(database, other)
    for job in (mine, others):
        database.change(job.id, cancel_requested_at=ago(1))
    lease._beat()
    assert lease.told.cancels == [mine.id]


def test_jobs_past_their_deadline_are_told_of_while_they_wait(lease, database):
    take(database, lease._worker, deadline=ahead(60))
    database.change(1, deadline=ago(1))
    lease._beat()
    assert lease.told.overdue == 0
    database.add(queue="whatever", deadline=ago(1))
    lease._deadlines_at = 0.0
    lease._beat()
    assert lease.told.overdue == 1


def test_deadlines_are_looked_at_the_less_often_the_longer_that_takes(lease, database, monkeypatch):
    lease._beat()
    assert lease._deadlines_at - monotonic() < 10 / maintenance._DEADLINES_SHARE
    monkeypatch.setattr(maintenance, "_DEADLINES_SHARE", 1e-9)
    lease._deadlines_at = 0.0
    lease._beat()
    database.add(queue="whatever", deadline=ago(1))
    lease._beat()
    assert lease.told.overdue == 0
    # However long it takes.
    assert lease._deadlines_at - monotonic() <= maintenance._DEADLINES_EVERY


def test_a_look_for_deadlines_that_was_cut_off_is_not_repeated_by_the_next_heartbeat(lease, monkeypatch):
    asked, execute = [], lease._execute

    def cut_off(connection, statement, **parameters):
        asked.append(parameters.get("deadlines"))
        if asked == [True]:
            raise psycopg.OperationalError("the connection was cut")
        return execute(connection, statement, **parameters)

    monkeypatch.setattr(lease, "_execute", cut_off)
    with pytest.raises(psycopg.OperationalError):
        lease._beat()
    assert lease._beat()
    assert asked == [True, False]


@pytest.mark.parametrize("living", [[], [20], [10, 20, 30]])
@pytest.mark.parametrize("worker", [None, -(2**62), 5, 15, 25, 2**62])
def test_what_runs_without_a_worker_is_found_whatever_its_workers_number(database, living, worker):
    for number in living:
        database.worker(id=number)
        database.add(queue="q", status="running", claim_token=1, worker_id=number)
    orphan = database.add(queue="q", status="running", claim_token=7, worker_id=worker)
    with database.begin() as connection:
        assert connection.execute(statements.orphans()).all() == [(orphan, 7)]


# Housekeeping --------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_housekeeper(engine, database):
    made = []

    def make(retention=timedelta(days=7)):
        housekeeper = Housekeeper(
            Link(engine, PostgresDialect(), "housekeeping"),
            RunnerConfig(retention=retention),
            claimant(database, 0).options,
        )
        made.append(housekeeper)
        return housekeeper

    yield make
    for housekeeper in made:
        housekeeper.stop()
        housekeeper._link.close()


def finished(database, seconds, status="processed"):
    return database.add(queue="q", status=status, finished_at=ago(seconds))


DAY = 86_400


def test_jobs_past_their_deadline_are_buried_and_nothing_else_is(make_housekeeper, database):
    overdue = [database.add(queue=queue, status=status, deadline=ago(1), payload={"a": 1}) for queue, status in
               (("q", "new"), ("other", "failed"))]  # fmt: skip
    kept = [database.add(queue="q", deadline=ahead(60)), database.add(queue="q"), finished(database, 1)]
    worker = database.worker()
    (running,) = take(database, worker, deadline=ahead(60), priority=9)
    database.change(running.id, deadline=ago(1))
    make_housekeeper()._bury_overdue()
    assert database.dead() == dict.fromkeys(overdue, "deadline")
    assert {*kept, running.id} == set(database.statuses())
    (first, _) = database.rows(DeadJob)
    assert (first.payload, first.error) == ({"a": 1}, "the deadline passed before the job could run")


def test_many_overdue_jobs_are_buried_in_batches(make_housekeeper, database, monkeypatch):
    monkeypatch.setattr(maintenance, "_PRUNE_BATCH", 7)
    for _ in range(20):
        database.add(queue="q", deadline=ago(1))
    make_housekeeper()._bury_overdue()
    assert len(database.dead()) == 20


def test_finished_jobs_are_removed_once_they_are_old_enough(make_housekeeper, database):
    for status in ("processed", "cancelled"):
        finished(database, 8 * DAY, status)
    kept = [finished(database, 6 * DAY), finished(database, 0), database.add(queue="q", created_at=ago(99 * DAY)),
            database.add(queue="q", status="failed", run_after=ago(99 * DAY))]  # fmt: skip
    make_housekeeper()._prune(7 * DAY)
    assert sorted(database.statuses()) == kept


def test_old_history_is_removed_but_no_sooner_than_after_a_week(make_housekeeper, database):
    old, young = (database.add(model=Failure, job_id=1, attempt=1, kind="error", message="x", failed_at=ago(days * DAY))
                  for days in (8, 6))  # fmt: skip
    make_housekeeper()._prune(0)
    assert [row.id for row in database.rows(Failure)] == [young]
    assert old != young


def test_pruning_goes_in_small_batches_with_a_breath_between(make_housekeeper, database, monkeypatch):
    monkeypatch.setattr(maintenance, "_PRUNE_BATCH", 10)
    for _ in range(35):
        finished(database, 8 * DAY)
    housekeeper, breaths = make_housekeeper(), []
    housekeeper.stopping = SimpleNamespace(is_set=lambda: False, wait=breaths.append, set=lambda: None)
    housekeeper._prune(7 * DAY)
    assert database.rows() == []
    assert breaths == [maintenance._PRUNE_PAUSE] * 3


def test_a_row_that_somebody_holds_is_left_for_the_next_time(make_housekeeper, database):
    held, free = finished(database, 8 * DAY), finished(database, 8 * DAY)
    with database.begin() as connection:
        connection.execute(text("SELECT 1 FROM neoq_jobs WHERE id = :id FOR UPDATE"), {"id": held})
        make_housekeeper()._prune(7 * DAY)
        assert free not in database.statuses()
    assert held in database.statuses()


def test_its_thread_prunes_when_it_starts(make_housekeeper, database):
    finished(database, 8 * DAY)
    housekeeper = make_housekeeper()
    housekeeper.start()
    eventually(lambda: database.rows() == [])
    assert housekeeper.stop()
    assert not threads("neoq-housekeeper")


def test_a_retention_of_none_keeps_everything(make_housekeeper, database):
    finished(database, 3000 * DAY)
    database.add(queue="q", deadline=ago(1))
    housekeeper = make_housekeeper(retention=None)
    housekeeper.start()
    housekeeper.overdue()
    eventually(database.dead)
    assert list(database.statuses().values()) == ["processed"]


def test_a_retention_of_zero_removes_what_others_left(make_housekeeper, database):
    finished(database, 1)
    housekeeper = make_housekeeper(retention=timedelta(0))
    housekeeper.start()
    eventually(lambda: database.rows() == [])


def test_it_buries_as_soon_as_it_is_told(make_housekeeper, database):
    housekeeper = make_housekeeper()
    housekeeper.start()
    eventually(lambda: housekeeper._link._connection is not None)
    job = database.add(queue="q", deadline=ago(1))
    housekeeper.overdue()
    eventually(lambda: database.dead() == {job: "deadline"})


def test_a_stop_that_comes_just_as_it_goes_round_is_not_overlooked(make_housekeeper):
    housekeeper = make_housekeeper()

    class StoppedMeanwhile(threading.Event):
        def clear(self):
            housekeeper.stopping.set()
            housekeeper.interrupt()
            super().clear()

    housekeeper._called = StoppedMeanwhile()
    housekeeper.overdue()
    housekeeper.start()
    housekeeper.join(10)
    assert not housekeeper.alive


def test_it_goes_on_after_its_connection_was_ended(make_housekeeper, database, caplog):
    housekeeper = make_housekeeper()
    housekeeper.start()
    eventually(lambda: housekeeper._link._connection is not None)
    with database.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'sqla_neoq housekeeping'"
            )
        )
    job = database.add(queue="q", deadline=ago(1))
    with caplog.at_level(logging.WARNING):
        housekeeper.overdue()
        eventually(lambda: database.dead() == {job: "deadline"})
    assert "housekeeping failed" in caplog.text


def test_stopping_closes_its_connection(make_housekeeper, database):
    housekeeper = make_housekeeper()
    housekeeper.start()
    eventually(lambda: database.backends(name="sqla_neoq housekeeping"))
    assert housekeeper.stop()
    eventually(lambda: not database.backends(name="sqla_neoq housekeeping"))


def test_a_job_that_another_table_refers_to_is_kept_and_stops_no_other(make_housekeeper, database, caplog):
    jobs = [finished(database, 9 * DAY) for _ in range(3)]
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE invoices (job bigint REFERENCES neoq_jobs (id))"))
        connection.execute(text("INSERT INTO invoices VALUES (:job)"), {"job": jobs[1]})
    try:
        make_housekeeper()._prune(7 * DAY)
        assert set(database.statuses()) == {jobs[1]}
        assert f"job {jobs[1]} is not pruned" in caplog.text
    finally:
        with database.begin() as connection:
            connection.execute(text("DROP TABLE invoices"))


def test_a_job_put_back_by_hand_under_its_old_id_can_die_again(make_housekeeper, database):
    job, other = (database.add(queue="q", deadline=ago(1)) for _ in range(2))
    with database.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO neoq_dead_jobs "
                "(id, queue, priority, payload, run_after, retries, crashes, created_at, reason) "
                "VALUES (:id, 'x', 0, '{}', now(), 0, 0, now(), 'exhausted')"
            ),
            {"id": job},
        )
    make_housekeeper()._bury_overdue()
    assert database.dead() == {job: "deadline", other: "deadline"}


def test_crashes_at_the_end_of_their_type_are_too_many(lease, database):
    job = database.add(queue="q", status="running", claim_token=5, worker_id=77_777, crashes=2**15 - 1)
    lease._beat()
    assert database.dead() == {job: "crashed"}


def test_after_an_outage_nobody_is_declared_dead_before_all_had_time_to_come_back(lease, database, caplog):
    lease.start()
    database.cut_backends("sqla_neoq lease")
    eventually(lambda: "the heartbeat failed" in caplog.text)
    other = database.worker(listening=True)
    silent(database, other, SILENT_AFTER + 1)
    beaten = lease.last_beat
    eventually(lambda: lease.last_beat > beaten)
    assert other in workers(database)
    lease._judge_from = 0.0
    eventually(lambda: other not in workers(database))
