"""Statements about workers: leases, their renewal, and the rescue of what the dead leave behind."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Integer,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    false,
    func,
    insert,
    literal_column,
    null,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_neoq.models import DEFAULT_MAX_RETRIES
from sqla_neoq.statements.claiming import runnable
from sqla_neoq.statements.housekeeping import overdue
from sqla_neoq.statements.parts import (
    ZERO,
    array,
    bury_rows,
    clock,
    failures,
    jobs,
    next_of,
    recordset,
    running,
    seconds,
    suspect,
    unless_cancelled,
    waiting,
    workers,
)

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Executable, Select


def worker_lock(worker: Any) -> ColumnElement[int]:
    """The advisory lock that a listening runner holds for as long as its process lives.

    Seeded with the table's own identity (``:jobs``, its oid), so that two installations in one database never meet.
    """
    return func.hashtextextended(literal_column("'worker:'").concat(cast(worker, Text)), _table_oid())


def advisory_lock(function: str) -> str:
    """Return the SQL, for psycopg, that calls an advisory lock function with a lock's name and the jobs table's oid.

    ``worker:ID`` is the lock above; ``queue:NAME``, held in shared mode, says that somebody is hungry for that queue,
    and is what the trigger function ``neoq_wake()`` tries.
    """
    return f"SELECT {function}(hashtextextended(%s, %s))"


def _table_oid() -> ColumnElement[int]:
    return bindparam("jobs", type_=BigInteger)


@cache
def jobs_oid() -> Executable:
    """The oid of the jobs table that ``:table`` names, quoted and qualified as SQL wants it."""
    return text("SELECT CAST(CAST(CAST(:table AS regclass) AS oid) AS bigint)")


@cache
def register_worker() -> Executable:
    """Enter a runner; returns its id."""
    return (
        insert(workers)
        .values(
            name=bindparam("name", type_=Text),
            host=bindparam("host", type_=Text),
            pid=bindparam("pid", type_=Integer),
            queues=cast(bindparam("queues", type_=Text), JSONB),
            version=bindparam("version", type_=Text),
            listening=bindparam("listening", type_=Boolean),
        )
        .returning(workers.c.id)
    )


@cache
def unregister_worker() -> Executable:
    """Remove the runner ``:worker``; whatever still runs under its name is then rescued by others."""
    return delete(workers).where(workers.c.id == bindparam("worker", type_=BigInteger))


@cache
def beat() -> Select[Any]:
    """Renew the lease of ``:worker`` and look around, in one round trip.

    Returns one row: ``alive`` (false: the row is gone, this runner was declared dead), whether there are workers
    ``stale`` for more than ``:stale`` seconds, ``orphans`` (running jobs without a worker), due ``suspects`` in
    ``:wanted``, ``cancels``, the ids of own jobs that somebody asked to stop, and, if ``:deadlines`` says so,
    ``overdue`` jobs past their deadline.
    """
    me = bindparam("worker", type_=BigInteger)
    own = update(workers).where(workers.c.id == me).values(heartbeat_at=clock).returning(workers.c.id).cte("own")
    wanted = recordset("wanted", "wanted", column("queue", Text), column("slots", Integer), column("handler", Boolean))
    stale = exists().where(workers.c.id != me, workers.c.heartbeat_at < clock - seconds("stale"))
    suspects = exists().where(
        jobs.c.queue == wanted.c.queue,
        suspect(),
        waiting(),
        jobs.c.run_after <= clock,
        runnable(wanted.c.handler),
    )
    asked = select(jobs.c.id).where(jobs.c.worker_id == me, running(), jobs.c.cancel_requested_at.is_not(None))
    # CASE, because it may be dear: where vacuum is held up, it walks over all whose deadline has passed since.
    late = case((bindparam("deadlines", type_=Boolean), exists(overdue())), else_=false())
    return select(
        exists(select(own.c.id)).label("alive"),
        stale.label("stale"),
        exists(select(orphans().subquery("orphan").c.id)).label("orphans"),
        late.label("overdue"),
        suspects.label("suspects"),
        array(asked).label("cancels"),
    )


@cache
def remove_dead_workers() -> Executable:
    """Declare workers dead and return their ids: this deletion is the verdict, and its commit frees their jobs.

    Dead is who has been silent for ``:stale`` seconds and no longer holds the lock that lives with its process, or
    who has been silent for ``:dead`` seconds, lock or no lock (frozen, cut off, or without a listening connection).
    """
    silent = clock - seconds("stale")
    gone = and_(workers.c.listening, func.pg_try_advisory_xact_lock(worker_lock(workers.c.id)))
    picked = (
        select(workers.c.id)
        .where(
            workers.c.id != bindparam("worker", type_=BigInteger),
            workers.c.heartbeat_at < silent,
            # CASE, so that the lock is only tried on the silent.
            case((workers.c.heartbeat_at < clock - seconds("dead"), true()), else_=gone),
        )
        .with_for_update(skip_locked=True)
        .cte("picked")
        .prefix_with("MATERIALIZED")
    )
    return delete(workers).where(workers.c.id == any_(array(select(picked.c.id)))).returning(workers.c.id)


@cache
def orphans() -> Select[Any]:
    """The running jobs that no worker owns any more: (id, token).

    Sought between the workers' ids and beyond, not among what runs: there, where vacuum is held up, are the dead
    entries of all that ever ran, and this is asked with each heartbeat (22 ms after 300,000 jobs; 0.1 ms this way).
    """
    lowest, highest = literal_column(f"{-(2**63)}", type_=BigInteger), literal_column(f"{2**63 - 1}", type_=BigInteger)
    ids = select(workers.c.id).union_all(select(lowest)).subquery("ids")
    edges = select(
        ids.c.id.label("above"),
        func.coalesce(func.lead(ids.c.id).over(order_by=ids.c.id), highest).label("below"),
    ).subquery("edges")
    # OFFSET keeps the planner from making another join of it, which would begin with all that runs.
    between = (
        select(jobs.c.id, jobs.c.claim_token)
        .where(running(), jobs.c.worker_id > edges.c.above, jobs.c.worker_id < edges.c.below)
        .offset(ZERO)
        .lateral("between")
    )
    # Plain SQL may have made one run that has no worker.
    nobodys = select(jobs.c.id, jobs.c.claim_token).where(running(), jobs.c.worker_id.is_(None))
    found = select(between.c.id, between.c.claim_token).select_from(edges.join(between, true()))
    orphan = found.union_all(nobodys).subquery("found")
    return select(orphan.c.id.label("id"), orphan.c.claim_token.label("token"))


@cache
def rescue() -> Select[Any]:
    """Take ``:orphans`` (id, token) back: ``failed`` and due at once, or dead when it was once too often.

    Fenced like an outcome, because a locked row is read anew and the workers are not: a job that was rescued and
    claimed again in between, by a worker that is younger than this statement, would seem to have no worker.

    Counts a crash. ``:limit`` crashes make a job dead (``crashed``); so do used-up retries (``exhausted``). Returns
    (id, reason), the reason NULL for those that will run again.
    """
    crashes = next_of(jobs.c.crashes, 2**15 - 1)
    records = recordset("record", "orphans", column("id", BigInteger), column("token", BigInteger))
    seen = select(*records.c).cte("seen").prefix_with("MATERIALIZED")
    orphan = (
        select(
            jobs.c.id,
            case(
                (crashes >= bindparam("limit", type_=Integer), "crashed"),
                (jobs.c.retries >= func.coalesce(jobs.c.max_retries, DEFAULT_MAX_RETRIES), "exhausted"),
            ).label("reason"),
        )
        .where(
            # The array is redundant, and the reason that the plan begins with the primary key.
            jobs.c.id == any_(array(select(seen.c.id))),
            jobs.c.id == seen.c.id,
            jobs.c.claim_token == seen.c.token,
            running(),
            ~exists().where(workers.c.id == jobs.c.worker_id),
        )
        .with_for_update(skip_locked=True, of=jobs)
        .cte("orphan")
        .prefix_with("MATERIALIZED")
    )
    message: ColumnElement[str] = literal_column("'the worker died while it ran this job'")
    again = (
        update(jobs)
        .where(jobs.c.id == any_(array(select(orphan.c.id).where(orphan.c.reason.is_(None)))))
        .values(
            **unless_cancelled("failed"),
            claim_token=null(),
            crashes=crashes,
            run_after=clock,
            error=message,
        )
        .returning(jobs.c.id, jobs.c.retries, jobs.c.worker_id, jobs.c.ran_at)
        .cte("again")
    )
    gone = (
        delete(jobs)
        .where(jobs.c.id == any_(array(select(orphan.c.id).where(orphan.c.reason.is_not(None)))))
        .returning(*(c for c in jobs.c if c.name != "crashes"), crashes.label("crashes"))
        .cte("gone")
    )
    buried = bury_rows(gone, orphan.c.reason, message, gone.join(orphan, gone.c.id == orphan.c.id))
    ended = select(*again.c).union_all(select(*(gone.c[name] for name in again.c.keys()))).cte("ended")  # noqa: SIM118
    note = select(
        ended.c.id,
        next_of(ended.c.retries, 2**31 - 1),
        ended.c.worker_id,
        ended.c.ran_at,
        literal_column("'crashed'"),
        message,
    )
    names = ["job_id", "attempt", "worker_id", "started_at", "kind", "message"]
    noted = insert(failures).from_select(names, note, include_defaults=False).cte("noted")
    return select(orphan.c.id, orphan.c.reason).add_cte(buried, noted)
