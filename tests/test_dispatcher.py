import contextlib
import threading
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from support.running import Database, Gate, ago, ahead, claimant, in_thread, threads
from support.waiting import eventually

from sqla_neoq import Retry, Snooze, floor, handler, prefetch
from sqla_neoq import dispatcher as module
from sqla_neoq import quarantine as quarantine_module
from sqla_neoq.config import RunnerConfig
from sqla_neoq.dialects import PostgresDialect
from sqla_neoq.dispatcher import Dispatcher
from sqla_neoq.eventloop import EventLoop
from sqla_neoq.link import Link
from sqla_neoq.outcomes import Verb
from sqla_neoq.pool import WorkPool
from sqla_neoq.transaction import RunTransaction

NEVER = timedelta(hours=1)
"""A poll interval within which no test waits for a poll: what happens was brought about by something else."""


class FakeListener:
    """Remembers for what the dispatcher is hungry."""

    def __init__(self):
        self.hungry = []

    def set_hungry(self, queues):
        self.hungry.append(frozenset(queues))


class Rig:
    """A dispatcher on a real database, with a pool of threads and without the rest of a runner."""

    def __init__(self, database, function, queues, *, concurrency, poll_interval, retention):
        self.database = database
        self.ended = []
        self.rounds = self.waits = 0
        self.listener = FakeListener()
        self.loop = EventLoop()
        self.link = Link(database.engine, PostgresDialect(), "dispatch")
        self.me = claimant(database, database.worker())
        handlers = {queue: handler(queue, max_retries=3)(function) for queue in queues}
        self.pool = WorkPool(
            queues,
            handlers=handlers,
            concurrency=concurrency,
            resolve=lambda job: handlers[job.queue],
            make_transaction=lambda definition: RunTransaction(None, {}),
            loop=self.loop,
        )
        self.dispatcher = Dispatcher(
            self.link,
            self.pool,
            self.me,
            config=RunnerConfig(poll_interval=poll_interval, concurrency=concurrency, retention=retention),
            listener=self.listener,
            on_settled=self._settled,
        )
        self._count("rounds", self.dispatcher, "_round")
        self._count("waits", self.pool, "wait")

    def _settled(self, outcomes, lost):
        self.ended += [(outcome.job.id, "lost" if outcome.job.id in lost else outcome.verb) for outcome in outcomes]

    def _count(self, name, owner, method):
        original = getattr(owner, method)

        def counted(*args, **kwargs):
            setattr(self, name, getattr(self, name) + 1)
            return original(*args, **kwargs)

        setattr(owner, method, counted)

    @property
    def verbs(self):
        return Counter(verb for _, verb in self.ended)

    def start(self):
        self.pool.start()
        self.dispatcher.start()

    def idle(self):
        """Wait until it has found nothing, and says so."""
        eventually(lambda: self.listener.hungry)

    def stop(self):
        self.dispatcher.claiming = False
        self.dispatcher.stopping.set()
        self.pool.poke()
        self.dispatcher.join(10)
        assert not self.dispatcher.alive
        self.pool.close()
        self.loop.close()


@pytest.fixture
def database(engine):
    return Database(engine)


@pytest.fixture
def rig(database):
    """Factory of rigs; stopped after the test, which fails if they do not stop or leave a connection."""
    made = []

    def make(function=lambda job: None, queues=("q",), *, concurrency=2, poll_interval=NEVER, retention=NEVER, limit=9):
        named = queues if isinstance(queues, dict) else dict.fromkeys(queues, limit)
        rig = Rig(database, function, named, concurrency=concurrency, poll_interval=poll_interval, retention=retention)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        rig.stop()
    eventually(lambda: not threads("neoq-job") and not threads("neoq-dispatcher"))
    eventually(lambda: not database.backends(name="sqla_neoq dispatch"))


@pytest.fixture
def no_polls(monkeypatch):
    """Without the quick polls of a runner that has just turned hungry: what happens was brought about otherwise."""
    monkeypatch.setattr(module, "_FIRST_POLL", NEVER.total_seconds())


# Claiming and writing ------------------------------------------------------------------------------------------------


def test_what_is_due_is_run_and_what_became_of_it_is_written(rig, database):
    jobs = [database.add(queue="q") for _ in range(30)]
    r = rig()
    r.start()
    eventually(lambda: len(r.ended) == 30)
    assert sorted(r.ended) == [(job, Verb.COMPLETE) for job in jobs]
    assert set(database.statuses().values()) == {"processed"}


def test_a_retention_of_zero_leaves_nothing_behind(rig, database):
    for _ in range(5):
        database.add(queue="q")
    r = rig(retention=timedelta(0))
    r.start()
    eventually(lambda: len(r.ended) == 5)
    assert database.rows() == []


def test_no_more_is_claimed_than_can_be_started(rig, database):
    for _ in range(10):
        database.add(queue="q")
    gate = Gate()
    r = rig(lambda job: gate(), concurrency=3)
    r.start()
    gate.await_arrived(3)
    r.pool.poke()
    assert Counter(database.statuses().values()) == {"running": 3, "new": 7}
    gate.open()
    eventually(lambda: len(r.ended) == 10)


def test_a_wake_makes_it_look_at_once(rig, database, no_polls):
    r = rig()
    r.start()
    r.idle()
    database.add(queue="q")
    r.dispatcher.wake(frozenset({"q"}))
    eventually(lambda: r.ended)


