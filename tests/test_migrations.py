"""The tables come and go in the caller's transaction: in a host's revision, without Alembic, and as a script."""

import asyncio
import io
import subprocess
import textwrap
import threading
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from support import eventually
from support.hosts import psql
from support.processes import environment, python
from support.servers import libpq
from support.wakeups import ears

from sqla_neoq import enqueue, migrations, statements
from sqla_neoq.errors import SchemaError, SchemaMissing, SchemaOutdated, SchemaTooNew
from sqla_neoq.migrations import LATEST, downgrade, installed_version, migrate, upgrade, verify
from sqla_neoq.migrations.failures import explained
from sqla_neoq.migrations.indexes import Index
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

_HERE = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"


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
            yield Index("neoq_jobs_colour_key", "neoq_jobs", "(colour) WHERE colour <> ':x'", unique=True)

        @staticmethod
        def down(prefix):
            yield f"DROP INDEX IF EXISTS {prefix}neoq_jobs_colour_key"
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
        claim = {"worker": me, "tasks": "[]", "wanted": wanted, "total": 1, "ids": "{}", "tokens": "{}"}
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
    query = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND {_HERE}"
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


# Indexes on tables in use ---------------------------------------------------------------------------------------------


@contextmanager
def revision(engine):
    """Yield ``op`` as a revision has it, in a transaction that Alembic began and commits."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        with context.begin_transaction():
            yield Operations(context)


def valid(connection, name="neoq_jobs_colour_key", schema=None):
    query = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)"
    return connection.scalar(text(query), {"name": f"{qualifier(schema)}{name}"})


@pytest.fixture
def ran(empty):
    """The statements that ran on the empty database's engine."""
    statements = []
    event.listen(empty, "before_cursor_execute", lambda *args: statements.append(args[2]))
    return statements


def test_an_index_on_a_table_in_use_is_made_with_the_step_by_default(connection, second_step):
    migrate(operations(connection), 0, 2)
    assert valid(connection)
    migrate(operations(connection), 2, 1)
    assert valid(connection) is None


@SCHEMAS
def test_concurrently_such_an_index_is_built_after_the_step_is_committed(empty, second_step, ran, schema):
    with revision(empty) as op:
        migrate(op, 0, 1, schema=schema)
    with revision(empty) as op:
        migrate(op, 1, 2, schema=schema, concurrently=True)
    (built,) = [statement for statement in ran if "CONCURRENTLY" in statement]
    assert built.startswith("CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS neoq_jobs_colour_key")
    with empty.connect() as connection:
        assert valid(connection, schema=schema)
        assert installed_version(connection, schema=schema) == 2
        assert migrations.check(connection, schema=schema) == []
    ran.clear()
    with revision(empty) as op:
        migrate(op, 1, 2, schema=schema, concurrently=True)
    assert not [statement for statement in ran if "CREATE" in statement]


