"""Two at one row: each race is forced, by going on only when the server shows that the second waits for the first.

What the second finds when the first commits, or rolls back, is what PostgreSQL reads anew after the wait; these tests
show that the statements mean the right thing then. Those that pass over locked rows must not wait at all.
"""

import threading
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from support.running import Database, ago, claimant
from support.waiting import eventually

from sqla_neoq import DeadJob, Enqueued, Worker, cancel, enqueue, requeue, statements
from sqla_neoq.claim import Want, claim, settle
from sqla_neoq.outcomes import Outcome, Verb
from sqla_neoq.payloads import encode

COMMIT_OR_ROLLBACK = pytest.mark.parametrize("ended", ["commit", "rollback"])


@pytest.fixture
def database(engine):
    return Database(create_engine(engine.url, poolclass=NullPool))


@pytest.fixture
def me(database):
    return claimant(database, database.worker())


@pytest.fixture
def job(database, me):
    """A job that I have claimed."""
    database.add(queue="q", fingerprint="key", max_retries=5)
    return take(database, me)[0]


def take(database, me):
    with database.begin() as connection:
        return claim(connection, me, [Want("q", 9, True)], 9).jobs


def run(database, statement, **parameters):
    with database.begin() as connection:
        return connection.execute(statement, parameters).all()


def write(connection, me, job, verb=Verb.COMPLETE):
    outcome = Outcome(job, verb, delay=0.0, reason="exhausted", kind="error", message="no", traceback="")
    return settle(connection, [outcome], me.options)


def ride(connection, me, job):
    """Claim, and complete a job in the same statement."""
    return claim(connection, me, [Want("q", 9, True)], 9, completed=[Outcome(job, Verb.COMPLETE)])


@contextmanager
def first(database, ended):
    """Yield a connection in a transaction, and a function that lets another one run into its locks.

    That one is called in a thread, with a connection of its own, and commits. As soon as it waits for a lock, the
    first transaction is ended as said; its results are there after the block.
    """
    results = []
    threads = []

    def second(work):
        def call():
            try:
                with database.begin() as connection:
                    results.append(work(connection))
            except BaseException as error:
                results.append(error)

        threads.append(threading.Thread(target=call))
        threads[0].start()
        eventually(lambda: waits_for_a_lock(database), why=lambda: results)

    with database.engine.connect() as connection:
        # Begun here: a claim by itself begins none that SQLAlchemy knows of.
        transaction = connection.begin()
        yield connection, second, results
        getattr(transaction, ended)()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def waits_for_a_lock(database):
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with database.engine.connect() as connection:
        return connection.scalar(text(query))


# Cancelling ----------------------------------------------------------------------------------------------------------


@COMMIT_OR_ROLLBACK
def test_a_cancel_that_meets_a_claim_asks_the_claimed_job_to_stop(database, me, ended):
    id_ = database.add(queue="q")
    with first(database, ended) as (connection, second, results):
        assert len(claim(connection, me, [Want("q", 1, True)], 1).jobs) == 1
        second(lambda other: cancel(other, id_))
    row = database.row(id_)
    assert results == [True]
    assert (row.status, row.cancel_requested_at is not None) == (
        ("running", True) if ended == "commit" else ("cancelled", False)
    )


def test_a_claim_passes_over_a_job_that_is_being_cancelled(database, me):
    id_, other = database.add(queue="q"), database.add(queue="q")
    with database.engine.connect() as connection:
        cancel(connection, id_)
        assert [job.id for job in take(database, me)] == [other]
        connection.commit()
    assert take(database, me) == []
    assert database.row(id_).status == "cancelled"


@COMMIT_OR_ROLLBACK
@pytest.mark.parametrize(
    ("verb", "then"), [(Verb.COMPLETE, "processed"), (Verb.FAIL, "cancelled"), (Verb.PUT_BACK, "cancelled")]
)
def test_an_outcome_that_meets_a_cancel_obeys_it_unless_the_job_is_done(database, me, job, ended, verb, then):
    with first(database, ended) as (connection, second, results):
        cancel(connection, job.id)
        second(lambda other: write(other, me, job, verb))
    assert results == [set()]
    assert database.row(job.id).status == (then if ended == "commit" else verb.value)


@COMMIT_OR_ROLLBACK
def test_a_cancel_that_meets_a_completion_comes_too_late(database, me, job, ended):
    with first(database, ended) as (connection, second, results):
        write(connection, me, job)
        second(lambda other: cancel(other, job.id))
    assert results == [ended == "rollback"]
    assert database.row(job.id).status == ("processed" if ended == "commit" else "running")