def test_a_wake_that_comes_during_a_claim_asks_for_another(rig, database, no_polls, monkeypatch):
    r, claim, added = rig(), module.claim, []

    def wake_after(*args, **how):
        claimed = claim(*args, **how)
        if not added:
            added.append(database.add(queue="q"))
            r.dispatcher.wake(frozenset({"other"}))
        return claimed

    monkeypatch.setattr(module, "claim", wake_after)
    r.start()
    eventually(lambda: r.ended)
    assert r.ended == [(added[0], Verb.COMPLETE)]


def test_a_job_that_was_committed_while_it_turned_hungry_is_found_without_a_wake(rig, database):
    r = rig()
    with database.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('q')"))
        r.start()
        r.idle()
    eventually(lambda: r.ended)


def test_a_future_job_is_run_at_its_time_without_a_wake_and_never_before(rig, database, no_polls):
    job = database.add(queue="q", run_after=ahead(0.3))
    r = rig()
    r.start()
    eventually(lambda: r.ended)
    row = database.row(job)
    assert row.ran_at >= row.run_after


@pytest.mark.parametrize("how", [Retry(after=timedelta(seconds=0.2)), Snooze(timedelta(seconds=0.2))])
def test_a_job_that_is_put_off_is_run_again_at_its_time_without_a_wake(rig, database, no_polls, how):
    attempts, hold = [], Gate()

    def put_off(job):
        attempts.append(job.attempt)
        if len(attempts) == 1:
            hold()
            raise how

    job = database.add(queue="q")
    r = rig(put_off)
    r.start()
    hold.await_arrived(1)
    hold.open()
    eventually(lambda: database.row(job).status == "processed")
    assert database.row(job).ran_at >= database.row(job).run_after


def test_short_jobs_that_wait_behind_long_ones_are_left_to_other_runners(rig, database, monkeypatch):
    monkeypatch.setattr(prefetch, "PATIENCE", 0.1)
    gate, ran = Gate(), []
    r = rig(lambda job: gate() if job.payload == "long" else ran.append(job.id))
    r.pool._lanes["q"].mean = 0.0001
    for _ in range(2):
        database.add(queue="q", payload="long", priority=1)
    short = [database.add(queue="q") for _ in range(20)]
    r.start()
    gate.await_arrived(2)
    eventually(lambda: r.verbs[Verb.PUT_BACK] == 20)
    assert Counter(database.statuses().values()) == {"running": 2, "new": 20}
    sleep(0.05)
    assert busy(r, 0.2) == (0, 0)
    gate.open()
    eventually(lambda: sorted(ran) == short)
    assert {row.retries for row in database.rows()} == {0}


# Not spinning --------------------------------------------------------------------------------------------------------


def busy(rig, seconds=0.5):
    """Return how often it went round in that time: a slower machine makes it fewer."""
    rounds, waits = rig.rounds, rig.waits
    sleep(seconds)
    return rig.rounds - rounds, rig.waits - waits


def test_an_idle_dispatcher_asks_less_and_less_often(rig):
    r = rig()
    r.start()
    r.idle()
    eventually(lambda: r.dispatcher._poll_after > 0.3)
    rounds, waits = busy(r)
    assert rounds <= 2
    assert waits <= 3


def test_a_dispatcher_without_free_slots_waits_for_one(rig, database):
    for _ in range(10):
        database.add(queue="q")
    gate = Gate()
    r = rig(lambda job: gate())
    r.start()
    gate.await_arrived(2)
    sleep(0.05)  # the round that settles on waiting
    assert busy(r) == (0, 0)
    gate.open()
    eventually(lambda: len(r.ended) == 10)


def test_a_queue_at_its_limit_with_a_backlog_does_not_make_it_spin(rig, database):
    for _ in range(10):
        database.add(queue="one")
    gate = Gate()
    r = rig(lambda job: gate(), {"one": 1, "empty": 9})
    r.start()
    gate.await_arrived(1)
    eventually(lambda: r.dispatcher._poll_after > 0.3)
    rounds, waits = busy(r)
    assert rounds <= 2
    assert waits <= 3
    gate.open()
    eventually(lambda: len(r.ended) == 10)


def test_a_slot_of_a_limited_queue_is_filled_again_at_once_though_another_queue_is_empty(rig, database):
    for _ in range(2):
        database.add(queue="one")
    gate = Gate()
    r = rig(lambda job: gate(), {"one": 1, "empty": 9})
    r.start()
    gate.await_arrived(1)
    # Long enough on the empty queue alone that no poll is near.
    eventually(lambda: r.dispatcher._poll_after > 2)
    began = monotonic()
    gate.open()
    eventually(lambda: len(r.ended) == 2)
    assert monotonic() - began < 0.5


def test_jobs_that_nobody_here_can_run_do_not_make_it_spin(rig, database):
    for values in ({"task": "m:unknown"}, {"deadline": ago(1)}, {"crashes": 2, "task": "m:unknown"}):
        database.add(queue="q", **values)
    r = rig()
    r.start()
    r.idle()
    eventually(lambda: r.dispatcher._poll_after > 0.3)
    rounds, waits = busy(r)
    assert rounds <= 2
    assert waits <= 3


def test_a_quiet_dispatcher_does_nothing(rig, database):
    r = rig()
    r.dispatcher.claiming = False
    r.start()
    database.add(queue="q")
    sleep(0.05)
    assert busy(r, 0.2) == (0, 0)
    assert database.statuses() == {1: "new"}


def test_wakes_without_a_free_slot_cost_no_statement(rig, database):
    for _ in range(3):
        database.add(queue="q")
    gate = Gate()
    r = rig(lambda job: gate())
    r.start()
    gate.await_arrived(2)
    sleep(0.05)
    rounds = r.rounds
    for _ in range(100):
        r.dispatcher.wake(frozenset({"q"}))
    assert busy(r, 0.1)[0] == 0
    assert r.rounds == rounds
    gate.open()
    eventually(lambda: len(r.ended) == 3)


