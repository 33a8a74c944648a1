"""The application's command line: ``python -m catalog``."""

from __future__ import annotations

import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from catalog import app, demo, report
from catalog.database import engine_for
from sqla_neoq.embedded import EmbeddedServer

if TYPE_CHECKING:
    from sqlalchemy import Engine

REPOSITORY = Path(__file__).parents[2]

url_option = click.option(
    "--url",
    "engine",
    envvar=["NEOQ_DATABASE_URL", "DATABASE_URL"],
    required=True,
    callback=lambda _context, _parameter, url: engine_for(url),
    help="The database, as postgresql://user@host/name.",
)
root_option = click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=sysconfig.get_path("stdlib"),
    show_default=True,
    help="The folder whose Python files are catalogued.",
)


@click.group()
def main() -> None:
    """Count the lines, functions and classes of Python files, one background job for each file."""


@main.command("migrate")
@url_option
def migrate_command(engine: Engine) -> None:
    """Bring the database's tables up to date, the queue's included."""
    app.migrate(engine)


@main.command("enqueue")
@url_option
@root_option
def enqueue_command(engine: Engine, root: Path) -> None:
    """Add the files that are not there yet, each with its job."""
    click.echo(f"{app.enqueue_files(engine, root):,} new files under {root}")


@main.command("report")
@url_option
@root_option
def report_command(engine: Engine, root: Path) -> None:
    """Compare the database with a count made without the queue; exit 0 if they are equal."""
    sys.exit(not report.compare(engine, root).show())


@main.command("demo")
@click.option("--url", help="A database to use; by default an embedded PostgreSQL, with its data in --directory.")
@root_option
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=REPOSITORY / ".demo",
    help="Where the embedded database and the runners' logs are kept.  [default: .demo in the repository]",
)
@click.option("--runners", type=click.IntRange(1), default=2, show_default=True, help="How many processes work.")
@click.option("--kills", type=click.IntRange(0), default=0, help="How many times all of them are killed meanwhile.")
def demo_command(url: str | None, root: Path, directory: Path, runners: int, kills: int) -> None:
    """Do everything: migrate, enqueue, run, report; exit 0 if all is equal.

    The environment names no database here: the demo must not end up in one that matters.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if url is None:
            click.echo(f"PostgreSQL in {directory}")
            url = stack.enter_context(EmbeddedServer(directory)).url
        engine = engine_for(url)
        stack.callback(engine.dispose)
        sys.exit(not demo.demo(engine, root, directory, runners, kills))


if __name__ == "__main__":
    main()