@COMMIT_OR_ROLLBACK
def test_a_completion_that_rides_in_a_claim_and_meets_a_cancel_was_faster(database, me, job, ended):
    waiting = database.add(queue="q")
    with first(database, ended) as (connection, second, results):
        cancel(connection, job.id)
        second(lambda other: ride(other, me, job))
    (got,) = results
    assert ([taken.id for taken in got.jobs], got.lost) == ([waiting], frozenset())
    assert database.statuses() == {job.id: "processed", waiting: "running"}


# The dead and the late -----------------------------------------------------------------------------------------------


def rescue(connection, *jobs):
    orphans = encode([{"id": job.id, "token": job.token} for job in jobs])
    return connection.execute(statements.rescue(), {"orphans": orphans, "limit": 3}).all()


@COMMIT_OR_ROLLBACK
@pytest.mark.parametrize("verb", [Verb.COMPLETE, Verb.FAIL, Verb.PUT_BACK, Verb.BURY, Verb.CANCEL])
def test_a_late_outcome_that_meets_the_rescue_is_refused(database, me, job, ended, verb):
    database.remove(me.worker, model=Worker)
    with first(database, ended) as (connection, second, results):
        assert rescue(connection, job) == [(job.id, None)]
        second(lambda other: write(other, me, job, verb))
    assert results == [{job.id} if ended == "commit" else set()]
    rescued = [(row.status, row.crashes) for row in database.rows()] == [("failed", 1)]
    assert rescued == (ended == "commit")


@COMMIT_OR_ROLLBACK
def test_a_late_completion_that_rides_in_a_claim_and_meets_the_rescue_is_refused(database, me, job, ended):
    """And the claim takes the rescued job no more than any other: what it takes is what it saw when it began."""
    database.remove(me.worker, model=Worker)
    other_worker = claimant(database, database.worker())
    waiting = database.add(queue="q")
    with first(database, ended) as (connection, second, results):
        assert rescue(connection, job) == [(job.id, None)]
        second(lambda other: ride(other, other_worker, job))
    (got,) = results
    committed = ended == "commit"
    assert ([taken.id for taken in got.jobs], got.lost) == ([waiting], {job.id} if committed else set())
    assert database.statuses() == {job.id: "failed" if committed else "processed", waiting: "running"}


@COMMIT_OR_ROLLBACK
def test_a_rescue_does_not_touch_a_job_whose_outcome_is_being_written(database, me, job, ended):
    database.remove(me.worker, model=Worker)
    with database.engine.connect() as connection:
        write(connection, me, job)
        with database.begin() as other:
            assert rescue(other, job) == []
        getattr(connection, ended)()
    with database.begin() as other:
        assert rescue(other, job) == ([] if ended == "commit" else [(job.id, None)])


@COMMIT_OR_ROLLBACK
def test_two_who_rescue_one_job_count_one_crash(database, me, job, ended):
    database.remove(me.worker, model=Worker)
    with database.engine.connect() as connection:
        assert len(rescue(connection, job)) == 1
        with database.begin() as other:
            assert rescue(other, job) == []
        getattr(connection, ended)()
    with database.begin() as other:
        assert len(rescue(other, job)) == (ended == "rollback")
    assert (database.row(job.id).crashes, len(database.failures())) == (1, 1)


def test_a_rescue_that_looked_before_the_job_was_claimed_again_leaves_it_alone(database, me, job):
    database.remove(me.worker, model=Worker)
    seen = run(database, statements.orphans())
    assert seen == [(job.id, job.token)]
    with database.begin() as connection:
        rescue(connection, job)
    other = claimant(database, database.worker())
    assert [again.id for again in take(database, other)] == [job.id]
    with database.begin() as connection:
        assert rescue(connection, job) == []
    assert (database.row(job.id).status, database.row(job.id).worker_id) == ("running", other.worker)


def test_a_rescue_takes_back_no_other_claim_than_the_one_it_saw(database, me, job):
    """When a job changes hands under a rescue, its row is read anew, and the workers as they were before.

    The second worker stands for one that such a rescue cannot see.
    """
    database.remove(me.worker, model=Worker)
    with database.begin() as connection:
        rescue(connection, job)
    unseen = claimant(database, database.worker())
    (again,) = take(database, unseen)
    database.remove(unseen.worker, model=Worker)
    with database.begin() as connection:
        assert rescue(connection, job) == []
        assert rescue(connection, again) == [(job.id, None)]


def declare_dead(connection):
    about = {"worker": 0, "stale": 4.0, "dead": 30.0, "jobs": 1}
    return connection.execute(statements.remove_dead_workers(), about).all()


def beat(connection, me):
    about = {"worker": me.worker, "stale": 4.0, "wanted": "[]", "tasks": "[]", "deadlines": True}
    return connection.execute(statements.beat(), about).one().alive