def test_an_invalid_index_is_reported_and_the_same_call_replaces_it(empty, second_step):
    with empty.begin() as connection:
        upgrade(connection, to=2, concurrently=True)
        assert valid(connection) is None
        connection.execute(text("INSERT INTO neoq_jobs (queue, colour) VALUES ('q', 'red'), ('q', 'red')"))
    with pytest.raises(IntegrityError, match="neoq_jobs_colour_key"), revision(empty) as op:
        migrate(op, 1, 2, concurrently=True)
    with empty.begin() as connection:
        assert valid(connection) is False
        (sentence,) = migrations.check(connection)
        assert sentence.startswith("index neoq_jobs_colour_key is ")
        assert " INVALID, and should be " in sentence
        connection.execute(text("UPDATE neoq_jobs SET colour = id::text"))
    with revision(empty) as op:
        migrate(op, 1, 2, concurrently=True)
    with empty.connect() as connection:
        assert valid(connection)
        assert migrations.check(connection) == []
        assert connection.scalar(text(f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND {_HERE}")) == 0


def test_of_two_that_build_at_once_the_second_waits_and_builds_nothing(empty, second_step, ran):
    with empty.begin() as connection:
        upgrade(connection, concurrently=True)
    autocommit = empty.execution_options(isolation_level="AUTOCOMMIT")
    errors = []

    def build():
        try:
            with autocommit.connect() as connection:
                migrations.build_indexes(connection)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    with empty.connect() as busy:
        # Who builds waits for this transaction, and so do both.
        busy.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('q')"))
        for thread in threads:
            thread.start()
        eventually(lambda: [s for s in ran if "CONCURRENTLY" in s] and sum("try_advisory" in s for s in ran) >= 4)
        busy.commit()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert errors == []
    assert sum("CONCURRENTLY" in statement for statement in ran) == 1
    with empty.connect() as connection:
        assert valid(connection)


def test_building_lifts_the_timeouts_and_puts_them_back(empty, second_step):
    with empty.begin() as connection:
        upgrade(connection, concurrently=True)
    seen = []

    def look(connection, cursor, statement, *_):
        if "CONCURRENTLY" in statement:
            cursor.execute("SELECT current_setting('lock_timeout') || current_setting('statement_timeout')")
            seen.append(cursor.fetchone()[0])

    event.listen(empty, "before_cursor_execute", look)
    with empty.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text("SET lock_timeout = '3s'"))
        connection.execute(text("SET statement_timeout = '4s'"))
        migrations.build_indexes(connection)
        assert connection.scalar(text("SHOW lock_timeout")) == "3s"
        assert connection.scalar(text("SHOW statement_timeout")) == "4s"
    assert seen == ["00"]


def test_building_within_a_transaction_is_refused_and_says_so(connection, second_step):
    upgrade(connection, concurrently=True)
    with pytest.raises(SchemaError, match="cannot be built CONCURRENTLY within a transaction") as refusal:
        migrations.build_indexes(connection)
    assert "AUTOCOMMIT" in refusal.value.remedy


def test_concurrently_in_a_transaction_that_alembic_did_not_begin_is_refused_before_anything_changes(connection):
    before = there(connection)
    with pytest.raises(SchemaError, match=r"this env.py began the transaction itself; nothing was changed"):
        migrate(operations(connection), 0, 1, concurrently=True)
    assert there(connection) == before


@SCHEMAS
def test_the_offline_script_builds_concurrently_after_its_commit(empty, second_step, schema):
    script = io.StringIO()
    opts = {"as_sql": True, "output_buffer": script, "literal_binds": True}
    context = MigrationContext.configure(dialect_name="postgresql", opts=opts)
    with context.begin_transaction():
        migrate(Operations(context), 0, 2, schema=schema, concurrently=True)
    lines = [line for line in script.getvalue().splitlines() if line in {"BEGIN;", "COMMIT;"} or "CONCURRENTLY" in line]
    assert [line.split()[0] for line in lines] == ["BEGIN;", "COMMIT;", "CREATE", "BEGIN;", "COMMIT;"]
    done = psql(empty.url.render_as_string(hide_password=False), script.getvalue())
    assert (done.returncode, done.stderr) == (0, "")
    with empty.connect() as connection:
        assert migrations.check(connection, schema=schema) == []


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_connection_in_autocommit_is_refused(empty):
    with empty.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        before = there(connection)
        for change in (upgrade, downgrade, lambda connection: migrate(operations(connection), 0, 1)):
            with pytest.raises(SchemaError, match="in autocommit, so a migration that fails would stay half done"):
                change(connection)
        assert there(connection) == before


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("CREATE TABLE neoq_jobs (id integer)", "neoq_jobs"),
        ("CREATE TABLE neoq_meta (id integer)", "neoq_meta"),
        ("CREATE TABLE neoq_meta (version text)", "neoq_meta"),
        ("CREATE VIEW neoq_workers AS SELECT 1", "neoq_workers"),
        ("CREATE SEQUENCE neoq_claim_tokens", "neoq_claim_tokens"),
    ],
)
def test_what_has_our_names_and_is_not_ours_is_refused_by_name(connection, made, named):
    connection.execute(text(made))
    before = there(connection)
    sentence = f"^there is {named} already, which this release did not make; nothing was changed"
    with pytest.raises(SchemaError, match=sentence) as refusal:
        upgrade(connection)
    assert "schema of its own" in refusal.value.remedy
    assert there(connection) == before


