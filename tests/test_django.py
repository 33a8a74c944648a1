"""The Django application in a project of its own, with real processes: migrations, worker, connections, admin."""

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.pool import NullPool
from support import eventually
from support.django_project import Project
from support.running import Database

from sqla_neoq import migrations
from sqla_neoq.models import Base

TASKS = """
from django.db import connection

from sqla_neoq import task


@task(queue="users")
def add_user(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO users VALUES (%s)", [name])
"""
ENQUEUE = """
from django.db import connection, transaction
from shop.tasks import add_user

with transaction.atomic():
    add_user.enqueue(connection, {name!r})
"""


@pytest.fixture
def url(fresh_database):
    return fresh_database()


@pytest.fixture
def project(tmp_path, url):
    return Project(tmp_path / "project", url, TASKS)


@pytest.fixture
def database(url):
    engine = create_engine(url, poolclass=NullPool)
    yield Database(engine)
    engine.dispose()


@pytest.fixture
def migrated(project, database):
    """The project with the queue's tables, and one of its own."""
    project.manage("migrate", "neoq", "--verbosity", "0")
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE users (name text)"))
    return project


def users(database):
    with database.begin() as connection:
        return list(connection.scalars(text("SELECT name FROM users")))


def test_the_migration_makes_the_tables_as_they_should_be_and_takes_them_away(project, database):
    assert "neoq_claim_tokens" in project.manage("sqlmigrate", "neoq", "0001")
    project.manage("migrate", "neoq", "--verbosity", "0")
    with database.engine.connect() as connection:
        assert migrations.check(connection) == []
    assert "No changes detected" in project.manage("makemigrations", "--check")
    project.manage("migrate", "neoq", "zero")
    assert [name for name in inspect(database.engine).get_table_names() if name.startswith("neoq")] == []


def test_the_tables_stay_while_there_are_unfinished_jobs(migrated, database):
    database.add(queue="q")
    output = migrated.manage("migrate", "neoq", "zero", code=1)
    assert "would lose unfinished jobs" in output
    assert len(database.rows()) == 1


def test_the_models_have_the_columns_of_the_tables(project):
    script = """
from django.apps import apps
for model in apps.get_app_config("neoq").get_models():
    print(model._meta.db_table, *sorted(field.column for field in model._meta.fields))
"""
    said = {line.split()[0]: line.split()[1:] for line in project.python(script).splitlines()}
    tables = Base.metadata.tables
    assert said == {name: sorted(tables[name].columns.keys()) for name in said}
    assert set(said) == {"neoq_jobs", "neoq_dead_jobs", "neoq_failures"}


def test_a_job_exists_with_its_transaction_and_a_worker_runs_it(migrated, database, run_process):
    migrated.python(ENQUEUE.format(name="lost") + "    transaction.set_rollback(True)\n")
    migrated.python(ENQUEUE.format(name="ada"))
    worker = run_process("neoq_worker", "--burst", module="django", cwd=migrated.directory, env=migrated.environment)
    assert worker.wait() == 0, worker.output
    assert [(row.task, row.status) for row in database.rows()] == [("shop.tasks:add_user", "processed")]
    assert users(database) == ["ada"]


def test_a_commit_of_djangos_completes_the_job(migrated, database, run_process):
    more = """
from django.db import transaction
from sqla_neoq import current_job

@task(queue="shop", max_retries=0)
def add_once(name: str) -> None:
    with transaction.atomic():
        add_user(name)
        current_job().complete(connection)
    raise RuntimeError("too late to fail")
"""
    tasks = migrated.directory / "shop" / "tasks.py"
    tasks.write_text(tasks.read_text() + more)
    migrated.python(ENQUEUE.format(name="ada").replace("add_user", "add_once"))
    worker = run_process("neoq_worker", "--burst", module="django", cwd=migrated.directory, env=migrated.environment)
    assert worker.wait() == 0, worker.output
    assert [(row.task, row.status) for row in database.rows()] == [("shop.tasks:add_once", "processed")]
    assert users(database) == ["ada"]


def test_several_processes_are_started_by_the_same_command(migrated, database, run_process):
    migrated.python(ENQUEUE.format(name="ada"))
    worker = run_process(
        *["neoq_worker", "shop.tasks", "--processes", "2", "--burst", "--database", "default"],
        module="django",
        cwd=migrated.directory,
        env=migrated.environment,
    )
    assert worker.wait() == 0, worker.output
    assert worker.output.count("runner started") == 2
    assert [row.status for row in database.rows()] == ["processed"]


def test_a_thread_finds_its_connection_anew_when_the_server_has_closed_it(migrated, database, run_process):
    worker = run_process(
        "neoq_worker", "--concurrency", "1", module="django", cwd=migrated.directory, env=migrated.environment
    )
    for name in ("ada", "bob"):
        migrated.python(ENQUEUE.format(name=name))
        eventually(lambda: "new" not in (now := database.statuses().values()) and "running" not in now)
        assert set(database.statuses().values()) == {"processed"}, worker.output
        database.cut_backends("shop")  # the connection that the settings keep for ever


def test_the_admin_shows_the_jobs_and_changes_nothing(project, database):
    project.manage("migrate", "--verbosity", "0")
    job = database.add(queue="q", payload={"a": 1})
    script = f"""
from django.contrib.auth.models import User
from django.test import Client

User.objects.create_superuser("root", password="x")
client = Client()
client.force_login(User.objects.get())
for page in ("job/", "job/{job}/change/", "job/?q={job}", "deadjob/", "failure/"):
    print(client.get("/admin/neoq/" + page).status_code, end=" ")
print(client.get("/admin/neoq/job/add/").status_code, client.post("/admin/neoq/job/{job}/delete/").status_code, end=" ")
print(client.post("/admin/neoq/job/{job}/change/", {{"queue": "other"}}).status_code)
"""
    assert project.python(script) == "200 200 200 200 200 403 403 403"
    assert [row.queue for row in database.rows()] == ["q"]


def test_the_settings_of_a_database_become_a_url(project):
    script = "from sqla_neoq.contrib.django.databases import url_of\nprint(url_of('role').render_as_string(False))"
    assert project.python(script) == (
        "postgresql+psycopg://me%40x:p%3Aw%2Fd@/a/b?host=%2Frun%2Fpg&options=-c+role%3Da%5C+b&port=6543&sslmode=disable"
    )


def test_another_kind_of_database_is_refused(project):
    output = project.manage("neoq_worker", "--database", "small", code=1)
    assert "DATABASES['small']: the jobs are in PostgreSQL, and this is sqlite" in output


def test_without_tasks_the_worker_says_what_it_lacks(tmp_path, url):
    project = Project(tmp_path / "other", url, "")
    with (project.directory / "settings.py").open("a") as settings:
        settings.write("TASKS = {}\n")
    assert "no installed application has a module 'tasks'" in project.manage("neoq_worker", code=1)


def test_the_worker_is_not_to_be_called_from_code(project):
    script = """
from django.core.management import CommandError, call_command
try:
    call_command("neoq_worker")
except CommandError as error:
    print(error)
"""
    assert "use sqla_neoq.Runner" in project.python(script)
