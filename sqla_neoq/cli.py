"""The command line: ``sqla-neoq run`` and ``sqla-neoq status``, and the only reader of the environment.

Exit codes: 0 clean · 1 forced, or a crash · 2 a usage or import error · 3 no connection at start · 4 the tables are
missing, too old or too new. Once a runner has started, a lost connection never ends it.

``run`` is also what ``python -m sqla_neoq.run`` calls. It configures the log, imports the application's modules, and
hands over to :class:`~sqla_neoq.runner.Runner`, or with ``--processes`` and ``--reload`` to a
:class:`~sqla_neoq.supervisor.Supervisor` that starts this same command line several times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateSchema

from sqla_neoq import logs, migrations, options, systemd, targets
from sqla_neoq import status as looking
from sqla_neoq._version import __version__
from sqla_neoq.config import RunnerConfig
from sqla_neoq.dialects import engine_of, schema_of
from sqla_neoq.embedded import EmbeddedServer
from sqla_neoq.errors import (
    DatabaseUnavailable,
    EmbeddedError,
    NeoqError,
    SchemaError,
)
from sqla_neoq.health import HealthServer
from sqla_neoq.progress import Progress, describe
from sqla_neoq.reload import watching
from sqla_neoq.runner import Ended, Runner
from sqla_neoq.supervisor import Line, Supervisor, has_terminal, restart_delay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy import Connection, Engine

Command = TypeVar("Command", bound="Callable[..., Any]")

log = logging.getLogger(__name__)

FORCED, USAGE, NO_CONNECTION, SCHEMA = 1, 2, 3, 4
_FAILURES = "NEOQ_STARTS_FAILED"

# Flags ---------------------------------------------------------------------------------------------------------------


class _Option(click.Option):
    """An option whose environment variable is one value, never a list split at spaces: queue names may hold them."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = self.resolve_envvar_value(ctx)
        return (value,) if self.multiple and value is not None else value


