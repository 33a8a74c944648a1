"""``python -m sqla_neoq.migrate``: each command, its exit codes, and its sentence for what cannot be."""

import uuid

import click.testing
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool
from support.hosts import psql, scalar, there
from support.release_two import StepTwo

from sqla_neoq import migrate, migrations
from sqla_neoq.migrations import LATEST

ODD = "the queue's"


@pytest.fixture
def engine(fresh_database):
    engine = create_engine(fresh_database(), poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def url(engine):
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def neoq(url, monkeypatch):
    """Run a command on the empty database; returns what it wrote, after checking its exit code."""
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.delenv("NEOQ_DATABASE_URL", raising=False)
    monkeypatch.delenv("NEOQ_SCHEMA", raising=False)

    def run(*arguments, code=0):
        done = click.testing.CliRunner().invoke(migrate.main, arguments)
        assert done.exit_code == code, done.output
        return done.output

    return run


def test_up_installs_once_and_says_what_it_did(neoq, engine):
    assert neoq("up") == f"from version 0 to {LATEST}\n"
    before = there(engine)
    assert neoq("up") == f"version {LATEST}\n"
    assert there(engine) == before


def test_down_takes_everything_away_and_may_be_said_twice(neoq, engine):
    before = there(engine)
    neoq("up")
    assert neoq("down") == f"from version {LATEST} to 0\n"
    assert there(engine) == before
    assert neoq("down") == "version 0\n"


def test_down_with_unfinished_jobs_says_how_many_and_needs_force(neoq, engine):
    neoq("up")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('q'), ('q'), ('q')"))
    said = neoq("down", code=4)
    assert said.startswith("Error: removing the tables would lose 3 unfinished jobs\n\n")
    assert "--force" in said
    assert scalar(engine, "SELECT count(*) FROM neoq_jobs") == 3
    neoq("down", "--force")
    assert scalar(engine, "SELECT to_regclass('neoq_jobs')") is None


def test_current_says_both_versions(neoq):
    assert neoq("current") == f"not installed; this release brings version {LATEST}\n"
    neoq("up")
    assert neoq("current") == f"{LATEST} of {LATEST}\n"


def test_check_says_each_difference_and_exits_with_1(neoq, engine):
    assert "the tables of sqla_neoq are not there" in neoq("check", code=4)
    neoq("up")
    assert neoq("check") == f"version {LATEST}, as it should be\n"
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX neoq_jobs_claim_idx"))
        connection.execute(text("ALTER TABLE neoq_jobs ALTER COLUMN queue SET DEFAULT 'mine'"))
    lines = neoq("check", code=1).splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["column neoq_jobs.queue", "index neoq_jobs_claim_idx"]


def test_a_schema_of_its_own_is_created_on_demand(neoq, engine):
    said = neoq("up", "--schema", ODD, code=4)
    assert said.startswith("Error: the schema is not there; nothing was changed")
    neoq("up", "--schema", ODD, "--create-schema")
    neoq("up", "--schema", ODD, "--create-schema")
    assert neoq("check", "--schema", ODD) == f"version {LATEST}, as it should be\n"
    assert neoq("current").startswith("not installed")
    assert "--create-schema needs --schema" in neoq("up", "--create-schema", code=2)


@pytest.mark.parametrize("schema", [(), ("--schema", ODD)])
def test_the_sql_goes_through_psql_up_and_down(neoq, engine, url, schema):
    if schema:
        with engine.begin() as connection:
            connection.execute(text(f'CREATE SCHEMA "{ODD}"'))
    before = there(engine)
    for script in (neoq("sql", *schema), neoq("sql", "--from", str(LATEST), "--to", "0", *schema)):
        done = psql(url, script)
        assert (done.returncode, done.stderr) == (0, "")
        if "CREATE" in script:
            assert "as it should be" in neoq("check", *schema)
    assert there(engine) == before


def test_up_concurrently_builds_the_index_after_the_step(neoq, engine, url, monkeypatch):
    neoq("up")
    monkeypatch.setattr(migrations, "_STEPS", (*migrations._STEPS[:1], StepTwo))
    monkeypatch.setattr(migrations, "LATEST", 2)
    # Called as it is, because --to knows no 2.
    migrate.up.callback(url=url, schema=None, to=2, create_schema=False, concurrently=True, grant=(), grant_producer=())
    assert neoq("check") == "version 2, as it should be\n"
    assert scalar(
        engine,
        "SELECT indisvalid FROM pg_index WHERE indexrelid = CAST('neoq_jobs_note_idx' AS regclass)",
    )


def test_a_role_that_is_not_there_is_a_sentence_and_nothing_was_installed(neoq):
    said = neoq("up", "--grant", "nobody-there", code=4)
    assert said == 'Error: nothing was changed: role "nobody-there" does not exist\n'
    assert neoq("current").startswith("not installed")


def test_a_role_is_let_into_the_schema_that_the_search_path_names(neoq, engine):
    url = engine.url.update_query_dict({"options": "-c search_path=lane"})
    role = f"neoq_{uuid.uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA lane"))
        connection.execute(text(f"CREATE ROLE {role}"))
    try:
        neoq("up", "--grant", role, "--url", url.render_as_string(hide_password=False))
        assert scalar(engine, f"SELECT has_schema_privilege('{role}', 'lane', 'USAGE')")
        assert neoq("check", "--schema", "lane") == f"version {LATEST}, as it should be\n"
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


