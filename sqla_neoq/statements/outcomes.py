"""Statements that write what became of a run, each behind the fence."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Double,
    Text,
    all_,
    and_,
    any_,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_neoq.statements.parts import (
    array,
    bury_rows,
    clock,
    failures,
    in_seconds,
    jobs,
    next_of,
    recordset,
    running,
    unless_cancelled,
)

if TYPE_CHECKING:
    from sqlalchemy import CTE, ColumnElement, Executable, Select


def _outcomes(*extra: Any) -> CTE:
    records = recordset("record", "outcomes", column("id", BigInteger), column("token", BigInteger), *extra)
    return select(*records.c).cte("outcome").prefix_with("MATERIALIZED")


def _fenced(outcome: CTE) -> ColumnElement[bool]:
    """The fence: the row is still running under the very claim that this outcome comes from."""
    return and_(
        # The array is redundant, and the reason that every plan begins with the primary key.
        jobs.c.id == any_(array(select(outcome.c.id))),
        jobs.c.id == outcome.c.id,
        jobs.c.claim_token == outcome.c.token,
        _still_running(),
    )


def _still_running() -> ColumnElement[bool]:
    # Not running(): that is the predicate of neoq_jobs_running_idx, and a planner that counts on few running rows reads
    # all of that index instead. Under a pinned xmin horizon it also holds every job that ever ran: writing 100 outcomes
    # took 28 ms after 60,000 jobs, and takes 3 ms this way.
    return jobs.c.status.concat(literal_column("''")) == literal_column("'running'")


def _lost(outcome: CTE, written: CTE) -> Select[Any]:
    """The ids of the outcomes that the fence refused."""
    return select(outcome.c.id).where(~exists().where(written.c.id == outcome.c.id))


def _fences() -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """``:ids``, in ascending order, and the ``:tokens`` that belong to them, as arrays that are read once."""
    # An array that is cast from a parameter's text would be read again for every row that is compared with it.
    ids, tokens = (cast(bindparam(name, type_=Text), ARRAY(BigInteger)).label(name) for name in ("ids", "tokens"))
    fences = select(ids, tokens).cte("fences").prefix_with("MATERIALIZED")
    # The cast says that it is one array; ANY of a subquery would be any of its rows.
    return cast(select(fences.c.ids).scalar_subquery(), ARRAY(BigInteger)), select(fences.c.tokens).scalar_subquery()


def _fenced_by_pairs(ids: ColumnElement[Any], tokens: ColumnElement[Any]) -> ColumnElement[bool]:
    """The same fence for outcomes that are nothing but an id and a token.

    The token is found by bisection: width_bucket() counts how many of the ascending ids are not above this one. A join
    with the outcomes, unfolded from JSON, took another microsecond a job, a tenth of all that the server does for one.
    """
    return and_(
        jobs.c.id == any_(ids),
        jobs.c.claim_token == tokens[func.width_bucket(jobs.c.id, ids)],
        _still_running(),
    )


def lost_ids(ids: ColumnElement[Any], written: CTE) -> ColumnElement[Any]:
    """The ids that the fence refused, as an array; NULL when there are none."""
    given = select(func.unnest(ids).label("id")).subquery("given")
    lost = array(select(given.c.id).where(given.c.id.not_in(select(written.c.id))))
    all_of_them = select(func.count()).select_from(written).scalar_subquery() == func.cardinality(ids)
    return case((~all_of_them, lost))


def _ids_lost(ids: ColumnElement[Any], written: CTE) -> Select[Any]:
    return select(func.unnest(lost_ids(ids, written)))


def completed() -> tuple[ColumnElement[Any], CTE]:
    """``:ids``, and the rows that were completed of them under their ``:tokens``."""
    ids, tokens = _fences()
    written = (
        update(jobs)
        .where(_fenced_by_pairs(ids, tokens))
        .values(
            status=literal_column("'processed'"),
            finished_at=clock,
            claim_token=null(),
            cancel_requested_at=null(),
            error=null(),
        )
        .returning(jobs.c.id)
        .cte("written")
    )
    return ids, written


@cache
def complete() -> Select[Any]:
    """``running`` → ``processed`` for ``:ids`` and ``:tokens``. Returns the lost ids."""
    return _ids_lost(*completed())


@cache
def complete_and_delete() -> Select[Any]:
    """Delete the completed jobs at once, for a retention of zero. Returns the lost ids."""
    ids, tokens = _fences()
    written = delete(jobs).where(_fenced_by_pairs(ids, tokens)).returning(jobs.c.id).cte("written")
    return _ids_lost(ids, written)


@cache
def finish_cancelled() -> Select[Any]:
    """``running`` → ``cancelled`` for ``:ids`` and ``:tokens``. Returns the lost ids."""
    ids, tokens = _fences()
    written = (
        update(jobs)
        .where(_fenced_by_pairs(ids, tokens))
        .values(status=literal_column("'cancelled'"), finished_at=clock, claim_token=null())
        .returning(jobs.c.id)
        .cte("written")
    )
    return _ids_lost(ids, written)


@cache
def put_back() -> Select[Any]:
    """``running`` → ``new`` for ``:outcomes`` (id, token, delay): snoozed, or never started. Returns the lost ids.

    Or ``cancelled``, here and wherever else a job would run again, if somebody asked for that meanwhile. No retry is
    used up: the number only grows when a ``failed`` job is claimed. A delay of NULL keeps ``run_after``.
    """
    outcome = _outcomes(column("delay", Double))
    written = (
        update(jobs)
        .where(_fenced(outcome))
        .values(
            **unless_cancelled("new"),
            claim_token=null(),
            run_after=func.coalesce(in_seconds(outcome.c.delay), jobs.c.run_after),
        )
        .returning(jobs.c.id)
        .cte("written")
    )
    return _lost(outcome, written)


@cache
def put_back_strays() -> Executable:
    """``running`` → ``new`` for the jobs of ``:worker`` under no token of ``:tokens``. Returns their ids.

    Such jobs come from a claim whose answer was lost on the way: the server committed it, the runner never knew.
    """
    # Those that somebody else's transaction holds are left for the next time: nothing here waits for a row.
    stray = (
        select(jobs.c.id)
        .where(
            jobs.c.worker_id == bindparam("worker", type_=BigInteger),
            running(),
            jobs.c.claim_token != all_(cast(bindparam("tokens", type_=Text), ARRAY(BigInteger))),
        )
        .with_for_update(skip_locked=True)
        .cte("stray")
        .prefix_with("MATERIALIZED")
    )
    return (
        update(jobs)
        .where(jobs.c.id == any_(array(select(stray.c.id))))
        .values(**unless_cancelled("new"), claim_token=null())
        .returning(jobs.c.id)
    )


def _failed_attempts() -> CTE:
    return _outcomes(
        column("delay", Double),
        column("reason", Text),
        column("kind", Text),
        column("message", Text),
        column("traceback", Text),
    )


def _note_failures(ended: CTE, outcome: CTE) -> CTE:
    """Write one row of history for each ended attempt that failed."""
    rows = select(
        ended.c.id,
        next_of(ended.c.retries, 2**31 - 1),
        ended.c.worker_id,
        ended.c.ran_at,
        outcome.c.kind,
        outcome.c.message,
        outcome.c.traceback,
    ).where(ended.c.id == outcome.c.id, outcome.c.kind.is_not(None))
    names = ["job_id", "attempt", "worker_id", "started_at", "kind", "message", "traceback"]
    return insert(failures).from_select(names, rows, include_defaults=False).cte("noted")


@cache
def fail() -> Select[Any]:
    """``running`` → ``failed`` for ``:outcomes`` (id, token, delay, kind, message, traceback). Returns the lost ids."""
    outcome = _failed_attempts()
    written = (
        update(jobs)
        .where(_fenced(outcome))
        .values(
            **unless_cancelled("failed"),
            claim_token=null(),
            error=outcome.c.message,
            run_after=in_seconds(outcome.c.delay),
        )
        .returning(jobs.c.id, jobs.c.retries, jobs.c.worker_id, jobs.c.ran_at)
        .cte("written")
    )
    return _lost(outcome, written).add_cte(_note_failures(written, outcome))


@cache
def bury() -> Select[Any]:
    """``running`` → dead for ``:outcomes`` (id, token, reason, kind, message, traceback). Returns the lost ids.

    The job leaves one table and enters the other in one statement: no moment sees it in both, or in neither.
    """
    outcome = _failed_attempts()
    written = delete(jobs).where(_fenced(outcome)).returning(*jobs.c).cte("written")
    buried = bury_rows(
        written, outcome.c.reason, outcome.c.message, written.join(outcome, written.c.id == outcome.c.id)
    )
    return _lost(outcome, written).add_cte(buried, _note_failures(written, outcome))


@cache
def add_to_payload() -> Executable:
    """Add the members of ``:more`` to the payload of ``:job``, in the transaction that completes it."""
    more = cast(bindparam("more", type_=Text), JSONB)
    return (
        update(jobs)
        .where(jobs.c.id == bindparam("job", type_=BigInteger))
        .values(payload=jobs.c.payload.op("||")(more))
    )
