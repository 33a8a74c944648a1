"""Tasks with ``executor="process"``: child processes that are real, and killed for real."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from support.killable import (
    ALL,
    Nested,
    alias,
    coroutine,
    die,
    grow,
    handle,
    hang,
    innocent,
    log_something,
    note,
    steer,
    typed,
    wait,
    write,
)
from support.running import Database
from support.waiting import eventually

from sqla_neoq import ConfigurationError, Runner, RunnerConfig, TaskNotFound, cancel, enqueue, processes, targets, task
from sqla_neoq.child import Guard
from sqla_neoq.wire import Channel, Ready

# Fixtures -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def database(engine):
    database = Database(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (job bigint)"))
    yield database
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE effects"))


@pytest.fixture
def put(database):
    def put(target, *arguments, **options):
        with database.engine.begin() as connection:
            return target.using(**options).enqueue(connection, *arguments).id

    return put


@pytest.fixture
def start(database_url, database):
    started = []

    def start(tasks=ALL, **config):
        given = {"heartbeat_interval": timedelta(milliseconds=100), "concurrency": 2, **config}
        started.append(Runner(database_url, tasks, config=RunnerConfig(**given)))
        started[-1].start()
        return started[-1]

    yield start
    for runner in started:
        runner.stop(timedelta(0))


@pytest.fixture
def drain(start):
    def drain(**config):
        return start(**config).drain()

    return drain


def alive(pid):
    """Whether a process is there, and more than a zombie: each of its threads may end last."""
    for thread in Path("/proc").glob(f"{pid}/task/*/stat"):
        with suppress(OSError):
            if thread.read_text().rpartition(")")[2].split()[0] != "Z":
                return True
    return False


def pids(file):
    eventually(lambda: file.exists() and file.read_text().strip(), within=20)
    return [int(word) for word in file.read_text().split()]


def words(file):
    return file.read_text().split()


def children(parent):
    done = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def failure_of(database, id_):
    (failure,) = [failure for failure in database.failures() if failure.job_id == id_]
    return failure


# What a child runs ----------------------------------------------------------------------------------------------------


def test_a_job_runs_in_another_process_with_its_arguments_and_its_context(put, drain, database, tmp_path):
    key = UUID(int=5)
    id_ = put(typed, str(tmp_path / "a"), key, timedelta(seconds=1))
    assert drain().processed == 1
    said = words(tmp_path / "a")
    assert said[:4] == [str(id_), "q", "1", str(key)]
    assert int(said[4]) > 0
    assert database.statuses() == {id_: "processed"}


def test_a_child_is_used_for_many_jobs_and_ends_with_the_runner(put, drain, tmp_path):
    for number in range(5):
        put(note, str(tmp_path / "notes"), str(number))
    assert drain(concurrency=1).processed == 5
    (pid,) = {line.split()[1] for line in (tmp_path / "notes").read_text().splitlines()}
    assert int(pid) != os.getpid()
    assert not alive(pid)


def test_handlers_and_coroutines_run_in_a_child_too(put, drain, database, tmp_path):
    with database.engine.begin() as connection:
        handled = enqueue(connection, "handled", {"file": str(tmp_path / "handled")}).id
    waited = put(coroutine, str(tmp_path / "async"))
    assert drain().processed == 2
    for name, id_ in (("handled", handled), ("async", waited)):
        said = pids(tmp_path / name)
        assert said[0] == id_
        assert said[1] != os.getpid()


def test_what_a_task_raises_means_the_same_as_in_a_thread(put, drain, database):
    ids = {how: put(steer, how) for how in ("retry", "snooze", "discard", "raise", "exit")}
    counts = drain()
    assert (counts.failed, counts.snoozed, counts.dead) == (3, 1, 1)
    assert database.dead() == {ids["discard"]: "discarded"}
    assert {database.row(ids[how]).retries for how in ("raise", "snooze")} == {0}
    kinds = {how: failure_of(database, ids[how]).kind for how in ("retry", "discard", "raise", "exit")}
    assert kinds == {"retry": "retry", "discard": "discarded", "raise": "error", "exit": "error"}
    raised = failure_of(database, ids["raise"])
    assert raised.message == "LookupError: the reason"
    assert "in _deep\n    raise LookupError(reason)" in raised.traceback


def test_a_payload_that_does_not_fit_is_a_failure_that_says_so(drain, database):
    with database.engine.begin() as connection:
        id_ = enqueue(connection, "q", {"nonsense": 1}, task="p:note").id
    assert drain().failed == 1
    assert "nonsense" in failure_of(database, id_).message


def test_no_more_children_than_slots(put, start, database, tmp_path):
    for number in range(4):
        put(wait, str(tmp_path / f"{number}"))
    runner = start(concurrency=2)
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, within=20)
    assert runner.running == 2
    assert len(children(os.getpid())) <= 2 + 1  # the embedded server may be a child as well
    runner.stop(timedelta(0))
    assert set(database.statuses().values()) == {"new"}


# How a child dies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "exited with code 7"),
        ("segv", "was killed by SIGSEGV"),
        ("kill", "was killed by SIGKILL, perhaps for want of memory"),
        ("fork", "exited with code 8"),
    ],
)
def test_a_child_that_dies_is_one_failed_attempt_and_touches_no_other_job(put, start, database, how, message):
    id_ = put(die, how)
    others = [put(innocent) for _ in range(5)]
    runner = start()
    eventually(lambda: runner.counts.total == 6, within=20)
    assert runner.counts.failed == 1
    failure = failure_of(database, id_)
    assert failure.kind == "crashed"
    assert failure.message == f"JobCrashed: the child process that ran job {id_} {message}"
    row = database.row(id_)
    assert (row.status, row.crashes) == ("failed", 0)
    assert {database.row(other).status for other in others} == {"processed"}
    assert runner.health().ready


def test_after_a_death_the_next_job_has_a_new_child(put, drain, database, tmp_path):
    put(die, "exit", priority=10)
    put(note, str(tmp_path / "note"), "x")
    counts = drain(concurrency=1)
    assert (counts.failed, counts.processed) == (1, 1)


@pytest.mark.parametrize("how", ["sleep", "read", "loop", "c"])
def test_past_its_timeout_a_job_is_killed_whatever_it_does(put, start, database, tmp_path, how):
    id_ = put(hang, str(tmp_path / "pids"), how)
    runner = start()
    child, helper = pids(tmp_path / "pids")
    eventually(lambda: runner.counts.failed == 1, within=20)
    eventually(lambda: not alive(child) and not alive(helper))
    failure = failure_of(database, id_)
    assert failure.kind == "timeout"
    assert "ran past its timeout of 0.5 s" in failure.message
    eventually(lambda: runner.health().detail["stuck"] == 0)
    put(innocent)
    eventually(lambda: runner.counts.processed == 1)


def test_the_statement_of_a_killed_child_ends_on_the_server(put, start, database, tmp_path):
    put(hang, str(tmp_path / "pids"), "query")
    runner = start()
    eventually(lambda: runner.counts.failed == 1, within=20)
    with database.engine.connect() as connection:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(600)%'")
        eventually(lambda: (connection.rollback(), connection.scalar(query))[1] == 0)


def test_a_cancelled_job_is_killed_and_ends_cancelled(put, start, database, tmp_path):
    id_ = put(wait, str(tmp_path / "pids"), "c")
    runner = start()
    child, helper = pids(tmp_path / "pids")
    with Session(database.engine) as session, session.begin():
        assert cancel(session, id_)
    eventually(lambda: runner.counts.cancelled == 1)
    assert database.statuses() == {id_: "cancelled"}
    eventually(lambda: not alive(child) and not alive(helper))


def test_a_forced_stop_kills_and_gives_back_untouched(put, start, database, tmp_path):
    id_ = put(wait, str(tmp_path / "pids"), "c")
    runner = start()
    child, helper = pids(tmp_path / "pids")
    assert runner.stop(timedelta(0)) is False
    row = database.row(id_)
    assert (row.status, row.retries, row.crashes) == ("new", 0, 0)
    eventually(lambda: not alive(child) and not alive(helper))


def test_what_runs_may_finish_at_a_stop(put, start, database, tmp_path):
    id_ = put(note, str(tmp_path / "note"), "x")
    runner = start()
    eventually(lambda: runner.running or runner.counts.processed)
    assert runner.stop() is True
    assert database.statuses() == {id_: "processed"}


def test_an_idle_child_that_was_killed_costs_no_job_anything(put, start, tmp_path, caplog):
    runner = start(concurrency=1)
    put(note, str(tmp_path / "notes"), "first")
    eventually(lambda: runner.counts.processed == 1, within=20)
    first = int(words(tmp_path / "notes")[1])
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not alive(first))
    put(note, str(tmp_path / "notes"), "second")
    eventually(lambda: runner.counts.processed == 2, within=20)
    assert "an idle child process is gone (was killed by SIGKILL" in caplog.text


def test_a_child_that_is_idle_for_long_is_closed(put, start, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "IDLE_LIMIT", 0.2)
    runner = start()
    put(note, str(tmp_path / "note"), "x")
    eventually(lambda: runner.counts.processed == 1, within=20)
    pid = int(words(tmp_path / "note")[1])
    eventually(lambda: pid not in children(os.getpid()))  # reaped, too


def test_signals_to_the_group_are_the_runners_to_obey(put, start, tmp_path, database, monkeypatch):
    monkeypatch.chdir(tmp_path)
    id_ = put(wait, str(tmp_path / "pids"), "gate")
    runner = start()
    child, helper = pids(tmp_path / "pids")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(child, number)
    (tmp_path / "gate").touch()
    eventually(lambda: runner.counts.total == 1)
    assert database.statuses() == {id_: "processed"}
    os.kill(helper, signal.SIGKILL)


# job.session ----------------------------------------------------------------------------------------------------------


def effects(database):
    with database.engine.connect() as connection:
        return list(connection.scalars(text("SELECT job FROM effects ORDER BY job")))


def test_the_session_commits_with_the_completion_or_not_at_all(put, drain, database):
    done, failed, died = put(write), put(write, "raise"), put(write, "die")
    counts = drain()
    assert (counts.processed, counts.failed) == (1, 2)
    assert effects(database) == [done]
    assert {database.row(id_).status for id_ in (failed, died)} == {"failed"}


def test_a_run_that_lost_its_job_writes_nothing(put, start, database):
    id_ = put(write, "lose")
    runner = start()
    eventually(lambda: runner.counts.lost == 1, within=20)
    assert effects(database) == []
    assert database.statuses() == {id_: "running"}


def test_an_engine_of_the_applications_own_must_be_named(put, database):
    id_ = put(write)
    assert Runner(database.engine, ALL).drain().failed == 1
    assert 'RunnerConfig(child_database="myapp.db:engine")' in failure_of(database, id_).message


NAMED = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
engine = create_engine(os.environ["NAMED_URL"])
def make(): return engine
sessions = sessionmaker(engine)
nothing = 5
"""


