"""``python -m sqla_neoq.run`` in processes of its own: signals, restarts, several processes, what surrounds it."""

import json
import os
import re
import signal
import socket
import subprocess
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy import select as select_rows
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from support import eventually
from support.processes import environment, python
from support.terminals import Terminal

from sqla_neoq import enqueue
from sqla_neoq.models import Job, Worker

# A gate is a file: a job that came to it says so, and goes on when the file is there.
TASKS = """
import os, pathlib, signal, threading, time
from datetime import timedelta
from sqla_neoq import current_job, task

def say(*words):  # one write a line: several processes share the file
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

@task(name="quick")
def quick(): ...

@task(name="wait", timeout=None)
def wait(gate: str):
    say("job", current_job().id, "waits in", os.getpid())
    while not pathlib.Path(gate).exists():
        current_job().raise_if_cancelled()
        time.sleep(0.01)
    say("job", current_job().id, "ends")

@task(name="signalled")
def signalled():
    say("signalled")
    time.sleep(0.3)  # the main thread waits by then
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

@task(name="hang", timeout=timedelta(seconds=0.1))
def hang(seconds: float):
    say("hangs")
    time.sleep(seconds)
"""


EDITED = TASKS.replace("def quick(): ...", "def quick(): say('new code')")


@pytest.fixture
def neoq(run_process, tmp_path, database_url):
    """Start a worker of the tasks above, by default without its own name for them."""
    (tmp_path / "worktasks.py").write_text(TASKS)

    def start(*arguments, until="runner started", **env):
        process = run_process("worktasks", *arguments, env={"DATABASE_URL": database_url} | env)
        process.wait_for(until)
        return process

    return start


def jobs(session, status=None):
    session.rollback()
    statement = select_rows(Job.id).order_by(Job.id)
    return list(session.scalars(statement if status is None else statement.where(Job.status == status)))


def workers(session):
    session.rollback()
    return {worker.pid for worker in session.scalars(select_rows(Worker))}


def waiting(session, gate, number=1):
    """Enqueue jobs that wait at a gate."""
    return [enqueue(session, "default", {"gate": str(gate)}, task="wait").id for _ in range(number)]


def test_a_burst_runs_what_is_due_and_exits_0(neoq, session):
    for _ in range(20):
        enqueue(session, "default", {}, task="quick")
    session.commit()
    process = neoq("--burst", until="burst ended: 20 jobs")
    assert process.wait() == 0
    assert len(jobs(session, "processed")) == 20
    line = r"INFO job processed id=20 task=quick queue=default attempt=1 duration=\d+\.\dms"
    assert re.search(line, process.stderr)
    assert "\x1b" not in process.output  # no progress line where there is no terminal
    assert process.stdout == ""


def test_python_m_runs_the_command_once_and_without_a_warning(run_process, tmp_path):
    (tmp_path / "worktasks.py").write_text(TASKS)
    process = run_process("worktasks", "--dry-run", env={"PYTHONWARNINGS": "error"})
    assert process.wait() == 0, process.stderr
    assert process.stderr == ""
    assert "quick" in process.stdout


