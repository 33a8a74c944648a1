"""The classes say what the migrated tables are; and the tables refuse what no job can be."""

import re

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, create_engine, null, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Session
from support.databases import truncate

from sqla_neoq import DeadJob, Failure, Job, Worker, migrations, models
from sqla_neoq.migrations import step_0001
from sqla_neoq.models import Base

TABLES = {"neoq_jobs", "neoq_dead_jobs", "neoq_workers", "neoq_failures", "neoq_meta"}
CONSTRAINTS = """
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = CAST(:schema AS regnamespace) AND contype <> 'n'
"""
INDEXES = """
SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = :schema
"""


@pytest.fixture(scope="module")
def one_engine(worker_database):
    truncate(worker_database)
    engine = create_engine(worker_database)
    yield engine
    engine.dispose()


@pytest.fixture
def session(one_engine):
    """A session on empty tables; what it does is undone, so it must not commit."""
    with Session(one_engine) as session:
        yield session


def differences(engine):
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "compare_type": True,
                "compare_server_default": True,
                "include_name": lambda name, type_, _parents: type_ != "table" or name.startswith("neoq_"),
            },
        )
        return compare_metadata(context, Base.metadata)


@pytest.fixture
def own_engine(migrated_database):
    engine = create_engine(migrated_database())
    yield engine
    engine.dispose()


def test_the_models_equal_the_migrated_tables(one_engine):
    assert differences(one_engine) == []


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("ALTER TABLE neoq_jobs ALTER priority SET DEFAULT 1", "modify_default"),
        ("ALTER TABLE neoq_jobs ALTER retries TYPE bigint", "modify_type"),
        ("ALTER TABLE neoq_jobs ALTER task SET NOT NULL", "modify_nullable"),
        ("DROP INDEX neoq_jobs_suspect_idx", "add_index"),
    ],
)
def test_a_difference_between_them_would_be_seen(own_engine, change, seen):
    with own_engine.begin() as connection:
        connection.execute(text(change))
    assert seen in str(differences(own_engine))


@pytest.fixture(scope="module")
def two_schemas(databases):
    """A database with the migrated tables in one schema, and those that the models would make in another."""
    url = databases.create()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA migrated"))
        connection.execute(text("CREATE SCHEMA modelled"))
        migrations.upgrade(connection, schema="migrated")
        Base.metadata.create_all(connection.execution_options(schema_translate_map={None: "modelled"}))
    with engine.connect() as connection:
        yield connection
    engine.dispose()
    databases.drop(url)


def definitions(connection, query, schema):
    rows = connection.execute(text(query), {"schema": schema})
    # Storage parameters are the migration's business; the models say nothing of them.
    return {name: re.sub(r" WITH \(.*?\)", "", definition).replace(f"{schema}.", "") for name, definition in rows}


@pytest.mark.parametrize("query", [CONSTRAINTS, INDEXES], ids=["constraints", "indexes"])
def test_every_constraint_and_index_reads_the_same_to_the_last_word(two_schemas, query):
    migrated = definitions(two_schemas, query, "migrated")
    assert migrated == definitions(two_schemas, query, "modelled")
    assert len(migrated) >= 10


def test_every_constraint_and_index_has_the_name_that_the_models_give_it(two_schemas):
    named = {item.name for table in Base.metadata.tables.values() for item in (*table.constraints, *table.indexes)}
    assert None not in named
    assert all(name.startswith("neoq_") for name in named)
    there = definitions(two_schemas, CONSTRAINTS, "migrated") | definitions(two_schemas, INDEXES, "migrated")
    assert there.keys() == named


def test_the_predicates_of_the_partial_indexes_are_those_that_statements_repeat(two_schemas):
    steps = "\n".join(step_0001.up(""))
    assert f"(queue, priority DESC, run_after, id) WHERE {models.WAITING_SQL}" in steps
    assert f"(queue, fingerprint) WHERE {models.UNFINISHED_SQL}" in steps
    query = "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indexrelid = CAST(:index AS regclass)"
    for index, predicate in (
        ("neoq_jobs_claim_idx", "(status = ANY (ARRAY['new'::text, 'failed'::text]))"),
        (
            "neoq_jobs_fingerprint_key",
            "((fingerprint IS NOT NULL) AND (status = ANY (ARRAY['new'::text, 'running'::text, 'failed'::text])))",
        ),
    ):
        assert two_schemas.scalar(text(query), {"index": f"migrated.{index}"}) == predicate