# Hunger --------------------------------------------------------------------------------------------------------------


def test_it_is_hungry_for_the_queues_that_gave_less_than_was_asked(rig, database):
    gate = Gate()
    for _ in range(5):
        database.add(queue="full")
    r = rig(lambda job: gate(), {"full": 1, "dry": 1})
    r.start()
    gate.await_arrived(1)
    eventually(lambda: r.listener.hungry and r.listener.hungry[-1] == {"dry"})
    gate.open()
    eventually(lambda: len(r.ended) == 5)
    eventually(lambda: r.listener.hungry[-1] == {"full", "dry"})


def test_with_more_to_do_than_slots_it_is_hungry_for_nothing(rig, database):
    gate = Gate()
    for _ in range(5):
        database.add(queue="q")
    r = rig(lambda job: gate())
    r.start()
    gate.await_arrived(2)
    eventually(lambda: r.listener.hungry)
    assert set(r.listener.hungry) == {frozenset()}
    gate.open()
    eventually(lambda: len(r.ended) == 5)


def test_in_a_rush_of_wakes_it_looks_by_itself_and_is_hungry_again_afterwards(rig, database):
    r = rig()
    r.start()
    r.idle()
    rushing = threading.Event()

    def rush():
        while not rushing.is_set():
            r.dispatcher.wake(frozenset({"q"}))
            database.add(queue="q")

    thread = in_thread(rush)
    calls = len(r.listener.hungry)
    # Each of the wakes counts: make them many without the machine having to be fast.
    eventually(lambda: r.dispatcher.wake(frozenset({"q"})) or frozenset() in r.listener.hungry[calls:])
    rushing.set()
    thread.join(10)
    eventually(lambda: r.listener.hungry[-1] == {"q"})
    eventually(lambda: len(r.ended) == len(database.rows()))


# Suspects ------------------------------------------------------------------------------------------------------------


def test_a_suspect_is_run_when_the_lease_has_seen_it(rig, database):
    suspect = database.add(queue="q", status="failed", crashes=2)
    r = rig()
    r.start()
    r.idle()
    assert database.statuses() == {suspect: "failed"}
    r.dispatcher.suspects_due()
    eventually(lambda: r.ended == [(suspect, Verb.COMPLETE)])


def test_suspects_run_one_after_the_other_and_alone(rig, database):
    suspects = [database.add(queue="q", status="failed", crashes=2) for _ in range(3)]
    inside, together, gate = [], [], Gate()

    def work(job):
        inside.append(job.id)
        together.append(sorted(inside))
        sleep(0.01)
        inside.remove(job.id)

    r = rig(work, concurrency=4)
    r.start()
    r.idle()
    r.dispatcher.suspects_due()
    eventually(lambda: len(r.ended) == 3)
    assert sorted(together) == [[suspect] for suspect in suspects]
    gate.open()


def test_others_wait_while_a_suspect_runs_but_not_for_long(rig, database, monkeypatch):
    monkeypatch.setattr(quarantine_module, "ALONE", 0.2)
    gate = Gate()
    suspect = database.add(queue="q", status="failed", crashes=2)
    r = rig(lambda job: gate() if job.id == suspect else None)
    r.start()
    r.idle()
    r.dispatcher.suspects_due()
    gate.await_arrived(1)
    other = database.add(queue="q")
    r.dispatcher.wake(frozenset({"q"}))
    eventually(lambda: r.ended == [(other, Verb.COMPLETE)])
    gate.open()
    assert database.row(other).ran_at - database.row(suspect).ran_at >= timedelta(seconds=0.2)


def test_a_suspect_that_runs_on_and_on_does_not_make_it_spin(rig, database, monkeypatch):
    monkeypatch.setattr(quarantine_module, "ALONE", 0.05)
    gate = Gate()
    database.add(queue="q", status="failed", crashes=2)
    r = rig(lambda job: gate())
    r.start()
    r.idle()
    r.dispatcher.suspects_due()
    gate.await_arrived(1)
    eventually(lambda: r.dispatcher._poll_after > 0.3)
    rounds, waits = busy(r)
    assert rounds <= 2
    assert waits <= 3
    gate.open()
    eventually(lambda: r.ended)


def test_a_suspect_does_not_wait_for_ever_for_the_jobs_that_run(rig, database, monkeypatch):
    monkeypatch.setattr(quarantine_module, "HOLD", 0.1)
    gate = Gate()
    long = database.add(queue="q")
    r = rig(lambda job: gate() if job.id == long else None)
    r.start()
    gate.await_arrived(1)
    suspect = database.add(queue="q", status="failed", crashes=2)
    r.dispatcher.suspects_due()
    eventually(lambda: r.ended == [(suspect, Verb.COMPLETE)])
    gate.open()


def test_a_wake_that_comes_before_the_look_for_a_suspect_is_not_lost(rig, database, no_polls, monkeypatch):
    monkeypatch.setattr(quarantine_module, "HOLD", 0.1)
    gate = Gate()
    long = database.add(queue="q")
    r = rig(lambda job: gate() if job.id == long else None)
    r.start()
    gate.await_arrived(1)
    r.dispatcher.quarantine.due = True  # there is none: another runner was faster
    r.pool.poke()
    eventually(lambda: r.dispatcher.quarantine._held_since)
    other = database.add(queue="q")
    r.dispatcher.wake(frozenset({"q"}))
    eventually(lambda: r.ended == [(other, Verb.COMPLETE)])
    gate.open()


