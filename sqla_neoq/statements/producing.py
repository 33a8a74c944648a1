"""Statements that create jobs, call them off, and put dead ones back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    ARRAY,
    JSON,
    BigInteger,
    Double,
    Integer,
    SmallInteger,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    collate,
    column,
    delete,
    exists,
    func,
    null,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import insert as postgresql_insert

from sqla_neoq.models import UNFINISHED_SQL
from sqla_neoq.statements.parts import (
    array,
    aware_time,
    clock,
    dead_jobs,
    in_seconds,
    in_status,
    jobs,
    recordset,
    running,
    waiting,
)

if TYPE_CHECKING:
    from sqlalchemy import Executable, Select

_KEPT_BY_THE_REQUEUED: Final = (
    "id",
    "queue",
    "task",
    "priority",
    "payload",
    "fingerprint",
    "max_retries",
    "created_at",
)


@cache
def insert_jobs(*, keyed: bool = True) -> Executable:
    """Insert the jobs of ``:jobs`` in their order; return (id, queue, fingerprint) of those that were created.

    Each member of ``:jobs`` is a run of jobs that differ in nothing but their payloads, a list. Said once for the run,
    the rest costs the server next to nothing: 10,000 jobs of one task take it 4.5 µs each, where a record for each took
    7.5 and COPY takes 4.1; and where each is a run of its own, no more than before.

    With ``keyed=False`` none of them has a fingerprint, and ids are all that is returned.

    A job whose fingerprint an unfinished job of its queue already has is left out: it raises nothing, so the caller's
    transaction stays usable. A fingerprint that another open transaction is just inserting is waited for.
    """
    new = recordset(
        "new",
        "jobs",
        column("queue", Text),
        column("task", Text),
        column("priority", SmallInteger),
        column("payloads", JSON),
        column("fingerprint", Text),
        column("run_at", aware_time),
        column("run_in", Double),
        column("deadline_at", aware_time),
        column("deadline_in", Double),
        column("max_retries", Integer),
    )
    # As json, and each made jsonb by itself: one jsonb array is refused from 256 MB on.
    each = func.json_array_elements(new.c.payloads).table_valued(column("value", JSON)).lateral("each")
    rows = select(
        new.c.queue,
        new.c.task,
        new.c.priority,
        cast(each.c.value, JSONB),
        new.c.fingerprint,
        func.coalesce(new.c.run_at, in_seconds(new.c.run_in), func.now()),
        func.coalesce(new.c.deadline_at, in_seconds(new.c.deadline_in)),
        new.c.max_retries,
    ).join_from(new, each, true())
    names = ["queue", "task", "priority", "payload", "fingerprint", "run_after", "deadline", "max_retries"]
    insert = postgresql_insert(jobs).from_select(names, rows, include_defaults=False)
    if not keyed:
        return insert.returning(jobs.c.id)
    return insert.on_conflict_do_nothing(
        index_elements=[jobs.c.queue, jobs.c.fingerprint], index_where=text(UNFINISHED_SQL)
    ).returning(jobs.c.id, jobs.c.queue, jobs.c.fingerprint)


@cache
def find_unfinished() -> Select[Any]:
    """Look up the unfinished jobs with the (queue, fingerprint) pairs of ``:keys``."""
    key = recordset("key", "keys", column("queue", Text), column("fingerprint", Text))
    return (
        select(jobs.c.id, jobs.c.queue, jobs.c.fingerprint)
        .join_from(key, jobs, and_(jobs.c.queue == key.c.queue, jobs.c.fingerprint == key.c.fingerprint))
        .where(jobs.c.fingerprint.is_not(None), in_status("new", "running", "failed"))
    )


@cache
def cancel_job() -> Executable:
    """Cancel job ``:job`` if it waits; ask it to stop if it runs. Returns its status, or no row."""
    waits = waiting()
    return (
        update(jobs)
        .where(jobs.c.id == bindparam("job", type_=BigInteger), or_(waits, running()))
        .values(
            status=case((waits, "cancelled"), else_=jobs.c.status),
            finished_at=case((waits, clock)),
            cancel_requested_at=case((waits, null()), else_=clock),
        )
        .returning(jobs.c.status)
    )


@cache
def requeue_dead() -> Select[Any]:
    """Dead → ``new`` for the dead jobs of ``:ids``, as if newly enqueued, but with their id and ``created_at``.

    Returns (id, queue, fingerprint, back, there) of each that is dead: ``back`` says that it is in the queue again,
    ``there`` that a job with its id was there before. With neither, an unfinished job has its fingerprint.
    """
    # Locked, so that of two who requeue one job the second finds it gone; and in the order in which enqueues insert
    # their fingerprints, or two batches would wait for each other.
    dead = (
        select(dead_jobs)
        .where(dead_jobs.c.id == any_(cast(bindparam("ids", type_=Text), ARRAY(BigInteger))))
        .order_by(
            dead_jobs.c.fingerprint.is_not(None),
            case((dead_jobs.c.fingerprint.is_not(None), collate(dead_jobs.c.queue, "C"))),
            collate(dead_jobs.c.fingerprint, "C"),
            dead_jobs.c.id,
        )
        .with_for_update()
        .cte("dead")
        .prefix_with("MATERIALIZED")
    )
    there = exists().where(jobs.c.id == dead.c.id)
    rows = select(
        *(dead.c[name] for name in _KEPT_BY_THE_REQUEUED), clock, case((dead.c.deadline > clock, dead.c.deadline))
    ).where(~there)
    # The identity column takes an id that is given (BY DEFAULT), and its sequence never gives that one again.
    # No target: the id may have been taken a moment ago as well as the fingerprint.
    back = (
        postgresql_insert(jobs)
        .from_select([*_KEPT_BY_THE_REQUEUED, "run_after", "deadline"], rows, include_defaults=False)
        .on_conflict_do_nothing()
        .returning(jobs.c.id)
        .cte("back")
    )
    gone = delete(dead_jobs).where(dead_jobs.c.id == any_(array(select(back.c.id)))).cte("gone")
    return select(
        dead.c.id,
        dead.c.queue,
        dead.c.fingerprint,
        exists().where(back.c.id == dead.c.id).label("back"),
        there.label("there"),
    ).add_cte(gone)
