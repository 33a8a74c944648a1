"""The command line in this process; ``tests/test_run.py`` has it in processes of its own."""

import itertools
import json
import logging
import os
import re
import signal
import sys
import textwrap
from typing import NamedTuple

import click
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from sqla_neoq import cli
from sqla_neoq.config import RunnerConfig
from sqla_neoq.supervisor import LINE_VARIABLE

TASKS = """
from sqla_neoq import handler, task

@task(queue="emails", max_retries=5)
def send(to): ...

@handler("greetings", concurrency=8)
def greet(job): ...
"""

number = itertools.count()


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch):
    """Undo what a worker's process does to itself: signals, logging, the module path, the environment."""
    for name in [*os.environ]:
        if name.startswith("NEOQ_") or name == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    root = logging.getLogger()
    handlers, level, modules = list(root.handlers), root.level, set(sys.modules)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    for name in set(sys.modules) - modules:
        if name.startswith("neoqcli"):
            del sys.modules[name]


@pytest.fixture
def app(tmp_path):
    """Write a module of a new name below tmp_path, the --app-dir; returns the name."""

    def write(code=TASKS):
        name = f"neoqcli{next(number)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return name

    return write


class Said(NamedTuple):
    stdout: str
    stderr: str

    @property
    def output(self):
        return self.stdout + self.stderr


@pytest.fixture
def neoq(tmp_path, monkeypatch, capsys):
    """Call the command line, assert its exit code, and return what it said; --app-dir is tmp_path by default."""

    def call(*arguments, code=0, **env):
        with monkeypatch.context() as patch:
            for name, value in ({"NEOQ_APP_DIR": str(tmp_path)} | env).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                cli.main(arguments, prog_name="sqla-neoq")
        said = Said(*capsys.readouterr())
        assert (ended.value.code or 0) == code, said
        return said

    return call


def rows(table):
    return [line.split() for line in table.splitlines()]


def settings(result):
    return dict(line.split(None, 1) for line in result.stdout.rpartition("SETTING")[2].splitlines()[1:])


# Flags and the environment


def flags(command):
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize("command", [cli.run, cli.status])
def test_every_flag_has_a_variable_and_both_are_in_the_help(command, neoq):
    help_text = re.sub(r"\s+", " ", neoq(command.name, "-h").stdout)
    for flag in flags(command):
        if flag.name in {"help", "url"}:
            continue
        long = max(flag.opts, key=len)
        assert flag.envvar == [f"NEOQ_{long[2:].replace('-', '_').upper()}"]
        assert f" {long}" in help_text
        assert f"env var: {flag.envvar[0]}" in help_text
    assert "env var: NEOQ_DATABASE_URL, DATABASE_URL" in help_text


def test_the_defaults_are_those_of_the_runner(neoq, app):
    shown = settings(neoq("run", app(), "--dry-run"))
    config = RunnerConfig()
    assert shown == {name: str(getattr(config, name)) for name in shown}
    assert {"concurrency", "poll_interval", "shutdown_timeout", "retention", "listen"} <= set(shown)


def test_flags_reach_the_runner(neoq, app):
    given = "--dry-run -c 3 --max-jobs 7 --shutdown-timeout 1m --poll-interval 500ms --retention none --no-listen"
    shown = settings(neoq("run", app(), *given.split(), "--schema", "The Queue's", "--name", "w1"))
    assert shown == settings(neoq("run", app(), "--dry-run")) | {
        "concurrency": "3",
        "max_jobs": "7",
        "shutdown_timeout": "0:01:00",
        "poll_interval": "0:00:00.500000",
        "retention": "None",
        "listen": "False",
        "schema": "The Queue's",
        "name": "w1",
    }


def test_variables_reach_the_runner_and_flags_beat_them(neoq, app):
    variables = {"NEOQ_DRY_RUN": "1", "NEOQ_CONCURRENCY": "3", "NEOQ_RETENTION": "12h", "NEOQ_NO_LISTEN": "1"}
    shown = settings(neoq("run", app(), "--retention", "0", **variables))
    assert (shown["concurrency"], shown["retention"], shown["listen"]) == ("3", "0:00:00", "False")


def queues(result):
    table = result.stdout.split("\n\n")[1]
    return {name: int(limit) for name, limit in (line.rsplit(None, 1) for line in table.splitlines()[1:])}


def test_without_queues_it_works_on_those_of_the_tasks_and_handlers(neoq, app):
    assert queues(neoq("run", app(), "--dry-run")) == {"emails": 10, "greetings": 8}


