"""Runs one job: enters its context, calls its function, and turns what happens into an outcome. Knows no database."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from sqla_neoq.context import enter, leave
from sqla_neoq.outcomes import Outcome, Verb, judge

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from sqla_neoq.context import ClaimedJob, JobContext
    from sqla_neoq.tasks import Definition
    from sqla_neoq.transaction import AsyncRunTransaction, RunTransaction


around_runs: Final[list[Callable[[], AbstractContextManager[object]]]] = []
"""What integrations have entered around the call of every plain ``def`` task in this process, in its thread."""


def _within(
    managers: list[Callable[[], AbstractContextManager[object]]], definition: Definition, job: JobContext
) -> Any:
    with ExitStack() as around:
        for manager in managers:
            around.enter_context(manager())
        return definition.run(job)


def execute(job: ClaimedJob, definition: Definition, context: JobContext, transaction: RunTransaction) -> Outcome:
    """Run a plain ``def`` task in this thread."""
    mark = enter(context)
    try:
        result = _within(around_runs, definition, context) if around_runs else definition.run(context)
        if result is not None and inspect.iscoroutine(result):
            result.close()
            raise TypeError(f"{definition.name} returned a coroutine, and none of it has run: use async def")
        if not transaction.used:
            return Outcome(job, Verb.COMPLETE, joined=transaction.joined)
        transaction.complete(job)
        return Outcome(job, Verb.COMPLETE, written=True)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a task is that task's failure, not the worker's end
        transaction.rollback()
        return judge(error, job, definition, context.stop_reason)
    finally:
        leave(mark)


async def execute_async(
    job: ClaimedJob, definition: Definition, context: JobContext, transaction: AsyncRunTransaction
) -> Outcome:
    """Run an ``async def`` task on the running event loop."""
    mark = enter(context)
    try:
        await definition.run(context)
        if not transaction.used:
            return Outcome(job, Verb.COMPLETE, joined=transaction.joined)
        await transaction.complete(job)
        return Outcome(job, Verb.COMPLETE, written=True)
    except BaseException as error:  # noqa: BLE001 - a CancelledError too: the runner cancels, and the outcome says why
        await transaction.rollback()
        return judge(error, job, definition, context.stop_reason)
    finally:
        leave(mark)
