import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections import Counter, defaultdict
from datetime import timedelta
from random import Random

import pytest
from support.running import Gate, claimed, in_thread, threads
from support.waiting import eventually

from sqla_neoq import handler, prefetch, task
from sqla_neoq.claim import Want
from sqla_neoq.context import StopReason, current_job
from sqla_neoq.eventloop import EventLoop
from sqla_neoq.outcomes import Verb
from sqla_neoq.pool import WorkPool
from sqla_neoq.transaction import AsyncRunTransaction, RunTransaction

numbers = itertools.count(1)


def job(queue="q", **values):
    number = next(numbers)
    return claimed(**{"id": number, "token": number, "queue": queue} | values)


def running(function, **options):
    """A task of no arguments that calls ``function``."""

    def call():
        function()

    return task(name="m:f", **options)(call)


class Transaction(RunTransaction):
    """One that has no database, and remembers that it was cancelled."""

    __slots__ = ("was_cancelled",)

    def __init__(self, definition):
        super().__init__(None, {})
        self.was_cancelled = False

    def cancel(self):
        self.was_cancelled = True
        super().cancel()


def make_transaction(definition):
    return AsyncRunTransaction(None, {}) if definition.on_loop else Transaction(definition)


DEFINITIONS = {}


def submit(pool, jobs):
    """Submit jobs, each with what it shall run."""
    DEFINITIONS.update(jobs)
    pool.accept([job for job, _ in jobs], time.monotonic())
    pool.hand_out()


@pytest.fixture
def make_pool():
    """Factory of started pools, closed after the test."""
    made = []

    def make(limits=None, *, concurrency=4, handlers=(), start=True):
        loop = EventLoop()
        pool = WorkPool(
            {"q": concurrency} if limits is None else limits,
            handlers=handlers,
            concurrency=concurrency,
            resolve=DEFINITIONS.__getitem__,
            make_transaction=make_transaction,
            loop=loop,
        )
        made.append((pool, loop))
        if start:
            pool.start()
        return pool

    yield make
    for pool, loop in made:
        pool.close()
        loop.close()
    eventually(lambda: not threads("neoq-job"), why=threads)


def collect(pool, number, within=10.0):
    """Wait for that many outcomes, as the dispatcher would, and return all."""
    outcomes = []
    deadline = time.monotonic() + within
    while len(outcomes) < number:
        now = time.monotonic()
        assert now < deadline, f"{len(outcomes)} of {number} outcomes, {pool.in_flight} in flight"
        pool.wait(now + 0.1, low=-1, linger=now)
        outcomes += pool.take_outcomes()
    return outcomes


# Running -------------------------------------------------------------------------------------------------------------


def test_every_job_is_run_once_and_its_outcome_handed_in_once(make_pool):
    pool, ran = make_pool(), []
    jobs = [job() for _ in range(200)]
    submit(pool, [(one, running(lambda: ran.append(current_job().id))) for one in jobs])
    outcomes = collect(pool, 200)
    assert sorted(ran) == sorted(outcome.job.id for outcome in outcomes) == [one.id for one in jobs]
    assert {outcome.verb for outcome in outcomes} == {Verb.COMPLETE}
    assert (pool.in_flight, pool.running, pool.take_outcomes()) == (0, 0, [])


def test_an_outcome_says_how_long_its_run_took(make_pool):
    pool, gate = make_pool(), Gate()
    began = time.monotonic()
    submit(pool, [(job(), running(gate))])
    gate.await_arrived(1)
    gate.open()
    (outcome,) = collect(pool, 1)
    assert 0 < outcome.duration <= time.monotonic() - began


def test_a_queues_jobs_start_in_the_order_they_were_claimed(make_pool):
    pool, ran = make_pool(concurrency=1), []
    jobs = [job() for _ in range(20)]
    submit(pool, [(one, running(lambda: ran.append(current_job().id))) for one in jobs])
    collect(pool, 20)
    assert ran == [one.id for one in jobs]