def test_no_foreign_key_and_no_native_enum_ties_history_to_the_work(two_schemas):
    assert two_schemas.scalar(text("SELECT count(*) FROM pg_constraint WHERE contype = 'f'")) == 0
    assert two_schemas.scalar(text("SELECT count(*) FROM pg_type WHERE typtype = 'e'")) == 0


def test_the_tables_are_the_five_and_keep_out_of_the_host_s_metadata():
    class HostBase(DeclarativeBase):
        metadata = MetaData()

    assert Base.metadata.tables.keys() == TABLES
    assert not HostBase.metadata.tables
    assert all(table.schema is None for table in Base.metadata.tables.values())


def test_a_plain_insert_of_queue_and_payload_is_a_job_that_is_due_now(session):
    session.execute(text("""INSERT INTO neoq_jobs (queue, payload) VALUES ('greetings', '{"message": "hello"}')"""))
    job = session.scalars(select(Job)).one()
    now = session.scalar(text("SELECT now()"))
    assert job.payload == {"message": "hello"}
    assert job.run_after == job.created_at == now
    assert (job.status, job.priority, job.retries, job.crashes) == ("new", 0, 0, 0)
    columns = ("task", "fingerprint", "deadline", "max_retries", "ran_at", "finished_at", "worker_id", "claim_token")
    assert {getattr(job, name) for name in columns} == {None}


def test_a_job_needs_no_more_than_a_queue(session):
    session.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('tick')"))
    assert session.scalars(select(Job)).one().payload == {}


def test_a_job_added_to_a_session_is_a_job(session):
    job = Job(queue="greetings", payload={"message": "hello"}, priority=5)
    session.add(job)
    session.flush()
    session.expire(job)
    assert (job.status, job.priority, job.payload) == ("new", 5, {"message": "hello"})
    assert job.run_after.tzinfo is not None


def test_many_jobs_are_added_as_one(session):
    session.add_all([Job(queue="q", payload={"n": n}) for n in range(300)])
    session.flush()
    assert sorted(job.payload["n"] for job in session.scalars(select(Job))) == list(range(300))


NOW = text("now()")
JOB = {"queue": "q"}
DEAD = {"id": 1, "queue": "q", "priority": 0, "payload": {}, "run_after": NOW, "retries": 0, "crashes": 0}
DEAD |= {"created_at": NOW, "reason": "exhausted"}
FAILURE = {"job_id": 1, "attempt": 1, "kind": "error", "message": "no"}
RUNNING = {"status": "running", "claim_token": 1}


@pytest.mark.parametrize(
    ("model", "values", "constraint"),
    [
        (Job, {"queue": ""}, "neoq_jobs_queue_length"),
        (Job, {"queue": "q" * 129}, "neoq_jobs_queue_length"),
        (Job, JOB | {"task": ""}, "neoq_jobs_task_length"),
        (Job, JOB | {"task": "t" * 256}, "neoq_jobs_task_length"),
        (Job, JOB | {"fingerprint": ""}, "neoq_jobs_fingerprint_length"),
        (Job, JOB | {"fingerprint": "f" * 256}, "neoq_jobs_fingerprint_length"),
        (Job, JOB | {"status": "dead"}, "neoq_jobs_status_known"),
        (Job, JOB | {"status": "NEW"}, "neoq_jobs_status_known"),
        (Job, JOB | {"priority": 101}, "neoq_jobs_priority_in_range"),
        (Job, JOB | {"priority": -101}, "neoq_jobs_priority_in_range"),
        (Job, JOB | {"retries": -1}, "neoq_jobs_retries_not_negative"),
        (Job, JOB | {"max_retries": -1}, "neoq_jobs_max_retries_not_negative"),
        (Job, JOB | {"crashes": -1}, "neoq_jobs_crashes_not_negative"),
        (Job, JOB | {"run_after": text("'infinity'")}, "neoq_jobs_run_after_in_calendar"),
        (Job, JOB | {"run_after": text("'-infinity'")}, "neoq_jobs_run_after_in_calendar"),
        (Job, JOB | {"run_after": text("'10000-01-01 UTC'")}, "neoq_jobs_run_after_in_calendar"),
        (Job, JOB | {"run_after": text("'0001-12-31 23:59 UTC BC'")}, "neoq_jobs_run_after_in_calendar"),
        (Job, JOB | {"deadline": text("'infinity'")}, "neoq_jobs_deadline_in_calendar"),
        (Job, JOB | {"created_at": text("'-infinity'")}, "neoq_jobs_created_at_in_calendar"),
        (Job, JOB | {"status": "running"}, "neoq_jobs_running_has_token"),
        (Job, JOB | {"claim_token": 1}, "neoq_jobs_running_has_token"),
        (Job, JOB | {"status": "processed", "finished_at": NOW, "claim_token": 1}, "neoq_jobs_running_has_token"),
        (Job, JOB | {"status": "processed"}, "neoq_jobs_finished_has_time"),
        (Job, JOB | {"status": "cancelled"}, "neoq_jobs_finished_has_time"),
        (Job, JOB | {"finished_at": NOW}, "neoq_jobs_finished_has_time"),
        (DeadJob, DEAD | {"reason": "bored"}, "neoq_dead_jobs_reason_known"),
        (Failure, FAILURE | {"kind": "bored"}, "neoq_failures_kind_known"),
        (models.Meta, {"id": 2, "version": 1}, "neoq_meta_one_row"),
    ],
)
def test_the_database_refuses_what_cannot_be(session, model, values, constraint):
    with pytest.raises(IntegrityError, match=rf'check constraint "{constraint}"'):
        session.execute(model.__table__.insert().values(values))


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Job, {"queue": "ü" * 128, "task": "t" * 255, "fingerprint": "f" * 255, "priority": 100, "max_retries": 0}),
        (Job, JOB | {"priority": -100, "deadline": NOW, "retries": 2**31 - 1, "crashes": 2**15 - 1}),
        (Job, JOB | {"run_after": text("'0001-01-01 00:00 UTC'")}),
        (Job, JOB | {"run_after": text("'9999-12-31 23:59:59.999999 UTC'")}),
        (Job, JOB | RUNNING),
        (Job, JOB | {"status": "failed"}),
        *[(Job, JOB | {"status": status, "finished_at": NOW}) for status in ("processed", "cancelled")],
        *[(DeadJob, DEAD | {"reason": reason}) for reason in ("exhausted", "discarded", "deadline", "crashed")],
        *[(Failure, FAILURE | {"kind": kind}) for kind in ("error", "retry", "timeout", "discarded", "crashed")],
        (Worker, {"name": "w", "host": "h", "pid": 1, "queues": [], "version": "1"}),
    ],
)
def test_the_database_takes_what_can_be(session, model, values):
    session.execute(model.__table__.insert().values(values))


