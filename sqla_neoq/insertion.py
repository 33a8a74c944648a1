"""The INSERT as a plan that any handle can run: one statement, the ids of duplicates, results in the order of the jobs.

What a handle is and how a statement goes through it is :mod:`sqla_neoq.handles`' business.
"""

from __future__ import annotations

import sys
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqla_neoq import statements
from sqla_neoq.handles import Query, join, join_async
from sqla_neoq.newjob import records
from sqla_neoq.payloads import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqla_neoq.handles import AsyncHandle, Handle, Steps
    from sqla_neoq.newjob import NewJob

# A duplicate may finish between the INSERT that saw it and the SELECT that looks for it; then both are tried again.
# A hundred such coincidences in a row mean that something else is wrong.
MOST_ROUNDS: Final = 100


class Enqueued(NamedTuple):
    """What became of one enqueue.

    Attributes:
        id: the job's id.
        created: False when an unfinished job with the same fingerprint was there already; ``id`` is then that job's.
    """

    id: int
    created: bool


def insert(
    handle: Handle | None, jobs: Sequence[NewJob], *, verb: str = "enqueue", using: str | None = None
) -> list[Enqueued]:
    """Insert jobs in one statement within the handle's transaction; the results stand in the order of the jobs.

    Called by the public functions alone: a warning about the handle stands where their caller does.

    Raises:
        TypeError: the handle is none that synchronous code can use.
        ValueError: a payload is over the limit.
    """
    return join(handle, verb=verb, using=using).perform(lambda limit: _insert(jobs, limit), warn=True)


async def insert_async(handle: AsyncHandle, jobs: Sequence[NewJob], *, verb: str = "enqueue") -> list[Enqueued]:
    """The same for a handle of asynchronous code.

    Raises:
        TypeError: the handle is none that asynchronous code can use.
        ValueError: a payload is over the limit.
    """
    return await join_async(handle, verb=verb).perform(lambda limit: _insert(jobs, limit), warn=True)


def unfinished(keys: Iterable[tuple[str, str | None]]) -> Steps[dict[tuple[str, str | None], int]]:
    """Return the ids of the unfinished jobs by their (queue, fingerprint), as far as there are any."""
    records = encode([{"queue": queue, "fingerprint": fingerprint} for queue, fingerprint in keys], limit=sys.maxsize)
    rows = yield Query(statements.find_unfinished(), {"keys": records})
    return {(queue, fingerprint): id_ for id_, queue, fingerprint in rows}


def _check_size(payload: str, limit: int) -> None:
    if (size := len(payload.encode())) > limit:
        raise ValueError(
            f"payload: {size:,} bytes of JSON, the most are {limit:,}; keep large data in a table of its own and pass "
            "its key, or raise the limit with create_engine(..., execution_options={'neoq_max_payload': ...}), or "
            "configure(handle, max_payload=...) without SQLAlchemy"
        )


def _insert(jobs: Sequence[NewJob], limit: int) -> Steps[list[Enqueued]]:
    for job in jobs:
        # No character takes more than four bytes: nearly every payload is seen to fit by its length.
        if len(job.payload) * 4 > limit:
            _check_size(job.payload, limit)
    if jobs and all(job.fingerprint is None for job in jobs):
        rows = yield Query(statements.insert_jobs(keyed=False), {"jobs": records(jobs)})
        return list(map(Enqueued, _in_order(rows, len(jobs)), repeat(True)))
    results: list[Enqueued | None] = [None] * len(jobs)
    # Those with a fingerprint last, and in one order everywhere: two callers with the same keys in opposite orders
    # would wait for each other in a deadlock. The others keep their order, in which they will run.
    pending = sorted(range(len(jobs)), key=lambda place: _place_of(jobs[place], place))
    for _ in range(MOST_ROUNDS):
        if not pending:
            return [result for result in results if result is not None]
        rows = yield Query(statements.insert_jobs(), {"jobs": records([jobs[place] for place in pending])})
        keyed = {(queue, fingerprint): id_ for id_, queue, fingerprint in rows if fingerprint is not None}
        plain = sum(jobs[place].fingerprint is None for place in pending)
        ordered = iter(_in_order([row for row in rows if row[2] is None], plain))
        duplicates = []
        for place in pending:
            job = jobs[place]
            if job.fingerprint is None:
                results[place] = Enqueued(next(ordered), created=True)
            elif (id_ := keyed.pop((job.queue, job.fingerprint), None)) is not None:
                results[place] = Enqueued(id_, created=True)
            else:
                duplicates.append(place)
        pending = yield from _find(jobs, duplicates, results)
    raise RuntimeError(f"a duplicate of {jobs[pending[0]]!r} came and went {MOST_ROUNDS} times during one enqueue")


def _in_order(rows: Sequence[Sequence[Any]], expected: int) -> list[int]:
    """Return the ids of the rows in the order of their jobs: in that they are drawn, but RETURNING does not keep it."""
    if len(rows) != expected:
        raise RuntimeError(
            f"of {expected} jobs the database created {len(rows)}: a trigger or a rule of its own keeps the others back"
        )
    return sorted(row[0] for row in rows)


def _place_of(job: NewJob, place: int) -> tuple[bool, str, str, int]:
    keyed = job.fingerprint is not None
    return (keyed, job.queue if keyed else "", job.fingerprint or "", place)


def _find(jobs: Sequence[NewJob], duplicates: list[int], results: list[Enqueued | None]) -> Steps[list[int]]:
    """Fill in the ids of the jobs already there; return the places whose duplicate has meanwhile finished."""
    if not duplicates:
        return []
    found = yield from unfinished((jobs[place].queue, jobs[place].fingerprint) for place in duplicates)
    finished = []
    for place in duplicates:
        id_ = found.get((jobs[place].queue, jobs[place].fingerprint))
        if id_ is None:
            finished.append(place)
        else:
            results[place] = Enqueued(id_, created=False)
    return finished
