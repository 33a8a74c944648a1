"""Indexes on tables that hold jobs already: made within the step, or CONCURRENTLY beside the running work.

``CREATE INDEX`` keeps every writer out until it is done; ``CREATE INDEX CONCURRENTLY`` keeps nobody out, but cannot be
part of a transaction, and leaves an INVALID index behind when it fails. So with ``concurrently`` a step is committed
without its indexes, and they are built after it; whoever asks again builds what is missing and replaces what is
INVALID. That is safe because a release works on the schema version before its own, and so without these indexes.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from sqla_neoq.errors import SchemaError
from sqla_neoq.migrations.failures import explained, in_transaction
from sqla_neoq.migrations.quoting import qualifier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy import Connection

_NAP: Final = 0.2
_LOCK: Final = "hashtextextended('neoq:index:' || coalesce(:schema, current_schema(), ''), 0)"


@dataclass(frozen=True, slots=True)
class Index:
    """An index that a step adds to a table which an earlier one made.

    Attributes:
        name: the index's.
        table: the table's, without its schema.
        definition: what follows in CREATE INDEX: the columns, and perhaps a WHERE.
        unique: whether it is a unique index.
    """

    name: str
    table: str
    definition: str
    unique: bool = False

    def create(self, prefix: str, *, concurrently: bool = False) -> str:
        """Return the CREATE INDEX statement; ``prefix`` is ``"schema".`` or nothing."""
        kind = "UNIQUE INDEX" if self.unique else "INDEX"
        how = " CONCURRENTLY IF NOT EXISTS" if concurrently else ""
        return f"CREATE {kind}{how} {self.name} ON {prefix}{self.table} {self.definition}"


def unbuilt(connection: Connection, indexes: Iterable[Index], *, schema: str | None) -> list[Index]:
    """Return those that are not there, or not valid."""
    return [index for index in indexes if not _is_valid(connection, index, schema)]


def build(connection: Connection, indexes: Iterable[Index], *, schema: str | None) -> None:
    """Build those that are not there or not valid, one after the other, while jobs go on.

    Args:
        connection: in autocommit.
        indexes: what shall be there.
        schema: where the tables are.

    Raises:
        SchemaError: an index cannot be built; the tables work without it, only slower, and a later call tries again.
    """
    prefix = qualifier(schema)
    with _unhurried(connection), _alone(connection, schema), explained("the index is missing until the next try"):
        for index in indexes:
            valid = _is_valid(connection, index, schema)
            if valid:
                continue
            if valid is False:
                _execute(connection, f"DROP INDEX CONCURRENTLY {prefix}{index.name}")
            _execute(connection, index.create(prefix, concurrently=True))


def _is_valid(connection: Connection, index: Index, schema: str | None) -> bool | None:
    """Return whether the index is usable; None when it is not there."""
    valid: bool | None = connection.scalar(
        text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)"),
        {"name": f"{qualifier(schema)}{index.name}"},
    )
    return valid


@contextmanager
def _unhurried(connection: Connection) -> Iterator[None]:
    """Lift the timeouts: building waits for every older transaction to end, and nobody waits for the building."""
    if in_transaction(connection):
        raise SchemaError(
            "an index cannot be built CONCURRENTLY within a transaction",
            "Use a connection in autocommit: engine.connect().execution_options(isolation_level='AUTOCOMMIT').",
        )
    names = ("lock_timeout", "statement_timeout")
    before = {name: connection.scalar(text(f"SELECT current_setting('{name}')")) for name in names}
    for name in names:
        _set(connection, name, "0")
    try:
        yield
    finally:
        for name, value in before.items():
            _set(connection, name, value)


@contextmanager
def _alone(connection: Connection, schema: str | None) -> Iterator[None]:
    """Hold a lock, so that nobody takes an index that is being built for an INVALID leftover."""
    # Asked again and again: one that waited would hold a snapshot, and be waited for by whoever builds, for ever.
    while not connection.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK})"), {"schema": schema}):
        time.sleep(_NAP)
    try:
        yield
    finally:
        connection.scalar(text(f"SELECT pg_advisory_unlock({_LOCK})"), {"schema": schema})


def _set(connection: Connection, name: str, value: Any) -> None:
    connection.execute(text("SELECT set_config(:name, :value, false)"), {"name": name, "value": value})


def _execute(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
