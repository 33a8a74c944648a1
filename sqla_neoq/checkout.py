"""Pooled connections that are asked whether they live only when there is reason to doubt it.

``pool_pre_ping`` asks at each checkout: a round trip, and 50 µs of Python, before every job that opens its session. A
connection that the server has closed has something to read, and to look costs 2 µs. What that does not show, a link
that was cut without a word, befalls a connection that lay idle; so such a one is asked as before.
"""

from __future__ import annotations

import select
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import psycopg
from sqlalchemy import event
from sqlalchemy.exc import InvalidatePoolError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.pool import ConnectionPoolEntry

LONGEST_IDLE: Final = 1.0
"""Seconds after which a connection is asked in any case."""

_SINCE: Final = "neoq_idle_since"


def ask_the_doubtful(engine: Engine) -> None:
    """Have the engine's pool replace connections that do not answer, instead of lending them."""
    dialect = engine.dialect

    @event.listens_for(engine, "checkin")
    def note(_connection: Any, entry: ConnectionPoolEntry) -> None:
        entry.info[_SINCE] = monotonic()

    @event.listens_for(engine, "checkout")
    def ask(connection: Any, entry: ConnectionPoolEntry, _proxy: object) -> None:
        since = entry.info.pop(_SINCE, None)
        if since is None or not is_doubtful(connection, monotonic() - since):
            return
        try:
            dialect.do_ping(connection)
        except psycopg.Error as error:
            # All of them, as SQLAlchemy does it: a server that closed one has most likely closed the others.
            raise InvalidatePoolError("a pooled connection did not answer") from error


def is_doubtful(connection: psycopg.Connection[Any], idle: float) -> bool:
    """Whether a connection may have died in so many seconds."""
    # To read there may also be a notice: asking tells.
    return idle > LONGEST_IDLE or _has_something_to_read(connection)


def _has_something_to_read(connection: psycopg.Connection[Any]) -> bool:
    try:
        waiting = select.poll()
        waiting.register(connection.fileno(), select.POLLIN)
        return bool(waiting.poll(0))
    except (AttributeError, OSError, psycopg.Error):  # no poll() on this system, or no socket any more
        return True
