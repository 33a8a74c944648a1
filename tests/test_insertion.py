"""Jobs join whatever holds the caller's transaction: there if it commits, not there if it does not, once if unique."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import flask
import flask_sqlalchemy
import pytest
import sqlmodel
import sqlmodel.ext.asyncio.session
from sqlalchemy import Delete, Engine, Insert, MetaData, String, Update, create_engine, event, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool
from support import eventually
from support.wakeups import ears

from sqla_neoq import (
    Enqueued,
    Job,
    NeoqWarning,
    NewJob,
    cancel,
    enqueue,
    enqueue_async,
    enqueue_many,
    enqueue_many_async,
    insertion,
)
from sqla_neoq.models import Base


class HostBase(DeclarativeBase):
    metadata = MetaData()


class Order(HostBase):
    """A table of the host's; its rows come and go with the jobs of the same transaction."""

    __tablename__ = "host_orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String)


@pytest.fixture(scope="module")
def host_tables(worker_database):
    engine = create_engine(worker_database, poolclass=NullPool)
    HostBase.metadata.create_all(engine)
    yield
    HostBase.metadata.drop_all(engine)


@pytest.fixture(autouse=True)
def clean_host(host_tables, engine):
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE host_orders"))


@dataclass
class Held:
    """A handle, and how its kind ends a transaction."""

    handle: Any
    commit: Callable[[], None]
    rollback: Callable[[], None]
    execute: Callable[..., Any]


def held(handle) -> Held:
    return Held(handle, handle.commit, handle.rollback, handle.execute)


@contextmanager
def a_session(engine: Engine) -> Iterator[Held]:
    with Session(engine) as session:
        yield held(session)


@contextmanager
def a_session_of_a_sessionmaker(engine: Engine) -> Iterator[Held]:
    with sessionmaker(engine, expire_on_commit=False)() as session:
        yield held(session)


@contextmanager
def a_scoped_session(engine: Engine) -> Iterator[Held]:
    session = scoped_session(sessionmaker(engine))
    yield held(session)
    session.remove()


@contextmanager
def a_connection(engine: Engine) -> Iterator[Held]:
    with engine.connect() as connection:
        yield held(connection)


@contextmanager
def a_session_with_binds(engine: Engine) -> Iterator[Held]:
    """The host's tables and ours on two engines of one database."""
    other = create_engine(engine.url, poolclass=NullPool)
    with Session(binds={HostBase: other, Base: engine}) as session:
        ours = {"bind_arguments": {"mapper": Job.__mapper__}}
        yield Held(session, session.commit, session.rollback, lambda statement: session.execute(statement, **ours))


@contextmanager
def a_session_in_a_test_s_transaction(engine: Engine) -> Iterator[Held]:
    """As SQLAlchemy's documentation has a test join a session to a transaction that it will undo."""
    with engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:

            def commit() -> None:
                session.commit()
                connection.commit()

            yield Held(session, commit, session.rollback, session.execute)


@contextmanager
def a_sqlmodel_session(engine: Engine) -> Iterator[Held]:
    with sqlmodel.Session(engine) as session:
        yield Held(session, session.commit, session.rollback, lambda *args: Session.execute(session, *args))


@contextmanager
def a_flask_session(engine: Engine) -> Iterator[Held]:
    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = engine.url
    db = flask_sqlalchemy.SQLAlchemy(app)
    with app.app_context():
        yield held(db.session)
        db.session.remove()
        db.engine.dispose()


