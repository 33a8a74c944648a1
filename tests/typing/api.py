"""What a type checker sees of the public API. Checked by mypy in tests/test_typing.py; never run.

A line that must not pass says so with the error it gets: one that passed would leave its ``type: ignore`` unused, which
is an error itself.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, assert_type

from sqlalchemy.orm import Session, scoped_session

import sqla_neoq
from sqla_neoq import (
    Enqueued,
    Handler,
    Job,
    JobContext,
    NewJob,
    Runner,
    RunnerConfig,
    cancel,
    cancel_async,
    configure,
    constant,
    current_job,
    enqueue,
    enqueue_async,
    enqueue_many,
    enqueue_many_async,
    handler,
    requeue,
    requeue_async,
    requeue_many,
    requeue_many_async,
    sidekiq,
    task,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlmodel import Session as SQLModelSession

SOON = datetime.now(UTC)


@task
def plain(user_id: int, *, greeting: str = "hello") -> str:
    return f"{greeting} {user_id}"


@task(queue="emails", priority=5, max_retries=3, timeout=timedelta(seconds=5), backoff=constant(timedelta(seconds=1)))
def with_options(user_id: int) -> None: ...


@task(timeout=None, backoff=sidekiq())
async def asynchronous(key: str) -> int:
    return len(key)


@handler("greetings", concurrency=8)
def greet(job: JobContext) -> None:
    assert_type(job.id, int)
    assert_type(job.task, str | None)
    assert_type(job.payload, Any)
    assert_type(job.session, Session)
    assert_type(job.run_after, datetime)
    job.id = 5  # type: ignore[misc]


# A task is its function still, with its arguments and its result.
assert_type(plain(5), str)
assert_type(plain(5, greeting="hi"), str)
assert_type(with_options(5), None)
assert_type(greet, Handler)
assert_type(current_job(), JobContext)
plain("5")  # type: ignore[arg-type]
plain()  # type: ignore[call-arg]


async def awaits() -> None:
    assert_type(await asynchronous("key"), int)


def takes_a_function(function: Callable[[int], None]) -> None: ...


takes_a_function(with_options)


def enqueues(
    session: Session,
    scoped: scoped_session[Session],
    connection: Connection,
    sqlmodel_session: SQLModelSession,
    driver_connection: psycopg.Connection,
    engine: Engine,
    asynchronous_session: AsyncSession,
) -> None:
    """Check the functions of synchronous code."""
    # The call is checked against the function's signature.
    assert_type(plain.enqueue(session, 5, greeting="hi"), Enqueued)
    assert_type(plain.job(user_id=5), NewJob)
    plain.enqueue(session, "5")  # type: ignore[arg-type]
    plain.enqueue(session)  # type: ignore[call-arg]
    plain.enqueue(session, 5, "hi")  # type: ignore[call-arg]
    plain.enqueue(session, 5, colour="red")  # type: ignore[call-arg]
    plain.enqueue(5)  # type: ignore[call-arg, arg-type]
    plain.job("5")  # type: ignore[arg-type]
    plain.job(user_id=5, greeting=None)  # type: ignore[arg-type]
    asynchronous.job(5)  # type: ignore[arg-type]

    # So are the options; what comes out of using() is the task still.
    urgent = plain.using(priority=10, run_after=timedelta(hours=1), deadline=SOON, unique=True, queue="urgent")
    assert_type(urgent.enqueue(session, 5), Enqueued)
    plain.using(fingerprint="key", max_retries=None).enqueue(session, user_id=5)
    urgent.enqueue(session, "5")  # type: ignore[arg-type]
    plain.using(colour="red")  # type: ignore[call-arg]
    plain.using(priority="high")  # type: ignore[arg-type]
    plain.using(run_after=60)  # type: ignore[arg-type]
    plain.using(unique=None)  # type: ignore[arg-type]
    plain.using(queue=None)  # type: ignore[arg-type]

    # Whatever holds the transaction will do; what holds none will not.
    for handle in (session, scoped, connection, sqlmodel_session):
        enqueue(handle, "q")
    enqueue(driver_connection, "q")
    enqueue(driver_connection.cursor(), "q")
    plain.enqueue(configure(driver_connection, schema="neoq"), 5)
    enqueue(None, "q", using="default")
    enqueue(target="q", using="default")
    enqueue(None, "q", using=5)  # type: ignore[arg-type]
    configure(driver_connection, schema=5)  # type: ignore[arg-type]
    enqueue(engine, "q")  # type: ignore[arg-type]
    enqueue(asynchronous_session, "q")  # type: ignore[arg-type]
    plain.enqueue(asynchronous_session, 5)  # type: ignore[arg-type]
    cancel(engine, 5)  # type: ignore[arg-type]
    assert_type(cancel(session, 5), bool)
    cancel(session, "5")  # type: ignore[arg-type]
    requeue(engine, 5)  # type: ignore[arg-type]
    assert_type(requeue(session, 5), Enqueued | None)
    requeue(session, "5")  # type: ignore[arg-type]
    assert_type(requeue_many(connection, (n for n in range(5))), list[Enqueued | None])
    requeue_many(session, 5)  # type: ignore[arg-type]

    made = enqueue(session, "q", {"a": [1]}, task="m:f", run_after=SOON, priority=0, deadline=timedelta(1), unique=True)
    assert_type(made.id, int)
    assert_type(made.created, bool)
    id_, _ = made
    assert_type(id_, int)
    enqueue(session, plain, {"user_id": 5}, max_retries=0, fingerprint="key")
    enqueue(session, "q", {"user_id": 5}, task=plain)
    enqueue(session, 5)  # type: ignore[arg-type]
    enqueue(session, greet)  # type: ignore[arg-type]
    enqueue(session, "q", run_after=60)  # type: ignore[arg-type]
    enqueue(session, "q", priority=1.5)  # type: ignore[arg-type]
    enqueue(session, "q", colour="red")  # type: ignore[call-arg]

    assert_type(enqueue_many(session, (plain.job(n) for n in range(5))), list[Enqueued])
    enqueue_many(session, [plain.job(1), with_options.job(2), NewJob.of("q", {})])
    enqueue_many(session, [plain])  # type: ignore[list-item]
    enqueue_many(session, ["q"])  # type: ignore[list-item]
    session.add(Job(queue="q", payload={}))


def connections(job: JobContext) -> tuple[Connection, psycopg.Connection[Any]]:
    """Check what a job's transaction is to Core and to the driver."""
    return job.connection, job.driver_connection


