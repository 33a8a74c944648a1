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
from sqla_neoq.migrations import drift, indexes, step_0001
from sqla_neoq.migrations.failures import explained, refuse_autocommit, refuse_foreign
from sqla_neoq.migrations.indexes import Index
from sqla_neoq.migrations.quoting import qualifier
from sqla_neoq.migrations.reference import reference_directory as reference_directory
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


def statements(from_: int, to: int, *, schema: str | None = None, concurrently: bool = False) -> Iterator[str]:
    """Yield the single SQL statements that lead from one schema version to another, up or down.

    Args:
        from_: the version the tables have; 0 means that they are not there.
        to: the version they shall have.
        schema: the schema to put them in; None leaves it to the connection's search_path.
        concurrently: leave out the indexes on tables that hold jobs already, to be built after the commit.

    Raises:
        ValueError: for a version that this release does not know.
    """
    for name, version in (("from_", from_), ("to", to)):
        if not 0 <= version <= LATEST:
            raise ValueError(f"{name}={version!r}: this release knows the schema versions 0 to {LATEST}")
    prefix = qualifier(schema)
    if from_ < to:
        for number in range(from_ + 1, to + 1):
            for part in _STEPS[number - 1].up(prefix):
                if not isinstance(part, Index):
                    yield part
                elif not concurrently:
                    yield part.create(prefix)
            yield _set_version(prefix, number)
    for number in range(from_, to, -1):
        yield from _STEPS[number - 1].down(prefix)
        if number > 1:
            yield _set_version(prefix, number - 1)


def _indexes(to: int, *, above: int = 0) -> list[Index]:
    """Return the indexes that can be built CONCURRENTLY, of the steps from above one version to another."""
    return [part for step in _STEPS[above:to] for part in step.up("") if isinstance(part, Index)]


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
    concurrently: bool = False,
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
        concurrently: build indexes on tables that hold jobs already beside the running work. This commits the
            revision, and those before it in the same transaction, and then takes as long as the oldest transaction. If
            it fails, the same call tries again.
        lock_timeout: how long a statement may wait for a lock, and make others wait behind it.

    Raises:
        ValueError: for a version that this release does not know.
        SchemaError: the database holds another version than ``from_``, tables of somebody else under our names, or
            jobs that a downgrade would lose; nothing was changed. It is no error when it already holds ``to``: then
            nothing is done. Offline (``--sql``) nothing can be looked up, and ``from_`` is believed.
    """
    planned = list(statements(from_, to, schema=schema, concurrently=concurrently))
    context = op.get_context()
    if context.as_sql:
        timeout = f"SET LOCAL lock_timeout = '{_milliseconds(lock_timeout)}ms'"
        _write(context, timeout, *planned, "SET LOCAL lock_timeout = DEFAULT")
        later = _indexes(to, above=from_) if concurrently else []
        if later:
            with context.autocommit_block():
                _write(context, *(index.create(qualifier(schema), concurrently=True) for index in later))
        return
    if concurrently and getattr(context, "_transaction", None) is None:
        raise SchemaError(
            "concurrently=True needs to commit, and this env.py began the transaction itself; nothing was changed",
            "Use context.begin_transaction() in env.py, or leave out concurrently=True.",
        )
    force = force or _forced_from_outside(context)
    _begin(op.get_bind(), schema)
    _run(op.get_bind(), from_, to, schema, force=force, concurrently=concurrently, lock_timeout=lock_timeout)
    if concurrently and indexes.unbuilt(op.get_bind(), _indexes(to), schema=schema):
        with context.autocommit_block():
            indexes.build(op.get_bind(), _indexes(to), schema=schema)


def _write(context: Any, *script: str) -> None:
    for statement in script:
        # Not op.execute(): it goes through text(), which takes ":word" for a bind and doubles "%" offline.
        context.impl.static_output(statement + ";\n")


def upgrade(
    connection: Connection,
    *,
    to: int | None = None,
    schema: str | None = None,
    concurrently: bool = False,
    lock_timeout: timedelta = DEFAULT_LOCK_TIMEOUT,
) -> None:
    """Bring the tables to version ``to``, by default the newest, in the connection's open transaction.

    The caller commits. Nothing is done when they are there already. With ``concurrently`` the indexes on tables that
    hold jobs already are left to :func:`build_indexes`, after the commit.

    Raises:
        SchemaTooNew: the database holds a newer version than ``to``.
        SchemaError: there are tables of somebody else under our names, or the server refused; nothing was changed.
    """
    to = LATEST if to is None else to
    _begin(connection, schema)
    current = installed_version(connection, schema=schema)
    if current > to:
        raise SchemaTooNew(
            f"the tables have version {current}, newer than the {to} asked for", "Use downgrade() on purpose."
        )
    _run(connection, current, to, schema, force=False, concurrently=concurrently, lock_timeout=lock_timeout)


def build_indexes(connection: Connection, *, schema: str | None = None) -> None:
    """Build CONCURRENTLY what ``upgrade(..., concurrently=True)`` left out, and again what an earlier try left INVALID.

    Args:
        connection: one in autocommit: ``engine.connect().execution_options(isolation_level="AUTOCOMMIT")``.
        schema: where the tables are; None leaves it to the connection's search_path.

    Raises:
        SchemaError: an index cannot be built; the tables work without it, and the same call tries again.
    """
    indexes.build(connection, _indexes(installed_version(connection, schema=schema)), schema=schema)


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
        SchemaTooNew: the database holds a version that this release does not know the way back from.
        SchemaError: unfinished jobs would be lost, and ``force`` was not given; or the server refused. Nothing was
            changed.
    """
    _begin(connection, schema)
    current = installed_version(connection, schema=schema)
    _refuse_unknown(current)
    if current > to:
        _run(connection, current, to, schema, force=force, lock_timeout=lock_timeout)


