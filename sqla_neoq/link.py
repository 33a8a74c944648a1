"""A connection that one service owns: opened when needed, cut when it hangs, opened again after it broke."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from sqla_neoq.dialects import cut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

    from sqla_neoq.dialects import Dialect

LONGEST_WAIT: Final = 75.0
"""Seconds after which a database call is cut off: above the server's own statement_timeout of 60."""

_jitter: Final = random.Random()  # noqa: S311 - jitter, not a secret


class Link:
    """One service's connection.

    Every use is bounded: :meth:`use` notes until when it may take, and the runner's timekeeper cuts the connection
    when it takes longer, because a half-open one would otherwise be waited on for ever.
    """

    def __init__(self, engine: Engine, dialect: Dialect, name: str) -> None:
        self._engine = engine
        self._dialect = dialect
        self._name = name
        self._connection: Connection | None = None
        # Remembered, because asking a broken Connection for it makes it connect again.
        self._driver_connection: Any = None
        self._busy_until: float | None = None
        # Between looking at a connection's file number and cutting it, it must not be closed: the number may be
        # another connection's by then.
        self._closing = threading.Lock()

    @contextmanager
    def use(self, longest: float = LONGEST_WAIT) -> Iterator[Connection]:
        """Yield the connection, opening it if need be; an error closes it, and the next use opens another."""
        try:
            if self._connection is None:
                self._connection = self._dialect.connect(self._engine, self._name)
                self._driver_connection = self._connection.connection.dbapi_connection
            self._busy_until = monotonic() + longest
            yield self._connection
        except BaseException:
            self.close()
            raise
        finally:
            self._busy_until = None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Yield the connection within BEGIN and COMMIT."""
        with self.use() as connection, self._driver_connection.transaction():
            yield connection

    def close(self) -> None:
        """Close the connection, if it is open. Safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            with self._closing:
                driver_connection, self._driver_connection = self._driver_connection, None
                # Itself: invalidate() only forgets a connection that is in no pool, and without invalidate() a broken
                # one would first be asked for a rollback.
                driver_connection.close()
            connection.invalidate()
            connection.close()
        except Exception:  # noqa: BLE001, S110 - it was to be gone, and is
            pass

    def cut_if_late(self, now: float) -> bool:
        """Cut the connection if its use takes too long; for another thread. Returns whether it was cut."""
        with self._closing:
            until, driver_connection = self._busy_until, self._driver_connection
            if until is None or driver_connection is None or now < until:
                return False
            self._busy_until = None
            cut(driver_connection)
            return True


class Reconnecting:
    """How long to wait between attempts while the database is away: 0.1 s doubling to 5 s, each with jitter.

    At most 5 s, because a worker's silence is noticed after thirty.
    """

    _FIRST = 0.1
    _LONGEST = 5.0

    def __init__(self) -> None:
        self._tries = 0

    def succeeded(self) -> None:
        """The database answered."""
        self._tries = 0

    def next_delay(self) -> float:
        """Return the seconds to wait after one more failure."""
        delay = min(self._LONGEST, self._FIRST * float(2 ** min(self._tries, 16)))
        self._tries += 1
        return delay * (0.5 + _jitter.random() / 2)

    @property
    def failures(self) -> int:
        """How many attempts failed in a row."""
        return self._tries