def test_other_objects_with_our_names_are_a_sentence_too(empty):
    with empty.begin() as connection:
        connection.execute(text("CREATE FUNCTION neoq_wake() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN END'"))
        before = there(connection)
    sentence = r"a name that sqla_neoq uses is taken; nothing was changed: .*neoq_wake"
    with pytest.raises(SchemaError, match=sentence), empty.begin() as connection:
        upgrade(connection)
    with empty.connect() as connection:
        assert there(connection) == before


def test_a_half_made_installation_is_refused_and_the_remedy_s_lines_clear_it_away(connection):
    before = there(connection)
    upgrade(connection)
    connection.execute(text("DELETE FROM neoq_meta"))
    connection.execute(text("DROP TABLE neoq_workers"))
    with pytest.raises(SchemaError, match="neoq_dead_jobs, neoq_failures, neoq_jobs, neoq_meta already") as refusal:
        upgrade(connection)
    assert "python -m sqla_neoq.migrate sql --from 1 --to 0" in refusal.value.remedy
    for statement in migrations.statements(1, 0):
        execute(connection, statement)
    assert there(connection) == before
    upgrade(connection)
    assert migrations.check(connection) == []


def test_a_downgrade_that_cannot_count_the_jobs_is_refused_and_forced_takes_the_rest(empty):
    with empty.begin() as connection:
        before = there(connection)
        upgrade(connection)
        connection.execute(text("DROP TABLE neoq_jobs"))
    sentence = "belongs to the installed version is not there; nothing was changed"
    with pytest.raises(SchemaError, match=sentence), empty.begin() as connection:
        downgrade(connection)
    with empty.begin() as connection:
        assert installed_version(connection) == LATEST
        downgrade(connection, force=True)
        assert there(connection) == before


@pytest.mark.parametrize(
    ("setting", "options", "sentence"),
    [
        ("0", {"lock_timeout": timedelta(milliseconds=50)}, "waited longer than lock_timeout for a lock"),
        ("500ms", {}, "was cancelled, by statement_timeout or by somebody"),
    ],
)
def test_a_timeout_that_is_hit_is_a_sentence_and_changes_nothing(empty, second_step, setting, options, sentence):
    with empty.begin() as connection:
        upgrade(connection, to=1)
        before = there(connection)
    with empty.connect() as holder:
        holder.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('q')"))
        impatient = create_engine(
            empty.url, poolclass=NullPool, connect_args={"options": f"-c statement_timeout={setting}"}
        )
        whole = f"{sentence}.*; nothing was changed"
        with pytest.raises(SchemaError, match=whole) as refusal, impatient.begin() as connection:
            upgrade(connection, **options)
        # Where a traceback ends is what somebody reads.
        assert refusal.value.__notes__ == [refusal.value.remedy]
    with empty.connect() as connection:
        assert there(connection) == before
        assert installed_version(connection) == 1


def test_a_deadlock_is_a_sentence_and_what_is_not_known_passes_as_it_is(empty):
    def fail(code):
        with empty.begin() as connection, explained():
            execute(connection, f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}', MESSAGE = 'said'; END $$")

    with pytest.raises(SchemaError, match=r"waited for each other.*; nothing was changed: said"):
        fail("40P01")
    with pytest.raises(DBAPIError, match="said"):
        fail("22012")


def test_the_lock_timeout_of_the_application_s_session_is_as_it_was(connection):
    connection.execute(text("SET lock_timeout = '7s'"))
    upgrade(connection)
    assert connection.scalar(text("SHOW lock_timeout")) == "7s"


