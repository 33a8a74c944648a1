"""Enqueue: one INSERT in the caller's open transaction. The job exists if, and only if, that transaction commits.

Cancelling a job and putting a dead one back go the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqla_neoq import statements
from sqla_neoq.insertion import (
    MOST_ROUNDS,
    Enqueued,
    connection_of,
    execution_options,
    insert,
    insert_async,
    options_of,
    run_async,
    unfinished,
)
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
    _check_id("job_id", job_id)
    options_of(session, asynchronous="await cancel_async() instead")
    if not _possible(job_id):
        return False
    connection = connection_of(session)
    row = connection.execute(
        statements.cancel_job(), {"job": job_id}, execution_options=execution_options(connection)
    ).first()
    return row is not None


async def cancel_async(session: AsyncHandle, job_id: int) -> bool:
    """The same as :func:`cancel` for an AsyncSession or AsyncConnection."""
    _check_id("job_id", job_id)
    found: bool = await run_async(session, cancel, job_id, synchronous="cancel()")
    return found


def requeue(session: Handle, job_id: int) -> Enqueued | None:
    """Put a dead job back into its queue, in the session's open transaction.

    It is as if it had just been enqueued, due now, with no retry used up and no crash counted; but it keeps its id, its
    ``created_at`` and its options. A deadline that has passed is dropped. A refusal raises nothing, and your
    transaction goes on.

    Returns:
        The job's id and ``created=True``. When an unfinished job with the same fingerprint keeps it out, that job's id
        and ``created=False``: it stays dead. None when there is no such dead job.

    Raises:
        TypeError: an argument of the wrong type.
    """
    _check_id("job_id", job_id)
    options_of(session, asynchronous="await requeue_async() instead")
    return _requeue(session, [job_id])[0]


async def requeue_async(session: AsyncHandle, job_id: int) -> Enqueued | None:
    """The same as :func:`requeue` for an AsyncSession or AsyncConnection."""
    _check_id("job_id", job_id)
    results: list[Enqueued | None] = await run_async(session, _requeue, [job_id], synchronous="requeue()")
    return results[0]


def requeue_many(session: Handle, job_ids: Iterable[int]) -> list[Enqueued | None]:
    """Put many dead jobs back with one statement, each on its own terms: see :func:`requeue`.

    Returns:
        One result for each id, in their order.
    """
    listed = _all_ids(job_ids)
    options_of(session, asynchronous="await requeue_many_async() instead")
    return _requeue(session, listed)


async def requeue_many_async(session: AsyncHandle, job_ids: Iterable[int]) -> list[Enqueued | None]:
    """The same as :func:`requeue_many` for an AsyncSession or AsyncConnection."""
    listed = _all_ids(job_ids)
    results: list[Enqueued | None] = await run_async(session, _requeue, listed, synchronous="requeue_many()")
    return results


def _requeue(handle: Handle, job_ids: list[int]) -> list[Enqueued | None]:
    results: dict[int, Enqueued] = {}
    pending = [job_id for job_id in dict.fromkeys(job_ids) if _possible(job_id)]
    if not pending:
        return [None for _ in job_ids]
    connection = connection_of(handle)
    options = execution_options(connection)
    for _ in range(MOST_ROUNDS):
        rows = connection.execute(
            statements.requeue_dead(), {"ids": statements.array_literal(pending)}, execution_options=options
        ).all()
        results.update({row.id: Enqueued(row.id, created=row.back) for row in rows if row.back or row.there})
        kept_out = {row.id: (row.queue, row.fingerprint) for row in rows if row.id not in results}
        twins = unfinished(connection, kept_out.values(), options) if kept_out else {}
        results.update({id_: Enqueued(twins[key], created=False) for id_, key in kept_out.items() if key in twins})
        # What kept these out has finished meanwhile.
        pending = [id_ for id_ in kept_out if id_ not in results]
        if not pending:
            return [results.get(job_id) for job_id in job_ids]
    raise RuntimeError(f"a duplicate of dead job {pending[0]} came and went {MOST_ROUNDS} times during one requeue")


def _possible(job_id: int) -> bool:
    """Whether a job can have this id: for another one PostgreSQL would fail the caller's transaction."""
    return 0 <= job_id < 2**63


def _check_id(name: str, job_id: object) -> None:
    if isinstance(job_id, bool) or not isinstance(job_id, int):
        raise TypeError(f"{name}={job_id!r}: expected int, got {type(job_id).__name__}")


def _all_ids(job_ids: Iterable[int]) -> list[int]:
    if isinstance(job_ids, int):
        raise TypeError(f"job_ids={job_ids!r}: expected several ids; for one call requeue()")
    listed = list(job_ids)
    for place, job_id in enumerate(listed):
        _check_id(f"job_ids[{place}]", job_id)
    return listed


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
