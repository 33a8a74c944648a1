"""Claims, execution and what ends a run: S39-S49, S53, S55 and the rows about them."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import text
from support import eventually
from support.running import Gate

from sqla_neoq import JobTimeout, Worker, constant, handler

MOMENT = timedelta(milliseconds=50)


@handler("work")
def work(job):
    pass


# Claims ---------------------------------------------------------------------------------------------------------------


@pytest.mark.neoq("T06", "N14")
def test_a_thousand_jobs_all_run(place):
    place.sql("INSERT INTO {}neoq_jobs (queue) SELECT 'work' FROM generate_series(1, 1000)")
    assert place.drain(work).processed == 1000


@pytest.mark.neoq("S47")
def test_nothing_to_do_is_an_answer_and_no_error(place, caplog):
    assert place.drain(work).total == 0
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.neoq("S40", "T13")
def test_eight_runners_share_jobs_and_no_job_runs_twice(place, start, done):
    ran = []
    noted = handler("work")(lambda job: ran.append(job.id))
    place.sql("INSERT INTO {}neoq_jobs (queue) SELECT 'work' FROM generate_series(1, 200)")
    for _ in range(8):
        start(noted, concurrency=1)
    done(200)
    assert sorted(ran) == sorted(place.statuses())


@pytest.mark.neoq("S41", "T27")
def test_a_runner_takes_nothing_from_a_queue_it_does_not_work_on(place):
    mine, other = place.enqueue("work").id, place.enqueue("other").id
    handlers = [work, handler("other")(lambda job: None)]
    assert place.drain(*handlers, queues={"work": None}).processed == 1
    assert place.statuses() == {mine: "processed", other: "new"}
    assert place.drain(*handlers).processed == 1


@pytest.mark.neoq("S43")
def test_a_running_job_is_a_committed_state_with_its_owner_and_no_lock(place, start):
    gate = Gate()
    start(handler("work")(lambda job: gate()))
    id_ = place.enqueue("work").id
    gate.await_arrived(1)
    job = place.job(id_)
    [worker] = place.rows(Worker)
    assert (job.status, job.worker_id, job.claim_token > 0) == ("running", worker.id, True)
    assert job.ran_at >= job.created_at
    place.sql("SELECT id FROM {}neoq_jobs FOR UPDATE NOWAIT")
    eventually(
        lambda: (
            place.sql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name LIKE 'sqla_neoq%' AND xact_start IS NOT NULL"
            )
            == 0
        )
    )
    gate.open()


@pytest.mark.neoq("S44")
def test_an_attempt_after_a_failed_one_is_counted_when_it_is_claimed(place, start):
    gate = Gate()
    id_ = place.add(queue="work", status="failed", retries=2)
    start(handler("work")(lambda job: gate()))
    gate.await_arrived(1)
    assert place.job(id_).retries == 3
    gate.open()


@pytest.mark.neoq("N09", "N18")
def test_each_queue_keeps_its_own_concurrency(place, start, done):
    gates = {"one": Gate(), "two": Gate()}
    one = handler("one", concurrency=1)(lambda job: gates["one"]())
    two = handler("two", concurrency=2)(lambda job: gates["two"]())
    start(one, two, concurrency=8)
    for queue in gates:
        for _ in range(5):
            place.enqueue(queue)
    gates["one"].await_arrived(1)
    gates["two"].await_arrived(2)
    for gate in gates.values():
        gate.open()
    done(10)
    assert (gates["one"].most_inside, gates["two"].most_inside) == (1, 2)


@pytest.mark.neoq("T15", "T29", "N09")
def test_every_queue_of_a_runner_is_worked_on(place, start, done):
    start(*(handler(name)(lambda job: None) for name in ("first", "second", "third")))
    for name in ("third", "first", "second") * 2:
        place.enqueue(name)
    done(6)


# How runs end ---------------------------------------------------------------------------------------------------------


@pytest.mark.neoq("S49")
def test_success_leaves_no_error_and_says_when_it_was(place):
    @handler("work", backoff=constant(timedelta(0)))
    def second_time(job):
        if job.attempt == 1:
            raise ValueError("not yet")

    id_ = place.enqueue("work").id
    assert place.drain(second_time).processed == 1
    job = place.job(id_)
    assert (job.status, job.error, job.retries) == ("processed", None, 1)
    assert job.created_at < job.ran_at <= job.finished_at


class Panic(BaseException):
    pass


@pytest.mark.neoq("S46", "T05", "T18", "T26", "T34")
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, StopIteration, RecursionError, Panic])
def test_any_exception_is_a_failure_with_its_traceback_and_the_runner_goes_on(place, caplog, error):
    @handler("work")
    def panic(job):
        if job.payload == "panic":
            raise error("the cause")

    bad, good = place.enqueue("work", "panic").id, place.enqueue("work").id
    counts = place.drain(panic, concurrency=1)
    assert (counts.failed, counts.processed) == (1, 1)
    assert place.statuses() == {bad: "failed", good: "processed"}
    [failure] = place.failures_of(bad)
    assert (failure.attempt, failure.kind, failure.message) == (1, "error", f"{error.__name__}: the cause")
    assert 'raise error("the cause")' in failure.traceback
    assert failure.message in [record.neoq.get("error") for record in caplog.records if hasattr(record, "neoq")]


@pytest.mark.neoq("S45", "N10", "T31", "T40")
def test_past_its_timeout_a_handler_is_told_to_stop_and_the_attempt_has_failed(place, start):
    seen = []

    @handler("work", timeout=MOMENT)
    def polite(job):
        while not job.cancelled:
            threading.Event().wait(0.005)
        with pytest.raises(JobTimeout):
            job.raise_if_cancelled()
        seen.append(job.id)

    id_ = place.enqueue("work").id
    start(polite)
    eventually(lambda: seen == [id_] and place.failures_of(id_))
    [failure] = place.failures_of(id_)
    assert (failure.kind, place.job(id_).status) == ("timeout", "failed")


@pytest.mark.neoq("S45", "N10", "N11", "T40")
def test_past_its_timeout_a_handlers_statement_is_cancelled_and_its_connection_given_up(place, start):
    @handler("work", timeout=MOMENT)
    def sleep(job):
        job.session.execute(text("SELECT pg_sleep(60)"))

    id_ = place.enqueue("work").id
    start(sleep)
    eventually(lambda: place.failures_of(id_))
    eventually(lambda: place.sql("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'") == 0)
    eventually(lambda: place.engine.pool.checkedout() == 0)


@pytest.mark.neoq("S45", "N10", "T41", "T42", "T43", "T44")
@pytest.mark.parametrize("ending", ["finishes", "panics"])
def test_a_handler_that_does_not_stop_blocks_nobody_and_its_late_end_changes_nothing(place, start, ledger, ending):
    gate = Gate()

    @handler("work", timeout=MOMENT)
    def stubborn(job):
        if job.payload == "stubborn":
            gate()
            job.session.execute(text("INSERT INTO ledger (entry) VALUES (1)"))
            if ending == "panics":
                raise ValueError("late")

    stuck = place.enqueue("work", "stubborn").id
    runner = start(stubborn, concurrency=1, stuck_limit=9)
    eventually(lambda: place.failures_of(stuck))
    after = place.job(stuck)
    assert (after.status, after.claim_token) == ("failed", None)
    other = place.enqueue("work").id
    eventually(lambda: place.job(other).status == "processed")
    assert runner.health().detail["stuck"] == 1
    gate.open()
    eventually(lambda: runner.health().detail["stuck"] == 0)
    assert place.job(stuck) == after
    assert [failure.kind for failure in place.failures_of(stuck)] == ["timeout"]
    assert place.sql("SELECT count(*) FROM ledger") == 0
    assert place.engine.pool.checkedout() == 0


@pytest.mark.neoq("S48")
def test_a_commit_that_fails_is_a_failure_that_left_nothing_behind(place, ledger):
    @handler("work")
    def refer(job):
        job.session.execute(text("INSERT INTO ledger (entry, of) VALUES (1, 2)"))

    id_ = place.enqueue("work").id
    assert place.drain(refer).failed == 1
    assert place.job(id_).status == "failed"
    assert "ledger" in place.failures_of(id_)[0].message
    assert place.sql("SELECT count(*) FROM ledger") == 0


@pytest.mark.neoq("S48")
def test_a_later_claim_has_a_higher_token_for_systems_that_can_refuse_the_lower(place):
    tokens = []

    @handler("work", backoff=constant(timedelta(0)), max_retries=2)
    def note(job):
        tokens.append(job.token)
        raise ValueError("again")

    place.enqueue("work")
    place.drain(note)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 3


@pytest.mark.neoq("S43", "S55")
def test_a_success_is_written_although_all_of_the_runners_connections_die_meanwhile(place, start, done):
    ran = []

    @handler("work")
    def cut(job):
        ran.append(job.id)
        place.terminate()

    id_ = place.enqueue("work").id
    start(cut)
    done(1)
    assert ran == [id_]
    assert place.failures_of(id_) == []


@pytest.mark.neoq("S43", "S55")
def test_a_failure_is_written_when_the_handlers_own_connection_dies(place, ledger):
    @handler("work")
    def cut(job):
        job.session.execute(text("INSERT INTO ledger (entry) VALUES (1)"))
        job.session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    id_ = place.enqueue("work").id
    assert place.drain(cut).failed == 1
    assert (place.job(id_).status, len(place.failures_of(id_))) == ("failed", 1)
    assert place.sql("SELECT count(*) FROM ledger") == 0


@pytest.mark.neoq("N08", "T50")
def test_a_handler_that_takes_longer_than_any_idle_limit_commits_once(place, start, done):
    ran = []

    @handler("work", timeout=None)
    def slow(job):
        ran.append(job.id)
        threading.Event().wait(0.2)

    engine = place.make_engine(settings="-cidle_in_transaction_session_timeout=50")
    id_ = place.enqueue("work", fingerprint="one").id
    start(slow, database=engine)
    done(1)
    assert ran == [id_]
    assert place.enqueue("work", fingerprint="one").created
    engine.dispose()


@pytest.mark.neoq("N11", "N17")
def test_however_its_jobs_end_a_runner_keeps_its_threads_and_its_connections(place, start, done):
    @handler("work", max_retries=0, timeout=timedelta(seconds=10))
    def end(job):
        job.session.execute(text("SELECT 1"))
        if job.payload == "fail":
            raise ValueError("no")

    for number in range(10):
        place.enqueue("work", "fail")
        place.enqueue("work", number, deadline=timedelta(0))
    runner = start(end, concurrency=2, heartbeat_interval=timedelta(milliseconds=100))
    eventually(lambda: sorted(place.dead().values()) == ["deadline"] * 10 + ["exhausted"] * 10, why=place.dead)
    gate = Gate()
    runner.stop()
    assert place.engine.pool.checkedout() == 0
    both = handler("work")(lambda job: gate())
    start(both, concurrency=2)
    place.enqueue("work")
    place.enqueue("work")
    gate.await_arrived(2)
    gate.open()
    done(2)
