"""``python -m sqla_neoq.migrate``: the tables from the command line, with Alembic or without.

``up`` and ``down`` are for applications without Alembic; with it, the tables travel in the application's own chain, and
``revision`` writes that revision. ``current``, ``check`` and ``sql`` serve both.

Exit codes: 0 done, or as it should be; 1 ``check`` found differences; 2 usage; 3 no connection; 4 the tables are not as
they must be for what was asked, and nothing was changed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError

from sqla_neoq import migrations
from sqla_neoq.dialects import engine_of
from sqla_neoq.errors import ConfigurationError, SchemaError
from sqla_neoq.migrations.quoting import qualifier, quote
from sqla_neoq.migrations.rights import grants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

_LATEST = migrations.LATEST
_url = click.option(
    "--url",
    envvar=["NEOQ_DATABASE_URL", "DATABASE_URL"],
    required=True,
    show_envvar=True,
    help="The database, as a postgresql:// URL.",
)


def _checked(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    try:
        qualifier(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return name


_schema = click.option(
    "--schema",
    callback=_checked,
    envvar="NEOQ_SCHEMA",
    show_envvar=True,
    help="The schema of the tables; by default the search_path decides.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Create, upgrade, check and remove the tables of sqla_neoq."""


@main.command()
@_url
@_schema
@click.option("--to", type=click.IntRange(1, _LATEST), default=_LATEST, show_default=True, help="The version to reach.")
@click.option("--create-schema", is_flag=True, help="Create the schema if it is not there.")
@click.option("--concurrently", is_flag=True, help="Build new indexes on tables in use after it, beside running jobs.")
@click.option("--grant", multiple=True, metavar="ROLE", help="Let ROLE run jobs and enqueue them. Repeatable.")
@click.option("--grant-producer", multiple=True, metavar="ROLE", help="Let ROLE enqueue jobs. Repeatable.")
def up(
    *,
    url: str,
    schema: str | None,
    to: int,
    create_schema: bool,
    concurrently: bool,
    grant: tuple[str, ...],
    grant_producer: tuple[str, ...],
) -> None:
    """Bring the tables to the newest version, in one transaction."""
    if create_schema and schema is None:
        raise click.UsageError("--create-schema needs --schema")
    with _transaction(url) as connection:
        migrations.lock(connection, schema)
        if create_schema and not _has_schema(connection, schema):
            connection.exec_driver_sql(f"CREATE SCHEMA {quote(str(schema))}", execution_options={"no_parameters": True})
        before = migrations.installed_version(connection, schema=schema)
        migrations.upgrade(connection, to=to, schema=schema, concurrently=concurrently)
        # Whoever is in public already needs no right to look into it; any other schema is closed.
        place = schema or connection.scalar(text("SELECT nullif(current_schema(), 'public')"))
        for roles, producer_only in ((grant, False), (grant_producer, True)):
            for role in roles:
                for statement in grants(role, schema=place, producer_only=producer_only):
                    connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
    click.echo(f"version {to}" if before == to else f"from version {before} to {to}")
    if concurrently:
        with _connection(url) as connection:
            migrations.build_indexes(connection.execution_options(isolation_level="AUTOCOMMIT"), schema=schema)


@main.command()
@_url
@_schema
@click.option("--to", type=click.IntRange(0, _LATEST), default=0, show_default=True, help="The version to go back to.")
@click.option("--force", is_flag=True, help="Even though unfinished jobs are lost.")
def down(*, url: str, schema: str | None, to: int, force: bool) -> None:
    """Go back to an older version; to 0, removing the tables with everything in them."""
    with _transaction(url) as connection:
        before = migrations.installed_version(connection, schema=schema)
        migrations.downgrade(connection, to=to, schema=schema, force=force)
    click.echo(f"version {before}" if before <= to else f"from version {before} to {to}")


@main.command()
@_url
@_schema
def current(*, url: str, schema: str | None) -> None:
    """Say which version the tables have, and which this release brings."""
    with _transaction(url) as connection:
        installed = migrations.installed_version(connection, schema=schema)
    click.echo(f"{installed} of {_LATEST}" if installed else f"not installed; this release brings version {_LATEST}")


