"""Keeps Alembic's autogenerate off our tables, for every host, asked for or not.

A host's metadata does not know our tables, so autogenerate would write ``op.drop_table("neoq_jobs")``. Alembic 1.18 and
newer find this protection as a plugin that their default, ``alembic.autogenerate.*``, includes (see
:mod:`sqla_neoq.alembic_plugin`). In any release it registers itself with the global comparators when a revision or an
``env.py`` imports :mod:`sqla_neoq.migrations`, as every revision does that calls it.

Nothing is imported from Alembic until a function is called, because plugins are loaded in the middle of its own import.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from sqla_neoq.models import TABLES


def protect() -> None:
    """Keep autogenerate off our tables, whatever the host configured. Does nothing when Alembic is not in use."""
    # It may be half imported: Alembic loads plugins in the middle of its own import.
    if hasattr(sys.modules.get("alembic.autogenerate"), "comparators"):
        _protect()


@cache
def _protect() -> None:
    from alembic.autogenerate import comparators

    register: Any = comparators.dispatch_for
    try:
        from alembic.util import DispatchPriority
    except ImportError:
        # Before 1.18 they run in the order of their registration, and Alembic's own were first.
        register("schema")(leave_ours_alone)
    else:
        register("schema", priority=DispatchPriority.LAST)(leave_ours_alone)


def leave_ours_alone(context: Any, upgrade_ops: Any, _schemas: Any) -> Any:
    """Take out every operation on our tables: the numbered steps are the only ones that touch them.

    May run twice in one comparison, registered both ways; the second time it finds nothing.
    """
    theirs = _names_of_the_host(context)
    upgrade_ops.ops[:] = [one for one in upgrade_ops.ops if not _on_ours(one, theirs)]
    return go_on()


def _on_ours(operation: Any, theirs: frozenset[tuple[str | None, str]]) -> bool:
    name = getattr(operation, "table_name", None)
    return name in TABLES and (getattr(operation, "schema", None), name) not in theirs


def _names_of_the_host(context: Any) -> frozenset[tuple[str | None, str]]:
    """Return the tables with one of our names that are in the metadata to compare: its owner wants them compared.

    Those that :func:`sqla_neoq.migrations.attach` copied there are not meant: they are for foreign keys only.
    """
    return frozenset(
        (table.schema, table.name)
        for table in context.sorted_tables
        if table.name in TABLES and not table.info.get("neoq")
    )


def go_on() -> Any:
    """Return what a comparator returns to let the others run too."""
    try:
        from alembic.util import PriorityDispatchResult
    except ImportError:
        return None
    return PriorityDispatchResult.CONTINUE