def _option(
    *names: str, read: Callable[[Any], Any] | None = None, env: Sequence[str] = (), **more: Any
) -> Callable[[Command], Command]:
    """Declare a flag with its environment variable, ``NEOQ_<FLAG>``; ``read`` turns the text into the value."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return value if read is None or value is None else read(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    flag = next(name for name in names if name.startswith("--"))
    variables = list(env) or [f"NEOQ_{flag.removeprefix('--').replace('-', '_').upper()}"]
    return click.option(*names, cls=_Option, callback=callback, envvar=variables, show_envvar=True, **more)


def _common(command: Command) -> Command:
    """The flags that say where the code and the database are."""
    flags: list[Callable[[Command], Command]] = [
        click.argument("modules", metavar="[MODULE]...", nargs=-1),
        _option(
            "--url",
            env=["NEOQ_DATABASE_URL", "DATABASE_URL"],
            metavar="URL",
            help="The database: postgresql://user:password@host/name.",
        ),
        _option("--engine", metavar="MODULE:NAME", help="The application's own Engine, or a function that returns it."),
        _option("--embedded", is_flag=True, help="A PostgreSQL of its own. Not for production."),
        _option(
            "--embedded-dir",
            default=".neoq",
            show_default=True,
            metavar="DIRECTORY",
            type=click.Path(file_okay=False, path_type=Path),
            help="Where the embedded PostgreSQL keeps its data.",
        ),
        _option("--schema", metavar="NAME", help="The schema of the tables.  [default: as the search path finds them]"),
        _option(
            "--app-dir",
            default=".",
            show_default=True,
            metavar="DIRECTORY",
            type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
            help="Where modules are looked for first.",
        ),
    ]
    for flag in reversed(flags):
        command = flag(command)
    return command


# Commands ------------------------------------------------------------------------------------------------------------


_HELP = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=_HELP)
@click.version_option(__version__, prog_name="sqla-neoq")
def main() -> None:
    """Background jobs in the PostgreSQL database you already have. Its tables: python -m sqla_neoq.migrate."""


@main.command(context_settings=_HELP)
@_common
@_option(
    "-q",
    "--queues",
    multiple=True,
    read=options.queues,
    metavar="NAME[:N],...",
    help="The queues to work on, each with how many of its jobs may run at once; may be repeated. A backslash makes a "
    "comma or colon part of a name.  [default: the queues of what MODULE holds]",
)
@_option(
    "-c",
    "--concurrency",
    type=click.IntRange(min=1),
    metavar="N",
    help="Worker threads in a process.  [default: the sum of the queues' numbers if each has one, else 10]",
)
@_option("--processes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Runner processes.")
@_option("--burst", is_flag=True, help="Run everything that is due, then exit.")
@_option("--max-jobs", type=click.IntRange(min=1), metavar="N", help="Start a process anew after N jobs.")
@_option(
    "--max-memory",
    read=options.size,
    metavar="SIZE",
    help="Start a process anew when it holds more memory than SIZE (512M, 2G) after a job.",
)
@_option("--reload", is_flag=True, help="Start anew when a Python file below --app-dir changes. Not for production.")
@_option(
    "--shutdown-timeout",
    read=options.duration,
    default="25s",
    show_default=True,
    metavar="DURATION",
    help="How long running jobs may take to finish at the end.",
)
@_option(
    "--poll-interval",
    read=options.duration,
    default="2s",
    show_default=True,
    metavar="DURATION",
    help="How often an idle runner looks for jobs unasked.",
)
@_option(
    "--retention",
    read=options.duration_or_none,
    default="7d",
    show_default=True,
    metavar="DURATION",
    help="How long processed jobs are kept; 0 deletes them at once, none keeps them for ever.",
)
@_option("--no-listen", is_flag=True, help="Only poll, for connections that cannot LISTEN.")
@_option(
    "--listen-url",
    metavar="URL",
    read=options.database_url,
    help="A direct URL for LISTEN, when the database's goes through a pooler.",
)
@_option("--name", metavar="NAME", help="The worker's name in the database.")
@_option("--log-level", type=click.Choice(logs.LEVELS), help="[default: info; with --burst on a terminal, warning]")
@_option("--log-format", type=click.Choice(logs.FORMATS), default="text", show_default=True)
@_option(
    "--log-config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A logging configuration instead: .json or .toml for dictConfig, else fileConfig's.",
)
@_option("--health-port", read=options.address, metavar="[HOST:]PORT", help="Answer /livez and /readyz over HTTP.")
@_option("--check", is_flag=True, help="Import, connect, check the tables, print a summary and exit.")
@_option("--dry-run", is_flag=True, help="Import, print the tasks and queues and exit; needs no database.")
@click.pass_context
def run(context: click.Context, /, **flags: Any) -> None:
    """Run the jobs of the tasks in each MODULE.

    MODULE is a module (myapp.tasks), a package, whose submodule "tasks" belongs to it, or a task or a list of tasks
    in a module (myapp.tasks:send_welcome).

    \b
    TERM, INT  finish the running jobs, then end; a second one gives them back
    QUIT       end at once
    TSTP       take no more jobs, go on with the running ones
    HUP        finish the running jobs, then start anew
    """  # noqa: D301 - not raw: click takes the backspace itself for "leave these lines as they are"
    directory, had_terminal = Path.cwd(), has_terminal()
    failures = os.environ.pop(_FAILURES, None)  # of a process that has started anew to connect
    _take_signals()
    with _reported():
        level, form, file = _log_settings(flags)
        logs.configure(level, form, None if file is None else Path(file))
        line = Line.from_environment(os.environ)
        many = flags["processes"] > 1 or flags["reload"]
        if many and line is None and not (flags["check"] or flags["dry_run"]):
            sys.exit(_supervise(context))
        try:
            ended = _run_here(context, line)
        except DatabaseUnavailable as error:
            if failures is None:
                raise
            # It ran before, and once a runner has run, a lost connection never ends it.
            delay = restart_delay(int(failures) + 1, random.random())  # noqa: S311 - spreads, protects nothing
            log.warning("%s; trying again in %.1f s", error, delay)
            time.sleep(delay)
            _start_anew(directory, int(failures) + 1)
    if ended is Ended.RESTART and line is not None:
        line.ask_restart()
    elif ended is Ended.RESTART and (has_terminal() or not had_terminal):  # else HUP came from the terminal's closing
        _start_anew(directory)
    sys.exit(FORCED if ended is Ended.FORCED else 0)


@main.command(context_settings=_HELP)
@_common
@_option("--format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def status(context: click.Context, /, **flags: Any) -> None:
    """Show the jobs by queue and status, and the workers.

    Given the MODULEs that the runners are started with, also the waiting jobs that none of them could run.
    """
    with _reported(), _database(context) as engine, _connected(engine, flags["schema"]) as connection:
        report = looking.collect(connection, _load(context) if flags["modules"] else None)
    click.echo(looking.as_json(report) if flags["format"] == "json" else looking.as_text(report))


# One runner ----------------------------------------------------------------------------------------------------------


def _run_here(context: click.Context, line: Line | None) -> Ended:
    """Import the modules and run their jobs in this process; with --check or --dry-run, only say what is there."""
    flags = context.params
    runnables = _load(context)
    queues: dict[str, int | None] = flags["queues"]
    limits = [limit for limit in queues.values() if limit is not None]
    every_queue_has_one = len(limits) == len(queues) > 0
    config = RunnerConfig(
        concurrency=flags["concurrency"] or (sum(limits) if every_queue_has_one else RunnerConfig().concurrency),
        poll_interval=flags["poll_interval"],
        shutdown_timeout=flags["shutdown_timeout"],
        retention=flags["retention"],
        listen=not flags["no_listen"],
        listen_url=flags["listen_url"],
        schema=flags["schema"],
        name=flags["name"],
        max_jobs=flags["max_jobs"],
        max_memory=flags["max_memory"],
        child_logs=_log_settings(flags),
    )
    if flags["dry_run"]:
        # Never connected to: it is here to be asked how it understands the modules and the queues.
        runner = Runner("postgresql+psycopg://", runnables, queues=queues or None, config=config)
        click.echo(looking.describe(runner))
        return Ended.CLEAN
    with _database(context, size=config.concurrency) as engine:
        # An Engine cannot be sent to the children of executor="process"; where it came from can.
        named = flags["engine"] if _chosen_database(context) == "engine" else None
        config = replace(config, child_database=named or engine.url.render_as_string(hide_password=False))
        runner = Runner(engine, runnables, queues=queues or None, config=config)
        if flags["check"]:
            runner.check()
            url = engine.url.render_as_string(hide_password=True)
            click.echo(f"{url}: tables ok\n\n{looking.describe(runner)}")
            return Ended.CLEAN
        for queue in runner.queues.keys() - runner.handlers.keys() if not runner.tasks else ():
            log.warning("queue %r has no handler here, and there are no tasks: nothing on it will run", queue)
        return _serve(runner, flags, line)


def _log_settings(flags: dict[str, Any]) -> tuple[str, str, str | None]:
    quiet = flags["burst"] and sys.stderr.isatty()
    file = flags["log_config"]
    level = flags["log_level"] or ("warning" if quiet else "info")
    return level, flags["log_format"], None if file is None else str(file.resolve())


def _serve(runner: Runner, flags: dict[str, Any], line: Line | None) -> Ended:
    """Run until told to stop, with everything around the runner that was asked for."""
    with contextlib.ExitStack() as around:
        begin_anew = None
        if line is not None:
            line.follow(runner)
        else:
            if flags["health_port"]:
                host, port = flags["health_port"]
                around.enter_context(HealthServer(runner.health, port, host))
            begin_anew = around.enter_context(systemd.reporting(runner.health))
            if flags["burst"]:
                around.enter_context(Progress(runner))
        began = time.monotonic()
        ended = runner.run(burst=flags["burst"])
        if ended is Ended.RESTART and begin_anew is not None:
            begin_anew()
        _let_end(anew=ended is Ended.RESTART)
    if flags["burst"]:
        log.info("burst ended: %s", describe(runner.counts, time.monotonic() - began))
    return ended


def _take_signals() -> None:
    """Until the runner has handlers of its own: TERM ends the start, and HUP is no reason for another one.

    Then lets in what came while the process was starting anew.
    """
    # Not by an exception, which the modules being imported could catch. There is no job yet to be given back.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def _let_end(*, anew: bool) -> None:
    """Let nothing interrupt the end that has begun; if it is a new beginning, signals wait for that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    if not anew:
        for number in _HELD_BACK:
            # Blocked means here; a thread that is stuck in a job would still take the signal, and die of it.
            signal.signal(number, signal.SIG_IGN)


