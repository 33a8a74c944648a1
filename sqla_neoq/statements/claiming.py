"""Statements that take due jobs for one runner."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Integer,
    MetaData,
    SmallInteger,
    Table,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    column,
    exists,
    extract,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import OID, REGCLASS

from sqla_neoq.models import claim_tokens
from sqla_neoq.statements.outcomes import completed, lost_ids
from sqla_neoq.statements.parts import (
    ONE,
    ZERO,
    array,
    aware_time,
    clock,
    jobs,
    next_of,
    recordset,
    suspect,
    waiting,
    workers,
)

if TYPE_CHECKING:
    from sqlalchemy import CTE, ColumnElement, Label, Select


def _epoch(time: Any) -> ColumnElement[Any]:
    # Seconds since 1970. A timestamp costs the driver four times as much to read, and there are four in each row, few
    # of which are ever looked at; and PostgreSQL has some that no datetime can hold, 'infinity' the first of them.
    return func.date_part(literal_column("'epoch'"), time, type_=Double).label(time.key)


_CLAIMED: Final = (
    jobs.c.id,
    jobs.c.claim_token,
    jobs.c.queue,
    jobs.c.task,
    # As text: parsed by the thread that runs the job, and only there.
    cast(jobs.c.payload, Text).label("payload"),
    jobs.c.priority,
    jobs.c.retries,
    jobs.c.max_retries,
    jobs.c.crashes,
    _epoch(jobs.c.run_after),
    _epoch(jobs.c.deadline),
    _epoch(jobs.c.created_at),
    _epoch(jobs.c.ran_at),
    jobs.c.fingerprint,
)

# A sequence is a relation too, and tells which one it is. Sequence.next_value() would put the schema's name between
# apostrophes, and schema_translate_map does not double one that is in the name.
_tokens: Final = Table(claim_tokens.name, MetaData(), Column("tableoid", OID))

_place: Final[Label[Any]] = literal_column(f"{jobs.name}.ctid").label("ctid")
"""Where this version of a row is. Spelt out, because a column of the mapped table it shall not be."""


def registered() -> ColumnElement[bool]:
    """Whether ``:worker`` exists: a frozen runner, declared dead and resumed, must not claim under its old name."""
    return exists().where(workers.c.id == bindparam("worker", type_=BigInteger))


def runnable(handles_queue: Any) -> ColumnElement[bool]:
    """A job this runner can run: of a task it knows, or without a task on a queue it has the handler of."""
    known = array(select(func.json_array_elements_text(cast(bindparam("tasks", type_=Text), JSON), type_=Text)))
    return and_(
        or_(jobs.c.task == any_(known), and_(jobs.c.task.is_(None), handles_queue)),
        or_(jobs.c.deadline.is_(None), jobs.c.deadline > clock),
    )


def _lanes(began: CTE) -> CTE:
    """The (queue, priority) pairs to take jobs from: those that are known, and those that are found.

    Why not simply sort: ``queue = ANY(...) ORDER BY priority DESC, run_after`` reads the whole backlog for every
    claim (10 ms at 100,000 jobs), and with equality on the queue alone the future jobs of a high priority are walked
    over. Within a lane the index is already in the order wanted and starts at what is due, or at the lane's floor.

    They are found by skipping from one to the next in the claim index, between two priorities: those of the known
    lanes, which may have many dead entries, are not walked over.
    """
    wanted = recordset(
        "wanted",
        "wanted",
        column("queue", Text),
        column("slots", Integer),
        column("handler", Boolean),
        column("above", SmallInteger),
        column("below", SmallInteger),
        column("since", Double),
    )
    known = recordset(
        "known",
        "known",
        column("queue", Text),
        column("slots", Integer),
        column("handler", Boolean),
        column("priority", SmallInteger),
        column("since", Double),
        column("last", BigInteger),
        default="[]",
    )

    def best_between(queue: Any, above: Any, below: Any, since: Any) -> Any:
        return (
            select(jobs.c.priority)
            .where(
                jobs.c.queue == queue,
                waiting(),
                jobs.c.priority < above,
                jobs.c.priority > below,
                jobs.c.run_after >= since,
            )
            .order_by(jobs.c.priority.desc())
            .limit(ONE)
            .scalar_subquery()
        )

    above = func.coalesce(wanted.c.above, literal_column("101"))
    below = func.coalesce(wanted.c.below, literal_column("-101"))
    since = _time(wanted.c.since)
    found = (
        select(
            wanted.c.queue,
            wanted.c.slots,
            wanted.c.handler,
            below.label("below"),
            since.label("since"),
            best_between(wanted.c.queue, above, below, since).label("priority"),
        )
        .where(registered(), select(began.c.at).scalar_subquery().is_not(None))
        .cte("found", recursive=True)
    )
    found = found.union_all(
        select(
            found.c.queue,
            found.c.slots,
            found.c.handler,
            found.c.below,
            found.c.since,
            best_between(found.c.queue, found.c.priority, found.c.below, found.c.since),
        ).where(found.c.priority.is_not(None))
    )
    return (
        select(found.c.queue, found.c.slots, found.c.handler, found.c.priority, found.c.since, ZERO.label("last"))
        .where(found.c.priority.is_not(None))
        .union_all(
            select(
                known.c.queue, known.c.slots, known.c.handler, known.c.priority, _time(known.c.since), known.c.last
            ).where(registered())
        )
        .cte("lanes")
    )


def _time(seconds: Any) -> ColumnElement[Any]:
    """The time that many seconds after 1970; NULL: before any other.

    The number is what :func:`_epoch` made of a time, and comes back as the same microsecond: between 1900 and
    2100; others may be a microsecond off.
    """
    return func.coalesce(func.to_timestamp(seconds), literal_column("'-infinity'::timestamptz"), type_=aware_time)


def _quotas(lanes: CTE) -> CTE:
    """Share each queue's slots out over its lanes, the highest priority first.

    Without it a claim of n would lock n rows in *every* lane of the queue. The lowest lane needs no count: it gets
    what is left, so a queue with one priority (most are) pays nothing here. Nor does a queue that may have as many as
    the claim in all: no more rows than those are ever drawn, so none is locked that is not taken. (Counted without
    need, 200 lanes with 400 jobs each took longer than all the rest of a claim of 1,000.)
    """
    lowest = func.row_number().over(partition_by=lanes.c.queue, order_by=lanes.c.priority) == ONE
    unlimited = lanes.c.slots >= bindparam("total", type_=Integer)
    ranked = select(lanes, or_(lowest, unlimited).label("uncounted")).cte("ranked")
    due = (
        select(ONE.label("one"))
        .where(_in_lane(ranked.c), runnable(ranked.c.handler))
        # In the index's order, or the planner may build a bitmap of the whole lane before the first row.
        .order_by(jobs.c.run_after, jobs.c.id)
        .limit(ranked.c.slots)
        # Only those that can be had, and they are kept until they are picked: what somebody else holds (cancel() does,
        # until it commits) must not take the slots away from the lanes below.
        .with_for_update(skip_locked=True)
        .correlate(ranked)
        .subquery("due")
    )
    counted = select(
        ranked,
        case((ranked.c.uncounted, ZERO), else_=select(func.count()).select_from(due).scalar_subquery()).label("due"),
    ).cte("counted")
    above = func.sum(counted.c.due).over(
        partition_by=counted.c.queue, order_by=counted.c.priority.desc(), rows=(None, -1)
    )
    return select(
        counted.c.queue,
        counted.c.priority,
        counted.c.handler,
        counted.c.since,
        counted.c.last,
        func.greatest(counted.c.slots - func.coalesce(above, ZERO), ZERO).label("slots"),
    ).cte("quotas")


def _in_lane(lane: Any) -> ColumnElement[bool]:
    return and_(
        jobs.c.queue == lane.queue,
        jobs.c.priority == lane.priority,
        waiting(),
        tuple_(jobs.c.run_after, jobs.c.id) > tuple_(lane.since, lane.last),
        jobs.c.run_after <= clock,
        ~suspect(),
    )


def _take(picked: CTE, before: Any) -> CTE:
    """Turn the picked, locked jobs into running ones of ``:worker`` under a new token."""
    # A scalar subquery: drawn once for the whole claim, and not at all when nothing was picked.
    token = select(func.nextval(cast(_tokens.c.tableoid, REGCLASS)).label("value")).where(before).cte("token")
    token = token.prefix_with("MATERIALIZED")
    # By an array, not by a join: whatever the statistics say, that is never a hash of the table. And by the place of
    # each row: it is known, this transaction has locked it there, and the primary key need not be asked again.
    return (
        update(jobs)
        .where(_place.element == any_(array(select(picked.c.ctid))))
        .values(
            status=literal_column("'running'"),
            worker_id=bindparam("worker", type_=BigInteger),
            claim_token=select(token.c.value).scalar_subquery(),
            ran_at=clock,
            retries=next_of(
                jobs.c.retries, 2**31 - 1, case((jobs.c.status == literal_column("'failed'"), ONE), else_=ZERO)
            ),
            cancel_requested_at=null(),
        )
        .returning(*_CLAIMED)
        .cte("taken")
    )


def _seconds(interval: Any) -> ColumnElement[float]:
    return cast(extract("epoch", interval), Double)


@cache
def claim_due() -> Select[Any]:
    """Claim up to ``:total`` due jobs of ``:wanted`` (queue, slots, handler) and ``:tasks`` for ``:worker``.

    Best first: by priority over all queues, then by due time; between queues of one priority chance decides, so that
    a long backlog in one never starves another.

    Always returns at least one row: with nothing to claim, ``id`` is NULL and ``next_due`` says in how many seconds
    the next waiting job of these queues falls due (NULL: none), so that an idle runner asks one question, not two.

    It also does what :func:`~sqla_neoq.statements.outcomes.complete` does, for ``:ids`` and ``:tokens``, and every row
    holds the ``lost`` ids as an array (NULL: none). One statement is a transaction by itself: a round trip instead of
    four, and each of those would cost the thread that waits for it a turn of Python's interpreter lock.
    """
    began = select(func.clock_timestamp(type_=aware_time).label("at")).cte("began").prefix_with("MATERIALIZED")
    lanes = _lanes(began)
    quotas = _quotas(lanes)
    # The lanes in the order they are drawn from; nothing is locked in a lane that the total does not reach. OFFSET
    # keeps the planner from pulling the subquery up, which would lose the order.
    queued = select(quotas).order_by(quotas.c.priority.desc(), func.random()).offset(ZERO).subquery("queued")
    best = (
        select(_place)
        .select_from(jobs)
        .where(_in_lane(queued.c), runnable(queued.c.handler))
        .order_by(jobs.c.run_after, jobs.c.id)
        .limit(queued.c.slots)
        .with_for_update(skip_locked=True)
        .lateral("best")
    )
    picked = (
        select(best.c.ctid)
        .select_from(queued.join(best, true()))
        .limit(bindparam("total", type_=Integer))
        .cte("picked")
        .prefix_with("MATERIALIZED")
    )
    # What it took to find them, without what it takes to write them: the first token is drawn between the two.
    count = select(func.count().label("of")).select_from(picked).subquery("count")
    walked = (
        select(_seconds(func.clock_timestamp(type_=aware_time) - began.c.at).label("seconds"))
        .select_from(count.join(began, true()))
        .where(count.c.of >= ZERO)
        .cte("walked")
        .prefix_with("MATERIALIZED")
    )
    taken = _take(picked, select(walked.c.seconds).scalar_subquery().is_not(None))
    later = (
        select(jobs.c.run_after)
        .where(
            jobs.c.queue == lanes.c.queue,
            jobs.c.priority == lanes.c.priority,
            waiting(),
            jobs.c.run_after > clock,
        )
        .order_by(jobs.c.run_after)
        .limit(ONE)
        .correlate(lanes)
        .scalar_subquery()
    )
    soonest = select(func.min(later)).select_from(lanes).scalar_subquery()
    # A row that was written to between the look at it and its lock is not where it was: seen, locked, and not taken. It
    # is due, and the next claim will find it where it is now.
    next_due = case((exists(select(picked.c.ctid)), ZERO), else_=_seconds(soonest - clock))
    nothing = ~exists(select(taken.c.id))
    idle = select(
        case((nothing, next_due)).label("next_due"),
        case((nothing, _epoch(clock))).label("now"),
        select(walked.c.seconds).scalar_subquery().label("walked"),
        lost_ids(*completed()).label("lost"),
    ).subquery("idle")
    return (
        select(*taken.c, *idle.c)
        .select_from(idle.outerjoin(taken, true()))
        .order_by(taken.c.priority.desc(), taken.c.run_after, taken.c.id)
    )


@cache
def claim_suspect() -> Select[Any]:
    """Claim one due suspect of ``:wanted`` and ``:tasks`` for ``:worker``: a job under which workers died twice."""
    wanted = recordset("wanted", "wanted", column("queue", Text), column("slots", Integer), column("handler", Boolean))
    picked = (
        select(_place)
        .join_from(wanted, jobs, jobs.c.queue == wanted.c.queue)
        .where(
            registered(),
            waiting(),
            suspect(),
            jobs.c.run_after <= clock,
            runnable(wanted.c.handler),
        )
        .order_by(jobs.c.run_after, jobs.c.id)
        .limit(ONE)
        .with_for_update(skip_locked=True, of=jobs)
        .cte("picked")
        .prefix_with("MATERIALIZED")
    )
    taken = _take(picked, true())
    return select(*taken.c)
