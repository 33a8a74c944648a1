"""The tables come and go in the caller's transaction: in a host's revision, without Alembic, and as a script."""

import asyncio
import io
import subprocess
import textwrap
import threading

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, event, inspect, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from support import eventually
from support.processes import environment, python
from support.servers import libpq
from support.wakeups import ears

from sqla_neoq import enqueue, migrations, statements
from sqla_neoq.errors import SchemaError, SchemaMissing, SchemaOutdated, SchemaTooNew
from sqla_neoq.migrations import LATEST, downgrade, installed_version, migrate, upgrade, verify
from sqla_neoq.migrations.quoting import qualifier, quote

ODD = 'the "queue"\'s 100%s :odd \\ 🚀'
"""A schema's name with all that quoting, formatting, binding or escaping could trip over."""
SCHEMAS = pytest.mark.parametrize("schema", [None, "public", ODD])

# Everything in a database that is not PostgreSQL's own.
THERE = """
SELECT 'relation', relname FROM pg_class WHERE relnamespace NOT IN (SELECT oid FROM system) AND relkind <> 'i'
UNION ALL SELECT 'function', proname FROM pg_proc WHERE pronamespace NOT IN (SELECT oid FROM system)
UNION ALL SELECT 'type', typname FROM pg_type WHERE typnamespace NOT IN (SELECT oid FROM system)
UNION ALL SELECT 'trigger', tgname FROM pg_trigger
UNION ALL SELECT 'constraint', conname FROM pg_constraint WHERE connamespace NOT IN (SELECT oid FROM system)
"""
SYSTEM = "WITH system AS (SELECT oid FROM pg_namespace WHERE nspname ~ '^(pg_|information_schema)') "


def there(connection):
    return sorted(tuple(row) for row in connection.execute(text(SYSTEM + THERE)))


def execute(connection, statement):
    """Execute SQL in which the odd schema's percent sign is one."""
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def engine_on(url):
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        execute(connection, f"CREATE SCHEMA {quote(ODD)}")
    return engine


@pytest.fixture
def empty(fresh_database):
    """An engine on an empty database, with the odd schema in it."""
    return engine_on(fresh_database())


@pytest.fixture(scope="module")
def always_empty(databases):
    url = databases.create()
    yield engine_on(url)
    databases.drop(url)


@pytest.fixture
def connection(always_empty):
    """A connection to such a database, for tests that do not commit."""
    with always_empty.connect() as connection:
        yield connection


@pytest.fixture
def second_step(monkeypatch):
    """A release whose newest version is 2."""

    class Step:
        @staticmethod
        def up(prefix):
            yield f"ALTER TABLE {prefix}neoq_jobs ADD COLUMN colour text"

        @staticmethod
        def down(prefix):
            yield f"ALTER TABLE {prefix}neoq_jobs DROP COLUMN colour"

    monkeypatch.setattr(migrations, "_STEPS", (*migrations._STEPS[:1], Step))
    monkeypatch.setattr(migrations, "LATEST", 2)
    monkeypatch.setattr(migrations, "OLDEST_USABLE", 1)


def columns(connection, schema=None):
    return {column["name"] for column in inspect(connection).get_columns("neoq_jobs", schema=schema)}


@SCHEMAS
def test_up_and_down_again_leaves_nothing(connection, schema):
    before = there(connection)
    upgrade(connection, schema=schema)
    assert installed_version(connection, schema=schema) == verify(connection, schema=schema) == LATEST
    assert {"neoq_jobs", "neoq_wake", "neoq_jobs_wake", "neoq_claim_tokens"} <= {name for _, name in there(connection)}
    downgrade(connection, schema=schema)
    assert there(connection) == before
    assert installed_version(connection, schema=schema) == 0


@SCHEMAS
def test_upgrading_again_changes_nothing(connection, schema):
    upgrade(connection, schema=schema)
    execute(connection, f"INSERT INTO {qualifier(schema)}neoq_jobs (queue) VALUES ('q')")
    before = there(connection)
    upgrade(connection, schema=schema)
    assert there(connection) == before
    assert execute(connection, f"SELECT count(*) FROM {qualifier(schema)}neoq_jobs").scalar() == 1


def test_downgrading_what_is_not_there_does_nothing(connection):
    before = there(connection)
    downgrade(connection)
    downgrade(connection, schema=ODD)
    assert there(connection) == before


def test_the_caller_commits_or_does_not(empty):
    with empty.connect() as connection:
        before = there(connection)
        upgrade(connection)
        connection.rollback()
        assert there(connection) == before
        upgrade(connection)
        connection.commit()
        downgrade(connection)
        connection.rollback()
        assert installed_version(connection) == LATEST


