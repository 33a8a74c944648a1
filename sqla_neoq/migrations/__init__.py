"""The tables' DDL as numbered steps, called from the host application's own Alembic revisions.

.. code-block:: python

    from sqla_neoq import migrations as neoq

    def upgrade():
        neoq.migrate(op, 0, 1)

    def downgrade():
        neoq.migrate(op, 1, 0)

:func:`upgrade` and :func:`downgrade` do the same on a plain SQLAlchemy connection, for applications without Alembic.
Each step is a list of single SQL statements, up and down. This module imports nothing of Alembic: it only uses the
``op`` it is handed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from sqla_neoq.errors import SchemaError, SchemaMissing, SchemaOutdated, SchemaTooNew
from sqla_neoq.migrations import step_0001
from sqla_neoq.migrations.quoting import qualifier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, CursorResult

_STEPS: Final = (step_0001,)
LATEST: Final = len(_STEPS)
"""The schema version that this release installs."""
OLDEST_USABLE: Final = max(1, LATEST - 1)
"""The oldest schema version that this release can run on."""


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


def migrate(op: Any, from_: int, to: int, *, schema: str | None = None) -> None:
    """Lead the tables from one version to another inside a revision of the host's Alembic chain.

    Args:
        op: ``alembic.op``, as a revision imports it.
        from_: the version the tables have before; 0 means that they are not there.
        to: the version they have after.
        schema: the schema to put them in; None leaves it to the connection's search_path.

    Raises:
        ValueError: for a version that this release does not know.
        SchemaError: when the database holds another version than ``from_``. It is no error when it already holds
            ``to``: then nothing is done. Offline (``--sql``) nothing can be looked up, and ``from_`` is believed.
    """
    planned = list(statements(from_, to, schema=schema))
    context = op.get_context()
    if context.as_sql:
        for statement in planned:
            # Not op.execute(): it goes through text(), which takes ":word" for a bind and doubles "%" offline.
            context.impl.static_output(statement + ";\n")
        return
    _run(op.get_bind(), planned, from_, to, schema)


def upgrade(connection: Connection, *, to: int = LATEST, schema: str | None = None) -> None:
    """Bring the tables to version ``to``, by default the newest, in the connection's open transaction.

    The caller commits. Nothing is done when they are there already.

    Raises:
        SchemaTooNew: the database holds a newer version than ``to``.
    """
    lock(connection, schema)
    current = installed_version(connection, schema=schema)
    if current > to:
        raise SchemaTooNew(
            f"the tables have version {current}, newer than the {to} asked for", "Use downgrade() on purpose."
        )
    _run(connection, list(statements(current, to, schema=schema)), current, to, schema)


def downgrade(connection: Connection, *, to: int = 0, schema: str | None = None) -> None:
    """Bring the tables back to version ``to``; 0 removes them with every job in them. The caller commits."""
    lock(connection, schema)
    current = installed_version(connection, schema=schema)
    if current > to:
        _run(connection, list(statements(current, to, schema=schema)), current, to, schema)


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
        "Without Alembic:\n\n"
        "    from sqla_neoq import migrations\n\n"
        "    with engine.begin() as connection:\n"
        f"        migrations.upgrade(connection{at})\n"
    )


def _run(connection: Connection, planned: list[str], from_: int, to: int, schema: str | None) -> None:
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
    for statement in planned:
        _execute(connection, statement)


def _execute(connection: Connection, statement: str) -> CursorResult[Any]:
    # One statement a call (asyncpg refuses several), with no parameters (so that "%" means "%").
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