@main.command()
@_url
@_schema
@click.pass_context
def check(context: click.Context, *, url: str, schema: str | None) -> None:
    """Compare the tables, indexes, constraints and the trigger with what their version should be."""
    with _transaction(url) as connection:
        found = migrations.check(connection, schema=schema)
        installed = migrations.installed_version(connection, schema=schema)
    for sentence in found:
        click.echo(sentence)
    if found:
        context.exit(1)
    click.echo(f"version {installed}, as it should be")


@main.command()
@_schema
@click.option("--from", "from_", type=click.IntRange(0, _LATEST), default=0, show_default=True, help="The version now.")
@click.option("--to", type=click.IntRange(0, _LATEST), default=_LATEST, show_default=True, help="The version to reach.")
def sql(*, schema: str | None, from_: int, to: int) -> None:
    """Print the SQL between two versions, for psql or another migration tool. Connects to nothing."""
    click.echo("BEGIN;")
    for statement in migrations.statements(from_, to, schema=schema):
        click.echo(f"{statement};")
    click.echo("COMMIT;")


@main.command()
@_schema
@click.option(
    "--config", "-c", default="alembic.ini", type=click.Path(dir_okay=False, path_type=Path), show_default=True
)
@click.option("--from", "from_", type=click.IntRange(0, _LATEST), default=0, show_default=True, help="The version now.")
@click.option("--to", type=click.IntRange(0, _LATEST), default=_LATEST, show_default=True, help="The version to reach.")
@click.option("--message", "-m", default="sqla_neoq tables", show_default=True)
@click.option("--head", default="head", show_default=True, help="The revision to put it after.")
def revision(*, schema: str | None, config: Path, from_: int, to: int, message: str, head: str) -> None:
    """Write the revision into the application's Alembic chain. Connects to nothing."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError, rev_id

    if from_ == to:
        raise click.UsageError(f"--from {from_} is --to {to}: there is nothing to write")
    if not config.exists():
        raise click.UsageError(f"there is no {config}; name your Alembic configuration with --config")
    at = "" if schema is None else f", schema={schema!r}"
    try:
        script = ScriptDirectory.from_config(Config(str(config))).generate_revision(
            rev_id(),
            message,
            head=head,
            imports="from sqla_neoq import migrations as neoq",
            upgrades=f"neoq.migrate(op, {from_}, {to}{at})",
            downgrades=f"neoq.migrate(op, {to}, {from_}{at})",
        )
    except CommandError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"wrote {script.path}" if script is not None else "nothing was written")


@contextlib.contextmanager
def _transaction(url: str) -> Iterator[Connection]:
    """Yield a connection in a transaction, which is committed; errors as :func:`_connection`."""
    with _connection(url) as connection, connection.begin():
        yield connection


@contextlib.contextmanager
def _connection(url: str) -> Iterator[Connection]:
    """Yield a connection; what goes wrong becomes a sentence and an exit code."""
    try:
        engine = engine_of(url, pool=False)
        with engine.connect() as connection:
            yield connection
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except SchemaError as error:
        raise _Failure(4, f"{error}\n\n{error.remedy}") from error
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) is None:
            raise _Failure(3, f"cannot connect: {error.orig}") from error
        raise _Failure(4, f"nothing was changed: {error.orig}") from error
    except DBAPIError as error:
        # A missing privilege, a schema that does not exist, a role that does not exist: the server's own sentence.
        raise _Failure(4, f"nothing was changed: {error.orig}") from error


class _Failure(click.ClickException):
    """A sentence for the terminal, and the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]  # click reads it from the instance


def _has_schema(connection: Connection, schema: str | None) -> bool:
    found = connection.scalar(text("SELECT count(*) FROM pg_namespace WHERE nspname = :schema"), {"schema": schema})
    return bool(found)


if __name__ == "__main__":
    main(prog_name="python -m sqla_neoq.migrate")