async def session_of_a_coroutine(job: JobContext) -> AsyncSession:
    """Check what it is to a coroutine."""
    return await job.async_session()


async def enqueues_async(
    session: AsyncSession,
    connection: AsyncConnection,
    driver_connection: psycopg.AsyncConnection,
    synchronous: Session,
) -> None:
    """Check the functions of asynchronous code."""
    await enqueue_async(driver_connection, "q")
    await plain.enqueue_async(configure(driver_connection, schema="neoq"), 5)
    await enqueue_async(driver_connection.cursor(), "q")
    enqueue(driver_connection, "q")  # type: ignore[arg-type]
    assert_type(await enqueue_async(session, "q", run_after=SOON), Enqueued)
    assert_type(await plain.enqueue_async(connection, 5), Enqueued)
    assert_type(await enqueue_many_async(session, [plain.job(5)]), list[Enqueued])
    assert_type(await cancel_async(session, 5), bool)
    assert_type(await requeue_async(connection, 5), Enqueued | None)
    assert_type(await requeue_many_async(session, [5]), list[Enqueued | None])
    await cancel_async(synchronous, 5)  # type: ignore[arg-type]
    await requeue_async(synchronous, 5)  # type: ignore[arg-type]
    await session.run_sync(cancel, 5)
    await plain.enqueue_async(session, "5")  # type: ignore[arg-type]
    await enqueue_async(synchronous, "q")  # type: ignore[arg-type]
    await enqueue_many_async(synchronous, [])  # type: ignore[arg-type]
    await enqueue(synchronous, "q")  # type: ignore[misc]


# What cannot be a task, a handler or a setting is seen too.
@task(timeout=30)  # type: ignore[call-overload, untyped-decorator]
def badly_timed() -> None: ...


@task(colour="red")  # type: ignore[call-overload, untyped-decorator]
def badly_coloured() -> None: ...


@handler  # type: ignore[arg-type]
def without_a_queue(job: JobContext) -> None: ...


@handler("q")  # type: ignore[arg-type]
def without_the_job() -> None: ...


RunnerConfig(concurrency=5, retention=None, poll_interval=timedelta(seconds=1))
RunnerConfig(poll_interval=1)  # type: ignore[arg-type]
RunnerConfig(5)  # type: ignore[call-arg]
RunnerConfig(colour="red")  # type: ignore[call-arg]
RunnerConfig().concurrency = 5  # type: ignore[misc]
Runner("postgresql://localhost/app", [plain, greet], queues={"emails": 5, "default": None})
Runner("postgresql://localhost/app", plain, sessionmaker=Session)
Runner("postgresql://localhost/app", sqla_neoq)
Runner(5, [plain])  # type: ignore[arg-type]
Runner("postgresql://localhost/app", [5])  # type: ignore[list-item]
Runner("postgresql://localhost/app", [plain], queues=["emails"])  # type: ignore[arg-type]