def test_queues_take_turns(make_pool):
    pool, ran, gate = make_pool({"a": 1, "b": 1, "first": 1}, concurrency=1), [], Gate()
    note = running(lambda: ran.append(current_job().queue))
    submit(pool, [(job("first"), running(gate))])
    gate.await_arrived(1)
    submit(pool, [(job(queue), note) for queue in ("a",) * 5 + ("b",) * 5])
    gate.open()
    collect(pool, 11)
    assert Counter(ran[:4]) == {"a": 2, "b": 2}
    assert Counter(ran) == {"a": 5, "b": 5}


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt()])
def test_whatever_a_task_raises_its_thread_goes_on(make_pool, error):
    pool = make_pool(concurrency=1)

    def fail():
        raise error

    submit(pool, [(job(), running(fail)) for _ in range(3)])
    assert [outcome.verb for outcome in collect(pool, 3)] == [Verb.FAIL] * 3
    assert len(threads("neoq-job")) == 1


def test_idle_threads_wait_for_work_and_end_with_the_pool(make_pool):
    pool = make_pool(concurrency=3)
    assert len(threads("neoq-job")) == 3
    pool.close()
    eventually(lambda: not threads("neoq-job"))


def test_a_thread_that_runs_a_job_ends_after_it(make_pool):
    pool, gate = make_pool(concurrency=2), Gate()
    submit(pool, [(job(), running(gate))])
    gate.await_arrived(1)
    pool.close()
    eventually(lambda: len(threads("neoq-job")) == 1)
    gate.open()
    assert [outcome.verb for outcome in collect(pool, 1)] == [Verb.COMPLETE]
    eventually(lambda: not threads("neoq-job"))


# Limits --------------------------------------------------------------------------------------------------------------


class Meter:
    """How many jobs of each queue are inside at once, at most."""

    def __init__(self):
        self.lock = threading.Lock()
        self.inside = Counter()
        self.most = Counter()
        self.total = self.most_total = 0

    def __enter__(self):
        queue = current_job().queue
        with self.lock:
            self.inside[queue] += 1
            self.total += 1
            self.most[queue] = max(self.most[queue], self.inside[queue])
            self.most_total = max(self.most_total, self.total)

    def __exit__(self, *_):
        with self.lock:
            self.inside[current_job().queue] -= 1
            self.total -= 1


@pytest.mark.parametrize("concurrency", [3, 6, 20])
def test_no_queue_ever_runs_more_at_once_than_its_limit(make_pool, concurrency):
    limits = {"one": 1, "two": 2, "five": 5}
    pool, meter, gate = make_pool(limits, concurrency=concurrency), Meter(), Gate()

    def work():
        with meter:
            gate()
            time.sleep(0.001)  # long enough for the other threads to come

    order = [queue for queue in limits for _ in range(60)]
    Random(1).shuffle(order)
    for start in range(0, len(order), 9):
        submit(pool, [(job(queue), running(work)) for queue in order[start : start + 9]])
    most = min(concurrency, 8)
    gate.await_arrived(most)
    assert pool.running == most
    gate.open()
    assert {outcome.verb for outcome in collect(pool, 180)} == {Verb.COMPLETE}
    assert all(meter.most[queue] <= limit for queue, limit in limits.items())
    assert meter.most_total == most


def test_a_queue_at_its_limit_holds_up_no_other(make_pool):
    pool, gate = make_pool({"slow": 1, "fast": 4}, concurrency=4), Gate()
    submit(pool, [(job("slow"), running(gate)) for _ in range(3)])
    gate.await_arrived(1)
    submit(pool, [(job("fast"), running(lambda: None)) for _ in range(20)])
    assert {outcome.job.queue for outcome in collect(pool, 20)} == {"fast"}
    assert (gate.arrived, pool.running, pool.in_flight) == (1, 1, 3)
    gate.open()
    collect(pool, 3)
    assert gate.most_inside == 1