# The database away ---------------------------------------------------------------------------------------------------


class Outage:
    """Lets a link fail while ``away`` is set."""

    def __init__(self, link, monkeypatch):
        self.away = threading.Event()
        self.refused = 0
        self._use = link.use
        monkeypatch.setattr(link, "use", self._refuse)

    @contextmanager
    def _refuse(self, *args):
        if self.away.is_set():
            self.refused += 1
            raise OperationalError("x", {}, psycopg.OperationalError("away"))
        with self._use(*args) as connection:
            yield connection


def test_outcomes_are_kept_while_the_database_is_away_and_written_when_it_is_back(rig, database, monkeypatch, caplog):
    gate = Gate()
    job = database.add(queue="q")
    r = rig(lambda job: gate())
    outage = Outage(r.link, monkeypatch)
    r.start()
    gate.await_arrived(1)
    outage.away.set()
    gate.open()
    eventually(lambda: outage.refused >= 2)
    assert r.dispatcher.away
    assert database.statuses() == {job: "running"}
    outage.away.clear()
    eventually(lambda: r.ended == [(job, Verb.COMPLETE)])
    assert not r.dispatcher.away
    assert "the database is away" in caplog.text


def test_it_waits_longer_and_longer_for_a_database_that_is_away(rig, monkeypatch):
    r = rig(poll_interval=timedelta(milliseconds=10))
    outage = Outage(r.link, monkeypatch)
    outage.away.set()
    r.start()
    eventually(lambda: outage.refused >= 3)
    refused = outage.refused
    sleep(0.5)
    assert outage.refused - refused <= 3


def test_after_its_connection_was_ended_it_goes_on(rig, database):
    gate = Gate()
    first = database.add(queue="q")
    r = rig(lambda job: gate() if job.id == first else None)
    r.start()
    gate.await_arrived(1)
    with database.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'sqla_neoq dispatch'"
            )
        )
    gate.open()
    eventually(lambda: r.ended == [(first, Verb.COMPLETE)])
    second = database.add(queue="q")
    eventually(lambda: (second, Verb.COMPLETE) in r.ended)


def test_a_claim_whose_answer_was_lost_is_put_back_and_run_once(rig, database, monkeypatch, caplog):
    ran, claim, lost = [], module.claim, []

    def lose_the_answer(*args, **how):
        claimed = claim(*args, **how)
        if claimed.jobs and not lost:
            lost.extend(claimed.jobs)
            raise OperationalError("x", {}, psycopg.OperationalError("the connection broke"))
        return claimed

    monkeypatch.setattr(module, "claim", lose_the_answer)
    jobs = [database.add(queue="q") for _ in range(2)]
    r = rig(lambda job: ran.append(job.id))
    r.start()
    eventually(lambda: len(r.ended) == 2)
    assert [job.id for job in lost] == jobs
    assert sorted(ran) == jobs
    assert {row.retries for row in database.rows()} == {0}
    assert "jobs of a claim whose answer was lost were put back" in caplog.text


def test_a_claim_that_commits_after_its_connection_broke_is_put_back_and_run(
    rig, database, engine, monkeypatch, caplog
):
    """The server goes on with what it was asked, and notices only at its answer that nobody is there."""
    claim, late, open_transactions = module.claim, engine.connect(), []

    def on_another_connection(connection, *args, **how):
        if open_transactions:
            return claim(connection, *args, **how)
        claimed = claim(late, *args, **how)
        if claimed.jobs:
            open_transactions.append(late)
            raise OperationalError("x", {}, psycopg.OperationalError("the connection broke"))
        return claimed

    monkeypatch.setattr(module, "claim", on_another_connection)
    job = database.add(queue="q")
    r = rig(lambda job: None)
    with late, late.begin() as transaction:
        r.start()
        # It has connected again, and found nothing of that claim.
        eventually(lambda: open_transactions and r.dispatcher._look_for_strays_after > module._FIRST_LOOK_FOR_STRAYS)
        assert database.row(job).status == "new"
        transaction.commit()
    eventually(lambda: (job, Verb.COMPLETE) in r.ended)
    assert "jobs of a claim whose answer was lost were put back" in caplog.text


def test_a_stray_that_somebody_holds_keeps_no_other_job_waiting(rig, database, engine):
    r = rig(lambda job: None)
    stray = database.add(queue="q", status="running", worker_id=r.me.worker, claim_token=1, ran_at=ago(1))
    with engine.begin() as holder:
        holder.execute(text("SELECT 1 FROM neoq_jobs WHERE id = :id FOR UPDATE"), {"id": stray})
        other = database.add(queue="q")
        r.start()
        eventually(lambda: (other, Verb.COMPLETE) in r.ended)
    eventually(lambda: (stray, Verb.COMPLETE) in r.ended)


def test_outcomes_whose_commit_was_not_answered_are_not_called_lost(rig, database, monkeypatch):
    broken, hold = [], Gate()
    job = database.add(queue="q")
    r = rig(lambda job: hold())
    transaction = r.link.transaction

    @contextmanager
    def break_after_the_commit():
        with transaction() as connection:
            yield connection
        if not broken:
            broken.append(True)
            raise OperationalError("x", {}, psycopg.OperationalError("the connection broke"))

    monkeypatch.setattr(r.link, "transaction", break_after_the_commit)
    r.start()
    hold.await_arrived(1)
    hold.open()
    eventually(lambda: r.ended)
    assert broken
    assert r.ended == [(job, Verb.COMPLETE)]


