import asyncio
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from support.running import claimed

from sqla_neoq import Snooze, current_job, executor, handler, task
from sqla_neoq.context import JobContext, StopReason
from sqla_neoq.errors import NoCurrentJob
from sqla_neoq.executor import execute, execute_async
from sqla_neoq.outcomes import Verb


class FakeTransaction:
    """Remembers what became of it."""

    def __init__(self, *, used=False, error=None):
        self.used = used
        self.joined = False
        self.done = []
        self._error = error

    def complete(self, job):
        self.done.append(("complete", job.id))
        if self._error is not None:
            raise self._error

    def rollback(self):
        self.done.append("rollback")


class FakeAsyncTransaction(FakeTransaction):
    async def complete(self, job):
        super().complete(job)

    async def rollback(self):
        super().rollback()


def run(definition, transaction=None, *, stop=None, **job):
    transaction = transaction or (FakeAsyncTransaction() if definition.is_async else FakeTransaction())
    row = claimed(**job)
    context = JobContext(row, transaction)
    if stop is not None:
        context.ask_to_stop(stop)
    if definition.is_async:
        return asyncio.run(execute_async(row, definition, context, transaction))
    return execute(row, definition, context, transaction)


def test_a_task_gets_its_arguments_from_the_payload():
    got = []

    @task(name="m:f")
    def add(a: int, b: int = 2):
        got.append((a, b))

    assert run(add, payload='{"a": 1}').verb is Verb.COMPLETE
    assert got == [(1, 2)]


def test_what_integrations_enter_is_left_whatever_the_task_does(monkeypatch):
    seen = []

    @contextmanager
    def around():
        seen.append("in")
        try:
            yield
        finally:
            seen.append("out")

    monkeypatch.setattr(executor, "around_runs", [around])

    @task(name="m:f")
    def works():
        seen.append("task")

    @task(name="m:f")
    def fails():
        raise ValueError

    assert (run(works).verb, run(fails).verb) == (Verb.COMPLETE, Verb.FAIL)
    assert seen == ["in", "task", "out", "in", "out"]


def test_an_integration_that_fails_fails_the_attempt(monkeypatch):
    def refuse():
        raise OSError("no")

    monkeypatch.setattr(executor, "around_runs", [refuse])
    assert run(task(name="m:f")(lambda: None)).message == "OSError: no"


def test_a_plain_function_that_returns_a_coroutine_has_not_done_its_work():
    async def work():
        raise AssertionError

    @task(name="m:f")
    def forgets_to_await():
        return work()

    outcome = run(forgets_to_await)
    assert outcome.verb is Verb.FAIL
    assert "async def" in outcome.message


def test_a_handler_gets_the_job():
    got = []
    outcome = run(handler("q")(lambda job: got.append((job.id, job.payload))), payload="[1]", id=9)
    assert (outcome.verb, outcome.written) == (Verb.COMPLETE, False)
    assert got == [(9, [1])]


def test_the_current_job_is_known_inside_and_not_outside():
    seen = []
    run(task(name="m:f")(lambda: seen.append(current_job().id)), id=5)
    assert seen == [5]
    with pytest.raises(NoCurrentJob):
        current_job()


def test_the_current_job_is_gone_after_a_failure_too():
    def fail():
        raise ValueError

    assert run(task(name="m:f")(fail)).verb is Verb.FAIL
    with pytest.raises(NoCurrentJob):
        current_job()


def test_a_used_session_is_completed_by_the_run_itself():
    transaction = FakeTransaction(used=True)
    outcome = run(task(name="m:f")(lambda: None), transaction, id=3)
    assert (outcome.verb, outcome.written) == (Verb.COMPLETE, True)
    assert transaction.done == [("complete", 3)]


def test_a_completion_that_fails_is_rolled_back_and_is_the_outcome():
    transaction = FakeTransaction(used=True, error=ValueError("constraint"))
    outcome = run(task(name="m:f")(lambda: None), transaction)
    assert (outcome.verb, outcome.written, outcome.message) == (Verb.FAIL, False, "ValueError: constraint")
    assert transaction.done == [("complete", 1), "rollback"]


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), Snooze(timedelta(1))])
def test_whatever_a_task_raises_is_rolled_back_and_stays_in_its_outcome(error):
    transaction = FakeTransaction(used=True)

    def fail():
        raise error

    outcome = run(task(name="m:f")(fail), transaction)
    assert outcome.verb is (Verb.PUT_BACK if isinstance(error, Snooze) else Verb.FAIL)
    assert transaction.done == ["rollback"]


def test_a_payload_that_does_not_fit_is_a_failure_with_a_clear_message():
    @task(name="m:f")
    def add(a: int): ...

    for payload in ('{"b": 1}', '{"a": "many"}', "[1]", "7"):
        outcome = run(add, payload=payload)
        assert outcome.verb is Verb.FAIL
        assert outcome.message.startswith("PayloadMismatch: m:f")


def test_the_reason_to_stop_decides_what_an_exception_means():
    def fail():
        raise ValueError

    assert run(task(name="m:f")(fail), stop=StopReason.SHUTDOWN).verb is Verb.PUT_BACK
    assert run(task(name="m:f")(fail), stop=StopReason.CANCELLED).verb is Verb.CANCEL


def test_who_finishes_although_asked_to_stop_has_finished():
    assert run(task(name="m:f")(lambda: None), stop=StopReason.CANCELLED).verb is Verb.COMPLETE


def test_an_async_task_runs_to_its_end():
    seen = []

    @task(name="m:f")
    async def wait(a: int):
        await asyncio.sleep(0)
        seen.append((a, current_job().id, threading.current_thread()))

    assert run(wait, payload='{"a": 1}', id=4).verb is Verb.COMPLETE
    assert seen == [(1, 4, threading.current_thread())]


def test_an_async_tasks_exception_is_its_outcome():
    @task(name="m:f")
    async def fail():
        await asyncio.sleep(0)
        raise ValueError("async")

    assert run(fail).message == "ValueError: async"


def test_an_async_payload_mismatch_is_a_failure_too():
    @task(name="m:f")
    async def add(a: int): ...

    assert run(add).message.startswith("PayloadMismatch: m:f")


@pytest.mark.parametrize(("stop", "verb"), [(StopReason.CANCELLED, Verb.CANCEL), (StopReason.TIMEOUT, Verb.FAIL)])
def test_a_cancelled_async_task_ends_as_the_reason_says(stop, verb):
    async def scenario():
        started = asyncio.Event()

        @task(name="m:f")
        async def wait():
            started.set()
            await asyncio.Event().wait()

        row = claimed()
        transaction = FakeAsyncTransaction(used=True)
        context = JobContext(row, transaction)
        running = asyncio.create_task(execute_async(row, wait, context, transaction))
        await started.wait()
        context.ask_to_stop(stop)
        running.cancel()
        return (await running).verb, transaction.done

    assert asyncio.run(scenario()) == (verb, ["rollback"])


def test_two_async_tasks_at_once_each_know_their_own_job():
    async def scenario():
        seen = []
        both = asyncio.Barrier(2)

        @task(name="m:f")
        async def meet():
            before = current_job().id
            await both.wait()
            seen.append((before, current_job().id))

        rows = [claimed(id=number) for number in (1, 2)]
        transaction = FakeAsyncTransaction()
        runs = [execute_async(row, meet, JobContext(row, transaction), transaction) for row in rows]
        await asyncio.gather(*runs)
        return seen

    assert sorted(asyncio.run(scenario())) == [(1, 1), (2, 2)]