# What to claim -------------------------------------------------------------------------------------------------------


def test_a_new_pool_wants_one_job_for_each_slot_and_none_ahead(make_pool):
    pool = make_pool({"a": 2, "b": 9}, concurrency=4, handlers=["b"], start=False)
    assert pool.wants() == ([Want("a", 2, handler=False), Want("b", 4, handler=True)], 4)


def test_what_runs_and_what_is_ready_is_not_wanted_again(make_pool):
    pool, gate = make_pool({"a": 2, "b": 9}, concurrency=4), Gate()
    submit(pool, [(job(queue), running(gate)) for queue in ("a", "b", "b")])
    gate.await_arrived(3)
    assert pool.wants() == ([Want("a", 1, handler=False), Want("b", 2, handler=False)], 1)
    submit(pool, [(job("b"), running(gate))])
    assert pool.wants() == ([], 0)
    gate.open()


def test_short_jobs_are_wanted_ahead_and_long_ones_are_not(make_pool, monkeypatch):
    pool = make_pool({"short": 2, "long": 2}, concurrency=4, start=False)
    pool._lanes["short"].mean, pool._lanes["long"].mean = 0.001, 1.0
    wants, total = pool.wants()
    assert {want.queue: want.slots for want in wants} == {"short": 2 + 40, "long": 2}
    assert total == 4 + 40


def test_the_mean_of_a_queue_follows_what_ran(make_pool):
    pool = make_pool(concurrency=2)
    submit(pool, [(job(), running(lambda: None)) for _ in range(50)])
    collect(pool, 50)
    (want,), total = pool.wants()
    assert 2 < want.slots <= 2 + prefetch.LIMIT
    assert total == min(want.slots, prefetch.BATCH)


# Waiting -------------------------------------------------------------------------------------------------------------


def waited(pool, until, **how):
    began = time.monotonic()
    pool.wait(began + until, **{"low": -1, "linger": began + until} | how)
    return time.monotonic() - began


def test_a_poke_ends_the_wait_from_any_thread(make_pool):
    pool = make_pool()
    thread = in_thread(lambda: eventually(lambda: pool._waiting) and pool.poke())
    assert waited(pool, 20) < 20
    thread.join(10)


def test_a_poke_before_the_wait_is_not_lost(make_pool):
    pool = make_pool()
    pool.poke()
    assert waited(pool, 20) < 20
    # And counts once.
    assert waited(pool, 0.02) >= 0.02


def test_an_outcome_ends_the_wait_once_it_has_lingered(make_pool):
    pool = make_pool()
    submit(pool, [(job(), running(lambda: None))])
    now = time.monotonic()
    pool.wait(now + 20, low=-1, linger=now + 0.05)
    assert 0.05 <= time.monotonic() - now < 20
    assert len(pool.take_outcomes()) == 1


def test_the_wait_ends_early_when_few_jobs_are_left_ready(make_pool):
    pool, gate = make_pool(concurrency=1), Gate()
    submit(pool, [(job(), running(gate))] + [(job(), running(lambda: None)) for _ in range(9)])
    gate.await_arrived(1)
    assert pool.low_water() == 4
    threading.Timer(0.02, gate.open).start()
    assert waited(pool, 20, low=4) < 20
    assert pool.take_outcomes()


# Giving back ---------------------------------------------------------------------------------------------------------


def test_what_has_not_started_is_given_back_untouched(make_pool):
    pool, gate = make_pool(concurrency=1), Gate()
    jobs = [job() for _ in range(4)]
    submit(pool, [(one, running(gate)) for one in jobs])
    gate.await_arrived(1)
    pool.give_back_ready()
    back = pool.take_outcomes()
    assert [(outcome.job.id, outcome.verb, outcome.delay) for outcome in back] == [
        (one.id, Verb.PUT_BACK, None) for one in jobs[1:]
    ]
    assert (pool.in_flight, pool.low_water()) == (1, 0)
    gate.open()
    assert [outcome.job.id for outcome in collect(pool, 1)] == [jobs[0].id]
    assert gate.arrived == 1