@pytest.mark.parametrize("column", [c.name for c in Job.__table__.c if not c.nullable])
def test_what_always_is_cannot_be_null(session, column):
    with pytest.raises(IntegrityError, match=f'null value in column "{column}"'):
        session.execute(Job.__table__.insert().values({"queue": "q", column: null()}))


@pytest.mark.parametrize("status", ["new", "running", "failed"])
def test_a_fingerprint_is_unique_among_the_unfinished_of_its_queue(session, status):
    values = {"queue": "q", "fingerprint": "f", "status": status}
    session.add(Job(**values, claim_token=1 if status == "running" else None))
    session.flush()
    session.add(Job(queue="other", fingerprint="f"))
    session.add(Job(queue="q", fingerprint="g"))
    session.add(Job(queue="q", fingerprint="f", status="processed", finished_at=NOW))
    session.add(Job(queue="q", fingerprint="f", status="cancelled", finished_at=NOW))
    session.flush()
    session.add(Job(queue="q", fingerprint="f"))
    with pytest.raises(IntegrityError, match="neoq_jobs_fingerprint_key"):
        session.flush()


def test_any_number_of_jobs_may_have_no_fingerprint(session):
    session.execute(Job.__table__.insert(), [{"queue": "q"}] * 3)
    assert len(session.scalars(select(Job)).all()) == 3


def test_ids_and_claim_tokens_are_64_bits_wide(session):
    session.execute(text("INSERT INTO neoq_jobs (id, queue) VALUES (9223372036854775807, 'q')"))
    assert session.scalars(select(Job.id)).all() == [2**63 - 1]
    query = "SELECT data_type FROM pg_sequences WHERE sequencename IN ('neoq_claim_tokens', 'neoq_jobs_id_seq')"
    assert session.scalars(text(query)).all() == ["bigint", "bigint"]


def test_tables_that_change_all_the_time_are_vacuumed_early(session):
    options = session.scalar(text("SELECT reloptions FROM pg_class WHERE oid = 'neoq_jobs'::regclass"))
    assert "autovacuum_vacuum_scale_factor=0.01" in options


def test_a_session_of_the_host_reads_what_became_of_a_job(session):
    session.add(Failure(job_id=1, attempt=1, kind="error", message="no"))
    session.add(DeadJob(**DEAD))
    session.flush()
    session.expire_all()
    assert session.scalars(select(Failure)).one().failed_at.tzinfo is not None
    assert session.get(DeadJob, 1).died_at.tzinfo is not None