_HELD_BACK = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def _start_anew(directory: Path, failures: int = 0) -> NoReturn:
    """Replace this process by a new one with the same command line, under the same process id."""
    log.info("starting anew")
    _let_end(anew=True)
    logging.shutdown()
    os.chdir(directory)
    os.environ[_FAILURES] = str(failures)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - its own command line


# Several runners -----------------------------------------------------------------------------------------------------


def _supervise(context: click.Context) -> int:
    """Start this command line as child processes and look after them; return the exit code."""
    flags = context.params
    with contextlib.ExitStack() as around:
        if _chosen_database(context) != "engine":  # importing that is the children's business
            # Checks the URL. An embedded server lives here, and the children find it by its directory.
            around.enter_context(_database(context))
        supervisor = Supervisor(
            [sys.executable, *sys.orig_argv[1:]], flags["processes"], burst=flags["burst"], reload=flags["reload"]
        )
        if flags["health_port"]:
            host, port = flags["health_port"]
            around.enter_context(HealthServer(supervisor.health, port, host))
        if flags["reload"]:
            log.warning("--reload is not for production")
            around.enter_context(watching(flags["app_dir"], supervisor.restart))
        code = supervisor.run()
        _let_end(anew=False)
        return code


# The code and the database -------------------------------------------------------------------------------------------