def test_after_giving_back_the_queue_can_be_used_again(make_pool):
    pool, gate = make_pool({"q": 1}, concurrency=2), Gate()
    submit(pool, [(job(), running(gate)), (job(), running(gate))])
    gate.await_arrived(1)
    pool.give_back_ready()
    submit(pool, [(job(), running(lambda: None))])
    gate.open()
    assert Counter(outcome.verb for outcome in collect(pool, 3)) == {Verb.COMPLETE: 2, Verb.PUT_BACK: 1}


def test_what_waits_behind_slow_jobs_is_given_back_and_not_claimed_ahead_again(make_pool):
    pool, gate = make_pool({"slow": 1, "other": 1}, concurrency=2), Gate()
    pool._lanes["slow"].mean = 0.001
    jobs = [job("slow") for _ in range(4)]
    submitted = time.monotonic()
    submit(pool, [(one, running(gate)) for one in jobs])
    gate.await_arrived(1)
    stale_at = pool.give_back_stale(submitted)
    assert submitted + prefetch.PATIENCE <= stale_at <= time.monotonic() + prefetch.PATIENCE
    assert pool.take_outcomes() == []
    assert pool.give_back_stale(stale_at) == float("inf")
    assert [(outcome.job.id, outcome.verb) for outcome in pool.take_outcomes()] == [
        (one.id, Verb.PUT_BACK) for one in jobs[1:]
    ]
    assert {want.queue: want.slots for want in pool.wants()[0]} == {"other": 1}
    gate.open()
    collect(pool, 1)
    assert gate.arrived == 1
    submit(pool, [(job("slow"), running(lambda: None))])
    assert len(collect(pool, 1)) == 1


def test_one_queues_slow_jobs_do_not_take_another_queues_ready_ones_back(make_pool):
    pool, gate = make_pool({"slow": 1, "fast": 1}, concurrency=1), Gate()
    first, waiting = job("slow"), job("fast")
    submit(pool, [(first, running(gate))])
    gate.await_arrived(1)
    submit(pool, [(waiting, running(lambda: None))])
    submit(pool, [(job("slow"), running(lambda: None))])
    pool._lanes["slow"].ready[0] = pool._lanes["slow"].ready[0]._replace(since=0.0)
    pool.give_back_stale(pool._lanes["fast"].ready[0].since)
    gate.open()
    outcomes = collect(pool, 3)
    assert {outcome.job.id: outcome.verb for outcome in outcomes}[waiting.id] is Verb.COMPLETE
    assert Counter(outcome.verb for outcome in outcomes) == {Verb.COMPLETE: 2, Verb.PUT_BACK: 1}


def test_the_tokens_held_are_those_of_jobs_ready_running_and_not_yet_collected(make_pool):
    pool, gate = make_pool(concurrency=1), Gate()
    done, run, ready = job(), job(), job()
    submit(pool, [(done, running(lambda: None))])
    eventually(lambda: pool.in_flight == 0)
    submit(pool, [(run, running(gate)), (ready, running(gate))])
    gate.await_arrived(1)
    assert pool.tokens() == {done.token, run.token, ready.token}
    pool.take_outcomes()
    assert pool.tokens() == {run.token, ready.token}
    gate.open()


def test_what_was_accepted_is_held_though_no_thread_has_it_yet(make_pool):
    pool, ran = make_pool(concurrency=2), []
    before, _ = pool.wants()
    accepted = [job(), job()]
    for one in accepted:
        DEFINITIONS[one] = running(lambda: ran.append(current_job().id))
    pool.accept(accepted, time.monotonic())
    assert pool.wants() == ([], 0)
    assert pool.tokens() == {one.token for one in accepted}
    assert (pool.in_flight, pool.at_rest, ran) == (2, False, [])
    pool.hand_out()
    pool.hand_out()
    collect(pool, 2)
    assert sorted(ran) == [one.id for one in accepted]
    assert pool.wants()[0][0].slots >= before[0].slots


