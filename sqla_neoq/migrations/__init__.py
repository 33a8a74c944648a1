"""The tables' DDL as numbered steps, called from the host application's own Alembic revisions.

.. code-block:: python

    from sqla_neoq import migrations as neoq

    def upgrade():
        neoq.migrate(op, 0, 1)

    def downgrade():
        neoq.migrate(op, 1, 0)

:func:`upgrade` and :func:`downgrade` do the same on a plain SQLAlchemy connection, for applications without Alembic.
Each step is a list of single SQL statements, up and down. This module imports nothing of Alembic: it only uses the
``op`` it is handed, and, where Alembic is in use already, keeps its autogenerate off these tables.
"""

from __future__ import annotations

import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from sqla_neoq.alembic_protection import protect
from sqla_neoq.errors import SchemaError, SchemaMissing, SchemaOutdated, SchemaTooNew
from sqla_neoq.migrations import drift, step_0001
from sqla_neoq.migrations.quoting import qualifier
from sqla_neoq.models import TABLES, Base

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, CursorResult, MetaData

_STEPS: Final = (step_0001,)
LATEST: Final = len(_STEPS)
"""The schema version that this release installs."""
OLDEST_USABLE: Final = max(1, LATEST - 1)
"""The oldest schema version that this release can run on."""
DEFAULT_LOCK_TIMEOUT: Final = timedelta(seconds=5)


def statements(from_: int, to: int, *, schema: str | None = None) -> Iterator[str]:
    """Yield the single SQL statements that lead from one schema version to another, up or down.

    Args:
        from_: the version the tables have; 0 means that they are not there.
        to: the version they shall have.
        schema: the schema to put them in; None leaves it to the connection's search_path.

    Raises:
        ValueError: for a version that this release does not know.
    """
    for name, version in (("from_", from_), ("to", to)):
        if not 0 <= version <= LATEST:
            raise ValueError(f"{name}={version!r}: this release knows the schema versions 0 to {LATEST}")
    prefix = qualifier(schema)
    if from_ < to:
        for number in range(from_ + 1, to + 1):
            yield from _STEPS[number - 1].up(prefix)
            yield _set_version(prefix, number)
    for number in range(from_, to, -1):
        yield from _STEPS[number - 1].down(prefix)
        if number > 1:
            yield _set_version(prefix, number - 1)


def _set_version(prefix: str, version: int) -> str:
    return (
        f"INSERT INTO {prefix}neoq_meta (version) VALUES ({version:d}) "
        f"ON CONFLICT (id) DO UPDATE SET version = excluded.version"
    )


def migrate(
    op: Any,
    from_: int,
    to: int,
    *,
    schema: str | None = None,
    force: bool = False,
    lock_timeout: timedelta = DEFAULT_LOCK_TIMEOUT,
) -> None:
    """Lead the tables from one version to another inside a revision of the host's Alembic chain.

    Args:
        op: ``alembic.op``, as a revision imports it.
        from_: the version the tables have before; 0 means that they are not there.
        to: the version they have after.
        schema: the schema to put them in, which must exist; None leaves it to the connection's search_path.
        force: remove the tables although they hold unfinished jobs. ``alembic -x neoq_force=yes downgrade ...`` says
            the same from outside.
        lock_timeout: how long a statement may wait for a lock, and make others wait behind it.

    Raises:
        ValueError: for a version that this release does not know.
        SchemaError: the database holds another version than ``from_``, tables of somebody else under our names, or
            jobs that a downgrade would lose; nothing was changed. It is no error when it already holds ``to``: then
            nothing is done. Offline (``--sql``) nothing can be looked up, and ``from_`` is believed.
    """
    planned = list(statements(from_, to, schema=schema))
    context = op.get_context()
    if context.as_sql:
        timeout = f"SET LOCAL lock_timeout = '{_milliseconds(lock_timeout)}ms'"
        for statement in (timeout, *planned, "SET LOCAL lock_timeout = DEFAULT"):
            # Not op.execute(): it goes through text(), which takes ":word" for a bind and doubles "%" offline.
            context.impl.static_output(statement + ";\n")
        return
    force = force or _forced_from_outside(context)
    _run(op.get_bind(), from_, to, schema, force=force, lock_timeout=lock_timeout)