def test_the_console_script_finds_modules_in_the_working_directory(tmp_path):
    (tmp_path / "worktasks.py").write_text(TASKS)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "sqla-neoq"
    script.write_text("import sys\nfrom sqla_neoq.cli import main\nsys.exit(main())\n")
    done = subprocess.run(
        python(str(script), "run", "worktasks", "--dry-run"),
        cwd=tmp_path,
        env=environment({}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "quick" in done.stdout


def test_a_burst_on_a_terminal_shows_its_progress_on_one_line(tmp_path, database_url, session):
    (tmp_path / "worktasks.py").write_text(TASKS)
    gate = tmp_path / "gate"
    waiting(session, gate)
    session.commit()
    command = python("-m", "sqla_neoq.run", "worktasks", "--burst")
    with Terminal(command, cwd=tmp_path, env=environment({"DATABASE_URL": database_url})) as terminal:
        eventually(lambda: "0 jobs in" in terminal.shown, within=20, why=lambda: terminal.shown)
        gate.touch()
        eventually(lambda: "1 processed\r\n" in terminal.shown, within=20, why=lambda: terminal.shown)
        assert terminal.popen.wait(20) == 0
        assert "INFO" not in terminal.shown


def test_log_lines_are_json_on_request(neoq, session):
    enqueue(session, "default", {}, task="quick")
    session.commit()
    process = neoq("--burst", "--log-format", "json", until="burst ended")
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    (done,) = [line for line in lines if line.get("event") == "processed"]
    assert (done["task"], done["queue"], done["attempt"], done["level"]) == ("quick", "default", 1, "info")
    assert done["job_id"] == 1
    assert 0 <= done["duration"] < 10


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_jobs_finish(neoq, session, tmp_path, number):
    waiting(session, tmp_path / "gate")
    session.commit()
    process = neoq(until="waits in")
    process.signal(number)
    (tmp_path / "gate").touch()
    assert process.wait() == 0
    assert jobs(session, "processed") == [1]
    assert workers(session) == set()


def test_a_signal_that_a_jobs_thread_receives_is_heard(neoq, session):
    enqueue(session, "default", {}, task="signalled")
    session.commit()
    process = neoq(until="signalled")
    assert process.wait() == 0
    assert jobs(session, "processed") == [1]


def test_a_term_during_a_restart_ends_the_process_and_forces_nothing(neoq, session, tmp_path):
    waiting(session, tmp_path / "gate")
    session.commit()
    process = neoq("--health-port", "127.0.0.1:0", until="waits in")
    process.signal(signal.SIGHUP)
    eventually(lambda: probe(health_port(process), "readyz") == (503, "stopping"))
    process.signal(signal.SIGTERM)
    (tmp_path / "gate").touch()
    assert process.wait() == 0
    assert jobs(session, "processed") == [1]
    assert starts(process) == 1


def test_a_restart_gives_back_what_outlasts_the_shutdown_timeout_and_starts_anew(neoq, session, tmp_path):
    waiting(session, tmp_path / "gate")
    session.commit()
    process = neoq("--shutdown-timeout", "100ms", until="waits in")
    process.signal(signal.SIGHUP)
    eventually(lambda: process.stdout.count("waits in") == 2)
    (tmp_path / "gate").touch()
    eventually(lambda: jobs(session, "processed") == [1])
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_the_second_signal_gives_them_back(neoq, session, tmp_path):
    waiting(session, tmp_path / "gate", 2)
    session.commit()
    process = neoq(until="job 2 waits in")
    process.signal(signal.SIGTERM)
    eventually(lambda: process.popen.poll() is not None or process.signal(signal.SIGTERM), within=20)
    assert process.wait() == 1
    assert jobs(session, "new") == [1, 2]
    session.rollback()
    assert set(session.execute(select_rows(Job.retries, Job.crashes)).all()) == {(0, 0)}
    assert workers(session) == set()


def test_quit_gives_them_back_at_once(neoq, session, tmp_path):
    waiting(session, tmp_path / "gate")
    session.commit()
    process = neoq(until="waits in")
    process.signal(signal.SIGQUIT)
    assert process.wait() == 1
    assert jobs(session, "new") == [1]


def test_jobs_that_outlast_the_shutdown_timeout_are_given_back(neoq, session, tmp_path):
    waiting(session, tmp_path / "gate")
    session.commit()
    process = neoq("--shutdown-timeout", "100ms", until="waits in")
    process.signal(signal.SIGTERM)
    assert process.wait() == 1
    assert jobs(session, "new") == [1]


def test_tstp_takes_no_more_jobs_and_lets_the_others_finish(neoq, session, tmp_path):
    waiting(session, tmp_path / "gate")
    session.commit()
    process = neoq("--health-port", "127.0.0.1:0", until="waits in")
    port = health_port(process)
    eventually(lambda: process.signal(signal.SIGTSTP) or probe(port, "readyz") == (503, "quiet"))
    assert probe(port, "livez") == (200, "quiet")
    waiting(session, tmp_path / "gate")
    session.commit()
    (tmp_path / "gate").touch()
    eventually(lambda: jobs(session, "processed") == [1])
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert jobs(session, "new") == [2]


def health_port(process):
    (port,) = re.findall(r"health at port (\d+)", process.stderr)
    return port


def probe(port, path):
    try:
        with urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
            return answer.status, json.load(answer).get("state")
    except HTTPError as answer:
        with answer:
            return answer.status, json.load(answer).get("state")


def starts(process):
    return process.stderr.count("runner started")


def test_hup_finishes_the_running_jobs_and_starts_anew_under_the_same_pid(neoq, session, tmp_path):
    waiting(session, tmp_path / "gate")
    session.commit()
    process = neoq(until="waits in")
    (tmp_path / "worktasks.py").write_text(EDITED)
    process.signal(signal.SIGHUP)
    (tmp_path / "gate").touch()
    process.wait_for("starting anew")
    enqueue(session, "default", {}, task="quick")
    session.commit()
    process.wait_for("new code")
    assert jobs(session, "processed")[0] == 1
    assert workers(session) == {process.pid}
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_signals_during_a_restart_neither_kill_nor_get_lost(neoq, session):
    process = neoq()
    process.signal(signal.SIGHUP)
    process.wait_for("starting anew")
    process.signal(signal.SIGHUP)
    eventually(lambda: starts(process) == 2)
    process.signal(signal.SIGHUP)
    eventually(lambda: process.stderr.count("starting anew") == 2)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert starts(process) == 2
    assert workers(session) == set()


def test_a_restart_waits_for_a_database_that_is_away(run_process, tmp_path, server_url, migrated_database):
    (tmp_path / "worktasks.py").write_text(TASKS)
    url = migrated_database()
    process = run_process("worktasks", env={"DATABASE_URL": url})
    process.wait_for("runner started")
    admin = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    name = make_url(url).database
    with admin.connect() as connection:
        connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'))
        process.signal(signal.SIGHUP)
        process.wait_for("trying again in")
        connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'))
    eventually(lambda: starts(process) == 2)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_hup_from_the_terminals_closing_ends_the_process(tmp_path, database_url, session):
    (tmp_path / "worktasks.py").write_text(TASKS)
    command = python("-m", "sqla_neoq.run", "worktasks")
    env = environment({"DATABASE_URL": database_url})
    with Terminal(command, cwd=tmp_path, env=env, errors_to=tmp_path / "said") as terminal:
        eventually(lambda: workers(session) == {terminal.popen.pid}, within=20)
        terminal.close()
        assert terminal.popen.wait(20) == 0
    assert "starting anew" not in (tmp_path / "said").read_text()


def test_max_jobs_starts_anew_and_no_job_is_lost(neoq, session):
    for _ in range(30):
        enqueue(session, "default", {}, task="quick")
    session.commit()
    process = neoq("--max-jobs", "10", "-c", "2", until="starting anew")
    eventually(lambda: len(jobs(session, "processed")) == 30, within=30)
    eventually(lambda: starts(process) >= 2)
    eventually(lambda: workers(session) == {process.pid})
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_too_many_stuck_threads_start_the_process_anew(neoq, session):
    enqueue(session, "default", {"seconds": 60.0}, task="hang", max_retries=0)
    session.commit()
    process = neoq("-c", "1", "--shutdown-timeout", "1", until="hangs")
    process.wait_for("starting anew", within=30)
    enqueue(session, "default", {}, task="quick")
    session.commit()
    eventually(lambda: len(jobs(session, "processed")) == 1, within=30)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_term_while_the_modules_are_imported_ends_the_start(run_process, tmp_path, database_url):
    (tmp_path / "slowtasks.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    process = run_process("slowtasks", env={"DATABASE_URL": database_url})
    process.wait_for("importing")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


# Several processes


def up(process, number):
    eventually(lambda: starts(process) >= number, within=30, why=lambda: process.output)


def pids(process):
    return [int(pid) for pid in re.findall(r"process started process=\d+ pid=(\d+)", process.stderr)]


def test_several_processes_share_the_work_and_end_with_their_parent(neoq, session, tmp_path):
    process = neoq("--processes", "2", "-c", "1")
    up(process, 2)
    waiting(session, tmp_path / "gate", 2)
    session.commit()
    process.wait_for("job 1 waits")
    process.wait_for("job 2 waits")
    assert {int(pid) for pid in re.findall(r"waits in (\d+)", process.stdout)} == set(pids(process)) == workers(session)
    process.signal(signal.SIGTERM)
    (tmp_path / "gate").touch()
    assert process.wait() == 0
    assert jobs(session, "processed") == [1, 2]
    assert workers(session) == set()


def test_a_service_manager_that_signals_every_process_drains_them_all(neoq, session, tmp_path):
    process = neoq("--processes", "2", "-c", "1")
    up(process, 2)
    waiting(session, tmp_path / "gate", 2)
    session.commit()
    process.wait_for("job 1 waits")
    process.wait_for("job 2 waits")
    for pid in (process.pid, *pids(process)):
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: process.stderr.count("stopping") >= 1)
    (tmp_path / "gate").touch()
    assert process.wait() == 0
    assert jobs(session, "processed") == [1, 2]


def test_a_child_that_is_killed_is_started_again_and_its_job_runs_elsewhere(neoq, session, tmp_path):
    process = neoq("--processes", "2", "-c", "1")
    up(process, 2)
    waiting(session, tmp_path / "gate")
    session.commit()
    process.wait_for("job 1 waits in")
    killed = int(re.search(r"waits in (\d+)", process.stdout)[1])
    os.kill(killed, signal.SIGKILL)
    (tmp_path / "gate").touch()
    up(process, 3)
    eventually(lambda: jobs(session, "processed") == [1], within=20)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_children_drain_when_their_parent_is_killed(neoq, session, tmp_path):
    process = neoq("--processes", "2", "-c", "1")
    up(process, 2)
    waiting(session, tmp_path / "gate")
    session.commit()
    process.wait_for("job 1 waits")
    process.signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: len(workers(session)) == 1)
    (tmp_path / "gate").touch()
    eventually(lambda: workers(session) == set(), within=20)
    assert jobs(session, "processed") == [1]


def test_a_second_signal_forces_the_children(neoq, session, tmp_path):
    process = neoq("--processes", "2", "-c", "1")
    up(process, 2)
    waiting(session, tmp_path / "gate", 2)
    session.commit()
    process.wait_for("job 2 waits")
    process.signal(signal.SIGTERM)
    eventually(lambda: process.popen.poll() is not None or process.signal(signal.SIGTERM), within=20)
    assert process.wait() == 1
    assert jobs(session, "new") == [1, 2]


def test_a_burst_of_several_processes_ends_when_all_is_done(neoq, session):
    for _ in range(50):
        enqueue(session, "default", {}, task="quick")
    session.commit()
    process = neoq("--processes", "2", "--burst", "--max-jobs", "20")
    assert process.wait(30) == 0
    assert len(jobs(session, "processed")) == 50
    assert workers(session) == set()


@pytest.mark.parametrize(("name", "code"), [("worktasks", 4), ("broken", 2)])
def test_what_is_wrong_at_the_start_is_said_once(run_process, tmp_path, fresh_database, name, code):
    (tmp_path / "worktasks.py").write_text(TASKS)
    (tmp_path / "broken.py").write_text("1 / 0")
    process = run_process(name, "--processes", "3", env={"DATABASE_URL": fresh_database()})
    assert process.wait() == code
    assert len(re.findall("^Error: ", process.stderr, re.MULTILINE)) == 1


def test_health_of_several_processes_is_their_parents(neoq):
    process = neoq("--processes", "2", "--health-port", "127.0.0.1:0")
    up(process, 2)
    eventually(lambda: probe(health_port(process), "readyz")[0] == 200)


# Around it


def test_systemd_hears_when_the_runner_is_ready_and_when_it_stops(neoq, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        process = neoq(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(100) == b"READY=1"
        process.signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert process.wait() == 0


def test_systemd_hears_of_a_restart_as_a_reload_for_a_stop_would_end_in_a_kill(neoq, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        process = neoq(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(100) == b"READY=1"
        process.signal(signal.SIGHUP)
        assert manager.recv(100).startswith(b"RELOADING=1\n")
        assert manager.recv(100) == b"READY=1"
        process.signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert process.wait() == 0


def test_reload_runs_the_edited_code_and_outlives_a_mistake_in_it(neoq, session, tmp_path):
    # Stands for watchfiles: each write to "changed" is a change.
    (tmp_path / "watchfiles.py").write_text("""
import os, time
PythonFilter = object
def watch(directory, watch_filter, stop_event):
    seen = 0
    while not stop_event.wait(0.01):
        if (size := os.path.getsize("changed")) > seen:
            seen = size
            yield {(1, "worktasks.py")}
""")
    (tmp_path / "changed").touch()
    tasks = tmp_path / "worktasks.py"

    def edit(code):
        tasks.write_text(code)
        with (tmp_path / "changed").open("a") as changed:
            changed.write("x")

    process = neoq("--reload")
    assert "--reload is not for production" in process.stderr
    edit("def (")
    process.wait_for("waiting for a change")
    edit(EDITED)
    enqueue(session, "default", {}, task="quick")
    session.commit()
    process.wait_for("new code", within=30)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_an_embedded_database_is_there_at_once_and_keeps_its_jobs(run_process, tmp_path):
    (tmp_path / "worktasks.py").write_text(TASKS)
    process = run_process("worktasks", "--embedded")
    process.wait_for("runner started")
    url = re.search(r"its URL is (\S+)", process.stderr)[1]
    assert "not for production" in process.stderr
    with Session(create_engine(url, poolclass=NullPool)) as session:
        enqueue(session, "default", {}, task="quick")
        enqueue(session, "default", {}, task="not here")
        session.commit()
    process.wait_for("job processed")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    again = run_process("worktasks", "--embedded", "--processes", "2", "--burst")
    assert again.wait(30) == 0
    assert "tables installed" not in again.stderr
    (tmp_path / "main.py").write_text("from sqla_neoq.cli import main\nmain()\n")
    shown = run_process("status", "worktasks", "--embedded", module="main")
    assert shown.wait() == 0, shown.stderr
    assert re.search(r"default +not here +1 +unclaimable", shown.stdout)


def test_a_connection_lost_after_the_start_ends_nothing(neoq, session):
    process = neoq()
    session.execute(text("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                         "WHERE datname = current_database() AND pid <> pg_backend_pid()"))  # fmt: skip
    enqueue(session, "default", {}, task="quick")
    session.commit()
    process.wait_for("job processed")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