def test_two_installations_in_one_database_do_not_meet(connection):
    upgrade(connection)
    upgrade(connection, schema=ODD)
    enqueue(connection.execution_options(neoq_schema=ODD), "q")
    downgrade(connection)
    assert installed_version(connection) == 0
    assert installed_version(connection, schema=ODD) == LATEST


def test_tables_in_an_odd_schema_work_from_enqueue_over_wake_up_to_claim(empty):
    with empty.begin() as connection:
        upgrade(connection, schema=ODD)
    engine = empty.execution_options(neoq_schema=ODD)
    options = {"schema_translate_map": {None: ODD}}
    with ears(empty.url, "q", table=f"{quote(ODD)}.neoq_jobs") as listening:
        with engine.begin() as connection:
            assert enqueue(connection, "q", {"a": 1}, unique=True).created
            assert not enqueue(connection, "q", {"a": 1}, unique=True).created
        assert listening.heard() == ["q"]
    with engine.begin() as connection:
        worker = {"name": "w", "host": "h", "pid": 1, "queues": "[]", "version": "0", "listening": False}
        me = connection.execute(statements.register_worker(), worker, execution_options=options).scalar()
        wanted = '[{"queue": "q", "slots": 1, "handler": true}]'
        claim = {"worker": me, "tasks": "[]", "wanted": wanted, "total": 1}
        (job,) = connection.execute(statements.claim_due(), claim, execution_options=options)
        assert (job.queue, job.payload) == ("q", '{"a": 1}')


def operations(connection):
    return Operations(MigrationContext.configure(connection))


@SCHEMAS
def test_a_revision_of_the_host_leads_up_and_down(connection, schema):
    before = there(connection)
    op = operations(connection)
    migrate(op, 0, 1, schema=schema)
    assert installed_version(connection, schema=schema) == 1
    migrate(op, 1, 0, schema=schema)
    assert there(connection) == before


def test_a_revision_whose_work_is_done_already_does_nothing(connection):
    before = there(connection)
    migrate(operations(connection), 1, 0)
    assert there(connection) == before
    upgrade(connection)
    installed = there(connection)
    migrate(operations(connection), 0, 1)
    assert there(connection) == installed


def test_versions_are_led_through_one_by_one(connection, second_step):
    op = operations(connection)
    migrate(op, 0, 1)
    assert "colour" not in columns(connection)
    migrate(op, 1, 2)
    assert installed_version(connection) == 2
    assert "colour" in columns(connection)
    migrate(op, 2, 1)
    assert installed_version(connection) == 1
    assert "colour" not in columns(connection)
    upgrade(connection, to=2)
    downgrade(connection, to=1)
    assert installed_version(connection) == 1
    migrate(op, 1, 2)
    migrate(op, 2, 0)
    assert installed_version(connection) == 0
    migrate(op, 0, 2)
    assert "colour" in columns(connection)


def test_a_revision_that_starts_from_another_version_is_refused_and_says_which(connection, second_step):
    before = there(connection)
    with pytest.raises(SchemaError, match="from version 1 to 2, but the database holds version 0") as refusal:
        migrate(operations(connection), 1, 2)
    assert refusal.value.remedy == "Make it migrate(op, 0, 2), or run the revisions that lead to 1 first."
    assert there(connection) == before
    upgrade(connection, to=2)
    with pytest.raises(SchemaError, match="from version 0 to 1, but the database holds version 2"):
        migrate(operations(connection), 0, 1)


@pytest.mark.parametrize(("from_", "to", "name"), [(0, LATEST + 1, "to"), (LATEST + 1, 0, "from_"), (-1, 1, "from_")])
def test_a_version_that_this_release_does_not_know_is_refused_before_any_io(from_, to, name):
    with pytest.raises(ValueError, match=rf"^{name}=.*: this release knows the schema versions 0 to {LATEST}$"):
        migrate(None, from_, to)


@pytest.mark.parametrize("schema", ["", "a\0b"])
def test_a_schema_s_name_that_cannot_be_is_refused_before_any_io(schema):
    with pytest.raises(ValueError, match="a schema's name is not empty and has no NUL"):
        migrate(None, 0, 1, schema=schema)


def offline(from_, to, schema):
    script = io.StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql", opts={"as_sql": True, "output_buffer": script, "literal_binds": True}
    )
    migrate(Operations(context), from_, to, schema=schema)
    return script.getvalue()


@SCHEMAS
def test_the_offline_script_does_what_the_online_revision_does(empty, schema):
    url = libpq(empty.url)
    with empty.connect() as connection:
        before = there(connection)
        upgrade(connection, schema=schema)
        installed = there(connection)
        connection.rollback()
        with psycopg.connect(url, autocommit=True) as other:
            other.execute(offline(0, 1, schema))
        assert there(connection) == installed
        assert verify(connection, schema=schema) == 1
        connection.rollback()
        with psycopg.connect(url, autocommit=True) as other:
            other.execute(offline(1, 0, schema))
        assert there(connection) == before