@pytest.mark.parametrize(
    ("arguments", "variable", "limits", "concurrency"),
    [
        (["-q", "emails:10,default:5"], None, {"emails": 10, "default": 5}, "15"),
        (["-q", "emails:2", "-q", r"a\,b:1"], None, {"emails": 2, "a,b": 1}, "3"),
        (["-q", "emails:2,other"], None, {"emails": 2, "other": 10}, "10"),
        (["-q", "emails:2,other", "-c", "4"], None, {"emails": 2, "other": 4}, "4"),
        ([], "two words:3,ümlaut:1", {"two words": 3, "ümlaut": 1}, "4"),
        (["-q", "emails"], "other", {"emails": 10}, "10"),
    ],
)
def test_queues_have_numbers_whose_sum_is_the_concurrency(arguments, variable, limits, concurrency, neoq, app):
    env = {} if variable is None else {"NEOQ_QUEUES": variable}
    result = neoq("run", app(), "--dry-run", *arguments, **env)
    assert queues(result) == limits
    assert settings(result)["concurrency"] == concurrency


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-q", "a,,b"], "'a,,b' is not a list of queues"),
        (["-q", "a:0"], "queue 'a' would run 0 jobs at once"),
        (["-c", "0"], "0 is not in the range x>=1"),
        (["--retention", "soon"], "'soon' is not a duration"),
        (["--shutdown-timeout", "none"], "'none' is not a duration"),
        (["--poll-interval", "0"], "poll_interval="),
        (["--health-port", "http"], "'http' is not a port"),
        (["--schema", ""], "schema=''"),
        (["--log-level", "loud"], "'loud' is not one of"),
        (["--log-config", "none.toml"], "'none.toml' does not exist"),
        (["--app-dir", "no/such"], "'no/such' does not exist"),
        (["--queue", "a"], "No such option"),
        (["-q", "x" * 129], "128"),
    ],
)
def test_a_value_that_cannot_be_is_a_usage_error_in_a_sentence(arguments, sentence, neoq, app):
    assert sentence in neoq("run", app(), "--dry-run", *arguments, code=2).stderr


# What is in the modules


def test_a_dry_run_shows_tasks_queues_and_options_without_a_database(neoq, app):
    name = app()
    tasks, queues, _ = neoq("run", name, "--dry-run", "--processes", "3").stdout.split("\n\n")
    assert rows(tasks) == [
        ["TASK", "QUEUE", "RETRIES", "TIMEOUT"],
        [f"{name}:send", "emails", "5", "30s"],
        ["(handler)", "greetings", "23", "30s"],
    ]
    assert rows(queues) == [["QUEUE", "AT", "ONCE"], ["emails", "10"], ["greetings", "8"]]


def test_several_modules_are_one_worker_and_a_task_named_twice_is_one(neoq, app):
    first = app()
    second = app(f"from {first} import send\nfrom sqla_neoq import task\n@task\ndef other(): ...")
    tasks = rows(neoq("run", first, second, f"{first}:send", "--dry-run").stdout.split("\n\n")[0])
    assert [row[0] for row in tasks] == ["TASK", f"{first}:send", f"{second}:other", "(handler)"]