def check(connection: Connection, *, schema: str | None = None) -> list[str]:
    """Compare the live schema with what its version should be; return a sentence for each difference.

    Raises:
        SchemaError: the tables are missing, or of a version that this release does not know.
    """
    current = verify(connection, schema=schema)
    _refuse_unknown(current)
    with explained():
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
    """Return the version of the tables in the database; 0 when they are not there.

    Raises:
        SchemaError: the role may not look, or there is a ``neoq_meta`` that is not ours.
    """
    name = f"{qualifier(schema)}neoq_meta"
    with explained():
        ours = connection.scalar(
            text(
                "SELECT count(a.attname) > 0 FROM (SELECT to_regclass(:name) AS oid) AS meta "
                "LEFT JOIN pg_attribute AS a ON a.attrelid = meta.oid AND a.attname = 'version' "
                "AND a.atttypid = CAST('integer' AS regtype) WHERE meta.oid IS NOT NULL GROUP BY meta.oid"
            ),
            {"name": name},
        )
        if ours is None:
            return 0
        if not ours:
            refuse_foreign(["neoq_meta"])
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


def _refuse_unknown(current: int) -> None:
    if current > LATEST:
        raise SchemaTooNew(
            f"the tables of sqla_neoq have version {current}; this release knows up to {LATEST}",
            "pip install --upgrade sqla-neoq",
        )


def lock(connection: Connection, schema: str | None = None) -> None:
    """Let one migration at a time work on these tables, until the end of the transaction.

    Every migration here takes this lock. A host whose deploys may overlap calls it in its ``env.py`` too, between
    ``begin_transaction()`` and ``run_migrations()``, so that the second one sees what the first has done.
    """
    connection.execute(
        text(
            "SELECT pg_advisory_xact_lock("
            "hashtextextended('neoq:migrate:' || coalesce(:schema, current_schema(), ''), 0))"
        ),
        {"schema": schema},
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


def _begin(connection: Connection, schema: str | None) -> None:
    """Take the lock, and see that it is clear which tables are meant and that nothing can stay half done."""
    with explained():
        refuse_autocommit(connection)
        lock(connection, schema)
        if schema is None:
            _refuse_tables_elsewhere(connection)


def _run(
    connection: Connection,
    from_: int,
    to: int,
    schema: str | None,
    *,
    force: bool,
    lock_timeout: timedelta,
    concurrently: bool = False,
) -> None:
    """Run the steps, if the database holds what they start from; after :func:`_begin`."""
    current = installed_version(connection, schema=schema)
    if current == to:
        return
    if current != from_:
        raise SchemaError(
            f"this revision leads the tables of sqla_neoq from version {from_} to {to}, "
            f"but the database holds version {current}",
            f"Make it migrate(op, {current}, {to}), or run the revisions that lead to {from_} first.",
        )
    # For this migration only: the host's other revisions may share the transaction.
    before = connection.scalar(text("SELECT current_setting('lock_timeout')"))
    _set_lock_timeout(connection, f"{_milliseconds(lock_timeout)}ms")
    with explained():
        if current == 0:
            refuse_foreign(_taken_names(connection, schema))
        if to == 0 and not force:
            _refuse_to_lose_jobs(connection, schema)
        for statement in statements(from_, to, schema=schema, concurrently=concurrently):
            _execute(connection, statement)
    _set_lock_timeout(connection, before)


def _refuse_tables_elsewhere(connection: Connection) -> None:
    """Refuse tables that the search_path finds in another schema than the one it creates tables in.

    An application with a schema for each tenant would else see the tables of ``public`` and make none for the tenant;
    and take down those of ``public`` when it removes the tenant's.
    """
    found = connection.execute(
        text(
            "SELECT n.nspname AS there, current_schema() AS here FROM pg_class AS c "
            "JOIN pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE c.oid = to_regclass('neoq_meta') AND n.nspname IS DISTINCT FROM current_schema()"
        )
    ).one_or_none()
    if found is not None:
        raise SchemaError(
            f"the search_path finds tables of sqla_neoq in schema {found.there!r}, but creates new ones in "
            f"{found.here!r}; nothing was changed",
            f"Say which are meant: schema={found.there!r}, or schema={found.here!r}.",
        )


def _taken_names(connection: Connection, schema: str | None) -> list[str]:
    """Return which of our names are taken; without our version row, what has them is not ours, or is half of ours."""
    names = [*sorted(TABLES), "neoq_claim_tokens"]
    found = connection.execute(
        text(
            "SELECT relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = coalesce(:schema, current_schema()) AND relname = ANY(string_to_array(:names, ',')) "
            "ORDER BY relname"
        ),
        {"schema": schema, "names": ",".join(names)},
    )
    return list(found.scalars())


def _refuse_to_lose_jobs(connection: Connection, schema: str | None) -> None:
    prefix = qualifier(schema)
    # What is counted must not grow before it is gone.
    _execute(connection, f"LOCK TABLE {prefix}neoq_jobs IN ACCESS EXCLUSIVE MODE")
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
