"""The drivers' own connections: psycopg, psycopg2, asyncpg.

Each query runs on a cursor made for it, so a cursor that the caller is reading from is not disturbed and its row
factory does not matter.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from sqla_neoq.handles.contract import AsyncJoined, Joined
from sqla_neoq.handles.rendering import Style, render

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqla_neoq.handles.contract import Query, Rows, Settings

_IDLE: Final = 0
"""libpq's PQTRANS_IDLE: connected, and in no transaction."""


class PsycopgHandle(Joined):
    """A connection of psycopg 3."""

    def __init__(self, connection: Any, settings: Settings) -> None:
        super().__init__(settings)
        self._connection = connection

    def in_transaction(self) -> bool:
        """Whether a transaction is open, or will be with the next statement."""
        return _psycopg_in_transaction(self._connection)

    def rows(self, query: Query) -> Rows:
        """Run one query on a cursor of the connection's own kind, but with tuples for rows."""
        from psycopg.rows import tuple_row

        with self._connection.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(*render(query, _psycopg_style(cursor), self.settings.schema))
            rows: Rows = cursor.fetchall()
            return rows


class AsyncPsycopgHandle(AsyncJoined):
    """An AsyncConnection of psycopg 3."""

    def __init__(self, connection: Any, settings: Settings) -> None:
        super().__init__(settings)
        self._connection = connection

    def in_transaction(self) -> bool:
        """Whether a transaction is open, or will be with the next statement."""
        return _psycopg_in_transaction(self._connection)

    async def rows(self, query: Query) -> Rows:
        """Run one query on a cursor of the connection's own kind, but with tuples for rows."""
        from psycopg.rows import tuple_row

        async with self._connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(*render(query, _psycopg_style(cursor), self.settings.schema))
            rows: Rows = await cursor.fetchall()
            return rows


def _psycopg_in_transaction(connection: Any) -> bool:
    # In autocommit, `with connection.transaction()` opens one all the same.
    return not connection.autocommit or connection.info.transaction_status != _IDLE


def _psycopg_style(cursor: Any) -> Style:
    # The connection's cursor_factory may be one of those that leave the text to the server as it is.
    raw = {"RawCursor", "AsyncRawCursor"} & {kind.__name__ for kind in cursor.__class__.__mro__}
    return "numeric_dollar" if raw else "format"


class Psycopg2Handle(Joined):
    """A connection of psycopg2, lent when the first query needs it."""

    def __init__(self, lend: Callable[[], Any], settings: Settings) -> None:
        super().__init__(settings)
        self._lend = lend

    def in_transaction(self) -> bool:
        """Whether a transaction is open, or will be with the next statement."""
        connection = self._lend()
        if connection.autocommit and connection.get_transaction_status() == _IDLE:
            # `with connection:` opens a transaction also in autocommit, but says so only from the first statement on.
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
            return bool(connection.get_transaction_status() != _IDLE)
        return True

    def rows(self, query: Query) -> Rows:
        """Run one query on a plain cursor, whatever the connection's own kind."""
        plain = sys.modules["psycopg2.extensions"].cursor
        with self._lend().cursor(cursor_factory=plain) as cursor:
            cursor.execute(*render(query, "format", self.settings.schema))
            rows: Rows = cursor.fetchall()
            return rows


class AsyncpgHandle(AsyncJoined):
    """A connection of asyncpg, also one lent by a pool."""

    def __init__(self, connection: Any, settings: Settings) -> None:
        super().__init__(settings)
        self._connection = connection

    def in_transaction(self) -> bool:
        """Whether a transaction is open: asyncpg begins none by itself."""
        return bool(self._connection.is_in_transaction())

    async def rows(self, query: Query) -> Rows:
        """Run one query; the rows are asyncpg's own records, whatever the connection's record class."""
        sql, values = render(query, "numeric_dollar", self.settings.schema)
        rows: Rows = await self._connection.fetch(sql, *values, record_class=sys.modules["asyncpg"].Record)
        return rows
