"""Enqueue: one INSERT in the caller's open transaction. The job exists if, and only if, that transaction commits.

Cancelling a job and putting a dead one back go the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqla_neoq import statements
from sqla_neoq.handles import Query, join, join_async
from sqla_neoq.insertion import MOST_ROUNDS, Enqueued, insert, insert_async, unfinished
from sqla_neoq.newjob import NewJob
from sqla_neoq.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime, timedelta

    from sqla_neoq.handles import AsyncHandle, Handle, Steps


def enqueue(
    session: Handle | None = None,
    target: Task[..., Any] | str | None = None,
    payload: Any = None,
    *,
    task: Task[..., Any] | str | None = None,
    run_after: datetime | timedelta | None = None,
    priority: int | None = None,
    deadline: datetime | timedelta | None = None,
    max_retries: int | None = None,
    unique: bool = False,
    fingerprint: str | None = None,
    using: str | None = None,
) -> Enqueued:
    """Enqueue one job in the session's open transaction.

    It never commits, opens no connection of its own and does not flush your pending objects. A duplicate raises
    nothing: you get the id of the job already there, and your transaction goes on.

    Args:
        session: what holds your transaction: a SQLAlchemy Session, scoped_session or Connection; a connection or cursor
            of psycopg or psycopg2; Django's ``connection``; a Peewee or Pony database.
        target: a task, or the name of a queue (which needs no worker code here).
        payload: JSON: the keyword arguments of a task, or whatever a queue's handler expects; None is ``{}``.
        task: for a queue's name: the task, or its name, that shall run the job instead of the queue's handler.
        run_after: not before this aware datetime, or this long from the database's now.
        priority: -100 to 100, higher runs first; None: the task's, else 0.
        deadline: not to be started after this aware datetime, or this long from now: then it is dead (``deadline``).
        max_retries: how often it is tried again after a failure; None: the task's, else 23.
        unique: make no second job with the same queue, task and payload while one is unfinished.
        fingerprint: the same with a key of your own, 1 to 255 characters, unique within the queue.
        using: the alias of a Django database, instead of a session.

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
    return insert(session, [job], using=using)[0]


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
    """Enqueue one job in the open transaction of a handle of asynchronous code; else like :func:`enqueue`."""
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


def enqueue_many(
    session: Handle | None = None, jobs: Iterable[NewJob] | None = None, *, using: str | None = None
) -> list[Enqueued]:
    """Enqueue many jobs, made by ``Task.job(...)`` or ``NewJob.of(...)``, with one statement.

    Args:
        session: what holds your transaction, as for :func:`enqueue`.
        jobs: the jobs; none are no statement.
        using: the alias of a Django database, instead of a session.

    Returns:
        One result for each job, in their order.
    """
    return insert(session, _all(jobs), verb="enqueue_many", using=using)


async def enqueue_many_async(session: AsyncHandle, jobs: Iterable[NewJob]) -> list[Enqueued]:
    """The same as :func:`enqueue_many` for a handle of asynchronous code."""
    return await insert_async(session, _all(jobs), verb="enqueue_many")


def cancel(session: Handle, job_id: int) -> bool:
    """Cancel a job in the session's open transaction.

    A waiting job is cancelled. A running one is asked to stop: its ``JobContext.cancelled`` turns true within a few
    seconds of the commit, and it ends cancelled if it then stops before it is done.

    Returns:
        Whether there was such a job to cancel.
    """
    _check_id("job_id", job_id)
    return join(session, verb="cancel").perform(lambda _limit: _cancel(job_id))


async def cancel_async(session: AsyncHandle, job_id: int) -> bool:
    """The same as :func:`cancel` for a handle of asynchronous code."""
    _check_id("job_id", job_id)
    return await join_async(session, verb="cancel").perform(lambda _limit: _cancel(job_id))


def _cancel(job_id: int) -> Steps[bool]:
    if not _possible(job_id):
        return False
    rows = yield Query(statements.cancel_job(), {"job": job_id})
    return len(rows) > 0


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
    return join(session, verb="requeue").perform(lambda _limit: _requeue([job_id]))[0]


async def requeue_async(session: AsyncHandle, job_id: int) -> Enqueued | None:
    """The same as :func:`requeue` for a handle of asynchronous code."""
    _check_id("job_id", job_id)
    return (await join_async(session, verb="requeue").perform(lambda _limit: _requeue([job_id])))[0]


def requeue_many(session: Handle, job_ids: Iterable[int]) -> list[Enqueued | None]:
    """Put many dead jobs back with one statement, each on its own terms: see :func:`requeue`.

    Returns:
        One result for each id, in their order.
    """
    listed = _all_ids(job_ids)
    return join(session, verb="requeue_many").perform(lambda _limit: _requeue(listed))


async def requeue_many_async(session: AsyncHandle, job_ids: Iterable[int]) -> list[Enqueued | None]:
    """The same as :func:`requeue_many` for a handle of asynchronous code."""
    listed = _all_ids(job_ids)
    return await join_async(session, verb="requeue_many").perform(lambda _limit: _requeue(listed))


def _requeue(job_ids: list[int]) -> Steps[list[Enqueued | None]]:
    results: dict[int, Enqueued] = {}
    pending = [job_id for job_id in dict.fromkeys(job_ids) if _possible(job_id)]
    for _ in range(MOST_ROUNDS):
        if not pending:
            return [results.get(job_id) for job_id in job_ids]
        rows = yield Query(statements.requeue_dead(), {"ids": statements.array_literal(pending)})
        kept_out = {}
        for id_, queue, fingerprint, back, there in rows:
            if back or there:
                results[id_] = Enqueued(id_, created=back)
            else:
                kept_out[id_] = (queue, fingerprint)
        twins = (yield from unfinished(kept_out.values())) if kept_out else {}
        results.update({id_: Enqueued(twins[key], created=False) for id_, key in kept_out.items() if key in twins})
        # What kept these out has finished meanwhile.
        pending = [id_ for id_ in kept_out if id_ not in results]
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


def _job(
    target: Task[..., Any] | str | None, payload: Any, task: Task[..., Any] | str | None, **options: Any
) -> NewJob:
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


def _all(jobs: Iterable[NewJob] | None) -> list[NewJob]:
    if jobs is None:
        raise TypeError("jobs=None: expected what Task.job(...) makes, several of them")
    listed = list(jobs)
    for place, job in enumerate(listed):
        if not isinstance(job, NewJob):
            raise TypeError(f"jobs[{place}]={job!r}: expected what Task.job(...) makes, got {type(job).__name__}")
    return listed