def test_a_schema_that_is_not_there_is_a_sentence_with_either_driver(empty):
    sentence = "the schema is not there; nothing was changed"
    with pytest.raises(SchemaError, match=sentence), empty.begin() as connection:
        upgrade(connection, schema="nowhere")

    async def install():
        engine = create_async_engine(empty.url.set(drivername="postgresql+asyncpg"), poolclass=NullPool)
        async with engine.connect() as connection:
            with pytest.raises(SchemaError, match=sentence):
                await connection.run_sync(lambda connection: upgrade(connection, schema="nowhere"))
        await engine.dispose()

    asyncio.run(install())


def test_a_table_of_the_application_s_that_refers_to_jobs_keeps_them(empty):
    with empty.begin() as connection:
        upgrade(connection)
        connection.execute(text("CREATE TABLE mine (job_id bigint REFERENCES neoq_jobs)"))
    sentence = r"something of the application's depends on the tables.*mine"
    with pytest.raises(SchemaError, match=sentence), empty.begin() as connection:
        downgrade(connection)
    with empty.connect() as connection:
        assert migrations.check(connection) == []


def test_tables_that_the_search_path_finds_elsewhere_are_not_taken_for_those_that_are_meant(connection):
    upgrade(connection, schema="public")
    execute(connection, f"SET LOCAL search_path TO {quote(ODD)}, public")
    before = there(connection)
    for change in (upgrade, downgrade, lambda connection: migrate(operations(connection), 0, 1)):
        with pytest.raises(SchemaError, match=r"in schema 'public', but creates new ones in .*; nothing was changed"):
            change(connection)
    assert there(connection) == before
    assert verify(connection) == LATEST


# Drift ----------------------------------------------------------------------------------------------------------------


DRIFT = {
    "ALTER TABLE neoq_jobs DROP COLUMN crashes CASCADE": "column neoq_jobs.crashes is missing: smallint NOT NULL",
    "ALTER TABLE neoq_jobs ADD COLUMN mine text": "column neoq_jobs.mine should not be there: text",
    "ALTER TABLE neoq_jobs ALTER COLUMN task TYPE varchar(9)": "neoq_jobs.task is character varying(9), and should be",
    "ALTER TABLE neoq_jobs ALTER COLUMN priority SET DEFAULT 7": "priority is smallint NOT NULL DEFAULT 7, and should",
    "ALTER TABLE neoq_jobs ALTER COLUMN queue DROP NOT NULL": "queue is text, and should be text NOT NULL",
    "ALTER TABLE neoq_jobs DROP CONSTRAINT neoq_jobs_status_known": "neoq_jobs_status_known of neoq_jobs is missing",
    "DROP INDEX neoq_jobs_claim_idx": "index neoq_jobs_claim_idx is missing",
    "DROP TRIGGER neoq_jobs_wake ON neoq_jobs": "trigger neoq_jobs_wake of neoq_jobs is missing",
    "ALTER TABLE neoq_jobs DISABLE TRIGGER neoq_jobs_wake": "(not enabled: D), and should be",
    "CREATE OR REPLACE FUNCTION neoq_wake() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN END'": "function neoq_wake() is",
    "DROP TABLE neoq_failures": "table neoq_failures is missing",
    "DROP SEQUENCE neoq_claim_tokens": "sequence neoq_claim_tokens is missing",
}


@pytest.mark.parametrize(("change", "sentence"), DRIFT.items())
def test_check_names_what_is_not_as_its_version_should_be(connection, change, sentence):
    upgrade(connection)
    assert migrations.check(connection) == []
    connection.execute(text(change))
    assert any(sentence in found for found in migrations.check(connection)), migrations.check(connection)


def test_check_works_with_the_asynchronous_driver(empty):
    async def look():
        engine = create_async_engine(empty.url.set(drivername="postgresql+asyncpg"), poolclass=NullPool)
        async with engine.connect() as connection:
            await connection.run_sync(upgrade)
            assert await connection.run_sync(migrations.check) == []
        await engine.dispose()

    asyncio.run(look())
