"""The consumer's verbs on a connection: claim jobs, and write what became of them. Transactions are the caller's."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from sqla_neoq import statements
from sqla_neoq.context import ClaimedJob
from sqla_neoq.dialects import fetch
from sqla_neoq.floor import EVERYWHERE, gaps
from sqla_neoq.outcomes import Verb
from sqla_neoq.payloads import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy import Connection, Executable, Select

    from sqla_neoq.floor import View
    from sqla_neoq.outcomes import Outcome

_COLUMNS = len(ClaimedJob._fields)
_fence_of = itemgetter(0, 1)  # id and token


class Want(NamedTuple):
    """How many jobs of one queue a runner would take."""

    queue: str
    slots: int
    handler: bool


class Claimed(NamedTuple):
    """What a claim brought.

    Attributes:
        jobs: the claimed jobs, best first.
        next_due: without jobs, the seconds until the next one of these queues is due; None: there is none.
        at: when the server began, in seconds since 1970.
        walked: the seconds that it took to find the jobs.
        lost: the ids of the completed jobs that the fence refused.
    """

    jobs: list[ClaimedJob]
    next_due: float | None
    at: float
    walked: float
    lost: frozenset[int]


class Claimant(NamedTuple):
    """Who claims: the runner's id and the names of the tasks it knows, as JSON, with the options to find the tables."""

    worker: int
    tasks: str
    options: dict[str, Any]


def claim(
    connection: Connection,
    claimant: Claimant,
    wants: Sequence[Want],
    total: int,
    *,
    view: View = EVERYWHERE,
    completed: Sequence[Outcome] = (),
    meanwhile: Callable[[], object] | None = None,
) -> Claimed:
    """Claim up to ``total`` due jobs, and in the same statement complete others, for which the task did its work.

    Args:
        connection: in autocommit, or in a transaction.
        claimant: who claims.
        wants: how many jobs of each queue.
        total: how many in all.
        view: where to look.
        completed: the outcomes of the others.
        meanwhile: called while the server works on it.
    """
    parameters = {**_asking(claimant, wants), "total": total, **_fences(completed)}
    if view is not EVERYWHERE:
        parameters |= _within(view, wants)
    rows = fetch(connection, statements.claim_due(), parameters, claimant.options, meanwhile=meanwhile)
    *_, next_due, now, walked, lost = rows[0]
    jobs = [] if rows[0][0] is None else [ClaimedJob._make(row[:_COLUMNS]) for row in rows]
    return Claimed(jobs, next_due, jobs[0].ran_at if jobs else now, walked, frozenset(lost or ()))


def claim_suspect(connection: Connection, claimant: Claimant, wants: Iterable[Want]) -> list[ClaimedJob]:
    """Claim one job whose worker died under it before."""
    rows = fetch(connection, statements.claim_suspect(), _asking(claimant, wants), claimant.options)
    return [ClaimedJob._make(row) for row in rows]


def _asking(claimant: Claimant, wants: Iterable[Want]) -> dict[str, Any]:
    return {
        "worker": claimant.worker,
        "tasks": claimant.tasks,
        "wanted": encode([want._asdict() for want in wants]),
    }


def _within(view: View, wants: Iterable[Want]) -> dict[str, Any]:
    """Return the parameters that say where a claim looks."""
    wanted: list[dict[str, Any]] = []
    known: list[dict[str, Any]] = []
    for want in wants:
        lanes = {priority: at for (queue, priority), at in view.lanes.items() if queue == want.queue}
        since = view.queues.get(want.queue)
        of_queue = want._asdict()
        wanted += [of_queue | {"above": above, "below": below, "since": since} for above, below in gaps(lanes)]
        known += [of_queue | {"priority": priority} | at._asdict() for priority, at in lanes.items()]
    return {"wanted": encode(wanted), "known": encode(known)}


def settle(
    connection: Connection, outcomes: Sequence[Outcome], options: dict[str, Any], *, delete: bool = False
) -> set[int]:
    """Write outcomes, one statement for each verb; return the ids of those that the fence refused.

    Args:
        connection: in a transaction, when they shall be written together.
        outcomes: in any order. Those that their run wrote itself, or lost, are passed over.
        options: the execution options to find the tables by.
        delete: delete completed jobs instead of keeping them.
    """
    lost: set[int] = set()
    ordered = sorted((o for o in outcomes if not o.written and o.verb is not Verb.LOST), key=_verb_name)
    for verb, group in groupby(ordered, key=lambda outcome: outcome.verb):
        rows = connection.execute(
            _statement(verb, delete=delete), _parameters(verb, list(group)), execution_options=options
        )
        lost.update(row[0] for row in rows)
    return lost


def completion(job: ClaimedJob, *, delete: bool = False) -> tuple[Select[Any], dict[str, Any]]:
    """Return the statement that completes one job, and its parameters; it returns a row if the job was lost."""
    statement = statements.complete_and_delete() if delete else statements.complete()
    return statement, {"ids": f"{{{job.id}}}", "tokens": f"{{{job.token}}}"}


def _verb_name(outcome: Outcome) -> str:
    return outcome.verb.value


def _statement(verb: Verb, *, delete: bool) -> Executable:
    match verb:
        case Verb.COMPLETE:
            return statements.complete_and_delete() if delete else statements.complete()
        case Verb.FAIL:
            return statements.fail()
        case Verb.BURY:
            return statements.bury()
        case Verb.CANCEL:
            return statements.finish_cancelled()
        case _:
            return statements.put_back()


def _fences(outcomes: Iterable[Outcome]) -> dict[str, str]:
    # In the order of the ids; and of two runs of one job, the later claim's last, which is the one that may own it.
    jobs = sorted([outcome.job for outcome in outcomes], key=_fence_of)
    literal = statements.array_literal
    return {"ids": literal([job.id for job in jobs]), "tokens": literal([job.token for job in jobs])}


def _parameters(verb: Verb, outcomes: list[Outcome]) -> dict[str, str]:
    if verb in {Verb.COMPLETE, Verb.CANCEL}:
        return _fences(outcomes)
    records = [
        {
            "id": o.job.id,
            "token": o.job.token,
            "delay": o.delay,
            "reason": o.reason,
            "kind": o.kind,
            "message": o.message,
            "traceback": o.traceback,
        }
        for o in outcomes
    ]
    return {"outcomes": encode(records, limit=2**30)}