@pytest.mark.parametrize("name", ["engine", "make", "sessions"])
def test_an_engine_or_sessionmaker_that_is_named_is_used(put, database, tmp_path, monkeypatch, name):
    (tmp_path / "named_database.py").write_text(NAMED)
    monkeypatch.setenv("NAMED_URL", database.engine.url.render_as_string(hide_password=False))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "named_database", raising=False)
    id_ = put(write)
    config = RunnerConfig(child_database=f"named_database:{name}")
    assert Runner(database.engine, ALL, config=config).drain().processed == 1
    assert effects(database) == [id_]


def test_the_schema_of_the_tables_holds_in_the_child(schema_engine, tmp_path):
    with schema_engine.begin() as connection:
        enqueue(connection, "q", {"then": "raise"}, task="p:write")
        note.enqueue(connection, str(tmp_path / "note"), "x")
    url = schema_engine.url.render_as_string(hide_password=False)
    schema = schema_engine.get_execution_options()["neoq_schema"]
    counts = Runner(url, ALL, config=RunnerConfig(schema=schema)).drain()
    assert (counts.processed, counts.failed) == (1, 1)


# What cannot be imported ----------------------------------------------------------------------------------------------


def test_a_task_that_a_child_cannot_import_is_refused_when_the_runner_is_made(engine):
    @task(queue="q", executor="process")
    def local(): ...

    with pytest.raises(ConfigurationError, match=r"executor='process', and a child process cannot import it: .*local"):
        Runner(engine, local)


