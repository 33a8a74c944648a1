"""The plugin that Alembic 1.18 and newer load by themselves, through the entry point ``alembic.plugins``.

Hosts that opt in with ``autogenerate_plugins=["alembic.autogenerate.*", "sqla_neoq"]`` get the migrate call written:
when this release knows a newer version of the tables than the database has, ``alembic revision --autogenerate`` writes
``neoq.migrate(op, 0, 1)`` and its reverse, and ``alembic check`` finds it missing. Whoever does not opt in still gets
the protection of :mod:`sqla_neoq.alembic_protection`.

Alembic loads plugins in the middle of its own import. So nothing is imported, from it or from the rest of this package,
until a function is called (:mod:`sqla_neoq` itself imports its names on demand): an error here would break ``import
alembic`` for the whole host.
"""

from __future__ import annotations

import sys
import types
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def setup(plugin: Any) -> None:
    """Register with Alembic 1.18 or newer; called by it."""
    from alembic.util import DispatchPriority

    from sqla_neoq.alembic_protection import leave_ours_alone

    plugin.add_autogenerate_comparator(_add_migration, "schema", "sqla_neoq")
    # A plugin of its own, because who did not opt in to the other must have this one.
    protection = type(plugin)("alembic.autogenerate.sqla_neoq_protection")
    protection.add_autogenerate_comparator(
        leave_ours_alone, "schema", "sqla_neoq_protection", priority=DispatchPriority.LAST
    )


def _add_migration(context: Any, upgrade_ops: Any, _schemas: Any) -> Any:
    """Ask for the steps between the version in the database and the one this release brings."""
    from sqla_neoq import migrations
    from sqla_neoq.alembic_protection import go_on

    schema = context.migration_context.opts.get("neoq_schema")
    if schema is None:
        schema = context.connection.get_execution_options().get("neoq_schema")
    installed = migrations.installed_version(context.connection, schema=schema)
    if installed < migrations.LATEST:
        upgrade_ops.ops.append(_operation()(installed, migrations.LATEST, schema))
    return go_on()


@cache
def _operation() -> Any:
    """Make the operation and its renderer, once Alembic can be imported."""
    from alembic.autogenerate.render import renderers
    from alembic.operations.ops import MigrateOperation

    class MigrateNeoq(MigrateOperation):
        """``neoq.migrate(op, from, to)`` in a revision."""

        def __init__(self, from_: int, to: int, schema: str | None) -> None:
            self.from_ = from_
            self.to = to
            self.schema = schema

        def reverse(self) -> MigrateNeoq:
            return MigrateNeoq(self.to, self.from_, self.schema)

        def to_diff_tuple(self) -> tuple[Any, ...]:
            return ("neoq_migrate", self.from_, self.to, self.schema)

    @renderers.dispatch_for(MigrateNeoq)
    def _render(context: Any, operation: MigrateNeoq) -> str:
        context.imports.add("from sqla_neoq import migrations as neoq")
        handle = (context.opts.get("alembic_module_prefix") or "op.").rstrip(".")
        at = "" if operation.schema is None else f", schema={operation.schema!r}"
        return f"neoq.migrate({handle}, {operation.from_}, {operation.to}{at})"

    return MigrateNeoq


class _IterableModule(types.ModuleType):
    """Alembic 1.18.0 to 1.20.0 iterate over what the entry point loads, 1.20.1 takes the module itself."""

    def __iter__(self) -> Iterator[types.ModuleType]:
        yield self


sys.modules[__name__].__class__ = _IterableModule
