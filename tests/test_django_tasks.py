"""The backend of ``django.tasks``: what Django's own tests of a backend ask, with a real worker in between."""

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool
from support.django_project import Project
from support.processes import ROOT, environment
from support.running import Database

django_6 = pytest.mark.skipif(
    not find_spec("django") or not find_spec("django.tasks"), reason="django.tasks came with Django 6, on Python 3.12"
)

TASKS = """
from django.tasks import task


@task
def add(a, b=1):
    return a + b


@task(takes_context=True, queue_name="mails, and: more", priority=7)
async def tell(context):
    return [context.attempt, str(context.task_result.status), context.task_result.id]


@task
def fail():
    raise ValueError("it\\nError: is this")


@task
def leave():
    raise SystemExit(3)


@task
def cannot_be_json():
    return object()
"""


@pytest.fixture
def url(fresh_database):
    return fresh_database()


@pytest.fixture
def database(url):
    engine = create_engine(url, poolclass=NullPool)
    yield Database(engine)
    engine.dispose()


@pytest.fixture
def project(tmp_path, url):
    project = Project(tmp_path / "project", url, TASKS)
    project.manage("migrate", "neoq", "--verbosity", "0")
    return project


@pytest.fixture
def work(project, run_process):
    def work():
        worker = run_process("neoq_worker", "--burst", module="django", cwd=project.directory, env=project.environment)
        assert worker.wait() == 0, worker.output
        return worker.output

    return work


@django_6
def test_tasks_are_enqueued_in_the_transaction_and_their_results_found(project, database, work):
    enqueue = """
import asyncio
from datetime import timedelta
from django.db import transaction
from django.tasks import default_task_backend, task_backends
from django.tasks.signals import task_enqueued
from django.utils import timezone
from shop import tasks

enqueued = []
task_enqueued.connect(lambda sender, task_result, **_: enqueued.append(task_result.id), weak=False)
with transaction.atomic():
    tasks.add.enqueue(5)
    transaction.set_rollback(True)
result = tasks.add.enqueue(2, b=3)
assert result == tasks.add.get_result(result.id) == default_task_backend.get_result(result.id)
assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
assert (result.task, result.args, result.kwargs) == (tasks.add, [2], {"b": 3})
ids = [result.id, asyncio.run(tasks.tell.aenqueue()).id]
ids += [task.enqueue().id for task in (tasks.fail, tasks.leave, tasks.cannot_be_json)]
later = tasks.add.using(run_after=timezone.now() + timedelta(hours=1), priority=-100)
deferred = later.enqueue(1)
assert deferred.task == later and deferred == later.get_result(deferred.id)
assert enqueued[1:] == [*ids, deferred.id]
print(*ids, deferred.id)
"""
    ids = project.python(enqueue).split()
    assert [(row.queue, row.priority) for row in database.rows()] == [
        ("default", 0),
        ("mails, and: more", 7),
        *[("default", 0)] * 3,
        ("default", -100),
    ]
    output = work()
    assert "path=shop.tasks.add state=SUCCESSFUL" in output
    assert "path=shop.tasks.fail state=FAILED" in output
    look = """
import sys
from django.tasks import default_task_backend

for id in sys.argv[1:]:
    result = default_task_backend.get_result(id)
    assert result.is_finished == (result.finished_at is not None)
    if result.is_finished:
        assert result.enqueued_at <= result.started_at <= result.last_attempted_at <= result.finished_at
        assert len(result.worker_ids) == result.attempts == 1
    try:
        value = result.return_value
    except ValueError as error:
        value = error
    print(result.status, value, *(error.exception_class.__name__ for error in result.errors))
"""
    assert project.python(f"import sys; sys.argv[1:] = {ids!r}\n{look}").splitlines() == [
        "SUCCESSFUL 5",
        f"SUCCESSFUL [1, 'RUNNING', '{ids[1]}']",
        "FAILED Task failed ValueError",
        "FAILED Task failed SystemExit",
        "FAILED Task failed TypeError",
        "READY Task has not finished yet",
    ]


@django_6
def test_what_is_no_result_of_this_backend_does_not_exist(project, database):
    other = database.add(queue="default")
    script = f"""
from django.tasks import default_task_backend
from django.tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
from shop import tasks

for id in ("123456", "{other}", "not-a-number", "-1", "9" * 30):
    try:
        print(default_task_backend.get_result(id))
    except TaskResultDoesNotExist:
        pass
try:
    print(tasks.fail.get_result(tasks.add.enqueue(1).id))
except TaskResultMismatch:
    pass
try:
    print(tasks.add.enqueue(object()))
except TypeError:
    pass
try:
    print(tasks.add.using(queue_name="unheard-of"))
except Exception as error:
    print(type(error).__name__)
"""
    assert project.python(script) == "InvalidTask"
    assert len(database.rows()) == 2


@django_6
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"retries": 5}, "['retries'] mean nothing here"),
        ({"timeout": 0}, "['timeout']=0: expected seconds above 0"),
        ({"max_retries": -1}, "max_retries=-1"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(project, options, sentence):
    script = f"""
from sqla_neoq.contrib.django import NeoqBackend
try:
    NeoqBackend("default", {{"OPTIONS": {options!r}}})
except Exception as error:
    print(type(error).__name__, error)
"""
    said = project.python(script)
    assert said.startswith("ImproperlyConfigured TASKS['default']['OPTIONS']")
    assert sentence in said


def runs(python):
    """Whether there is such an interpreter: pyenv has names for those that are not switched on, too."""
    return shutil.which(python) is not None and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


@pytest.mark.matrix
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the tests above have run on this Python")
def test_on_a_python_that_django_6_runs_on(server_url, tmp_path):
    newer = next(filter(runs, (f"python3.{minor}" for minor in (14, 13, 12))), None)
    if newer is None:
        pytest.skip("there is no Python 3.12 or newer on the PATH")
    subprocess.run([newer, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    needed = [f"{ROOT}[asyncio,embedded]", "django>=6", "pytest", "testcontainers", "hypothesis"]
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *needed], check=True, env=environment({"PYTHONPATH": None})
    )
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--pg={server_url}",
        "tests/test_django_tasks.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment({}), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-2_000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