def test_modules_are_looked_for_first_in_the_app_dir(neoq, app, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    name = app("raise SystemExit(9)")
    (tmp_path / "elsewhere" / f"{name}.py").write_text(TASKS)
    sys.path.insert(0, str(tmp_path))
    assert f"{name}:send" in neoq("run", name, "--app-dir", str(tmp_path / "elsewhere"), "--dry-run").stdout


@pytest.mark.parametrize("command", [["run", "--dry-run"], ["run"]])
def test_a_run_without_a_module_says_what_to_name(command, neoq):
    assert "name a MODULE that holds tasks" in neoq(*command, code=2).stderr


def test_a_module_that_does_not_exist_is_told_from_one_that_fails(neoq, app):
    missing = neoq("run", "neoq_no_such", "--dry-run", code=2).stderr
    assert missing == "Error: there is no module neoq_no_such; is --app-dir right?\n"
    name = app("def load():\n    import neoq_no_such\nload()")
    failing = neoq("run", name, "--dry-run", code=2).stderr
    assert failing.splitlines()[-1] == (
        f"Error: {name} cannot be imported: ModuleNotFoundError: No module named 'neoq_no_such'"
    )
    assert f'{name}.py", line 2, in load' in failing
    assert "cli.py" not in failing
    assert "targets.py" not in failing


def test_a_module_that_is_no_python_is_shown_where(neoq, app):
    assert "SyntaxError" in neoq("run", app("def ("), "--dry-run", code=2).stderr


def test_two_tasks_of_one_name_are_named(neoq, app):
    code = 'from sqla_neoq import task\n@task(name="same")\ndef a(): ...\n@task(name="same")\ndef b(): ...'
    assert "two tasks are called 'same'" in neoq("run", app(code), "--dry-run", code=2).stderr


def test_a_module_without_tasks_is_named(neoq, app):
    name = app("x = 1")
    assert f"module {name} has no tasks" in neoq("run", name, "--dry-run", code=2).stderr


# Where the database is


def test_without_a_database_it_says_both_ways(neoq, app):
    for command in (["run", app()], ["run", app(), "--processes", "2"], ["status"]):
        said = neoq(*command, code=2).stderr
        assert "NEOQ_DATABASE_URL" in said
        assert "--embedded" in said


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("u:secret@h/d", "this is not a database URL"),
        ("postgresql://u:secret@h:port/d", "this is not a database URL"),
        ("sqlite:///secret", "the runner works on postgresql://"),
        ("postgresql+asyncpg://u:secret@h/d", "not postgresql+asyncpg://"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--processes", "2"]])
def test_a_url_of_no_use_is_refused_without_being_repeated(url, sentence, arguments, neoq, app):
    said = neoq("run", app(), *arguments, DATABASE_URL=url, code=2).output
    assert sentence in said
    assert "secret" not in said


def test_a_listen_url_of_no_use_is_refused_at_the_start(neoq, app, database_url):
    said = neoq("run", app(), "--url", database_url, "--listen-url", "u:secret@h/d", code=2).output
    assert "--listen-url" in said
    assert "secret" not in said


def test_no_connection_is_exit_3_without_the_password(neoq, app):
    url = "postgresql://u:secret@127.0.0.1:1/d"
    for command in (["run", app()], ["run", app(), "--check"], ["status"]):
        said = neoq(*command, "--url", url, code=3).output
        assert "cannot connect to postgresql+psycopg://u:***@127.0.0.1:1/d" in said
        assert "secret" not in said


def test_missing_tables_are_exit_4_with_the_lines_to_paste(neoq, app, fresh_database):
    url = fresh_database()
    for command in (["run", app()], ["run", app(), "--check"], ["status"]):
        said = neoq(*command, "--url", url, code=4).stderr
        assert "the tables of sqla_neoq are not there" in said
        assert "neoq.migrate(op, 0, " in said


def test_tables_that_are_too_new_are_exit_4(neoq, app, migrated_database):
    url = migrated_database()
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("UPDATE neoq_meta SET version = 999"))
    assert "pip install --upgrade" in neoq("run", app(), "--url", url, "--check", code=4).stderr


def test_check_imports_connects_and_shows_what_is_there(neoq, app, database_url):
    shown = neoq("run", app(), "--check", "--processes", "2", "--url", database_url).stdout
    assert re.match(r"postgresql\+psycopg://\S+: tables ok\n\nTASK ", shown)


def test_flags_beat_variables_and_the_rarer_variable_beats_the_url(neoq, app, migrated_database):
    one, two, three, four = (migrated_database() for _ in range(4))
    engine = app(f"from sqlalchemy import create_engine\ndef make(): return create_engine({three!r})")
    name = app()

    def used(*arguments, **env):
        return re.search(r"(neoq_test_\w+)\S*: tables ok", neoq("run", name, "--check", *arguments, **env).stdout)[1]

    def is_in(url, database):
        return f"/{database}" in url

    variables = {"DATABASE_URL": one}
    assert is_in(one, used(**variables))
    variables["NEOQ_DATABASE_URL"] = two
    assert is_in(two, used(**variables))
    variables["NEOQ_ENGINE"] = f"{engine}:make"
    assert is_in(three, used(**variables))
    assert is_in(four, used("--url", four, **variables))


def test_a_postgres_url_works(neoq, app, database_url):
    url = database_url.replace("postgresql+psycopg", "postgres")
    assert "tables ok" in neoq("run", app(), "--check", DATABASE_URL=url).stdout


def test_two_databases_on_one_command_line_are_one_too_many(neoq, app):
    said = neoq("run", app(), "--url", "postgresql://h/d", "--embedded", code=2).stderr
    assert "--embedded and --url both name a database" in said


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("engine = 5", "engine is no SQLAlchemy Engine"),
        ("other = 5", "has no 'engine'"),
        ("def engine(): raise LookupError('no settings')", "LookupError: no settings"),
        ("from sqlalchemy import create_engine\nengine = create_engine('sqlite://')", "the runner works on PostgreSQL"),
    ],
)
def test_an_engine_of_no_use_is_named(code, sentence, neoq, app):
    assert sentence in neoq("run", app(), "--engine", f"{app(code)}:engine", code=2).stderr


