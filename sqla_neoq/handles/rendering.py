"""A statement as a driver takes it: SQL text in its parameter style, and the values in their order."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

if TYPE_CHECKING:
    from sqlalchemy import Executable

    from sqla_neoq.handles.contract import Query

Style: TypeAlias = Literal["format", "numeric_dollar"]
"""``%s`` or ``$1``."""


def render(query: Query, style: Style, schema: str | None) -> tuple[str, list[Any]]:
    """Return the text and the values of a query.

    Args:
        query: the statement and its parameters.
        style: how the driver writes a parameter.
        schema: where the tables are; None leaves it to the search_path.
    """
    sql, names, values = _rendered(query.statement, style, schema)
    # The statement's own constants, and over them what the caller gives.
    values = {**values, **query.parameters}
    return sql, [values[name] for name in names]


# A handful of statements; the schemas are as many as the host has tenants.
@lru_cache(maxsize=1024)
def _rendered(statement: Executable, style: Style, schema: str | None) -> tuple[str, list[str], dict[str, Any]]:
    # By class and not by name, and with no connection: this imports no driver.
    dialect = PGDialect_psycopg(paramstyle=style)  # type: ignore[no-untyped-call]
    translation = {} if schema is None else {"schema_translate_map": {None: schema}, "render_schema_translate": True}
    compiled: Any = statement.compile(dialect=dialect, **translation)  # type: ignore[attr-defined]
    return compiled.string, list(compiled.positiontup), compiled.construct_params(_check=False)