@COMMIT_OR_ROLLBACK
def test_a_heartbeat_that_meets_the_verdict_learns_of_it(database, me, ended):
    database.change(me.worker, model=Worker, heartbeat_at=ago(60))
    with first(database, ended) as (connection, second, results):
        assert declare_dead(connection) == [(me.worker,)]
        second(lambda other: beat(other, me))
    assert results == [ended == "rollback"]


def test_nobody_is_declared_dead_while_its_heartbeat_is_being_written(database, me):
    database.change(me.worker, model=Worker, heartbeat_at=ago(60))
    with database.engine.connect() as connection:
        assert beat(connection, me)
        assert run(database, statements.remove_dead_workers(), worker=0, stale=4.0, dead=30.0, jobs=1) == []
        connection.commit()
    assert run(database, statements.remove_dead_workers(), worker=0, stale=4.0, dead=30.0, jobs=1) == []


def test_what_is_claimed_while_the_verdict_is_not_committed_is_rescued_after_it(database, me):
    id_ = database.add(queue="q")
    database.change(me.worker, model=Worker, heartbeat_at=ago(60))
    with database.engine.connect() as connection:
        declare_dead(connection)
        (job,) = take(database, me)
        connection.commit()
    assert run(database, statements.orphans()) == [(id_, job.token)]
    with database.begin() as connection:
        assert rescue(connection, job) == [(id_, None)]
        assert write(connection, me, job) == {id_}
    assert take(database, me) == []


# Fingerprints --------------------------------------------------------------------------------------------------------


@COMMIT_OR_ROLLBACK
@pytest.mark.parametrize("verb", [Verb.COMPLETE, Verb.BURY, Verb.CANCEL])
def test_an_enqueue_that_meets_the_end_of_its_twin_makes_a_new_job(database, me, job, ended, verb):
    with first(database, ended) as (connection, second, results):
        write(connection, me, job, verb)
        second(lambda other: enqueue(other, "q", fingerprint="key"))
    ((id_, created),) = results
    assert created == (ended == "commit")
    assert (id_ == job.id) == (ended == "rollback")


@pytest.fixture
def dead(database, me, job):
    with database.begin() as connection:
        write(connection, me, job, Verb.BURY)
    return job.id


@COMMIT_OR_ROLLBACK
def test_a_requeue_that_meets_an_enqueue_of_its_key_gives_way(database, dead, ended):
    with first(database, ended) as (connection, second, results):
        twin = enqueue(connection, "q", fingerprint="key").id
        second(lambda other: requeue(other, dead))
    committed = ended == "commit"
    assert results == [Enqueued(twin, created=False) if committed else Enqueued(dead, created=True)]
    assert list(database.statuses()) == [twin if committed else dead]
    assert len(database.dead()) == committed


@COMMIT_OR_ROLLBACK
def test_an_enqueue_that_meets_a_requeue_of_its_key_finds_that_job(database, dead, ended):
    with first(database, ended) as (connection, second, results):
        assert requeue(connection, dead) == Enqueued(dead, created=True)
        second(lambda other: enqueue(other, "q", fingerprint="key"))
    ((id_, created),) = results
    assert created == (ended == "rollback")
    assert (id_ == dead) == (ended == "commit")


@COMMIT_OR_ROLLBACK
def test_of_two_who_requeue_one_job_one_does(database, dead, ended):
    with first(database, ended) as (connection, second, results):
        requeue(connection, dead)
        second(lambda other: requeue(other, dead))
    assert results == [None if ended == "commit" else Enqueued(dead, created=True)]
    assert (database.statuses(), database.rows(DeadJob)) == ({dead: "new"}, [])


# Housekeeping --------------------------------------------------------------------------------------------------------


def test_a_claim_does_not_wait_for_what_is_being_pruned_or_buried(database, me):
    done = database.add(queue="q", status="processed", finished_at=ago(60))
    late = database.add(queue="q", deadline=ago(60))
    due = database.add(queue="q")
    with database.engine.connect() as connection:
        connection.execute(statements.prune_jobs(), {"age": 1.0, "limit": 9, "kept": "{0}"})
        assert connection.execute(statements.bury_overdue(), {"limit": 9}).all() == [(late,)]
        assert [job.id for job in take(database, me)] == [due]
        connection.commit()
    assert (database.statuses(), database.dead()) == ({due: "running"}, {late: "deadline"})
    assert done not in database.statuses()


@COMMIT_OR_ROLLBACK
def test_a_cancel_that_meets_the_burial_of_its_job_finds_none(database, ended):
    late = database.add(queue="q", deadline=ago(60))
    with first(database, ended) as (connection, second, results):
        connection.execute(statements.bury_overdue(), {"limit": 9}).all()
        second(lambda other: cancel(other, late))
    assert results == [ended == "rollback"]
    assert database.dead() == ({late: "deadline"} if ended == "commit" else {})
