"""Host applications get, upgrade and remove the tables by their own ``alembic`` command, each of which really runs."""

import subprocess
import threading
import uuid
from contextlib import contextmanager
from datetime import timedelta
from textwrap import indent

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.pool import NullPool
from support import eventually
from support.hosts import CUSTOMER, MODELS, Host, excerpt, psql, scalar, there
from support.packages import make_venv
from support.processes import ROOT

from sqla_neoq import Runner, RunnerConfig, enqueue, enqueue_many, migrations, task
from sqla_neoq.errors import SchemaError
from sqla_neoq.migrations import installed_version

CLEAN = "No new upgrade operations detected."


@pytest.fixture
def url(fresh_database):
    return fresh_database()


@pytest.fixture
def engine(url):
    engine = create_engine(url, poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def host(tmp_path, url):
    """Make an application in the test's directory, on the test's database."""
    return lambda **options: Host(tmp_path / "host", url, **options)


def ours(engine):
    return {name for _, name, _ in there(engine) if "neoq" in name}


def assert_installed(engine, schema=None):
    with engine.connect() as connection:
        assert migrations.check(connection, schema=schema) == []


def assert_nothing_left(engine, *, schemas=("public",)):
    """Nothing is there but the table that Alembic keeps its version in."""
    left = {name for _, name, _ in there(engine) if name not in schemas}
    assert {name for name in left if "alembic_version" not in name} == set()


def test_a_plain_application_gets_the_tables_and_loses_them_and_autogenerate_never_sees_them(host, engine):
    app = host()
    app.alembic("revision", "--autogenerate", "-m", "start")
    assert "create_table('customer'" in app.written()
    assert "neoq" not in app.written()
    app.alembic("upgrade", "head")
    done = app.run("revision", module="sqla_neoq.migrate")
    assert done.returncode == 0, done.stderr
    assert "neoq.migrate(op, 0, 1)" in app.written()
    app.alembic("upgrade", "head")
    assert_installed(engine)
    assert CLEAN in app.alembic("check")
    app.alembic("revision", "--autogenerate", "-m", "nothing")
    assert app.written().count("    pass") == 2
    app.alembic("upgrade", "head")
    app.alembic("downgrade", "base")
    assert_nothing_left(engine)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_asynchronous_env_py(host, url, engine, driver):
    app = host(template="async")
    app.ini(f"sqlalchemy.url = {url.replace('+psycopg', f'+{driver}').replace('%', '%%')}")
    app.customers()
    app.queue(more=", concurrently=True")
    app.alembic("upgrade", "head")
    assert_installed(engine)
    assert CLEAN in app.alembic("check")
    app.alembic("downgrade", "base")
    assert_nothing_left(engine)


@pytest.mark.matrix
def test_another_synchronous_driver(host, url, engine, tmp_path):
    app = host(python=make_venv(tmp_path / "venv", "psycopg2-binary", borrow=True))
    app.ini(f"sqlalchemy.url = {url.replace('+psycopg', '+psycopg2').replace('%', '%%')}")
    app.customers()
    app.queue(more=", concurrently=True")
    with engine.begin() as connection:
        connection.execute(text("CREATE FUNCTION neoq_wake() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN END'"))
    assert "a name that sqla_neoq uses is taken; nothing was changed" in app.refused("upgrade", "head")
    with engine.begin() as connection:
        connection.execute(text("DROP FUNCTION neoq_wake()"))
    app.alembic("upgrade", "head")
    assert_installed(engine)
    assert CLEAN in app.alembic("check")
    app.alembic("downgrade", "base")
    assert_nothing_left(engine)


def test_several_schemas(host, engine):
    models = MODELS.replace('"customer"\n', '"customer"\n    __table_args__ = {"schema": "sales"}\n')
    app = host(models=models, configure="include_schemas=True")
    customer = CUSTOMER.replace('sa.UniqueConstraint("email")', 'sa.UniqueConstraint("email"), schema="sales"')
    schemas = "    op.execute('CREATE SCHEMA sales')\n    op.execute('CREATE SCHEMA queue')\n"
    app.revision("start", schemas + customer, "    op.execute('DROP SCHEMA sales CASCADE')")
    app.queue(more=", schema='queue'")
    app.alembic("upgrade", "head")
    assert_installed(engine, "queue")
    assert CLEAN in app.alembic("check")
    app.alembic("downgrade", "base")
    assert_nothing_left(engine, schemas=("public", "queue"))


def test_a_schema_for_each_tenant_by_search_path(host, engine):
    app = host()
    app.edit_env(
        """\
    with connectable.connect() as connection:
        context.configure(
            connection=connection, target_metadata=target_metadata
        )

        with context.begin_transaction():
            context.run_migrations()
""",
        "    with connectable.connect() as connection:\n" + indent(excerpt("A schema for each tenant"), " " * 8),
    )
    app.customers()
    app.queue()
    app.alembic("-x", "tenants=acme,The Bakery", "upgrade", "head")
    for tenant in ("acme", "The Bakery"):
        assert_installed(engine, tenant)
    assert scalar(engine, "SELECT to_regclass('public.neoq_jobs')") is None
    assert CLEAN in app.alembic("-x", "tenants=acme", "check")
    app.alembic("-x", "tenants=acme", "downgrade", "base")
    assert scalar(engine, "SELECT to_regclass('acme.neoq_jobs')") is None
    assert_installed(engine, "The Bakery")

    # A queue of its own in public is not taken for the tenant's.
    with engine.begin() as connection:
        migrations.upgrade(connection)
    said = app.refused("-x", "tenants=acme", "upgrade", "head")
    assert "finds tables of sqla_neoq in schema 'public', but creates new ones in 'acme'; nothing was changed" in said
    assert "Say which are meant: schema='public', or schema='acme'." in said
    assert_installed(engine, "public")


USE = """
from models import Report
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqla_neoq import Job, enqueue
import os

with Session(create_engine(os.environ["NEOQ_DATABASE_URL"])) as session, session.begin():
    report = Report(job_id=enqueue(session, "reports").id)
    session.add(report)
    session.flush()
    assert report.job.queue == "reports"
    session.delete(session.get(Job, report.job_id))
    session.flush()
    session.refresh(report)
    assert report.job_id is None
"""


def test_a_table_of_the_application_s_that_refers_to_jobs(host, engine):
    app = host(models=excerpt("Foreign keys to jobs"))
    app.queue()
    app.alembic("upgrade", "head")
    app.alembic("revision", "--autogenerate", "-m", "reports")
    assert "sa.ForeignKeyConstraint(['job_id'], ['neoq_jobs.id'], ondelete='SET NULL')" in app.written()
    assert app.written().count("op.") == 2
    app.alembic("upgrade", "head")
    assert CLEAN in app.alembic("check")
    (app.directory / "use.py").write_text(USE)
    done = app.run(module="use")
    assert done.returncode == 0, done.stderr
    app.alembic("downgrade", "base")
    assert_nothing_left(engine)


def test_a_naming_convention_of_the_application_s_leaves_our_names_alone(host, engine):
    convention = '{"pk": "HOST_pk_%(table_name)s", "uq": "HOST_uq_%(column_0_name)s", "ck": "HOST_%(constraint_name)s"}'
    app = host(models=MODELS.replace("    pass", f"    metadata = MetaData(naming_convention={convention})", 1))
    app.customers()
    app.queue()
    app.alembic("upgrade", "head")
    assert inspect(engine).get_pk_constraint("customer")["name"] == "HOST_pk_customer"
    assert_installed(engine)
    assert not [name for name in ours(engine) if "HOST" in name]
    assert CLEAN in app.alembic("check")


def test_in_the_middle_of_a_long_chain(host, engine):
    app = host()
    table = '    op.create_table("t{0}", sa.Column("id", sa.Integer(), primary_key=True))'
    for number in range(10):
        app.revision(f"before_{number}", table.format(number), f'    op.drop_table("t{number}")')
    app.queue()
    job = '    op.add_column("t{0}", sa.Column("job_id", sa.BigInteger(), sa.ForeignKey("neoq_jobs.id")))'
    for number in range(5):
        app.revision(f"after_{number}", job.format(number), f'    op.drop_column("t{number}", "job_id")')
    app.alembic("upgrade", "head")
    assert_installed(engine)
    app.alembic("downgrade", "-6")
    assert ours(engine) == set()
    assert "t9" in inspect(engine).get_table_names()
    app.alembic("upgrade", "+3")
    assert len(inspect(engine).get_foreign_keys("t1")) == 1
    app.alembic("upgrade", "head")
    app.alembic("downgrade", "base")
    assert_nothing_left(engine)


def test_several_databases_each_by_its_own_part_of_the_revision(host, url, fresh_database, engine):
    other = fresh_database()
    app = host(template="multidb")
    sections = "".join(
        f"[{name}]\nsqlalchemy.url = {at.replace('%', '%%')}\n" for name, at in (("shop", url), ("logs", other))
    )
    app.ini("databases = shop, logs", sections)
    app.queue()
    # As the template's revisions are: a function for each database.
    path = app.directory / "migrations" / "versions" / "queue_1.py"
    content = (
        path.read_text()
        .replace("def upgrade()", "def upgrade_shop()")
        .replace("def downgrade()", "def downgrade_shop()")
    )
    for way in ("upgrade", "downgrade"):
        content += f'\n\ndef {way}(engine_name):\n    if engine_name == "shop":\n        {way}_shop()\n'
    path.write_text(content)
    app.alembic("upgrade", "head")
    assert_installed(engine)
    other_engine = create_engine(other, poolclass=NullPool)
    assert ours(other_engine) == set()
    app.alembic("downgrade", "base")
    assert_nothing_left(engine)


def test_offline_the_script_goes_through_psql_up_and_down(host, url, engine):
    app = host()
    app.customers()
    app.queue()
    script = app.run("upgrade", "head", "--sql").stdout
    done = psql(url, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert_installed(engine)
    assert scalar(engine, "SELECT version_num FROM alembic_version") == "queue_1"
    done = psql(url, app.run("downgrade", "head:base", "--sql").stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert_nothing_left(engine)


def test_a_downgrade_that_would_lose_jobs_is_refused_unless_forced(host, engine):
    app = host()
    app.customers()
    app.queue()
    app.alembic("upgrade", "head")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('a'), ('b')"))
    before = there(engine)
    said = app.refused("downgrade", "base")
    assert "removing the tables would lose 2 unfinished jobs" in said
    assert "alembic -x neoq_force=yes downgrade" in said
    assert there(engine) == before
    app.alembic("-x", "neoq_force=yes", "downgrade", "base")
    assert_nothing_left(engine)


def test_a_table_of_the_application_s_with_our_name_is_refused_and_stays(host, engine):
    app = host()
    app.revision("start", '    op.create_table("neoq_jobs", sa.Column("id", sa.Integer(), primary_key=True))')
    app.queue()
    app.alembic("upgrade", "start")
    before = there(engine)
    said = app.refused("upgrade", "head")
    assert said.startswith(
        "SchemaError: there is neoq_jobs already, which this release did not make; nothing was changed"
    )
    assert there(engine) == before
    with engine.connect() as connection:
        assert installed_version(connection) == 0


TASKS = """
from sqlalchemy import text
from sqla_neoq import current_job, task

@task
def work():
    job = current_job()
    job.session.execute(text("INSERT INTO done (job) VALUES (:job)"), {"job": job.id})
"""
DONE = '    op.create_table("done", sa.Column("job", sa.BigInteger(), nullable=False))'


NEXT_RELEASE = "from support import release_two\nrelease_two.become()\n"
NEEDS_TWO = f"{NEXT_RELEASE}from sqla_neoq import cli, migrations\nmigrations.OLDEST_USABLE = 2\ncli.main()\n"


def test_a_runner_that_needs_newer_tables_exits_with_4_and_the_lines_to_paste_which_help(
    host, url, engine, run_process
):
    app = host(before=NEXT_RELEASE)
    app.revision("start", DONE)
    app.queue()
    app.alembic("upgrade", "head")
    (app.directory / "mytasks.py").write_text(TASKS)
    (app.directory / "needs_two.py").write_text(NEEDS_TWO)
    env = {"NEOQ_DATABASE_URL": url, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

    def work():
        return run_process("run", "mytasks", "--burst", module="needs_two", cwd=app.directory, env=env)

    with engine.begin() as connection:
        enqueue(connection, "default", task="mytasks:work")
    process = work()
    assert process.wait(60) == 4
    assert "the tables of sqla_neoq have version 1 (on the connection's search_path); this release needs 2" in (
        process.stderr
    )
    lines = process.stderr.splitlines()
    (up,) = [line[4:] for line in lines if "neoq.migrate(op, 1, 2)" in line]
    (down,) = [line[4:] for line in lines if "neoq.migrate(op, 2, 1)" in line]
    app.revision("pasted", up, down)
    app.alembic("upgrade", "head")
    process = work()
    assert process.wait(60) == 0, process.output
    assert scalar(engine, "SELECT count(*) FROM done") == 1
    app.alembic("downgrade", "-1")
    with engine.connect() as connection:
        assert installed_version(connection) == 1


@contextmanager
def producers(url, number=2):
    """Enqueue from several threads until the end; yields what they saw: errors, and the ids of the jobs."""
    stop, errors, ids = threading.Event(), [], []
    # Nothing may wait longer for the migration than the migration may wait itself, and make its changes.
    engine = create_engine(url, connect_args={"options": "-c lock_timeout=10s"})

    def produce():
        try:
            while not stop.is_set():
                with engine.begin() as connection:
                    ids.append(enqueue(connection, "default", task="mytasks:work").id)
                stop.wait(0.01)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=produce) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield errors, ids
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        engine.dispose()


def test_an_upgrade_while_runners_of_both_releases_work_loses_nothing_and_holds_nobody_up(
    host, url, engine, run_process
):
    app = host(before=NEXT_RELEASE)
    app.revision("start", DONE)
    app.queue()
    app.queue(1, 2, ", concurrently=True, lock_timeout=timedelta(seconds=1)")
    path = app.directory / "migrations" / "versions" / "queue_2.py"
    path.write_text(
        path.read_text().replace("import sqlalchemy", "from datetime import timedelta\nimport sqlalchemy", 1)
    )
    app.alembic("upgrade", "queue_1")
    (app.directory / "mytasks.py").write_text(TASKS)
    env = {"NEOQ_DATABASE_URL": url, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

    def start(module, *arguments):
        return run_process(*arguments, "mytasks", module=module, cwd=app.directory, env=env)

    old, new = "sqla_neoq.run", "support.release_two"
    with producers(url) as (errors, ids):
        # Both releases on the version before.
        runners = [start(old), start(new, "run")]
        for runner in runners:
            runner.wait_for("runner started")
        with engine.connect() as blocker:
            blocker.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('nobody-listens')"))
            said = app.refused("upgrade", "head")
            assert "a statement waited longer than lock_timeout for a lock that another transaction holds" in said
            assert "nothing was changed" in said
            blocker.rollback()
        with engine.connect() as connection:
            assert installed_version(connection) == 1
        app.alembic("upgrade", "head")
        # And both on the version after.
        runners.append(start(old))
        runners[-1].wait_for("runner started")
        seen = len(ids)
        eventually(lambda: len(ids) > seen + 20 or errors)
    assert errors == []
    eventually(lambda: scalar(engine, "SELECT count(*) FROM done") >= len(ids), within=60)
    assert [runner.popen.poll() for runner in runners] == [None] * 3
    with engine.connect() as connection:
        assert sorted(connection.scalars(text("SELECT job FROM done"))) == sorted(ids)
        assert connection.scalar(text("SELECT count(*) FROM neoq_failures")) == 0
        assert installed_version(connection) == 2
        valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = CAST('neoq_jobs_note_idx' AS regclass)"
        assert connection.scalar(text(valid))


def test_two_deploys_at_once_both_succeed_where_env_py_takes_the_lock(host, engine):
    app = host(before="from sqla_neoq import migrations as neoq\n")
    online = "        with context.begin_transaction():\n            context.run_migrations()\n"
    app.edit_env(online, indent(excerpt("When deploys overlap"), " " * 8))
    app.customers()
    app.queue()
    assert [code for code, _ in at_once(app, "upgrade", "head")] == [0, 0]
    assert_installed(engine)
    assert scalar(engine, "SELECT version_num FROM alembic_version") == "queue_1"


def test_two_deploys_at_once_without_that_leave_what_one_leaves(host, engine):
    app = host()
    app.customers()
    app.queue()
    app.alembic("upgrade", "customers")
    ended = at_once(app, "upgrade", "head")
    # The second waits, finds our work done, and Alembic notices that its own version has moved on.
    assert 0 in [code for code, _ in ended]
    assert all(code == 0 or "alembic_version" in said for code, said in ended), ended
    app.alembic("upgrade", "head")
    assert_installed(engine)


def test_two_that_migrate_at_once_without_alembic_both_succeed(host, engine):
    app = host()
    ended = at_once(app, "up", "--schema", "queue", "--create-schema", module="sqla_neoq.migrate")
    assert [code for code, _ in ended] == [0, 0], ended
    assert_installed(engine, "queue")


def at_once(app, *arguments, module="alembic"):
    command = app.command(*arguments, module=module)
    both = [
        subprocess.Popen(
            command, cwd=app.directory, env=app.environment(), stdout=-1, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    return [(one.wait(60), said) for one in both for said in [one.communicate()[0]]]


# Roles ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def role(engine):
    """Make a role that may log in and nothing else; returns its name and a function that makes engines for it."""
    made = []

    def make(kind):
        name = f"neoq {kind} {uuid.uuid4().hex[:8]}"
        with engine.begin() as connection:
            connection.execute(text(f"CREATE ROLE \"{name}\" LOGIN PASSWORD 'secret'"))
        own = create_engine(engine.url.set(username=name, password="secret"))
        made.append((name, own))
        return name, own

    yield make
    for name, own in made:
        own.dispose()
        with engine.begin() as connection:
            connection.execute(text(f'DROP OWNED BY "{name}"'))
            connection.execute(text(f'DROP ROLE "{name}"'))


def refused(engine, sql):
    with engine.connect() as connection, pytest.raises(ProgrammingError, match=r"permission denied|must be owner"):
        connection.execute(text(sql))


@task(name="note")
def note(job_id: int) -> None:
    """Write in the job's own session."""
    from sqla_neoq import current_job

    current_job().session.execute(text("INSERT INTO app.done (job) VALUES (:job)"), {"job": job_id})


@task(name="fail", max_retries=0)
def fail() -> None:
    raise RuntimeError("as it should")


def test_a_worker_without_any_ddl_right_does_all_its_work(host, engine, role):
    worker, worker_engine = role("worker")
    producer, producer_engine = role("producer")
    up = ["up", "--schema", "the queue", "--create-schema", "--grant", worker, "--grant-producer", producer]
    done = host().run(*up, module="sqla_neoq.migrate")
    assert done.returncode == 0, done.stderr
    options = {"neoq_schema": "the queue"}
    owner = engine.execution_options(**options, schema_translate_map={None: "the queue"})
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA app"))
        connection.execute(text("CREATE TABLE app.done (job bigint)"))
        connection.execute(text(f'GRANT USAGE ON SCHEMA app TO "{worker}"'))
        connection.execute(text(f'GRANT INSERT ON app.done TO "{worker}"'))
        # What a dead worker left behind, and what finished long ago.
        connection.execute(
            text(
                """INSERT INTO "the queue".neoq_jobs (queue, task, payload, status, claim_token, worker_id, finished_at)
                VALUES ('default', 'note', '{"job_id": 3}', 'running', 1, 999, NULL),
                       ('default', 'note', '{"job_id": 4}', 'processed', NULL, NULL, now() - interval '30 days')"""
            )
        )
        connection.execute(
            text(
                """INSERT INTO "the queue".neoq_jobs (queue, task, deadline)
                VALUES ('default', 'fail', now() - interval '1 day')"""
            )
        )
        connection.execute(
            text(
                """INSERT INTO "the queue".neoq_failures (job_id, attempt, kind, message, failed_at)
                VALUES (1, 1, 'error', 'long ago', now() - interval '30 days')"""
            )
        )

    with producer_engine.execution_options(**options).begin() as connection:
        assert enqueue(connection, "default", {"job_id": 1}, task="note", unique=True).created
        assert not enqueue(connection, "default", {"job_id": 1}, task="note", unique=True).created
        enqueue_many(connection, [note.job(job_id=2), fail.job()])
    for sql in (
        'UPDATE "the queue".neoq_jobs SET priority = 1',
        'DELETE FROM "the queue".neoq_jobs',
        'SELECT * FROM "the queue".neoq_dead_jobs',
        'INSERT INTO "the queue".neoq_workers (name) VALUES (1)',
        'UPDATE "the queue".neoq_meta SET version = 7',
        'CREATE TABLE "the queue".mine ()',
    ):
        refused(producer_engine, sql)
    with pytest.raises(SchemaError, match="lacks a right") as refusal:
        Runner(producer_engine, [note], config=RunnerConfig(schema="the queue")).check()
    assert "up --grant" in refusal.value.remedy

    config = RunnerConfig(schema="the queue", heartbeat_interval=timedelta(seconds=0.1))
    with Runner(worker_engine, [note, fail], config=config):
        eventually(lambda: scalar(engine, "SELECT count(*) FROM app.done") == 3, within=30)
        dead = "SELECT count(*) FROM \"the queue\".neoq_dead_jobs WHERE reason IN ('exhausted', 'deadline')"
        eventually(lambda: scalar(engine, dead) == 2, within=30)
        old = """SELECT count(*) FROM "the queue".neoq_jobs WHERE finished_at < now() - interval '7 days'"""
        eventually(lambda: scalar(engine, old) == 0, within=30)
        eventually(
            lambda: scalar(engine, """SELECT count(*) FROM "the queue".neoq_failures WHERE message = 'long ago'""") == 0
        )
    for sql in (
        'ALTER TABLE "the queue".neoq_jobs ADD COLUMN mine text',
        'CREATE TABLE "the queue".mine ()',
        'DROP TABLE "the queue".neoq_jobs',
        'UPDATE "the queue".neoq_meta SET version = 7',
        'TRUNCATE "the queue".neoq_jobs',
        "SELECT * FROM app.done",
    ):
        refused(worker_engine, sql)
    with owner.connect() as connection:
        assert migrations.check(connection, schema="the queue") == []


def test_a_database_that_is_away_is_the_driver_s_sentence(host):
    app = host()
    app.customers()
    app.ini("sqlalchemy.url = postgresql+psycopg://u:secret@127.0.0.1:1/d")
    said = app.refused("upgrade", "head")
    assert "connection failed" in said
    assert "secret" not in said


def test_whoever_may_not_create_tables_is_told_so_and_nothing_is_changed(host, engine, role):
    name, own = role("nobody")
    app = host()
    app.queue()
    with engine.begin() as connection:
        # Alembic's own table, which this role cannot make either.
        connection.execute(text("CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)"))
        connection.execute(text(f'GRANT ALL ON alembic_version TO "{name}"'))
        connection.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))
    app.ini(f"sqlalchemy.url = {own.url.render_as_string(hide_password=False).replace('%', '%%')}")
    before = there(engine)
    said = app.refused("upgrade", "head")
    assert "the database role lacks a right that this needs; nothing was changed: permission denied for schema" in said
    assert "may CREATE in their schema" in said
    assert there(engine) == before
