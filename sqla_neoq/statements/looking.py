"""Statements that only look: what the command line's ``status`` shows. They lock nothing and change nothing."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Double, cast, extract, func, select

from sqla_neoq.statements.parts import clock, dead_jobs, jobs, running, waiting, workers

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Select


def _age(time: Any) -> ColumnElement[float]:
    """The seconds from a time to now."""
    return cast(extract("epoch", clock - time), Double)


@cache
def count_jobs() -> Select[Any]:
    """The jobs for each queue and status, and for how many seconds the oldest has been due; null: none is."""
    due = jobs.c.run_after <= clock
    return (
        select(
            jobs.c.queue,
            jobs.c.status,
            func.count().label("jobs"),
            _age(func.min(jobs.c.run_after).filter(waiting(), due)).label("oldest_due"),
        )
        .group_by(jobs.c.queue, jobs.c.status)
        .order_by(jobs.c.queue, jobs.c.status)
    )


@cache
def count_dead() -> Select[Any]:
    """The dead jobs for each queue and reason."""
    return (
        select(dead_jobs.c.queue, dead_jobs.c.reason, func.count().label("jobs"))
        .group_by(dead_jobs.c.queue, dead_jobs.c.reason)
        .order_by(dead_jobs.c.queue, dead_jobs.c.reason)
    )


@cache
def running_workers() -> Select[Any]:
    """The workers with the ages of their start and last heartbeat, in seconds, and the jobs they run."""
    claimed = (
        select(jobs.c.worker_id, func.count().label("jobs"))
        .where(running())
        .group_by(jobs.c.worker_id)
        .subquery("claimed")
    )
    return (
        select(
            workers.c.id,
            workers.c.name,
            workers.c.host,
            workers.c.pid,
            workers.c.queues,
            workers.c.version,
            _age(workers.c.started_at).label("up_for"),
            _age(workers.c.heartbeat_at).label("heartbeat"),
            func.coalesce(claimed.c.jobs, 0).label("running"),
        )
        .select_from(workers.outerjoin(claimed, claimed.c.worker_id == workers.c.id))
        .order_by(workers.c.id)
    )


@cache
def count_waiting_by_task() -> Select[Any]:
    """The jobs that wait, now or for their time, for each queue and task (null: the queue's handler takes them)."""
    return (
        select(jobs.c.queue, jobs.c.task, func.count().label("jobs"))
        .where(waiting())
        .group_by(jobs.c.queue, jobs.c.task)
        .order_by(jobs.c.queue, jobs.c.task)
    )