def upgrade(
    connection: Connection,
    *,
    to: int = LATEST,
    schema: str | None = None,
    lock_timeout: timedelta = DEFAULT_LOCK_TIMEOUT,
) -> None:
    """Bring the tables to version ``to``, by default the newest, in the connection's open transaction.

    The caller commits. Nothing is done when they are there already.

    Raises:
        SchemaTooNew: the database holds a newer version than ``to``.
        SchemaError: there are tables of somebody else under our names.
    """
    lock(connection, schema)
    current = installed_version(connection, schema=schema)
    if current > to:
        raise SchemaTooNew(
            f"the tables have version {current}, newer than the {to} asked for", "Use downgrade() on purpose."
        )
    _run(connection, current, to, schema, force=False, lock_timeout=lock_timeout)


def downgrade(
    connection: Connection,
    *,
    to: int = 0,
    schema: str | None = None,
    force: bool = False,
    lock_timeout: timedelta = DEFAULT_LOCK_TIMEOUT,
) -> None:
    """Bring the tables back to version ``to``; 0 removes them with every job in them. The caller commits.

    Raises:
        SchemaError: unfinished jobs would be lost, and ``force`` was not given.
    """
    lock(connection, schema)
    current = installed_version(connection, schema=schema)
    if current > to:
        _run(connection, current, to, schema, force=force, lock_timeout=lock_timeout)


def check(connection: Connection, *, schema: str | None = None) -> list[str]:
    """Compare the live schema with what its version should be; return a sentence for each difference.

    Raises:
        SchemaError: the tables are missing, or of a version that this release does not know.
    """
    current = verify(connection, schema=schema)
    if current > LATEST:
        raise SchemaTooNew(
            f"the tables have version {current}; this release knows up to {LATEST} and cannot say what is right",
            "pip install --upgrade sqla-neoq",
        )
    return drift.differences(connection, statements(0, current, schema="pg_temp"), schema=schema)


def attach(metadata: MetaData, *, schema: str | None = None) -> None:
    """Copy the tables into the host's metadata, so that its own can have foreign keys to jobs.

    Autogenerate passes the copies over: only the numbered steps touch these tables.

    Args:
        metadata: the host's.
        schema: the schema that holds the tables; None leaves it to the connection's search_path.
    """
    for table in Base.metadata.sorted_tables:
        copy = table.to_metadata(metadata) if schema is None else table.to_metadata(metadata, schema=schema)
        copy.info["neoq"] = True


def include_object(object_: Any, name: str | None, type_: str, _reflected: bool, _compare_to: Any) -> bool:
    """Leave the tables out of an autogenerate comparison, for a host that filters for itself.

    Nobody needs it for protection; it also keeps the tables' indexes out of the log. Chain your own filter to it:
    ``include_object=lambda *args: neoq.include_object(*args) and mine(*args)``.
    """
    table = name if type_ == "table" else getattr(getattr(object_, "table", None), "name", None)
    return table not in TABLES


def installed_version(connection: Connection, *, schema: str | None = None) -> int:
    """Return the version of the tables in the database; 0 when they are not there."""
    name = f"{qualifier(schema)}neoq_meta"
    if connection.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is None:
        return 0
    return int(_execute(connection, f"SELECT version FROM {name}").scalar() or 0)


def verify(connection: Connection, *, schema: str | None = None) -> int:
    """Return the installed version if this release can run on it.

    Raises:
        SchemaMissing: the tables are not there.
        SchemaOutdated: they are older than this release can use.
        SchemaTooNew: they are newer than this release knows.
    """
    current = installed_version(connection, schema=schema)
    place = f"in schema {schema!r}" if schema else "on the connection's search_path"
    if current == 0:
        raise SchemaMissing(f"the tables of sqla_neoq are not there ({place})", _remedy(0, LATEST, schema))
    if current < OLDEST_USABLE:
        raise SchemaOutdated(
            f"the tables of sqla_neoq have version {current} ({place}); this release needs {OLDEST_USABLE}",
            _remedy(current, LATEST, schema),
        )
    if current > LATEST + 1:
        raise SchemaTooNew(
            f"the tables of sqla_neoq have version {current} ({place}); this release knows up to {LATEST}",
            "pip install --upgrade sqla-neoq",
        )
    return current


