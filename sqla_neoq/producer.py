"""Enqueue: one INSERT in the caller's open transaction. The job exists if, and only if, that transaction commits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqla_neoq import statements
from sqla_neoq.insertion import Enqueued, connection_of, execution_options, insert, insert_async, options_of
from sqla_neoq.newjob import NewJob
from sqla_neoq.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta

    from sqla_neoq.insertion import AsyncHandle, Handle


def enqueue(
    session: Handle,
    target: Task[..., Any] | str,
    payload: Any = None,
    *,
    task: Task[..., Any] | str | None = None,
    run_after: datetime | timedelta | None = None,
    priority: int | None = None,
    deadline: datetime | timedelta | None = None,
    max_retries: int | None = None,
    unique: bool = False,
    fingerprint: str | None = None,
) -> Enqueued:
    """Enqueue one job in the session's open transaction.

    It never commits, opens no connection of its own and does not flush your pending objects. A duplicate raises
    nothing: you get the id of the job already there, and your transaction goes on.

    Args:
        session: a Session, scoped_session or Connection with SQLAlchemy.
        target: a task, or the name of a queue (which needs no worker code here).
        payload: JSON: the keyword arguments of a task, or whatever a queue's handler expects; None is ``{}``.
        task: for a queue's name: the task, or its name, that shall run the job instead of the queue's handler.
        run_after: not before this aware datetime, or this long from the database's now.
        priority: -100 to 100, higher runs first; None: the task's, else 0.
        deadline: not to be started after this aware datetime, or this long from now: then it is dead (``deadline``).
        max_retries: how often it is tried again after a failure; None: the task's, else 23.
        unique: make no second job with the same queue, task and payload while one is unfinished.
        fingerprint: the same with a key of your own, 1 to 255 characters, unique within the queue.

    Returns:
        The job's id, and whether it was created.

    Raises:
        TypeError: an argument of the wrong type, or a payload that does not fit the task's signature.
        ValueError: an argument that cannot be: a naive datetime, a negative delay, NaN in the payload, and so on.
    """
    job = _job(
        target,
        payload,
        task,
        run_after=run_after,
        priority=priority,
        deadline=deadline,
        max_retries=max_retries,
        unique=unique,
        fingerprint=fingerprint,
    )
    return insert(session, [job])[0]


async def enqueue_async(
    session: AsyncHandle,
    target: Task[..., Any] | str,
    payload: Any = None,
    *,
    task: Task[..., Any] | str | None = None,
    run_after: datetime | timedelta | None = None,
    priority: int | None = None,
    deadline: datetime | timedelta | None = None,
    max_retries: int | None = None,
    unique: bool = False,
    fingerprint: str | None = None,
) -> Enqueued:
    """Enqueue one job in the open transaction of an AsyncSession or AsyncConnection; else like :func:`enqueue`."""
    job = _job(
        target,
        payload,
        task,
        run_after=run_after,
        priority=priority,
        deadline=deadline,
        max_retries=max_retries,
        unique=unique,
        fingerprint=fingerprint,
    )
    return (await insert_async(session, [job]))[0]


def enqueue_many(session: Handle, jobs: Iterable[NewJob]) -> list[Enqueued]:
    """Enqueue many jobs, made by ``Task.job(...)`` or ``NewJob.of(...)``, with one statement.

    Returns:
        One result for each job, in their order.
    """
    return insert(session, _all(jobs))


async def enqueue_many_async(session: AsyncHandle, jobs: Iterable[NewJob]) -> list[Enqueued]:
    """The same as :func:`enqueue_many` for an AsyncSession or AsyncConnection."""
    return await insert_async(session, _all(jobs))


def cancel(session: Handle, job_id: int) -> bool:
    """Cancel a job in the session's open transaction.

    A waiting job is cancelled. A running one is asked to stop: its ``JobContext.cancelled`` turns true within a few
    seconds of the commit, and it ends cancelled if it then stops before it is done.

    Returns:
        Whether there was such a job to cancel.
    """
    if isinstance(job_id, bool) or not isinstance(job_id, int):
        raise TypeError(f"job_id={job_id!r}: expected int, got {type(job_id).__name__}")
    options_of(session, asynchronous="await session.run_sync(cancel, job_id) instead")
    if not 0 <= job_id < 2**63:
        return False  # no id is like that, and PostgreSQL would fail the caller's transaction for it
    connection = connection_of(session)
    row = connection.execute(
        statements.cancel_job(), {"job": job_id}, execution_options=execution_options(connection)
    ).first()
    return row is not None


def _job(target: Task[..., Any] | str, payload: Any, task: Task[..., Any] | str | None, **options: Any) -> NewJob:
    payload = {} if payload is None else payload
    if isinstance(target, Task):
        if task is not None:
            raise TypeError(f"task={task!r}: the target {target!r} is a task already; name a queue, or leave task= out")
        return target.job_of(_bound(target, payload), **{**target.options, **_given(options)})
    if not isinstance(target, str):
        raise TypeError(f"target={target!r}: expected a Task or the name of a queue, got {type(target).__name__}")
    if isinstance(task, Task):
        return task.job_of(_bound(task, payload), **{**task.options, **_given(options), "queue": target})
    return NewJob.of(target, payload, task=task, **options)


def _bound(task: Task[..., Any], payload: Any) -> Any:
    if not isinstance(payload, dict) or not all(isinstance(key, str) for key in payload):
        raise TypeError(f"payload={payload!r}: expected a dict of {task.name}'s keyword arguments")
    return task.signature.bind((), payload)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _all(jobs: Iterable[NewJob]) -> list[NewJob]:
    listed = list(jobs)
    for place, job in enumerate(listed):
        if not isinstance(job, NewJob):
            raise TypeError(f"jobs[{place}]={job!r}: expected what Task.job(...) makes, got {type(job).__name__}")
    return listed