def test_a_claim_whose_answer_was_lost_completed_what_rode_in_it(rig, database, monkeypatch):
    ran, claim, lost = [], module.claim, []

    def lose_the_answer(*args, **how):
        claimed = claim(*args, **how)
        if how["completed"] and claimed.jobs and not lost:
            lost.extend(claimed.jobs)
            raise psycopg.OperationalError("the connection broke")
        return claimed

    monkeypatch.setattr(module, "claim", lose_the_answer)
    jobs = [database.add(queue="q") for _ in range(3)]
    r = rig(lambda job: ran.append(job.id), concurrency=1)
    r.start()
    eventually(lambda: len(r.ended) == 3)
    assert lost
    assert sorted(r.ended) == [(job, Verb.COMPLETE) for job in jobs]
    assert sorted(ran) == jobs


# Tiny jobs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """Claims of ten, as of a thousand; with a note of how many jobs each came with and brought, and of hand-outs."""
    monkeypatch.setattr(prefetch, "BATCH", 10)
    monkeypatch.setattr(prefetch, "LIMIT", 20)
    happened, claim = [], module.claim

    def note(*args, meanwhile, **how):
        happened.append(("sent", len(how["completed"])))

        def hand_out():
            happened.append("meanwhile")
            meanwhile()

        claimed = claim(*args, meanwhile=hand_out if meanwhile else None, **how)
        happened.append(("came", len(claimed.jobs)))
        return claimed

    monkeypatch.setattr(module, "claim", note)
    return happened


def test_tiny_jobs_are_handed_out_while_the_server_works_on_the_next_round(rig, database, tiny):
    for _ in range(95):
        database.add(queue="q")
    r = rig()
    handed_out, hand_out = [], r.pool.hand_out

    def note_what_is_handed_out():
        handed_out.append((tiny[-1:], len(r.pool._accepted)))
        hand_out()

    r.pool.hand_out = note_what_is_handed_out
    r.start()
    eventually(lambda: len(r.ended) == 95)
    assert r.verbs == {Verb.COMPLETE: 95}
    assert (["meanwhile"], 10) in handed_out


def test_what_was_accepted_is_handed_out_though_the_database_went_away(rig, database, tiny, monkeypatch):
    for _ in range(95):
        database.add(queue="q")
    r = rig()
    use, broken, held_back = r.link.use, [], []
    next_delay = r.dispatcher._reconnecting.next_delay

    def break_once(*args):
        if not broken and r.pool._accepted:
            broken.append(len(r.pool._accepted))
            raise OperationalError("x", {}, psycopg.OperationalError("the connection broke"))
        return use(*args)

    def note_what_waits():
        held_back.append(r.pool.holds_back)
        return next_delay()

    monkeypatch.setattr(r.link, "use", break_once)
    monkeypatch.setattr(r.dispatcher._reconnecting, "next_delay", note_what_waits)
    r.start()
    eventually(lambda: len(r.ended) == 95)
    assert broken
    assert held_back == [False]
    assert r.verbs == {Verb.COMPLETE: 95}


def test_what_waits_for_the_database_without_a_claim_leaves_no_job_unstarted_meanwhile(
    rig, database, tiny, monkeypatch
):
    for _ in range(95):
        database.add(queue="q")

    def fail_now_and_then(job):
        if job.id % 7 == 0:
            raise ValueError

    r = rig(fail_now_and_then)
    held_back, settle, strays = [], module.settle, r.dispatcher._put_back_strays

    def note(*args, **how):
        held_back.append(bool(args[1]) and r.pool.holds_back)
        return settle(*args, **how)

    def note_strays(now):
        held_back.append(r.pool.holds_back)
        strays(now)
        r.dispatcher._look_for_strays_at = 0.0

    monkeypatch.setattr(module, "settle", note)
    monkeypatch.setattr(r.dispatcher, "_put_back_strays", note_strays)
    r.start()
    eventually(lambda: len(r.ended) == 95)
    assert len(held_back) > 2
    assert not any(held_back)


# Outcomes that cannot be written -------------------------------------------------------------------------------------


def test_an_outcome_that_cannot_be_written_is_written_as_a_plain_failure_and_the_others_as_they_are(
    rig, database, caplog
):
    gate = Gate()
    jobs = [database.add(queue="q") for _ in range(3)]
    r = rig(lambda job: gate(), concurrency=3)
    r.start()
    gate.await_arrived(3)
    take = r.pool.take_outcomes
    together = []

    def all_at_once():
        together.extend(take())
        if len(together) < 3:
            return []
        for outcome in together:
            if outcome.job.id == jobs[1]:
                outcome.verb, outcome.delay, outcome.message = Verb.FAIL, 1.0, "x"
                outcome.kind = "a kind that the table refuses"
        outcomes = together[:]
        together.clear()
        return outcomes

    r.pool.take_outcomes = all_at_once
    gate.open()
    eventually(lambda: len(r.ended) == 3)
    assert database.statuses() == {jobs[0]: "processed", jobs[1]: "failed", jobs[2]: "processed"}
    assert "could not be written" in database.row(jobs[1]).error
    assert f"the outcome of job {jobs[1]} cannot be written" in caplog.text


def take_together(r, number):
    """Let the dispatcher take no outcome before there are that many, whatever wakes it."""
    take, taken = r.pool.take_outcomes, []

    def take_all():
        if not taken and len(r.pool._outcomes) < number:
            return []
        taken.append(True)
        return take()

    r.pool.take_outcomes = take_all


@contextmanager
def held(database, job):
    with database.begin() as holder:
        holder.execute(text("SELECT 1 FROM neoq_jobs WHERE id = :id FOR UPDATE"), {"id": job})
        yield


