"""The tables, and how they come into a database: S12, S17, S18, S21-S27 and the rows about them."""

from datetime import timedelta

import pytest
from sqlalchemy import create_engine, inspect, make_url
from sqlalchemy.exc import IntegrityError
from support import eventually
from support.running import ago, in_thread

from sqla_neoq import Failure, Runner, RunnerConfig, SchemaError, handler, migrations
from sqla_neoq.migrations.quoting import qualifier


@handler("work", max_retries=0)
def work(job):
    if job.payload == "fail":
        raise ValueError("no")


@pytest.fixture
def empty_schema(place):
    """A schema without the tables."""
    place.sql('CREATE SCHEMA "still empty"')
    yield "still empty"
    place.sql('DROP SCHEMA "still empty" CASCADE')


@pytest.mark.neoq("S22", "S34")
def test_two_columns_of_plain_sql_make_a_job_and_the_database_fills_in_the_rest(place):
    id_ = place.sql("INSERT INTO {}neoq_jobs (queue, payload) VALUES ('work', '[1]') RETURNING id")
    job = place.job(id_)
    assert (job.status, job.payload, job.retries, job.priority) == ("new", [1], 0, 0)
    assert job.run_after == job.created_at
    assert (job.fingerprint, job.max_retries, job.ran_at, job.error) == (None, None, None, None)
    assert place.drain(work).processed == 1


@pytest.mark.neoq("S12", "S25", "S26")
def test_no_row_can_be_what_no_job_is(place):
    for columns in [
        {"status": "'lost'"},
        {"queue": "''"},
        {"queue": "repeat('q', 129)"},
        {"priority": "101"},
        {"retries": "-1"},
        {"max_retries": "-1"},
        {"fingerprint": "''"},
        *({column: "NULL"} for column in ("id", "queue", "status", "payload", "retries", "run_after", "created_at")),
    ]:
        row = {"queue": "'work'"} | columns
        with pytest.raises(IntegrityError, match=f"neoq_jobs_{'|'.join(columns)}|null value in column"):
            place.sql(f"INSERT INTO {{}}neoq_jobs ({', '.join(row)}) VALUES ({', '.join(row.values())})")


@pytest.mark.neoq("S21")
def test_the_tables_bring_no_type_and_no_name_that_is_not_their_own(place):
    oids = "SELECT oid FROM pg_namespace WHERE nspname = coalesce(:schema, current_schema())"
    assert (
        place.sql(f"SELECT count(*) FROM pg_type WHERE typtype = 'e' AND typnamespace = ({oids})", schema=place.schema)
        == 0
    )
    strangers = place.sql(
        f"SELECT array_agg(relname) FROM pg_class WHERE relnamespace = ({oids}) AND relname NOT LIKE 'neoq\\_%'",
        schema=place.schema,
    )
    assert strangers is None


@pytest.mark.neoq("S24", "N03")
def test_the_claim_and_the_fingerprint_have_partial_indexes_that_know_no_status(place):
    indexes = {index["name"]: index for index in inspect(place.engine).get_indexes("neoq_jobs", schema=place.schema)}
    claim, fingerprint = indexes["neoq_jobs_claim_idx"], indexes["neoq_jobs_fingerprint_key"]
    assert claim["column_names"] == ["queue", "priority", "run_after", "id"]
    assert (fingerprint["column_names"], fingerprint["unique"]) == (["queue", "fingerprint"], True)
    for index in claim, fingerprint:
        assert index["dialect_options"]["postgresql_where"]


@pytest.mark.neoq("S25")
def test_ids_go_beyond_32_bits(place):
    place.sql("ALTER TABLE {}neoq_jobs ALTER COLUMN id RESTART WITH 3000000000")
    good, bad = place.enqueue("work").id, place.enqueue("work", "fail").id
    assert (good, bad) == (3_000_000_000, 3_000_000_001)
    place.drain(work)
    assert place.job(good).status == "processed"
    assert place.dead_job(bad).reason == "exhausted"


@pytest.mark.neoq("S23", "S54")
def test_a_dead_job_keeps_all_that_was_known_of_it(place):
    id_ = place.enqueue("work", "fail", priority=5, fingerprint="one").id
    alive = place.job(id_)
    place.drain(work)
    dead = place.dead_job(id_)
    for field in ("queue", "payload", "priority", "fingerprint", "run_after", "created_at", "retries", "max_retries"):
        assert getattr(dead, field) == getattr(alive, field), field
    assert dead.created_at < dead.ran_at < dead.died_at
    assert (dead.reason, dead.error) == ("exhausted", "ValueError: no")
    assert place.rows() == []