def test_the_applications_engine_keeps_its_schema(neoq, app, schema_engine):
    url = schema_engine.url.render_as_string(hide_password=False)
    code = f"""
        from sqlalchemy import create_engine
        plain = create_engine({url!r})
        engine = create_engine({url!r}, execution_options={{"neoq_schema": "The Queue's"}})
    """
    name = app(code)
    assert neoq("status", "--engine", f"{name}:engine").stdout.startswith("no jobs")
    neoq("run", app(), "--check", "--engine", f"{name}:engine")
    neoq("run", app(), "--check", "--engine", f"{name}:plain", "--schema", "The Queue's")
    neoq("status", "--engine", f"{name}:plain", "--schema", "The Queue's")
    neoq("status", "--engine", f"{name}:plain", code=4)


# Around the runner


def test_a_broken_logging_configuration_is_a_usage_error(neoq, app, tmp_path):
    file = tmp_path / "log.toml"
    file.write_text("x = = 1")
    assert f"the logging configuration {file}" in neoq("run", app(), "--log-config", str(file), code=2).stderr


def test_reload_without_its_library_says_the_remedy(neoq, app, database_url, monkeypatch):
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    said = neoq("run", app(), "--reload", "--url", database_url, code=2).stderr
    assert "pip install 'sqla_neoq[reload]'" in said


def test_a_health_port_that_is_taken_is_a_usage_error(neoq, app, database_url):
    from sqla_neoq.health import HealthServer

    with HealthServer(lambda: None, 0) as server:
        for more in ([], ["--processes", "2"]):
            said = neoq("run", app(), "--url", database_url, "--health-port", str(server.port), *more, code=2).stderr
            assert f"health port {server.port} cannot be listened on" in said


def test_a_queue_on_which_nothing_could_ever_run_is_warned_of(neoq, app, database_url):
    handlers = app("from sqla_neoq import handler\n@handler('a')\ndef f(job): ...")
    said = neoq("run", handlers, "-q", "a,b", "--burst", "--url", database_url).stderr
    assert "queue 'b' has no handler here, and there are no tasks" in said
    assert "queue 'a'" not in said
    # A task may be sent to any queue.
    assert "no handler" not in neoq("run", app(), "-q", "b", "--burst", "--url", database_url).stderr


def test_a_supervised_child_does_not_supervise(neoq, app, database_url):
    import socket

    ours, theirs = socket.socketpair()
    with ours:
        env = {LINE_VARIABLE: str(theirs.detach())}
        said = neoq("run", app(), "--processes", "2", "--burst", "--url", database_url, **env).stderr
        assert "process started" not in said
        assert "runner started" in said


# status


def test_status_shows_jobs_workers_and_what_could_not_be_run(neoq, app, database_url, session):
    from sqla_neoq import enqueue

    enqueue(session, "greetings", {})
    enqueue(session, "emails", {}, task="gone:task")
    session.commit()
    shown = neoq("status", app(), "--url", database_url).stdout.split("\n\n")
    assert [row[:2] for row in rows(shown[0])[1:]] == [["emails", "1"], ["greetings", "1"]]
    assert shown[1] == "no workers"
    assert rows(shown[2])[1:] == [["emails", "gone:task", "1", "unclaimable"]]


def test_status_is_json_for_programs(neoq, app, database_url):
    report = json.loads(neoq("status", "--format", "json", "--url", database_url).stdout)
    assert report == {"jobs": [], "dead": [], "workers": []}
    assert "unclaimable" in json.loads(neoq("status", app(), "--format", "json", "--url", database_url).stdout)


def test_the_version_is_told(neoq):
    from sqla_neoq import __version__

    assert neoq("--version").stdout == f"sqla-neoq, version {__version__}\n"


def test_every_command_is_tested_here():
    assert set(cli.main.commands) == {"run", "status"}