def test_tables_newer_than_this_release_are_left_alone(neoq, engine):
    neoq("up")
    with engine.begin() as connection:
        connection.execute(text("UPDATE neoq_meta SET version = 9"))
    assert "the tables have version 9, newer than the 1 asked for" in neoq("up", code=4)
    for command in ("check", "down"):
        said = neoq(command, code=4)
        assert "the tables of sqla_neoq have version 9" in said
        assert "this release knows up to 1" in said
        assert "pip install --upgrade" in said
    assert scalar(engine, "SELECT version FROM neoq_meta") == 9


def test_no_connection_is_one_sentence_without_the_password(neoq):
    for command in ("up", "down", "current", "check"):
        said = neoq(command, "--url", "postgresql://u:secret@127.0.0.1:1/d", code=3)
        assert said.startswith("Error: cannot connect: ")
        assert "secret" not in said
        assert "Traceback" not in said


def test_a_url_that_cannot_be_is_a_usage_error(neoq, monkeypatch):
    assert "a schema's name is not empty" in neoq("sql", "--schema", "", code=2)
    assert "not mysql://" in neoq("up", "--url", "mysql://h/d", code=2)
    monkeypatch.delenv("DATABASE_URL")
    assert "DATABASE_URL" in neoq("up", code=2)


def test_a_database_that_is_not_there_is_no_connection(neoq, engine):
    missing = make_url(engine.url).set(database="neoq_not_there").render_as_string(hide_password=False)
    assert "neoq_not_there" in neoq("up", "--url", missing, code=3)


INI = "[alembic]\nscript_location = %(here)s/migrations\npath_separator = os\n"
MAKO = """\"\"\"${message}\"\"\"
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
def upgrade():
    ${upgrades if upgrades else "pass"}
def downgrade():
    ${downgrades if downgrades else "pass"}
"""


def test_revision_writes_after_the_head_or_says_what_is_wrong(neoq, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no alembic.ini; name your Alembic configuration with --config" in neoq("revision", code=2)
    (tmp_path / "alembic.ini").write_text(INI)
    assert "Path doesn't exist" in neoq("revision", code=1)
    versions = tmp_path / "migrations" / "versions"
    versions.mkdir(parents=True)
    (versions.parent / "script.py.mako").write_text(MAKO)
    assert "there is nothing to write" in neoq("revision", "--from", "1", "--to", "1", code=2)
    neoq("revision", "-m", "first")
    neoq("revision", "-m", "second", "--schema", "it's")
    (first,) = versions.glob("*first.py")
    (second,) = versions.glob("*second.py")
    assert "\n    neoq.migrate(op, 0, 1)\n" in first.read_text()
    assert "\n    neoq.migrate(op, 1, 0)\n" in first.read_text()
    assert "from sqla_neoq import migrations as neoq\n" in first.read_text()
    assert '    neoq.migrate(op, 0, 1, schema="it\'s")\n' in second.read_text()
    assert f"down_revision = '{first.name.split('_')[0]}'" in second.read_text()
    neoq("revision", "-m", "branch", "--head", "base")
    assert "Multiple heads are present" in neoq("revision", code=1)
