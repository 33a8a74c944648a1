"""Connections of frameworks, through the frameworks' own methods: their logs and instrumentation see the statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sqla_neoq.handles.contract import AsyncJoined, Joined
from sqla_neoq.handles.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqla_neoq.handles.contract import Query, Rows, Settings
    from sqla_neoq.handles.rendering import Style


class DjangoHandle(Joined):
    """A connection of ``django.db.connections``."""

    def __init__(self, connection: Any, settings: Settings) -> None:
        super().__init__(settings)
        self._connection = connection

    def in_transaction(self) -> bool:
        """Whether this is inside ``atomic()``, or autocommit is switched off."""
        return bool(self._connection.in_atomic_block) or not self._connection.get_autocommit()

    def rows(self, query: Query) -> Rows:
        """Run one query."""
        with self._connection.cursor() as cursor:
            cursor.execute(*render(query, "format", self.settings.schema))
            return _by_position(cursor.fetchall())


class PeeweeHandle(Joined):
    """A PostgresqlDatabase of Peewee."""

    def __init__(self, database: Any, settings: Settings) -> None:
        super().__init__(settings)
        self._database = database

    def in_transaction(self) -> bool:
        """Whether this is inside ``atomic()``, or a transaction was begun by hand in ``manual_commit()``."""
        if self._database.in_transaction():
            return True
        connection = self._database.connection()
        return bool(connection.info.transaction_status)

    def rows(self, query: Query) -> Rows:
        """Run one query."""
        cursor = self._database.execute_sql(*render(query, "format", self.settings.schema))
        try:
            return _by_position(cursor.fetchall())
        finally:
            cursor.close()


class AsyncPeeweeHandle(AsyncJoined):
    """An AsyncPostgresqlDatabase of Peewee."""

    def __init__(self, database: Any, settings: Settings) -> None:
        super().__init__(settings)
        self._database = database

    def in_transaction(self) -> bool:
        """Whether this is inside ``atomic()``."""
        return bool(self._database.in_transaction())

    async def rows(self, query: Query) -> Rows:
        """Run one query."""
        cursor = await self._database.aexecute_sql(*render(query, "format", self.settings.schema))
        return _by_position(cursor.fetchall())


class TortoiseHandle(AsyncJoined):
    """What ``async with in_transaction() as connection`` of Tortoise gives, on asyncpg or psycopg."""

    def __init__(self, connection: Any, settings: Settings, style: Style) -> None:
        super().__init__(settings)
        self._connection = connection
        self._style = style

    def in_transaction(self) -> bool:
        """It is nothing but a transaction."""
        return True

    async def rows(self, query: Query) -> Rows:
        """Run one query."""
        return _by_position(
            await self._connection.execute_query_dict(*render(query, self._style, self.settings.schema))
        )


def _by_position(rows: Iterable[Any]) -> Rows:
    """Return rows as sequences, also where the framework was told to make them dicts."""
    return [tuple(row.values()) if isinstance(row, Mapping) else row for row in rows]