def lock(connection: Connection, schema: str | None = None) -> None:
    """Let one migration at a time work on these tables, until the end of the transaction."""
    connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended('neoq:migrate:' || :name, 0))"),
        {"name": schema or ""},
    )


def _remedy(from_: int, to: int, schema: str | None) -> str:
    at = f", schema={schema!r}" if schema else ""
    return (
        "Put this into a revision of your Alembic chain (alembic revision -m 'sqla_neoq tables') "
        "and run alembic upgrade head:\n\n"
        "    from sqla_neoq import migrations as neoq\n\n"
        "    def upgrade() -> None:\n"
        f"        neoq.migrate(op, {from_}, {to}{at})\n\n"
        "    def downgrade() -> None:\n"
        f"        neoq.migrate(op, {to}, {from_}{at})\n\n"
        "Or let python -m sqla_neoq.migrate revision write it. Without Alembic:\n\n"
        f"    python -m sqla_neoq.migrate up{f' --schema {shlex.quote(schema)}' if schema else ''}\n"
    )


def _run(
    connection: Connection, from_: int, to: int, schema: str | None, *, force: bool, lock_timeout: timedelta
) -> None:
    lock(connection, schema)
    current = installed_version(connection, schema=schema)
    if current == to:
        return
    if current != from_:
        raise SchemaError(
            f"this revision leads the tables of sqla_neoq from version {from_} to {to}, "
            f"but the database holds version {current}",
            f"Make it migrate(op, {current}, {to}), or run the revisions that lead to {from_} first.",
        )
    if current == 0:
        _refuse_foreign_tables(connection, schema)
    if to == 0 and not force:
        _refuse_to_lose_jobs(connection, schema)
    # For this migration only: the host's other revisions may share the transaction.
    before = connection.scalar(text("SELECT current_setting('lock_timeout')"))
    _set_lock_timeout(connection, f"{_milliseconds(lock_timeout)}ms")
    for statement in statements(from_, to, schema=schema):
        _execute(connection, statement)
    _set_lock_timeout(connection, before)


def _refuse_foreign_tables(connection: Connection, schema: str | None) -> None:
    """Without our version row, whatever has our tables' names is not ours, or is half of ours."""
    found = [
        name
        for name in sorted(TABLES)
        if connection.scalar(text("SELECT to_regclass(:name)"), {"name": f"{qualifier(schema)}{name}"}) is not None
    ]
    if found:
        raise SchemaError(
            f"there are tables called {', '.join(found)} already, which this release did not make",
            "If they are left over from a broken installation, drop them; if they are yours, give sqla_neoq a schema "
            "of its own: migrate(..., schema='neoq').",
        )


def _refuse_to_lose_jobs(connection: Connection, schema: str | None) -> None:
    prefix = qualifier(schema)
    unfinished = _execute(
        connection, f"SELECT count(*) FROM {prefix}neoq_jobs WHERE status IN ('new', 'failed', 'running')"
    ).scalar()
    if unfinished:
        raise SchemaError(
            f"removing the tables would lose {unfinished} unfinished jobs",
            "Let the runners finish them, or say that you mean it: force=True in the revision, "
            "alembic -x neoq_force=yes downgrade ..., or python -m sqla_neoq.migrate down --force.",
        )


def _forced_from_outside(context: Any) -> bool:
    environment = getattr(context, "environment_context", None)
    if environment is None:
        return False
    arguments = environment.get_x_argument(as_dictionary=True)
    return str(arguments.get("neoq_force", "")).lower() in {"yes", "true", "1"}


def _set_lock_timeout(connection: Connection, value: Any) -> None:
    connection.execute(text("SELECT set_config('lock_timeout', :value, true)"), {"value": value})


def _milliseconds(duration: timedelta) -> int:
    # 0 would mean "for ever".
    return max(1, int(duration.total_seconds() * 1000))


def _execute(connection: Connection, statement: str) -> CursorResult[Any]:
    # One statement a call (asyncpg refuses several), with no parameters (so that "%" means "%").
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


protect()