@contextmanager
def refused(database, job):
    with database.begin() as connection:
        connection.execute(text(f"ALTER TABLE neoq_jobs ADD CONSTRAINT r CHECK (id <> {job} OR status <> 'processed')"))
    try:
        yield
    finally:
        with database.begin() as connection:
            connection.execute(text("ALTER TABLE neoq_jobs DROP CONSTRAINT r"))


@pytest.mark.parametrize("obstacle", [held, refused])
def test_a_completion_that_cannot_be_written_costs_no_wake_up_that_came_with_it(
    rig, database, no_polls, monkeypatch, obstacle
):
    monkeypatch.setattr(module, "LINGER", NEVER.total_seconds())
    gate, job = Gate(), database.add(queue="q")
    r = rig(lambda context: gate() if context.id == job else None)
    r.start()
    gate.await_arrived(1)
    r.idle()
    with obstacle(database, job):
        gate.open()
        eventually(lambda: r.pool._outcomes)
        other = database.add(queue="q")
        r.dispatcher.wake(frozenset({"q"}))
        eventually(lambda: database.row(other).ran_at)
    r.pool.poke()
    eventually(lambda: {id_ for id_, _ in r.ended} == {job, other})
    assert database.statuses() == {job: "processed" if obstacle is held else "failed", other: "processed"}


def test_an_outcome_that_was_blocked_when_the_database_went_away_is_written_and_reported_once(
    rig, database, monkeypatch
):
    monkeypatch.setattr(module, "LINGER", NEVER.total_seconds())
    gate, broken = Gate(), []
    jobs = [database.add(queue="q") for _ in range(2)]
    r = rig(lambda job: gate(), concurrency=3)
    take, settle_one = r.pool.take_outcomes, r.dispatcher._settle_one

    def break_at_the_second(outcome):
        if outcome.job.id == jobs[1] and not broken:
            broken.append(True)
            raise OperationalError("x", {}, psycopg.OperationalError("the connection broke"))
        return settle_one(outcome)

    monkeypatch.setattr(r.pool, "take_outcomes", lambda: sorted(take(), key=lambda outcome: outcome.job.id))
    monkeypatch.setattr(r.dispatcher, "_settle_one", break_at_the_second)
    r.start()
    gate.await_arrived(2)
    r.idle()
    take_together(r, 2)
    with held(database, jobs[0]):
        gate.open()
        eventually(lambda: r.pool.poke() or (jobs[1], Verb.COMPLETE) in r.ended)
    assert broken
    eventually(lambda: len(r.ended) >= 2 and not r.dispatcher._blocked)
    assert sorted(r.ended) == [(job, Verb.COMPLETE) for job in jobs]


def test_rows_that_stay_held_cost_a_wait_for_one_of_them_and_the_others_are_written(rig, database, monkeypatch):
    monkeypatch.setattr(module, "_UNBLOCK_EVERY", 0.1)
    gate, tries = Gate(), []
    jobs = [database.add(queue="q") for _ in range(5)]
    r = rig(lambda job: gate(), concurrency=6)
    unblock, settle_one = r.dispatcher._unblock, r.dispatcher._settle_one

    def count(now):
        tries.append([])
        unblock(now)

    def note(outcome):
        if tries:
            tries[-1].append(outcome.job.id)
        return settle_one(outcome)

    monkeypatch.setattr(r.dispatcher, "_unblock", count)
    monkeypatch.setattr(r.dispatcher, "_settle_one", note)
    r.start()
    gate.await_arrived(5)
    with held(database, jobs[0]), held(database, jobs[1]):
        with contextlib.ExitStack() as released:
            for job in jobs[2:]:
                released.enter_context(held(database, job))
            gate.open()
            eventually(lambda: len(r.dispatcher._blocked) == 5)
            tries.clear()
            eventually(lambda: len(tries) > 5)
            assert {len(tried) for tried in tries[:5]} == {1}
            assert {job for tried in tries[:5] for job in tried} == set(jobs)
        eventually(lambda: {job for job, _ in r.ended} == set(jobs[2:]))
    eventually(lambda: sorted(r.ended) == [(job, Verb.COMPLETE) for job in jobs])


def test_what_was_written_before_the_database_went_away_is_not_called_lost(rig, database, monkeypatch):
    monkeypatch.setattr(module, "LINGER", NEVER.total_seconds())
    monkeypatch.setattr(module, "_UNBLOCK_EVERY", 0.1)
    gate, broken = Gate(), []
    jobs = [database.add(queue="q") for _ in range(2)]
    r = rig(lambda job: gate(), concurrency=3)
    settle_one = r.dispatcher._settle_one

    def break_after_the_first(outcome):
        written = settle_one(outcome)
        if not broken:
            broken.append(outcome.job.id)
            raise OperationalError("x", {}, psycopg.OperationalError("the answer was lost"))
        return written

    monkeypatch.setattr(r.dispatcher, "_settle_one", break_after_the_first)
    r.start()
    gate.await_arrived(2)
    r.idle()
    take_together(r, 2)
    with held(database, jobs[0]), held(database, jobs[1]):
        gate.open()
        eventually(lambda: r.pool.poke() or len(r.dispatcher._blocked) == 2)
    eventually(lambda: len(r.ended) >= 2)
    assert broken
    assert sorted(r.ended) == [(job, Verb.COMPLETE) for job in jobs]