def test_the_offline_script_keeps_percent_signs_and_colons_as_they_are():
    script = offline(0, 1, ODD)
    assert script.count(quote(ODD)) >= 15
    assert "%%" not in script
    assert "TG_RELID::bigint" in script
    assert "NULL::" not in script


def test_offline_the_version_that_is_named_is_believed():
    assert "CREATE" not in offline(1, 0, None)
    assert "DROP TABLE IF EXISTS neoq_jobs" in offline(1, 0, None)


def test_the_gate_says_that_nothing_is_there_and_what_to_paste(connection):
    with pytest.raises(SchemaMissing, match=r"not there .on the connection's search_path.") as refusal:
        verify(connection)
    assert_remedy_works(connection, refusal.value.remedy, None)
    with pytest.raises(SchemaMissing, match="in schema") as refusal:
        verify(connection, schema=ODD)
    assert_remedy_works(connection, refusal.value.remedy, ODD)


def assert_remedy_works(connection, remedy, schema):
    """Run the lines as they would be pasted into a revision."""
    pasted = remedy[remedy.index("    from") : remedy.rindex("    def")]
    pasted += remedy[remedy.rindex("    def") :].split("\n\n")[0]
    names = {"op": operations(connection)}
    exec(textwrap.dedent(pasted), names)
    names["upgrade"]()
    assert verify(connection, schema=schema) == LATEST
    names["downgrade"]()
    assert installed_version(connection, schema=schema) == 0


@pytest.mark.parametrize(("version", "usable"), [(1, False), (2, True), (3, True), (4, True), (5, False)])
def test_the_gate_lets_one_version_of_difference_pass(connection, monkeypatch, version, usable):
    monkeypatch.setattr(migrations, "LATEST", 3)
    monkeypatch.setattr(migrations, "OLDEST_USABLE", 2)
    upgrade(connection, to=1)
    connection.execute(text("UPDATE neoq_meta SET version = :version"), {"version": version})
    if usable:
        assert verify(connection) == version
    elif version < 3:
        with pytest.raises(SchemaOutdated, match=r"have version 1 .*; this release needs 2") as refusal:
            verify(connection)
        assert "neoq.migrate(op, 1, 3)" in refusal.value.remedy
    else:
        with pytest.raises(SchemaTooNew, match=r"have version 5 .*; this release knows up to 3") as refusal:
            verify(connection)
        assert refusal.value.remedy == "pip install --upgrade sqla-neoq"


def test_an_upgrade_does_not_go_back(connection):
    upgrade(connection)
    connection.execute(text("UPDATE neoq_meta SET version = 7"))
    with pytest.raises(SchemaTooNew, match="version 7, newer than the 1 asked for"):
        upgrade(connection, to=1)


def advisory_waits(connection):
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    count = connection.scalar(text(query))
    connection.rollback()
    return count


@pytest.mark.parametrize("ended", ["commit", "rollback"])
def test_of_two_that_upgrade_at_once_one_installs(empty, ended):
    ran = []
    event.listen(empty, "before_cursor_execute", lambda *args: ran.append(threading.current_thread().name))
    errors = []

    def second():
        try:
            with empty.begin() as connection:
                upgrade(connection)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=second, name="second")
    with empty.connect() as first, empty.connect() as watching:
        upgrade(first)
        thread.start()
        eventually(lambda: advisory_waits(watching))
        getattr(first, ended)()
        thread.join(20)
        assert not thread.is_alive()
        assert errors == []
        assert verify(watching) == LATEST
    # Whoever came second only looked, unless the first gave up.
    assert (ran.count("second") > 10) == (ended == "rollback")


def test_an_async_driver_that_takes_one_statement_at_a_time_installs_too(empty):
    async def install():
        engine = create_async_engine(empty.url.set(drivername="postgresql+asyncpg"), poolclass=NullPool)
        async with engine.begin() as connection:
            await connection.run_sync(upgrade)
            assert await connection.run_sync(verify) == LATEST
        async with engine.begin() as connection:
            await connection.run_sync(downgrade)
        await engine.dispose()

    asyncio.run(install())
    with empty.connect() as connection:
        assert installed_version(connection) == 0


def test_whoever_only_installs_or_looks_does_not_import_alembic():
    code = "import sys, sqla_neoq.migrations; sys.exit('alembic' in sys.modules)"
    assert subprocess.run(python("-c", code), env=environment({})).returncode == 0