def _load(context: click.Context) -> list[targets.Runnable]:
    """Import every MODULE and return the tasks in them, each once."""
    if not context.params["modules"]:
        raise click.UsageError("name a MODULE that holds tasks, such as myapp.tasks", context)
    _put_on_path(context.params["app_dir"])
    found: dict[int, targets.Runnable] = {}
    for module in context.params["modules"]:
        with _importing(module):
            found |= {id(runnable): runnable for runnable in targets.load(module)}
    return list(found.values())


def _put_on_path(directory: Path) -> None:
    if sys.path[:1] != [str(directory)]:
        sys.path.insert(0, str(directory))


@contextlib.contextmanager
def _importing(target: str) -> Iterator[None]:
    """Report an exception of the application's own code with its traceback; the library's own errors pass."""
    try:
        yield
    except NeoqError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may fail in any way, each its author's to see
        frames = error.__traceback__
        ours = (__name__, targets.__name__, "contextlib", "importlib", "importlib._bootstrap")
        while frames is not None and frames.tb_frame.f_globals.get("__name__") in ours:
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        _fail(USAGE, f"{target} cannot be imported: {type(error).__name__}: {error}")


def _chosen_database(context: click.Context) -> str | None:
    """Which of --engine, --embedded and --url counts: flags beat the environment, and there the rarer beats the URL."""
    for source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
        given = [
            name
            for name in ("engine", "embedded", "url")
            if context.params[name] and context.get_parameter_source(name) is source
        ]
        if len(given) > 1 and source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{given[0]} and --{given[1]} both name a database; give one of them", context)
        if given:
            return given[0]
    return None


@contextlib.contextmanager
def _database(context: click.Context, *, size: int = 1) -> Iterator[Engine]:
    """Yield an Engine for the database that the flags and the environment name; an embedded server runs meanwhile.

    Its pool has ``size`` connections, or what the application's own has. It connects to nothing here.
    """
    flags = context.params
    with contextlib.ExitStack() as around:
        match _chosen_database(context):
            case "url":
                engine = engine_of(flags["url"], size=size)
            case "engine":
                _put_on_path(flags["app_dir"])
                with _importing(flags["engine"]):
                    engine = targets.load_engine(flags["engine"])
            case "embedded":
                server = around.enter_context(EmbeddedServer(flags["embedded_dir"]))
                _install_tables(server.url, flags["schema"])
                log.warning("the embedded PostgreSQL is not for production; its URL is %s", server.url)
                engine = engine_of(server.url, size=size)
            case _:
                raise click.UsageError(
                    "no database is named. Give its URL, with --url or in NEOQ_DATABASE_URL or DATABASE_URL, "
                    "or say --embedded for a PostgreSQL of its own",
                    context,
                )
        around.callback(engine.dispose)
        yield engine


def _install_tables(url: str, schema: str | None) -> None:
    """Make an empty embedded database usable at once; the application's Alembic chain accepts what it finds there."""
    engine = engine_of(url, pool=False)
    with engine.begin() as connection:
        if migrations.installed_version(connection, schema=schema) == 0:
            if schema:
                connection.execute(CreateSchema(schema, if_not_exists=True))
            migrations.upgrade(connection, schema=schema)
            log.info("tables installed")


@contextlib.contextmanager
def _connected(engine: Engine, schema: str | None) -> Iterator[Connection]:
    """Yield a connection that finds the tables, after checking that they are there."""
    schema = schema or schema_of(engine)
    try:
        connection = engine.connect()
    except OperationalError as error:
        raise DatabaseUnavailable(f"cannot connect to {engine.url!r}: {error.orig}") from error
    with connection:
        migrations.verify(connection, schema=schema)
        yield connection.execution_options(schema_translate_map={None: schema}) if schema else connection


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turn the library's errors into a sentence and an exit code."""
    try:
        yield
    except SchemaError as error:
        _fail(SCHEMA, f"{error}\n\n{error.remedy}")
    except (DatabaseUnavailable, EmbeddedError) as error:
        _fail(NO_CONNECTION, str(error))
    except NeoqError as error:
        _fail(USAGE, str(error))


def _fail(code: int, sentence: str) -> NoReturn:
    click.echo(f"Error: {sentence}", err=True)
    sys.exit(code)