def test_what_may_have_been_written_is_remembered_while_other_outcomes_are_blocked(rig, database, monkeypatch):
    monkeypatch.setattr(module, "_UNBLOCK_EVERY", 0.01)
    first, second, broken = Gate(), Gate(), []
    blocked, doubtful = [database.add(queue="q") for _ in range(2)]
    r = rig(lambda job: (first if job.id == blocked else second)(), concurrency=3)
    transaction = r.link.transaction

    @contextmanager
    def break_after_the_commit():
        with transaction() as connection:
            yield connection
        if not broken:
            broken.append(True)
            raise OperationalError("x", {}, psycopg.OperationalError("the connection broke"))

    r.start()
    first.await_arrived(1)
    second.await_arrived(1)
    r.idle()
    with held(database, blocked):
        first.open()
        eventually(lambda: r.dispatcher._blocked)
        monkeypatch.setattr(r.link, "transaction", break_after_the_commit)
        second.open()
        eventually(lambda: r.ended)
    assert broken
    assert r.ended[0] == (doubtful, Verb.COMPLETE)
    eventually(lambda: r.ended[1:] == [(blocked, Verb.COMPLETE)])


def test_outcomes_wait_for_a_table_that_is_away_for_a_moment(rig, database):
    gate = Gate()

    def fail(job):
        gate()
        raise ValueError("remember me")

    job = database.add(queue="q")
    r = rig(fail)
    r.start()
    gate.await_arrived(1)
    with database.begin() as connection:
        connection.execute(text("ALTER TABLE neoq_failures RENAME TO neoq_failures_away"))
    try:
        gate.open()
        eventually(lambda: r.dispatcher.away or r.ended)
    finally:
        with database.begin() as connection:
            connection.execute(text("ALTER TABLE neoq_failures_away RENAME TO neoq_failures"))
    eventually(lambda: r.ended == [(job, Verb.FAIL)])
    assert [noted.message for noted in database.failures()] == ["ValueError: remember me"]


# Stopping and draining -----------------------------------------------------------------------------------------------


def test_stopping_lets_what_runs_finish_and_writes_it(rig, database):
    gate = Gate()
    jobs = [database.add(queue="q") for _ in range(5)]
    r = rig(lambda job: gate())
    r.start()
    gate.await_arrived(2)
    r.dispatcher.claiming = False
    r.dispatcher.stopping.set()
    r.pool.poke()
    assert r.dispatcher.alive
    gate.open()
    r.dispatcher.join(10)
    assert not r.dispatcher.alive
    assert database.statuses() == dict.fromkeys(jobs[:2], "processed") | dict.fromkeys(jobs[2:], "new")


def test_what_was_claimed_and_has_not_started_goes_back_untouched(rig, database):
    gate = Gate()
    r = rig(lambda job: gate(), concurrency=1)
    r.pool._lanes["q"].mean = 0.001
    jobs = [database.add(queue="q", status="failed", retries=1, run_after=ago(60)) for _ in range(5)]
    before = {row.id: row.run_after for row in database.rows()}
    r.start()
    gate.await_arrived(1)
    eventually(lambda: Counter(database.statuses().values()) == {"running": 5})
    r.dispatcher.claiming = False
    r.pool.poke()
    eventually(lambda: len(r.ended) == 4)
    back = database.rows()[1:]
    assert {(row.status, row.retries, row.claim_token) for row in back} == {("new", 2, None)}
    assert {row.id: row.run_after for row in back} == {job: before[job] for job in jobs[1:]}
    gate.open()


@pytest.mark.parametrize("moment", ["take_outcomes", "give_back_ready"])
def test_a_run_that_ends_while_the_dispatcher_looks_whether_to_end_is_written(rig, database, moment):
    gate = Gate()
    job = database.add(queue="q")
    r = rig(lambda job: gate())
    r.start()
    gate.await_arrived(1)
    original = getattr(r.pool, moment)

    def and_then_it_ends(*args):
        value = original(*args)
        if r.dispatcher.stopping.is_set():
            gate.open()
            eventually(lambda: r.pool.in_flight == 0)
        return value

    setattr(r.pool, moment, and_then_it_ends)
    r.dispatcher.claiming = False
    r.dispatcher.stopping.set()
    r.pool.poke()
    r.dispatcher.join(10)
    assert database.statuses() == {job: "processed"}


def test_it_is_drained_once_nothing_is_due_and_nothing_runs(rig, database):
    gate, drained = Gate(), threading.Event()
    database.add(queue="q")
    database.add(queue="q", run_after=ahead(60))
    r = rig(lambda job: gate())
    r.dispatcher.on_drained = drained.set
    r.start()
    gate.await_arrived(1)
    eventually(lambda: r.rounds >= 4)  # it has looked again and again
    assert not drained.is_set()
    gate.open()
    assert drained.wait(10)
    assert list(database.statuses().values()) == ["processed", "new"]


def test_it_is_not_drained_before_a_job_that_another_left_behind_at_the_last_moment(rig, database, monkeypatch):
    """The first job ends between the claim that finds nothing and the look whether anything runs."""
    claim, gate, drained = module.claim, Gate(), threading.Event()
    first = database.add(queue="q")
    left = []

    def work(job):
        if job.id == first:
            gate()
            left.append(database.add(queue="q"))

    r = rig(work)

    def find_nothing_and_then_it_ends(*args, **how):
        claimed = claim(*args, **how)
        if gate.arrived and not left and not claimed.jobs:
            gate.open()
            eventually(lambda: r.pool.in_flight == 0)
        return claimed

    monkeypatch.setattr(module, "claim", find_nothing_and_then_it_ends)
    r.dispatcher.on_drained = drained.set
    r.start()
    assert drained.wait(10)
    assert database.statuses() == {first: "processed", left[0]: "processed"}