def test_a_task_of_main_is_refused(run_process, tmp_path, database_url):
    (tmp_path / "script.py").write_text(
        "import os\nfrom sqla_neoq import Runner, task\n"
        "@task(name='t', executor='process')\ndef t(): ...\n"
        "Runner(os.environ['DATABASE_URL'], t)\n"
    )
    process = run_process(module="script", env={"DATABASE_URL": database_url})
    assert process.wait() == 1
    assert "ConfigurationError" in process.stderr
    assert "move it to one, or leave executor= out" in process.stderr


def test_a_task_is_found_where_its_module_has_it():
    addresses = {one: targets.address_of(one) for one in (note, handle, Nested.inside, alias)}
    assert list(addresses.values()) == [
        "support.killable:note",
        "support.killable:handle",
        "support.killable:Nested.inside",
        "support.killable:alias",
    ]
    for one, address in addresses.items():
        assert targets.load(address) == [one]
    assert targets.address_of(note.using(priority=5)) == "support.killable:note"


def test_a_module_that_fails_only_in_the_child_fails_the_job_with_its_traceback(
    database, database_url, tmp_path, monkeypatch
):
    (tmp_path / "only_here.py").write_text(
        f"import os\nfrom sqla_neoq import task\nif os.getpid() != {os.getpid()}: raise LookupError('not in a child')\n"
        "@task(name='t', queue='q', executor='process')\ndef t(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "only_here", raising=False)
    (only,) = targets.load("only_here:t")
    with database.engine.begin() as connection:
        id_ = only.enqueue(connection).id
    assert Runner(database_url, only).drain().failed == 1
    failure = failure_of(database, id_)
    assert failure.kind == "error"
    assert failure.message == "a child process cannot import its tasks: LookupError: not in a child"
    assert "only_here.py" in failure.traceback


def test_a_module_that_takes_for_ever_only_in_the_child_fails_the_job_and_says_why(
    database, database_url, tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "START_LIMIT", 0.1)
    before = children(os.getpid())
    (tmp_path / "slow_there.py").write_text(
        f"import os, time\nfrom sqla_neoq import task\nif os.getpid() != {os.getpid()}: time.sleep(600)\n"
        "@task(name='t', queue='q', executor='process')\ndef t(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_there", raising=False)
    (only,) = targets.load("slow_there:t")
    with database.engine.begin() as connection:
        id_ = only.enqueue(connection).id
    assert Runner(database_url, only).drain().failed == 1
    assert failure_of(database, id_).message == "a child process took more than 0.1 s to import its tasks"
    assert children(os.getpid()) == before


def test_the_guard_knows_of_a_job_that_came_before_the_last_was_dealt_with(monkeypatch):
    killed = threading.Event()
    monkeypatch.setattr(os, "killpg", lambda *_: killed.set())
    monkeypatch.setattr(os, "_exit", lambda _: None)
    ours, theirs = map(Channel, socket.socketpair())
    guard = Guard(theirs)
    guard.start()
    for _ in range(2):
        ours.send(Ready())
    guard.next(Ready)
    eventually(lambda: not guard._inbox.empty())
    guard.done()
    ours.close()
    assert killed.wait(3), "it thinks that nothing runs, and waits for the end of the process"
    theirs.close()


@pytest.mark.parametrize(("name", "error"), [("nonsense://x", ConfigurationError), ("support:nothing", TaskNotFound)])
def test_a_database_for_children_that_cannot_be_is_refused(engine, name, error):
    with pytest.raises(error):
        Runner(engine, note, config=RunnerConfig(child_database=name))


# Whole workers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(run_process, database_url):
    def run(*arguments, **env):
        tests = str(Path(__file__).parent)
        path = os.pathsep.join([tests, str(Path(tests).parent)])
        return run_process("support.killable", *arguments, env={"DATABASE_URL": database_url, "PYTHONPATH": path} | env)

    return run


@pytest.mark.parametrize("how", ["loop", "c"])
def test_when_the_runner_is_killed_no_child_survives_it(put, worker, database, tmp_path, how):
    put(wait, str(tmp_path / "pids"), how)
    process = worker()
    child, helper = pids(tmp_path / "pids")
    process.signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: not alive(child) and not alive(helper))


