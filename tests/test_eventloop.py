import asyncio
import threading
from types import SimpleNamespace

import pytest
from support.running import claimed, threads
from support.waiting import eventually

from sqla_neoq import current_job, task
from sqla_neoq.context import JobContext, StopReason
from sqla_neoq.eventloop import EventLoop
from sqla_neoq.outcomes import Verb
from sqla_neoq.transaction import AsyncRunTransaction


@pytest.fixture
def loop():
    loop = EventLoop()
    yield loop
    loop.close()


def run_of(definition, **row):
    job = claimed(**row)
    transaction = AsyncRunTransaction(None, {})
    context = JobContext(job, transaction)
    return SimpleNamespace(job=job, definition=definition, context=context, transaction=transaction, interrupt=None)


class Ended:
    """Where outcomes come in."""

    def __init__(self):
        self.outcomes = []
        self.threads = set()
        self.done = threading.Event()

    def __call__(self, run, outcome):
        self.outcomes.append((run.job.id, outcome.verb))
        self.threads.add(threading.current_thread().name)
        self.done.set()


def start(loop, function, **row):
    run, ended = run_of(task(name="m:f")(function), **row), Ended()
    loop.start_run(run, ended)
    return run, ended


def test_without_async_tasks_there_is_no_thread(loop):
    assert not threads("neoq-event-loop")


def test_a_run_ends_with_its_outcome_on_the_loops_thread(loop):
    async def work():
        await asyncio.sleep(0)
        assert current_job().id == 5

    _, ended = start(loop, work, id=5)
    assert ended.done.wait(10)
    assert (ended.outcomes, ended.threads) == ([(5, Verb.COMPLETE)], {"neoq-event-loop"})


def test_all_runs_share_one_thread(loop):
    meeting = asyncio.Barrier(3)

    async def work():
        await meeting.wait()

    ended = [start(loop, work)[1] for _ in range(3)]
    assert all(one.done.wait(10) for one in ended)
    assert set.union(*(one.threads for one in ended)) == {"neoq-event-loop"}
    assert len(threads("neoq-event-loop")) == 1


def test_an_exception_is_that_runs_failure_and_the_loop_goes_on(loop):
    async def fail():
        raise ValueError

    async def exit_():
        raise SystemExit(1)

    async def work(): ...

    for function, verb in ((fail, Verb.FAIL), (exit_, Verb.FAIL), (work, Verb.COMPLETE)):
        _, ended = start(loop, function)
        assert ended.done.wait(10)
        assert ended.outcomes == [(1, verb)]


def test_a_task_beside_the_run_that_exits_ends_neither_the_loop_nor_other_runs(loop):
    released, waiting = [], threading.Event()

    async def wait():
        released.append((asyncio.get_running_loop(), asyncio.Event()))
        waiting.set()
        await released[0][1].wait()

    async def exit_beside():
        async def exit_():
            raise SystemExit(3)

        await asyncio.gather(exit_())

    _, other = start(loop, wait)
    assert waiting.wait(10)
    _, ended = start(loop, exit_beside)
    assert ended.done.wait(10)
    assert ended.outcomes == [(1, Verb.FAIL)]
    released[0][0].call_soon_threadsafe(released[0][1].set)
    assert other.done.wait(10)
    assert other.outcomes == [(1, Verb.COMPLETE)]


def test_a_run_can_be_stopped_from_another_thread(loop):
    started = threading.Event()

    async def wait():
        started.set()
        await asyncio.Event().wait()

    run, ended = start(loop, wait)
    assert started.wait(10)
    run.context.ask_to_stop(StopReason.CANCELLED)
    run.interrupt()
    assert ended.done.wait(10)
    assert ended.outcomes == [(1, Verb.CANCEL)]


def test_stopping_a_run_that_has_ended_does_nothing(loop):
    async def work(): ...

    run, ended = start(loop, work)
    assert ended.done.wait(10)
    run.interrupt()
    loop.close()
    run.interrupt()
    assert ended.outcomes == [(1, Verb.COMPLETE)]


def test_closing_cancels_what_runs_and_ends_the_thread(loop):
    started, cleaned = threading.Event(), []

    async def wait():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")

    run, ended = start(loop, wait)
    assert started.wait(10)
    run.context.ask_to_stop(StopReason.SHUTDOWN)
    loop.close()
    assert (ended.outcomes, cleaned) == ([(1, Verb.PUT_BACK)], ["up"])
    assert not threads("neoq-event-loop")


def test_closing_twice_or_before_anything_ran_is_harmless():
    loop = EventLoop()
    loop.close()
    loop.close()
    assert not threads("neoq-event-loop")


def test_async_generators_left_behind_are_closed(loop):
    closed = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    kept = []

    async def work():
        generator = numbers()
        kept.append(generator)
        assert await anext(generator) == 1

    _, ended = start(loop, work)
    assert ended.done.wait(10)
    loop.close()
    assert closed == [True]


def test_finished_runs_are_forgotten(loop):
    async def work(): ...

    for _ in range(20):
        _, ended = start(loop, work)
        assert ended.done.wait(10)
    eventually(lambda: not loop._tasks)