def test_suspects_are_run_before_it_is_drained(rig, database):
    suspects = [database.add(queue="q", status="failed", crashes=2) for _ in range(2)]
    drained = threading.Event()
    r = rig()
    r.dispatcher.on_drained = drained.set
    r.start()
    assert drained.wait(10)
    assert database.statuses() == dict.fromkeys(suspects, "processed")


def test_a_retry_that_is_due_at_once_belongs_to_the_drain(rig, database):
    attempts, drained = [], threading.Event()

    def fail_twice(job):
        attempts.append(job.attempt)
        if job.attempt < 3:
            raise Retry(after=timedelta(0))

    job = database.add(queue="q")
    r = rig(fail_twice)
    r.dispatcher.on_drained = drained.set
    r.start()
    assert drained.wait(10)
    assert (attempts, database.statuses()) == ([1, 2, 3], {job: "processed"})


def test_draining_an_empty_queue_ends_at_once(rig):
    drained = threading.Event()
    r = rig()
    r.dispatcher.on_drained = drained.set
    r.start()
    assert drained.wait(10)


# The floor under the claim -------------------------------------------------------------------------------------------


@pytest.fixture
def dear(monkeypatch):
    """A claim is dear whatever it walks, and a look everywhere is due when the test says so."""
    monkeypatch.setattr(floor, "DEAR", -1.0)
    monkeypatch.setattr(floor, "_WORTH", 0)
    monkeypatch.setattr(floor, "SHARE", 1e9)


@pytest.fixture
def looks(monkeypatch):
    """Where each claim looked, and how many jobs it brought."""
    made, claim = [], module.claim

    def noted(*args, view, **how):
        claimed = claim(*args, view=view, **how)
        made.append(("everywhere" if view.everywhere else "above", len(claimed.jobs)))
        return claimed

    monkeypatch.setattr(module, "claim", noted)
    return made


def test_while_claims_are_dear_one_begins_where_the_last_stopped(rig, database, dear, looks):
    jobs = [database.add(queue="q", run_after=ago(60)) for _ in range(12)]
    r = rig()
    r.start()
    eventually(lambda: len(r.ended) == 12)
    assert looks[0][0] == "everywhere"
    assert {where for where, _ in looks[1:]} == {"above"}
    assert sorted(r.ended) == [(job, Verb.COMPLETE) for job in jobs]


def test_a_claim_above_the_floor_makes_nobody_hungry_and_one_everywhere_does(rig, database, dear, looks):
    for _ in range(12):
        database.add(queue="q", run_after=ago(60))
    r = rig()
    r.start()
    eventually(lambda: looks.count(("above", 0)) > 3)
    assert set(r.listener.hungry) == {frozenset()}
    r.dispatcher._floor.due = 0.0
    r.pool.poke()
    eventually(lambda: r.listener.hungry[-1] == {"q"})
    assert looks[-1][0] == "everywhere"


def test_hungry_it_stays_hungry_while_claims_above_the_floor_take_what_comes(rig, database, dear, looks, no_polls):
    r = rig()
    r.start()
    r.idle()
    eventually(lambda: r.listener.hungry[-1] == {"q"})
    told = len(r.listener.hungry)
    job = database.add(queue="q")
    r.dispatcher.wake(frozenset({"q"}))
    eventually(lambda: r.ended == [(job, Verb.COMPLETE)])
    assert ("above", 1) in looks
    assert set(r.listener.hungry[told:]) <= {frozenset({"q"})}


def test_a_job_below_the_floor_is_found_by_the_next_look_everywhere(rig, database, dear, looks, monkeypatch):
    for _ in range(12):
        database.add(queue="q", run_after=ago(60))
    r = rig()
    r.start()
    eventually(lambda: looks.count(("above", 0)) > 0)
    below = database.add(queue="q", run_after=ago(3600))
    seen = len(looks)
    eventually(lambda: looks[seen:].count(("above", 0)) > 3)
    assert database.row(below).status == "new"
    # Nothing announces it, and no poll is near but that one.
    r.dispatcher._floor.due = monotonic() + 0.05
    eventually(lambda: (below, Verb.COMPLETE) in r.ended)
    assert ("everywhere", 1) in looks


def test_a_new_priority_is_found_above_the_floor(rig, database, dear, looks):
    for _ in range(12):
        database.add(queue="q", run_after=ago(60))
    r = rig()
    r.start()
    eventually(lambda: looks.count(("above", 0)) > 0)
    job = database.add(queue="q", priority=50, run_after=ago(3600))
    eventually(lambda: (job, Verb.COMPLETE) in r.ended)
    assert [where for where, _ in looks].count("everywhere") == 1


def test_a_drain_ends_only_after_a_look_everywhere(rig, database, dear, looks):
    for _ in range(12):
        database.add(queue="q", run_after=ago(60))
    ended = []
    first = database.rows()[0].id
    r = rig(lambda job: database.add(queue="q", run_after=ago(3600)) if job.id == first else None)
    r.dispatcher.on_drained = lambda: ended.append((looks[-1], dict(database.statuses())))
    r.start()
    eventually(lambda: ended)
    look, statuses = ended[0]
    assert look == ("everywhere", 0)
    assert set(statuses.values()) == {"processed"}
    assert len(statuses) == 13


def test_what_was_known_of_the_floor_is_forgotten_with_the_connection(rig, database, dear, looks):
    for _ in range(12):
        database.add(queue="q", run_after=ago(60))
    r = rig()
    r.start()
    eventually(lambda: looks.count(("above", 0)) > 0)
    below = database.add(queue="q", run_after=ago(3600))
    database.cut_backends("sqla_neoq dispatch")
    r.pool.poke()
    eventually(lambda: (below, Verb.COMPLETE) in r.ended)