def test_what_was_accepted_can_be_given_back(make_pool):
    pool = make_pool()
    accepted = [job(), job()]
    pool.accept(accepted, time.monotonic())
    pool.give_back_ready()
    outcomes = pool.take_outcomes()
    assert [outcome.job for outcome in outcomes] == accepted
    assert {outcome.verb for outcome in outcomes} == {Verb.PUT_BACK}
    pool.hand_out()
    assert pool.at_rest


def test_a_job_whose_deadline_passes_while_it_waits_is_not_started(make_pool):
    pool, ran = make_pool(concurrency=1, start=False), []
    note = running(lambda: ran.append(current_job().id))
    late = job(ran_at=0.0, deadline=1e-6)
    good = job(ran_at=0.0, deadline=3600.0)
    submit(pool, [(late, note), (late, note), (good, note)])
    time.sleep(0.001)
    pool.start()
    outcomes = collect(pool, 3)
    assert [(outcome.verb, outcome.reason, outcome.kind) for outcome in outcomes[:2]] == [
        (Verb.BURY, "deadline", None)
    ] * 2
    assert ran == [good.id]
    assert pool.in_flight == 0


# Timeouts ------------------------------------------------------------------------------------------------------------

SHORT = timedelta(milliseconds=1)
LATER = 3600.0


def test_a_run_past_its_timeout_is_given_up_and_its_slot_replaced(make_pool):
    pool, gate = make_pool(concurrency=1), Gate()
    hanging = job()
    submit(pool, [(hanging, running(gate, timeout=SHORT))])
    gate.await_arrived(1)
    pool.expire(time.monotonic() + LATER)
    (outcome,) = pool.take_outcomes()
    assert (outcome.job.id, outcome.verb, outcome.kind) == (hanging.id, Verb.FAIL, "timeout")
    assert outcome.message == f"JobTimeout: job {hanging.id} ran past its timeout of 0.001 s"
    assert (pool.running, pool.stuck) == (0, 1)
    submit(pool, [(job(), running(lambda: None))])
    assert [outcome.verb for outcome in collect(pool, 1)] == [Verb.COMPLETE]
    gate.open()
    eventually(lambda: pool.stuck == 0)
    assert pool.take_outcomes() == []
    eventually(lambda: len(threads("neoq-job")) == 1)


def test_capacity_stays_the_same_after_many_timeouts(make_pool):
    pool, gate = make_pool(concurrency=3), Gate()
    for _ in range(4):
        submit(pool, [(job(), running(gate, timeout=SHORT)) for _ in range(3)])
        eventually(lambda: pool.running == 3)
        pool.expire(time.monotonic() + LATER)
        assert len(pool.take_outcomes()) == 3
        assert pool.wants()[1] == 3
    assert pool.stuck == 12
    together = threading.Barrier(3)
    submit(pool, [(job(), running(lambda: together.wait(10))) for _ in range(3)])
    assert {outcome.verb for outcome in collect(pool, 3)} == {Verb.COMPLETE}
    gate.open()
    eventually(lambda: pool.stuck == 0 and len(threads("neoq-job")) == 3)


def test_timed_out_jobs_of_a_limited_queue_make_room_in_it(make_pool):
    pool, gate = make_pool({"q": 1}, concurrency=2), Gate()
    submit(pool, [(job(), running(gate, timeout=SHORT)), (job(), running(lambda: None))])
    gate.await_arrived(1)
    pool.expire(time.monotonic() + LATER)
    assert [outcome.verb for outcome in collect(pool, 2)] == [Verb.FAIL, Verb.COMPLETE]
    gate.open()