def test_without_the_kernels_help_the_guard_ends_the_child(put, worker, tmp_path):
    # As on a system that has no F_SETSIG.
    (tmp_path / "sitecustomize.py").write_text("import fcntl\nfcntl.__dict__.pop('F_SETSIG', None)\n")
    put(wait, str(tmp_path / "pids"), "loop")
    paths = [str(tmp_path), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    process = worker(PYTHONPATH=os.pathsep.join(paths))
    child, helper = pids(tmp_path / "pids")
    process.signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: not alive(child) and not alive(helper))


@pytest.mark.parametrize("flags", [(), ("--engine", "engine_module:engine")])
def test_on_the_command_line_the_session_and_the_log_work_in_a_child(put, worker, database, tmp_path, flags):
    (tmp_path / "engine_module.py").write_text(
        "import os\nfrom sqlalchemy import create_engine\nengine = create_engine(os.environ['DATABASE_URL'])\n"
    )
    id_, other = put(write), put(log_something)
    process = worker("--burst", "--log-format", "json", *flags)
    assert process.wait() == 0, process.output
    assert effects(database) == [id_]
    assert {database.row(one).status for one in (id_, other)} == {"processed"}
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert {"info", "said in a child"} <= {line[key] for line in lines for key in ("level", "message")}
    assert process.stdout == "printed in a child\n"