@pytest.mark.neoq("S27")
def test_processed_jobs_are_removed_when_they_are_older_than_the_retention(place, start):
    old, young, failed = (
        place.add(queue="other", status="processed", finished_at=ago(3601)),
        place.add(queue="other", status="processed", finished_at=ago(3599)),
        place.add(queue="other", status="failed", created_at=ago(7200)),
    )
    start(work, retention=timedelta(hours=1))
    eventually(lambda: old not in place.statuses())
    assert place.statuses() == {young: "processed", failed: "failed"}


@pytest.mark.neoq("S27")
@pytest.mark.parametrize(("retention", "kept"), [(None, 1), (timedelta(0), 0)])
def test_processed_jobs_are_kept_for_ever_or_not_at_all_if_so_asked(place, retention, kept):
    place.enqueue("work")
    assert place.drain(work, retention=retention).processed == 1
    assert len(place.rows()) == kept


@pytest.mark.neoq("S17", "S18")
def test_a_runner_creates_nothing_and_says_what_would(place, empty_schema):
    with pytest.raises(SchemaError) as raised:
        place.runner(work, schema=empty_schema).start()
    assert f"migrate(op, 0, {migrations.LATEST}, schema={empty_schema!r})" in raised.value.remedy
    assert inspect(place.engine).get_table_names(schema=empty_schema) == []


@pytest.mark.neoq("S18", "T49")
def test_two_that_install_the_tables_at_once_install_them_once_where_they_are_told(place, empty_schema):
    engine = create_engine(place.url)
    errors = []

    def install():
        try:
            with engine.begin() as connection:
                migrations.upgrade(connection, schema=empty_schema)
        except Exception as error:
            errors.append(error)

    threads = [in_thread(install) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert errors == []
    with engine.begin() as connection:
        assert migrations.installed_version(connection, schema=empty_schema) == migrations.LATEST
        migrations.downgrade(connection, schema=empty_schema)
    left = place.sql(
        "SELECT count(*) FROM pg_proc FULL JOIN pg_class ON false WHERE :schema IN"
        " (SELECT nspname FROM pg_namespace WHERE oid IN (pronamespace, relnamespace))",
        schema=empty_schema,
    )
    engine.dispose()
    assert left == 0


@pytest.mark.neoq("S18")
def test_a_role_that_may_only_read_and_write_the_tables_runs_jobs(place):
    role = make_url(place.url).database + "_worker"
    schema = qualifier(place.sql("SELECT current_schema()") if place.schema is None else place.schema).rstrip(".")
    place.sql(f"CREATE ROLE {role}")
    try:
        place.sql(f"GRANT USAGE ON SCHEMA {schema} TO {role}".replace(":", r"\:"))
        for kind, rights in (("TABLES", "SELECT, INSERT, UPDATE, DELETE"), ("SEQUENCES", "USAGE, SELECT")):
            place.sql(f"GRANT {rights} ON ALL {kind} IN SCHEMA {schema} TO {role}".replace(":", r"\:"))
        good, bad = place.enqueue("work").id, place.enqueue("work", "fail").id
        engine = place.make_engine(settings=f"-crole={role}")
        counts = Runner(engine, work, config=RunnerConfig()).drain()
        engine.dispose()
        assert (counts.processed, counts.dead) == (1, 1)
        assert (place.job(good).status, place.dead_job(bad).reason) == ("processed", "exhausted")
    finally:
        place.sql(f"DROP OWNED BY {role}")
        place.sql(f"DROP ROLE {role}")


@pytest.mark.neoq("N13")
def test_a_search_path_that_leads_nowhere_does_not_matter_where_the_schema_is_named(place):
    engine = place.make_engine(settings="-csearch_path=")
    schema = place.sql("SELECT current_schema()") if place.schema is None else place.schema
    id_ = place.enqueue("work", "fail").id
    assert place.drain(work, database=engine, schema=schema).dead == 1
    engine.dispose()
    assert [row.job_id for row in place.rows(Failure)] == [id_]