def test_a_run_within_its_timeout_goes_on_and_the_next_expiry_is_told(make_pool):
    pool, gate = make_pool(), Gate()
    before = time.monotonic()
    submit(pool, [(job(), running(gate, timeout=timedelta(seconds=s))) for s in (100, 50)])
    gate.await_arrived(2)
    assert before + 50 <= pool.expire(before) <= time.monotonic() + 50
    assert pool.running == 2
    gate.open()
    collect(pool, 2)
    assert pool.expire(before) == float("inf")


def test_without_a_timeout_a_run_never_expires(make_pool):
    pool, gate = make_pool(), Gate()
    submit(pool, [(job(), running(gate, timeout=None))])
    gate.await_arrived(1)
    assert pool.expire(float("1e300")) == float("inf")
    assert pool.running == 1
    gate.open()


def test_a_task_can_see_that_it_is_past_its_timeout(make_pool):
    pool, gate, seen = make_pool(), Gate(), []

    def look():
        mine = current_job()
        gate()
        seen.append((mine.cancelled, mine.stop_reason))
        mine.raise_if_cancelled()

    submit(pool, [(job(), running(look, timeout=SHORT))])
    gate.await_arrived(1)
    pool.expire(time.monotonic() + LATER)
    gate.open()
    eventually(lambda: pool.stuck == 0)
    assert seen == [(True, StopReason.TIMEOUT)]


def test_the_statement_of_a_run_past_its_timeout_is_cancelled(make_pool):
    pool, gate = make_pool(), Gate()
    submit(pool, [(job(), running(gate, timeout=SHORT))])
    gate.await_arrived(1)
    (run,) = pool._runs
    pool.expire(time.monotonic() + LATER)
    assert run.transaction.was_cancelled
    gate.open()


# Stopping ------------------------------------------------------------------------------------------------------------


def test_what_a_given_up_run_begins_afterwards_is_cancelled_at_the_next_look(make_pool):
    pool, gate = make_pool(), Gate()
    submit(pool, [(job(), running(gate, timeout=SHORT))])
    gate.await_arrived(1)
    (run,) = pool._runs
    pool.expire(time.monotonic() + LATER)
    run.transaction.was_cancelled = False
    pool.expire(time.monotonic())
    assert run.transaction.was_cancelled
    gate.open()
    eventually(lambda: pool.stuck == 0)
    run.transaction.was_cancelled = False
    pool.expire(time.monotonic())
    assert not run.transaction.was_cancelled


def test_a_forced_stop_gives_running_jobs_back_whether_or_not_they_obey(make_pool):
    pool, gate, seen = make_pool(concurrency=2), Gate(), []

    def stubborn():
        mine = current_job()
        gate()
        seen.append(mine.stop_reason)

    jobs = [job(), job()]
    submit(pool, [(one, running(stubborn)) for one in jobs])
    gate.await_arrived(2)
    assert pool.give_up_running(StopReason.SHUTDOWN) == 2
    assert pool.give_up_running(StopReason.SHUTDOWN) == 0
    outcomes = pool.take_outcomes()
    assert sorted((outcome.job.id, outcome.verb) for outcome in outcomes) == [(one.id, Verb.PUT_BACK) for one in jobs]
    assert pool.in_flight == 0
    gate.open()
    eventually(lambda: pool.stuck == 0)
    assert seen == [StopReason.SHUTDOWN] * 2
    assert pool.take_outcomes() == []


def test_one_of_many_can_be_asked_to_stop(make_pool):
    pool, gate = make_pool(concurrency=2), Gate()

    def obey():
        mine = current_job()
        gate()
        mine.raise_if_cancelled()

    stopped, other = job(), job()
    submit(pool, [(stopped, running(obey)), (other, running(obey))])
    gate.await_arrived(2)
    pool.ask_to_stop([stopped.id, 10**9], StopReason.CANCELLED)
    gate.open()
    verbs = {outcome.job.id: outcome.verb for outcome in collect(pool, 2)}
    assert verbs == {stopped.id: Verb.CANCEL, other.id: Verb.COMPLETE}