KINDS = [
    a_session,
    a_session_of_a_sessionmaker,
    a_scoped_session,
    a_connection,
    a_session_with_binds,
    a_session_in_a_test_s_transaction,
    a_sqlmodel_session,
    a_flask_session,
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def caller(request, engine) -> Iterator[Held]:
    with request.param(engine) as caller:
        yield caller


def stored(engine) -> list[tuple]:
    """Return the committed jobs as others see them."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(select(Job.id, Job.queue, Job.payload).order_by(Job.id))]


def test_a_commit_makes_exactly_the_jobs_and_one_wake_up(caller, engine):
    with ears(engine.url, "q") as listening:
        first = enqueue(caller.handle, "q", {"n": 1})
        more = enqueue_many(caller.handle, [NewJob.of("q", {"n": n}) for n in (2, 3)])
        assert stored(engine) == []
        assert listening.heard() == []
        caller.commit()
        assert listening.heard() == ["q"]
    assert [first, *more] == [Enqueued(n, created=True) for n in (1, 2, 3)]
    assert stored(engine) == [(n, "q", {"n": n}) for n in (1, 2, 3)]


def test_a_rollback_makes_neither_jobs_nor_wake_ups(caller, engine):
    with ears(engine.url, "q") as listening:
        enqueue(caller.handle, "q")
        caller.rollback()
        assert listening.heard() == []
        assert stored(engine) == []
        enqueue(caller.handle, "q")
        caller.commit()
        assert listening.heard() == ["q"]
    assert len(stored(engine)) == 1


def test_a_savepoint_s_rollback_undoes_what_was_enqueued_in_it_and_no_more(caller, engine):
    enqueue(caller.handle, "q", {"n": 1})
    savepoint = caller.handle.begin_nested()
    enqueue(caller.handle, "q", {"n": 2}, unique=True)
    savepoint.rollback()
    with caller.handle.begin_nested():
        assert enqueue(caller.handle, "q", {"n": 2}, unique=True).created
    caller.commit()
    assert [payload["n"] for _, _, payload in stored(engine)] == [1, 2]


def test_a_duplicate_is_named_and_leaves_the_transaction_usable(caller, engine):
    with Session(engine) as other, other.begin():
        there = enqueue(other, "q", {"n": 1}, unique=True)
    assert enqueue(caller.handle, "q", {"n": 1}, unique=True) == Enqueued(there.id, created=False)
    caller.execute(text("INSERT INTO host_orders (id, title) VALUES (1, 'after it')"))
    assert enqueue(caller.handle, "q", {"n": 2}, unique=True).created
    caller.commit()
    assert [payload["n"] for _, _, payload in stored(engine)] == [1, 2]
    with engine.connect() as connection:
        assert connection.scalar(select(Order.title)) == "after it"


def test_job_and_work_are_there_together_or_not_at_all(engine):
    with Session(engine) as session:
        session.add(Order(id=1, title="kept"))
        enqueue(session, "q", {"order": 1})
        session.commit()
        session.add(Order(id=2, title="not kept"))
        session.flush()
        enqueue(session, "q", {"order": 2})
        session.add(Order(id=1, title="clashes"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        assert session.scalars(select(Order.title)).all() == ["kept"]
    assert [payload for _, _, payload in stored(engine)] == [{"order": 1}]


def test_a_session_that_begins_by_itself_is_begun(engine):
    with Session(engine) as session:
        enqueue(session, "q")
        assert session.in_transaction()
    assert stored(engine) == []
    with Session(engine) as session, session.begin():
        enqueue(session, "q")
    assert len(stored(engine)) == 1


def test_only_the_caller_s_own_connection_is_used(engine):
    opened = []
    other = create_engine(engine.url, poolclass=NullPool)
    for each in (engine, other):
        event.listen(each, "checkout", lambda *_args, each=each: opened.append(each))
    with Session(binds={HostBase: other, Base: engine}) as session:
        enqueue(session, "q", unique=True)
        enqueue(session, "q", unique=True)
        enqueue_many(session, [NewJob.of("q", {})])
        session.commit()
    assert opened == [engine]


def test_a_session_that_reads_from_replicas_enqueues_where_it_writes(engine):
    replica = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere")

    class RoutingSession(Session):
        """As SQLAlchemy's documentation has it."""

        def get_bind(self, mapper=None, *, clause=None, **rest):
            return engine if self._flushing or isinstance(clause, Insert | Update | Delete) else replica

    with RoutingSession() as session:
        session.add(Order(id=1, title="written"))
        session.flush()
        enqueue(session, "q", unique=True)
        assert not enqueue(session, "q", unique=True).created
        session.commit()
    assert len(stored(engine)) == 1


@pytest.mark.parametrize("autoflush", [True, False])
def test_pending_objects_of_the_caller_s_are_not_flushed(engine, autoflush):
    with Session(engine, autoflush=autoflush) as session:
        session.add(Order(id=1, title="whole"))
        session.commit()
        changed = session.get(Order, 1)
        half_built = Order(id=2)  # its title may not be null
        session.add(half_built)
        changed.title = None
        for _ in range(2):
            enqueue(session, "q", unique=True)
        enqueue_many(session, [NewJob.of("q", {})])
        assert list(session.new) == [half_built]
        assert list(session.dirty) == [changed]
        half_built.title, changed.title = "whole by now", "again"
        session.commit()
    assert len(stored(engine)) == 2


def test_the_same_connection_can_enqueue_for_ever(engine):
    # psycopg prepares a statement at its sixth use, PostgreSQL takes the generic plan at that one's sixth.
    with Session(engine) as session:
        ids = [enqueue(session, "q", unique=True).id for _ in range(30)]
        session.commit()
    assert ids == [1] * 30


def test_any_number_of_enqueues_and_a_commit_are_one_wake_up(engine):
    with ears(engine.url, "q") as listening, Session(engine) as session:
        for n in range(50):
            enqueue(session, "q", {"n": n})
        session.commit()
        assert listening.heard() == ["q"]


def test_results_stand_in_the_order_of_ten_thousand_jobs(engine):
    jobs = [
        NewJob.of("q", {"n": n}, fingerprint=f"key {n % 1_000}" if n % 3 == 0 else None, priority=n % 7)
        for n in range(10_000)
    ]
    with Session(engine) as session, session.begin():
        results = enqueue_many(session, jobs)
    assert len(results) == 10_000
    rows = {id_: payload["n"] for id_, _, payload in stored(engine)}
    first_with = {}
    for n, (result, job) in enumerate(zip(results, jobs, strict=True)):
        first = n if job.fingerprint is None else first_with.setdefault(job.fingerprint, n)
        assert result.created == (first == n)
        assert rows[result.id] == first
    assert len(rows) == sum(result.created for result in results)


def test_ten_thousand_duplicates_are_found(engine):
    jobs = [NewJob.of("a queue with rather a long name", {"n": n}, unique=True) for n in range(10_000)]
    with Session(engine) as session, session.begin():
        made = enqueue_many(session, jobs)
    with Session(engine) as session, session.begin():
        found = enqueue_many(session, reversed(jobs))
    assert found == [Enqueued(result.id, created=False) for result in reversed(made)]


def test_jobs_without_a_key_get_rising_ids_in_their_order(engine):
    with Session(engine) as session, session.begin():
        ids = [result.id for result in enqueue_many(session, (NewJob.of(f"q{n % 5}", {"n": n}) for n in range(100)))]
    assert ids == sorted(ids)
    assert [(queue, payload["n"]) for _, queue, payload in stored(engine)] == [(f"q{n % 5}", n) for n in range(100)]


def test_a_payload_may_be_null(engine):
    with Session(engine) as session, session.begin():
        enqueue_many(session, [NewJob.of("q", None), NewJob.of("q", None, unique=True)])
    assert [payload for _, _, payload in stored(engine)] == [None, None]


def test_keys_are_one_per_queue(engine):
    jobs = [NewJob.of(queue, {}, fingerprint=key) for queue in ("a", "b", "a") for key in ("x", "y")]
    with Session(engine) as session, session.begin():
        results = enqueue_many(session, jobs)
    assert [result.created for result in results] == [True] * 4 + [False] * 2
    assert results[4].id == results[0].id
    assert results[5].id == results[1].id


def test_no_jobs_are_no_statement():
    with Session(create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere")) as session:
        assert enqueue_many(session, []) == []


UNFINISHED = ["new", "running", "failed"]


@pytest.mark.parametrize("status", [*UNFINISHED, "processed", "cancelled"])
def test_only_an_unfinished_job_is_in_the_way_of_its_like(engine, status):
    with Session(engine) as session, session.begin():
        enqueue(session, "q", fingerprint="key")
        session.execute(
            text(
                "UPDATE neoq_jobs SET status = :status, claim_token = CASE WHEN :status = 'running' THEN 1 END,"
                " finished_at = CASE WHEN :status IN ('processed', 'cancelled') THEN now() END"
            ),
            {"status": status},
        )
        second = enqueue(session, "q", fingerprint="key")
    assert second.created == (status not in UNFINISHED)
    assert second.id == 1 or second.created


def in_thread(work):
    """Run ``work`` in a thread; return the thread and where its result will be."""
    results = []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def waits_for_a_lock(engine, *, count=1):
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with engine.connect() as connection:
        return connection.scalar(query) == count


@pytest.mark.parametrize("ended", ["commit", "rollback"])
def test_two_who_enqueue_the_same_at_once_make_one_job(engine, ended):
    def second():
        with Session(engine) as session, session.begin():
            return enqueue(session, "q", unique=True)

    with Session(engine) as session:
        first = enqueue(session, "q", unique=True)
        thread, results = in_thread(second)
        eventually(lambda: waits_for_a_lock(engine))
        getattr(session, ended)()
        thread.join(20)
    assert first.created
    if ended == "commit":
        assert results == [Enqueued(first.id, created=False)]
    else:
        assert results[0].created
    assert [id_ for id_, _, _ in stored(engine)] == [results[0].id]


def test_many_who_enqueue_the_same_at_once_make_one_job(engine):
    start = threading.Barrier(4)

    def contend():
        with Session(engine) as session, session.begin():
            session.connection()
            start.wait(20)
            return enqueue_many(session, [NewJob.of("q", {}, fingerprint=f"{n}") for n in range(50)])

    contenders = [in_thread(contend) for _ in range(4)]
    for thread, _ in contenders:
        thread.join(30)
    outcomes = [results[0] for _, results in contenders]
    ids = [id_ for id_, _, _ in stored(engine)]
    assert len(ids) == 50
    for outcome in outcomes:
        assert [result.id for result in outcome] == [result.id for result in outcomes[0]]
    assert sum(result.created for outcome in outcomes for result in outcome) == 50


def finish(engine):
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE neoq_jobs SET status = 'processed', finished_at = now() WHERE finished_at IS NULL")
        )


def is_insert(statement):
    return statement.startswith("INSERT INTO") and "neoq_jobs" in statement


def test_a_duplicate_that_finishes_before_it_is_looked_up_is_no_duplicate(engine):
    other = create_engine(engine.url, poolclass=NullPool)
    with Session(other) as session, session.begin():
        there = enqueue(session, "q", fingerprint="key")
    finished = []

    @event.listens_for(engine, "after_cursor_execute")
    def finish_it(connection, cursor, statement, *rest):
        if is_insert(statement) and not finished:
            finish(other)
            finished.append(True)

    with Session(engine) as session, session.begin():
        results = enqueue_many(
            session, [NewJob.of("q", {"n": n}, fingerprint=key) for n, key in enumerate(["new", "key", "key"])]
        )
    assert finished
    assert [result.created for result in results] == [True, True, False]
    assert results[1].id == results[2].id != there.id
    assert [payload for _, _, payload in stored(engine)] == [{}, {"n": 0}, {"n": 1}]


def test_a_duplicate_that_comes_and_goes_for_ever_does_not_hang_the_caller(engine, monkeypatch):
    monkeypatch.setattr(insertion, "MOST_ROUNDS", 5)
    other = create_engine(engine.url, poolclass=NullPool)

    @event.listens_for(engine, "before_cursor_execute")
    def come(connection, cursor, statement, *rest):
        if is_insert(statement):
            with Session(other) as session, session.begin():
                enqueue(session, "q", fingerprint="key")

    @event.listens_for(engine, "after_cursor_execute")
    def go(connection, cursor, statement, *rest):
        if is_insert(statement):
            finish(other)

    with Session(engine) as session, pytest.raises(RuntimeError, match="came and went 5 times during one enqueue"):
        enqueue(session, "q", fingerprint="key")


AUTOCOMMIT = pytest.mark.parametrize("make", [Session, Engine.connect], ids=["Session", "Connection"])


@AUTOCOMMIT
def test_autocommit_is_warned_of_where_the_caller_stands(engine, make):
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with make(autocommit) as handle:
        with pytest.warns(
            NeoqWarning, match="enqueue.. on a connection in AUTOCOMMIT: the job is there at once"
        ) as said:
            enqueue(handle, "q", {"n": 1})
        with pytest.warns(NeoqWarning, match="AUTOCOMMIT") as said_of_many:
            enqueue_many(handle, [NewJob.of("q", {"n": 2})])
        handle.rollback()
    assert {warning.filename for warning in (*said, *said_of_many)} == {__file__}
    assert len(stored(engine)) == 2


def test_a_transaction_on_an_engine_whose_default_is_autocommit_is_not_warned_of(engine):
    autocommit = create_engine(engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with autocommit.connect().execution_options(isolation_level="READ COMMITTED") as connection, connection.begin():
        enqueue(connection, "q")
    assert len(stored(engine)) == 1


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation_finds_the_duplicates_it_can_see(engine, level):
    with Session(engine) as session, session.begin():
        there = enqueue(session, "q", unique=True)
    with Session(engine.execution_options(isolation_level=level)) as session, session.begin():
        assert enqueue(session, "q", unique=True) == Enqueued(there.id, created=False)
        assert enqueue(session, "q", {"other": True}, unique=True).created
        assert not enqueue(session, "q", {"other": True}, unique=True).created


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("options", [{"stream_results": True}, {"yield_per": 10}])
def test_a_connection_that_reads_with_server_side_cursors_enqueues(engine, driver, options):
    engine = create_engine(engine.url.set(drivername=f"postgresql+{driver}"), poolclass=NullPool)
    with engine.connect().execution_options(**options) as connection, connection.begin():
        first = enqueue(connection, "q", unique=True)
        assert enqueue(connection, "q", unique=True) == (first.id, False)
        assert cancel(connection, first.id)
    assert len(stored(engine)) == 1


@pytest.mark.parametrize(("limit", "length"), [(None, 1024 * 1024), (100, 100)])
def test_a_payload_over_the_limit_is_refused_with_its_size_and_under_it_is_not(engine, limit, length):
    if limit:
        engine = engine.execution_options(neoq_max_payload=limit)
    with Session(engine) as session:
        enqueue(session, "q", "x" * (length - 2))
        with pytest.raises(
            ValueError, match=rf"payload: {length + 1:,} bytes of JSON, the most are {length:,}; .*neoq_max_payload"
        ):
            enqueue(session, "q", "x" * (length - 1))
        with pytest.raises(ValueError, match=f"payload: {length + 1:,} bytes"):
            enqueue_many(session, [NewJob.of("q", {}), NewJob.of("q", "ü" * (length // 2 - 1) + "x")])
        # Nothing was sent, so the transaction is as good as before.
        enqueue(session, "q")
        session.commit()
    assert len(stored(engine)) == 2


def test_the_limit_can_be_raised(engine):
    with Session(engine.execution_options(neoq_max_payload=2**22)) as session, session.begin():
        enqueue(session, "q", ["x" * 2**21])
    assert stored(engine)[0][2] == ["x" * 2**21]


def test_the_tables_may_be_in_a_schema_that_no_search_path_names(schema_engine):
    with Session(schema_engine) as session, session.begin():
        assert enqueue(session, "q", {"n": 1}, unique=True) == Enqueued(1, created=True)
        assert enqueue(session, "q", {"n": 1}, unique=True) == Enqueued(1, created=False)
    with schema_engine.begin() as connection:
        assert enqueue(connection, "q", {"n": 2}).created
        assert connection.scalar(text('SELECT count(*) FROM "The Queue\'s".neoq_jobs')) == 2


# Asynchronous handles ------------------------------------------------------------------------------------------------


@dataclass
class AsyncHeld:
    handle: Any
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    begin_nested: Callable[[], Any]


@asynccontextmanager
async def an_async_session(engine):
    async with AsyncSession(engine) as session:
        yield AsyncHeld(session, session.commit, session.rollback, session.begin_nested)


@asynccontextmanager
async def an_async_connection(engine):
    async with engine.connect() as connection:
        yield AsyncHeld(connection, connection.commit, connection.rollback, connection.begin_nested)


class OurScopedSession(async_scoped_session):
    """As a host may have it."""


@asynccontextmanager
async def an_async_scoped_session(engine):
    session = OurScopedSession(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    yield AsyncHeld(session, session.commit, session.rollback, session.begin_nested)
    await session.remove()


@asynccontextmanager
async def an_async_sqlmodel_session(engine):
    async with sqlmodel.ext.asyncio.session.AsyncSession(engine) as session:
        yield AsyncHeld(session, session.commit, session.rollback, session.begin_nested)


def run_async(database, driver, work, **options):
    """Run ``work(async_engine)`` on an event loop of its own."""

    async def run():
        engine = create_async_engine(database.url.set(drivername=f"postgresql+{driver}"), poolclass=NullPool, **options)
        try:
            return await work(engine)
        finally:
            await engine.dispose()

    return asyncio.run(run())


DRIVERS = pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])


@DRIVERS
@pytest.mark.parametrize(
    "kind",
    [an_async_session, an_async_connection, an_async_scoped_session, an_async_sqlmodel_session],
    ids=lambda kind: kind.__name__,
)
def test_asynchronous_handles_make_the_same_promises(engine, driver, kind):
    async def work(async_engine):
        with ears(engine.url, "q") as listening:
            async with kind(async_engine) as caller:
                # Rolled back, to a savepoint and altogether.
                await enqueue_async(caller.handle, "q", {"n": 0})
                await caller.rollback()
                await enqueue_async(caller.handle, "q", {"n": 1}, unique=True)
                savepoint = await caller.begin_nested()
                await enqueue_async(caller.handle, "q", {"n": -1})
                await savepoint.rollback()
                # Duplicates, and on.
                assert await enqueue_async(caller.handle, "q", {"n": 1}, unique=True) == Enqueued(2, created=False)
                jobs = [NewJob.of("q", {"n": n}, unique=True) for n in (1, 2, 2, 3)]
                results = await enqueue_many_async(caller.handle, jobs)
                assert [result.created for result in results] == [False, True, False, True]
                assert stored(engine) == []
                assert listening.heard() == []
                await caller.commit()
            assert listening.heard() == ["q"]

    run_async(engine, driver, work)
    # By id; those with a key are inserted in the order of their keys.
    assert sorted(payload["n"] for _, _, payload in stored(engine)) == [1, 2, 3]


@DRIVERS
def test_every_option_travels_through_asynchronous_drivers(engine, driver):
    async def work(async_engine):
        async with AsyncSession(async_engine) as session, session.begin():
            options = {"run_after": timedelta(seconds=5), "deadline": timedelta(seconds=60), "priority": -3}
            await enqueue_async(
                session, "ü 🚀 ' \" % :x \\", {"ü": [1.5, None]}, **options, max_retries=0, fingerprint="'"
            )

    run_async(engine, driver, work)
    with Session(engine) as session:
        job = session.scalars(select(Job)).one()
        assert (job.queue, job.payload) == ("ü 🚀 ' \" % :x \\", {"ü": [1.5, None]})
        assert (job.priority, job.max_retries, job.fingerprint) == (-3, 0, "'")
        assert job.deadline - job.run_after == timedelta(seconds=55)


@DRIVERS
def test_autocommit_is_warned_of_in_asynchronous_code_too(engine, driver):
    async def work(async_engine):
        async with AsyncSession(async_engine) as session:
            with pytest.warns(NeoqWarning, match="AUTOCOMMIT"):
                await enqueue_async(session, "q")

    run_async(engine, driver, work, isolation_level="AUTOCOMMIT")


def test_synchronous_functions_can_be_run_by_an_async_session(engine):
    async def work(async_engine):
        async with AsyncSession(async_engine) as session, session.begin():
            return await session.run_sync(enqueue, "q", {"n": 1})

    assert run_async(engine, "psycopg", work) == Enqueued(1, created=True)


def test_two_asynchronous_enqueuers_of_one_key_make_one_job(engine):
    async def work(async_engine):
        async with AsyncSession(async_engine) as first, AsyncSession(async_engine) as second:
            mine = await enqueue_async(first, "q", unique=True)
            theirs = asyncio.ensure_future(enqueue_async(second, "q", unique=True))
            while not waits_for_a_lock(engine):  # noqa: ASYNC110 - the wait is PostgreSQL's, it has no event here
                await asyncio.sleep(0.002)
            await first.commit()
            result = await asyncio.wait_for(theirs, 20)
            await second.commit()
            return mine, result

    mine, theirs = run_async(engine, "asyncpg", work)
    assert theirs == Enqueued(mine.id, created=False)


# Handles that are none -----------------------------------------------------------------------------------------------


@pytest.fixture
def nowhere():
    """An engine that would fail at the first attempt to connect."""
    return create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nowhere", poolclass=NullPool)


def async_of(engine):
    return create_async_engine(engine.url, poolclass=NullPool)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda engine: engine.execution_options(a=1),
            "got OptionEngine, which has no transaction to join; pass a Sess",
        ),
        (
            lambda engine: engine,
            "session=Engine.*got Engine, which has no transaction to join; pass a Session, or a Connection",
        ),
        (
            sessionmaker,
            "expected a Session, a connection or another handle that holds a transaction, got sessionmaker; call it",
        ),
        (
            lambda engine: Session,
            "expected a Session, a connection or another handle that holds a transaction, got type",
        ),
        (
            lambda engine: engine.pool,
            "expected a Session, a connection or another handle that holds a transaction, got NullPool",
        ),
        (
            lambda engine: None,
            "session=None: expected a Session, a connection or another handle that holds a transaction, got NoneType",
        ),
        (
            lambda engine: "q",
            "session='q': expected a Session, a connection or another handle that holds a transaction, got str",
        ),
        (
            lambda engine: AsyncSession(async_of(engine)),
            "got AsyncSession; await .* instead",
        ),
        (
            lambda engine: async_of(engine).connect(),
            "got AsyncConnection; await .* instead",
        ),
        (
            lambda engine: async_scoped_session(async_sessionmaker(async_of(engine)), asyncio.current_task),
            "got async_scoped_session; await .* instead",
        ),
        (async_of, "got AsyncEngine, which has no transaction to join; pass a Session"),
        (
            lambda engine: Session(create_engine("sqlite://")),
            "expected one to PostgreSQL, where the jobs are, got Session to sqlite",
        ),
        (lambda engine: create_engine("sqlite://").connect(), "got Connection to sqlite"),
    ],
    ids=[
        "OptionEngine",
        "Engine",
        "sessionmaker",
        "class",
        "pool",
        "None",
        "str",
        "AsyncSession",
        "AsyncConnection",
        "async_scoped_session",
        "AsyncEngine",
        "Session to SQLite",
        "Connection to SQLite",
    ],
)
def test_what_synchronous_code_cannot_use_is_refused_with_the_remedy(nowhere, make, sentence):
    handle = make(nowhere)
    for call in (lambda: enqueue(handle, "q"), lambda: enqueue_many(handle, []), lambda: cancel(handle, 1)):
        with pytest.raises(TypeError, match=sentence):
            call()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            Session,
            "expected an AsyncSession, an async connection or .*, got Session; in synchronous code call enqueue",
        ),
        (lambda engine: scoped_session(sessionmaker(engine)), "got scoped_session; in synchronous code call enqueue"),
        (lambda engine: engine, "got Engine, which has no transaction to join; pass an AsyncSession, or an AsyncConn"),
        (async_of, "got AsyncEngine, which has no transaction to join; pass an AsyncSession"),
        (lambda engine: async_sessionmaker(async_of(engine)), "got async_sessionmaker; call it"),
        (
            lambda engine: None,
            "session=None: expected an AsyncSession, an async connection or .*, got NoneType",
        ),
    ],
    ids=["Session", "scoped_session", "Engine", "AsyncEngine", "async_sessionmaker", "None"],
)
def test_what_asynchronous_code_cannot_use_is_refused_with_the_remedy(nowhere, make, sentence):
    handle = make(nowhere)
    for call in (lambda: enqueue_async(handle, "q"), lambda: enqueue_many_async(handle, [])):
        with pytest.raises(TypeError, match=sentence):
            asyncio.run(call())


def test_a_payload_is_measured_before_a_connection_is_made(nowhere):
    with Session(nowhere) as session, pytest.raises(ValueError, match="payload: 1,048,579 bytes"):
        enqueue(session, "q", "x" * (1024 * 1024 + 1))
