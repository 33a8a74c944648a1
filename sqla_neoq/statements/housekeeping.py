"""Statements that remove what is over: passed deadlines, finished jobs, old history."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import ARRAY, BigInteger, Integer, Text, all_, any_, bindparam, cast, delete, literal_column, select

from sqla_neoq.statements.parts import array, bury_rows, clock, failures, in_status, jobs, seconds, waiting

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Executable, Select


def overdue() -> Select[Any]:
    """The waiting jobs whose deadline has passed."""
    return select(jobs.c.id).where(jobs.c.deadline.is_not(None), jobs.c.deadline <= clock, waiting())


@cache
def bury_overdue() -> Select[Any]:
    """``new``, ``failed`` → dead, up to ``:limit`` jobs whose deadline has passed. Returns their ids."""
    picked = (
        overdue()
        .order_by(jobs.c.deadline)
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(skip_locked=True)
        .cte("picked")
        .prefix_with("MATERIALIZED")
    )
    gone = delete(jobs).where(jobs.c.id == any_(array(select(picked.c.id)))).returning(*jobs.c).cte("gone")
    error: ColumnElement[str] = literal_column("'the deadline passed before the job could run'")
    buried = bury_rows(gone, literal_column("'deadline'"), error, gone)
    return select(gone.c.id).add_cte(buried)


@cache
def prune_jobs() -> Executable:
    """Delete up to ``:limit`` jobs that finished more than ``:age`` seconds ago, but none of ``:kept``."""
    kept = cast(bindparam("kept", type_=Text), ARRAY(BigInteger))
    picked = (
        select(jobs.c.id)
        .where(
            jobs.c.finished_at < clock - seconds("age"),
            in_status("processed", "cancelled"),
            jobs.c.id != all_(kept),
        )
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(skip_locked=True)
        .cte("picked")
        .prefix_with("MATERIALIZED")
    )
    return delete(jobs).where(jobs.c.id == any_(array(select(picked.c.id))))


@cache
def prune_failures() -> Executable:
    """Delete up to ``:limit`` rows of history about attempts that failed more than ``:age`` seconds ago."""
    picked = (
        select(failures.c.id)
        .where(failures.c.failed_at < clock - seconds("age"))
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(skip_locked=True)
        .cte("picked")
        .prefix_with("MATERIALIZED")
    )
    return delete(failures).where(failures.c.id == any_(array(select(picked.c.id))))