def test_all_can_be_asked_to_stop(make_pool):
    pool, gate = make_pool(concurrency=2), Gate()

    def obey():
        mine = current_job()
        gate()
        mine.raise_if_cancelled()

    submit(pool, [(job(), running(obey)), (job(), running(obey))])
    gate.await_arrived(2)
    pool.ask_to_stop(None, StopReason.LOST)
    gate.open()
    assert {outcome.verb for outcome in collect(pool, 2)} == {Verb.LOST}


# Asynchronous tasks --------------------------------------------------------------------------------------------------


def test_async_tasks_share_the_slots_but_hold_no_thread(make_pool):
    pool, started = make_pool({"q": 9, "sync": 9}, concurrency=3), Gate()
    release = asyncio.Event()

    @task(name="m:wait")
    async def wait():
        started.open()
        await asyncio.to_thread(started)
        await release.wait()
        release.set()

    submit(pool, [(job(), wait) for _ in range(2)])
    started.await_arrived(2)
    assert pool.running == 2
    assert pool.wants()[1] == 1
    submit(pool, [(job("sync"), running(lambda: None)) for _ in range(5)])
    assert {outcome.job.queue for outcome in collect(pool, 5)} == {"sync"}
    pool._loop._loop.call_soon_threadsafe(release.set)
    assert [outcome.verb for outcome in collect(pool, 2)] == [Verb.COMPLETE] * 2


def test_async_tasks_of_a_queue_stay_within_its_limit(make_pool):
    pool, inside, most = make_pool({"q": 2}, concurrency=5), 0, 0

    @task(name="m:count")
    async def count():
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.001)
        inside -= 1

    submit(pool, [(job(), count) for _ in range(40)])
    assert {outcome.verb for outcome in collect(pool, 40)} == {Verb.COMPLETE}
    assert most == 2


def test_sync_and_async_jobs_wait_for_each_others_slots(make_pool):
    pool, gate = make_pool(concurrency=1), Gate()
    ran = []

    @task(name="m:note")
    async def note():
        ran.append("async")

    submit(pool, [(job(), running(gate)), (job(), note), (job(), running(lambda: ran.append("sync"))), (job(), note)])
    gate.await_arrived(1)
    gate.open()
    collect(pool, 4)
    assert ran == ["async", "sync", "async"]


def test_an_async_run_past_its_timeout_is_cancelled_and_holds_no_thread(make_pool):
    pool, waiting = make_pool(concurrency=1), threading.Event()

    @task(name="m:wait", timeout=SHORT)
    async def wait():
        waiting.set()
        await asyncio.Event().wait()

    submit(pool, [(job(), wait)])
    assert waiting.wait(10)
    pool.expire(time.monotonic() + LATER)
    assert [(outcome.verb, outcome.kind) for outcome in pool.take_outcomes()] == [(Verb.FAIL, "timeout")]
    eventually(lambda: pool.stuck == 0 and not pool._loop._tasks)
    assert pool.take_outcomes() == []


def test_an_async_run_that_will_not_end_counts_as_stuck(make_pool):
    pool, blocked, end = make_pool(concurrency=1), threading.Event(), threading.Event()

    @task(name="m:blocking", timeout=SHORT)
    async def blocking():
        blocked.set()
        end.wait(10)

    submit(pool, [(job(), blocking)])
    assert blocked.wait(10)
    pool.expire(time.monotonic() + LATER)
    assert pool.stuck == 1
    end.set()
    eventually(lambda: pool.stuck == 0)


def test_after_an_async_run_that_will_not_end_the_jobs_behind_it_start(make_pool):
    pool, waiting, end = make_pool(concurrency=1), threading.Event(), asyncio.Event()

    @task(name="m:stubborn", timeout=SHORT)
    async def stubborn():
        waiting.set()
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    submit(pool, [(job(), stubborn), (job(), running(lambda: None))])
    assert waiting.wait(10)
    pool.expire(time.monotonic() + LATER)
    assert [outcome.verb for outcome in collect(pool, 2)] == [Verb.FAIL, Verb.COMPLETE]
    pool._loop._loop.call_soon_threadsafe(end.set)


