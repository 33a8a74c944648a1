"""The INSERT, through whatever the caller's transaction is held by.

Never commits, never opens a connection of its own, and never flushes the caller's pending objects: statements go to
``session.connection()``, because ``session.execute()`` would autoflush first.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from sqla_neoq import statements
from sqla_neoq.errors import NeoqWarning
from sqla_neoq.models import Job
from sqla_neoq.payloads import MAX_PAYLOAD_BYTES, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    from sqla_neoq.newjob import NewJob

Handle: TypeAlias = "Session | scoped_session[Any] | Connection"
"""What can hold the caller's transaction in synchronous code."""
AsyncHandle: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"
"""What can hold it in asynchronous code."""

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


def insert(handle: Handle, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Insert jobs in one statement within the handle's transaction; the results stand in the order of the jobs.

    Raises:
        TypeError: the handle is none that synchronous code can use.
        ValueError: a payload is over the engine's limit.
    """
    options = options_of(handle)
    limit = options.get("neoq_max_payload", MAX_PAYLOAD_BYTES)
    for job in jobs:
        _check_size(job.payload, limit)
    if not jobs:
        return []
    connection = connection_of(handle)
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        warnings.warn(
            "enqueue() on a connection in AUTOCOMMIT: the job is there at once, and stays there when your work is "
            "rolled back; use a transaction",
            NeoqWarning,
            stacklevel=3,
        )
    return _insert(connection, jobs, execution_options(connection))


async def insert_async(handle: AsyncHandle, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """The same for an AsyncSession or AsyncConnection.

    Raises:
        TypeError: the handle is none that asynchronous code can use.
        ValueError: a payload is over the engine's limit.
    """
    result: list[Enqueued] = await run_async(handle, insert, jobs, synchronous="enqueue()")
    return result


async def run_async(handle: AsyncHandle, verb: Callable[..., Any], *arguments: Any, synchronous: str) -> Any:
    """Call a verb of synchronous code with the handle's synchronous session or connection.

    Args:
        handle: what the caller passed as ``session``.
        verb: takes the synchronous handle, then the arguments.
        arguments: whatever else it takes.
        synchronous: what to call instead when the handle is one of synchronous code.

    Raises:
        TypeError: the handle is none that asynchronous code can use.
    """
    # By their method and not by their class, because importing those classes needs greenlet. An async_scoped_session
    # has none of its own, but hands out its AsyncSession when it is called.
    holder: Any = handle
    if "async_scoped_session" in _kinds(handle):
        holder = holder.registry()
    run_sync: Callable[..., Any] | None = getattr(holder, "run_sync", None)
    if run_sync is None:
        remedy = _remedy(handle, "pass an AsyncSession, or an AsyncConnection from engine.begin()")
        if isinstance(holder, (Session, scoped_session, Connection)):
            remedy = f"; in synchronous code call {synchronous}"
        raise TypeError(
            f"session={handle!r}: expected an AsyncSession or AsyncConnection, got {type(handle).__name__}{remedy}"
        )
    return await run_sync(verb, *arguments)


def execution_options(connection: Connection) -> dict[str, Any]:
    """Return the options by which a statement finds the tables: the engine's ``neoq_schema``, if it has one."""
    schema = connection.get_execution_options().get("neoq_schema")
    return {} if schema is None else {"schema_translate_map": {None: schema}}


def connection_of(handle: Handle) -> Connection:
    """Return the connection of the handle's open transaction, beginning one as the session would."""
    if isinstance(handle, Connection):
        return handle
    # The mapper, for sessions that choose among several engines by class.
    return handle.connection(bind_arguments={"mapper": Job.__mapper__})


def options_of(handle: object, *, asynchronous: str = "await enqueue_async() instead") -> Any:
    """Return the handle's execution options without touching the database.

    Args:
        handle: what the caller passed as ``session``.
        asynchronous: what to do with one for asynchronous code.

    Raises:
        TypeError: the handle is none that synchronous code can use.
    """
    if isinstance(handle, (Session, scoped_session)):
        return handle.get_bind(mapper=Job.__mapper__).get_execution_options()
    if isinstance(handle, Connection):
        return handle.get_execution_options()
    remedy = _remedy(handle, "pass a Session, or a Connection from engine.begin()")
    if hasattr(handle, "run_sync") or "async_scoped_session" in _kinds(handle):
        remedy = f"; {asynchronous}"
    raise TypeError(
        f"session={handle!r}: expected a SQLAlchemy Session or Connection, got {type(handle).__name__}{remedy}"
    )


def _remedy(handle: object, better: str) -> str:
    kinds = _kinds(handle)
    if kinds & {"Engine", "OptionEngine", "AsyncEngine"}:
        return f", which has no transaction to join; {better}"
    if kinds & {"sessionmaker", "async_sessionmaker"}:
        return "; call it, and pass the session it makes"
    return ""


def _kinds(handle: object) -> set[str]:
    """Return the names of the handle's classes."""
    return {kind.__name__ for kind in type(handle).__mro__}


def _check_size(payload: str, limit: int) -> None:
    # No character takes more than four bytes: nearly every payload is seen to fit by its length.
    if len(payload) * 4 > limit and (size := len(payload.encode())) > limit:
        raise ValueError(
            f"payload: {size:,} bytes of JSON, the most are {limit:,}; keep large data in a table of its own and pass "
            "its key, or raise the limit with create_engine(..., execution_options={'neoq_max_payload': ...})"
        )


def _insert(connection: Connection, jobs: Sequence[NewJob], options: dict[str, Any]) -> list[Enqueued]:
    results: list[Enqueued | None] = [None] * len(jobs)
    # Those with a fingerprint last, and in one order everywhere: two callers with the same keys in opposite orders
    # would wait for each other in a deadlock. The others keep their order, in which they will run.
    pending = sorted(range(len(jobs)), key=lambda place: _place_of(jobs[place], place))
    for _ in range(MOST_ROUNDS):
        records = "[" + ",".join([jobs[place].record() for place in pending]) + "]"
        rows = connection.execute(statements.insert_jobs(), {"jobs": records}, execution_options=options)
        keyed: dict[tuple[str, str], int] = {}
        plain: list[int] = []
        for id_, queue, fingerprint in rows:
            if fingerprint is None:
                plain.append(id_)
            else:
                keyed[queue, fingerprint] = id_
        # Ids are drawn in the order of the rows, but RETURNING does not promise to keep it.
        plain.sort()
        ordered = iter(plain)
        duplicates = []
        for place in pending:
            job = jobs[place]
            if job.fingerprint is None:
                results[place] = Enqueued(next(ordered), created=True)
            elif (id_ := keyed.pop((job.queue, job.fingerprint), None)) is not None:
                results[place] = Enqueued(id_, created=True)
            else:
                duplicates.append(place)
        pending = _find(connection, jobs, duplicates, results, options)
        if not pending:
            return [result for result in results if result is not None]
    raise RuntimeError(f"a duplicate of {jobs[pending[0]]!r} came and went {MOST_ROUNDS} times during one enqueue")


def unfinished(
    connection: Connection, keys: Iterable[tuple[str, str | None]], options: dict[str, Any]
) -> dict[tuple[str, str | None], int]:
    """Return the ids of the unfinished jobs by their (queue, fingerprint), as far as there are any."""
    records = encode([{"queue": queue, "fingerprint": fingerprint} for queue, fingerprint in keys], limit=sys.maxsize)
    rows = connection.execute(statements.find_unfinished(), {"keys": records}, execution_options=options)
    return {(queue, fingerprint): id_ for id_, queue, fingerprint in rows}


def _place_of(job: NewJob, place: int) -> tuple[bool, str, str, int]:
    keyed = job.fingerprint is not None
    return (keyed, job.queue if keyed else "", job.fingerprint or "", place)


def _find(
    connection: Connection,
    jobs: Sequence[NewJob],
    duplicates: list[int],
    results: list[Enqueued | None],
    options: dict[str, Any],
) -> list[int]:
    """Fill in the ids of the jobs already there; return the places whose duplicate has meanwhile finished."""
    if not duplicates:
        return []
    found = unfinished(connection, ((jobs[place].queue, jobs[place].fingerprint) for place in duplicates), options)
    finished = []
    for place in duplicates:
        id_ = found.get((jobs[place].queue, jobs[place].fingerprint))
        if id_ is None:
            finished.append(place)
        else:
            results[place] = Enqueued(id_, created=False)
    return finished