def test_a_worker_that_outgrows_its_memory_starts_anew(put, worker, database):
    put(grow, 80)
    process = worker("--max-memory", "120M")
    process.wait_for("more than its limit of 120 MB; it ends for a restart")
    process.wait_for("starting anew")
    done = put(innocent)
    eventually(lambda: database.row(done).status == "processed", within=20)
    assert process.popen.poll() is None
    assert "after 1 jobs" in process.stderr


def test_a_limit_that_is_reached_before_the_first_job_is_warned_of(start, caplog):
    start(max_memory=16 * 2**20)
    assert "max_memory is 16 MB, and the process holds" in caplog.text


def test_processed_jobs_may_be_deleted_at_once_also_by_a_child(put, drain, database):
    id_ = put(write)
    assert drain(retention=timedelta(0)).processed == 1
    assert effects(database) == [id_]
    assert database.statuses() == {}


def test_a_child_that_outgrows_its_memory_is_replaced(put, start, tmp_path):
    runner = start(concurrency=1, max_memory=10 * 2**30)
    runner._services.children._max_memory = 2**20  # the runner itself keeps its limit
    for number in range(2):
        put(note, str(tmp_path / "notes"), f"{number}")
    eventually(lambda: runner.counts.processed == 2, within=20)
    first, second = (int(line.split()[1]) for line in (tmp_path / "notes").read_text().splitlines())
    assert first != second
    eventually(lambda: not alive(first))