@pytest.mark.parametrize(("reason", "verb"), [(StopReason.CANCELLED, Verb.CANCEL), (StopReason.LOST, Verb.LOST)])
def test_an_async_run_that_is_asked_to_stop_before_it_began_ends_all_the_same(make_pool, reason, verb):
    pool, hold, held = make_pool(concurrency=2), threading.Event(), threading.Event()

    @task(name="m:block")
    async def block():
        held.set()
        hold.wait(10)

    @task(name="m:wait", timeout=None)
    async def wait():
        await asyncio.Event().wait()

    blocking, asked = job(), job()
    submit(pool, [(blocking, block)])
    assert held.wait(10)
    submit(pool, [(asked, wait)])
    eventually(lambda: pool.running == 2)
    pool.ask_to_stop([asked.id], reason)
    hold.set()
    assert {outcome.job.id: outcome.verb for outcome in collect(pool, 2)} == {
        blocking.id: Verb.COMPLETE,
        asked.id: verb,
    }


def test_an_async_handler_gets_its_job(make_pool):
    pool, seen = make_pool(handlers=["q"]), []

    @handler("q")
    async def handle(job):
        await asyncio.sleep(0)
        seen.append(job.payload)

    submit(pool, [(job(payload='{"a": 1}'), handle)])
    collect(pool, 1)
    assert seen == [{"a": 1}]


# All at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_under_a_storm_of_everything_each_job_ends_once_within_the_limits(make_pool, seed):
    random = Random(seed)
    limits = {"a": 1, "b": 2, "c": 5}
    pool, meter = make_pool(limits, concurrency=4), Meter()
    hang = threading.Event()

    def work():
        with meter:
            time.sleep(random.random() / 1000)

    @task(name="m:async", timeout=None)
    async def nap():
        with meter:
            await asyncio.sleep(random.random() / 1000)

    # Not metered: who is given up is off the books while its thread still hangs.
    kinds = [running(work), nap, running(lambda: hang.wait(20), timeout=timedelta(milliseconds=2))]
    submitted, ended = set(), defaultdict(list)
    while len(submitted) < 300:
        wants, total = pool.wants()
        for want in wants:
            count = min(want.slots, total, random.randrange(4))
            jobs = [(job(want.queue), random.choices(kinds, [8, 8, 1])[0]) for _ in range(count)]
            submitted.update(one.id for one, _ in jobs)
            submit(pool, jobs)
        if random.random() < 0.1:
            pool.give_back_ready()
        now = time.monotonic()
        pool.expire(now)
        pool.wait(now + 0.002, low=pool.low_water(), linger=now + 0.001)
        for outcome in pool.take_outcomes():
            ended[outcome.job.id].append(outcome.verb)
    while pool.in_flight:
        now = time.monotonic()
        pool.expire(now)
        pool.wait(now + 0.005, low=-1, linger=now)
    for outcome in pool.take_outcomes():
        ended[outcome.job.id].append(outcome.verb)
    assert ended.keys() == submitted
    assert {len(verbs) for verbs in ended.values()} == {1}
    assert all(meter.most[queue] <= limit for queue, limit in limits.items())
    assert meter.most_total <= 4
    hang.set()
    eventually(lambda: pool.stuck == 0 and len(threads("neoq-job")) == 4)


def test_what_one_job_sets_in_its_context_the_next_does_not_see(make_pool):
    pool, seen, variable = make_pool(concurrency=1), [], contextvars.ContextVar("tenant", default=None)

    @task(name="m:tenant")
    def tenant():
        seen.append(variable.get())
        variable.set("acme")

    submit(pool, [(job(), tenant), (job(), tenant)])
    eventually(lambda: len(seen) == 2)
    assert seen == [None, None]
