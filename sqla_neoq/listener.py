"""LISTEN on a connection of its own: says "look at this queue", and nothing else.

The same connection holds two kinds of advisory locks, both of which the server drops the moment the process is gone:
the *liveness lock*, which tells other runners that this one is alive, and for each queue this runner is *hungry* for, a
shared lock that tells the enqueueing trigger that a notification is worth its price.

A notification is only a hint. Whatever is lost while this connection is down is found by polling, and after each
reconnection the dispatcher is told to look at everything.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from sqla_neoq import statements
from sqla_neoq.dialects import DATABASE_ERRORS, cut
from sqla_neoq.lifecycle import Service
from sqla_neoq.link import Reconnecting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import psycopg

log = logging.getLogger("sqla_neoq.listener")

CHANNEL: Final = "neoq"
_CHECK_EVERY: Final = 12.0
_CHECK_TIMEOUT: Final = 12.0  # together below the 30 s in which a dead link must be noticed


class Listener(Service):
    """Keeps one listening connection.

    Args:
        connect: opens the driver connection.
        oid: the jobs table's oid, which wake-ups for other installations in the same database do not carry.
        on_wake: called with the queues that have due jobs; with None when anything may have been missed.
    """

    name = "listener"

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        oid: int,
        on_wake: Callable[[frozenset[str] | None], None],
    ) -> None:
        super().__init__()
        self._connect = connect
        self._oid = oid
        self._on_wake = on_wake
        self._worker: int | None = None
        self._wanted: frozenset[str] = frozenset()
        self._held: set[str] = set()
        self._held_worker: int | None = None
        self._poke_in: socket.socket | None = None
        self._busy_until: float | None = None
        self._connection: psycopg.Connection[Any] | None = None
        # As in Link: what is being cut must not be closed, for its file number may be another's a moment later.
        self._closing = threading.Lock()
        self.connected = False

    def set_worker(self, worker: int) -> None:
        """Hold the liveness lock of this worker from now on."""
        self._worker = worker
        self._poke()

    def set_hungry(self, queues: Iterable[str]) -> None:
        """Be told about jobs on these queues. When that is so for a new one, ``on_wake`` is called for it."""
        wanted = frozenset(queues)
        if wanted != self._wanted:
            self._wanted = wanted
            self._poke()

    def interrupt(self) -> None:
        """Wake the thread."""
        self._poke()

    def cut_if_late(self, now: float) -> bool:
        """Cut the connection when a statement on it takes too long; for another thread."""
        with self._closing:
            until, connection = self._busy_until, self._connection
            if until is None or connection is None or now < until:
                return False
            self._busy_until = None
            cut(connection)
            return True

    def serve(self) -> None:
        """Connect, listen, and connect again, until stopped."""
        poke_in, poke_out = socket.socketpair()
        with poke_in, poke_out:
            poke_in.setblocking(False)
            poke_out.setblocking(False)
            # Who pokes before this sets what it wants, or ``stopping``, before that: it is read below.
            self._poke_in = poke_in
            self._serve(poke_out)

    def _serve(self, poked: socket.socket) -> None:
        reconnecting = Reconnecting()
        while not self.stopping.is_set():
            try:
                self._connection = self._connect()
                self._listen(self._connection, poked, reconnecting)
            except DATABASE_ERRORS as error:
                if self.stopping.is_set():
                    break
                delay = reconnecting.next_delay()
                log.warning("the listening connection is down (%s); polling, next attempt in %.1f s", error, delay)
                self.stopping.wait(delay)
            finally:
                self.connected = False
                with self._closing:
                    connection, self._connection = self._connection, None
                    if connection is not None:
                        connection.close()
                self._busy_until = None
                self._held.clear()
                self._held_worker = None

    def _listen(self, connection: psycopg.Connection[Any], poked: socket.socket, reconnecting: Reconnecting) -> None:
        heard: list[str] = []
        # What comes with the answer to a statement. Connection.notifies() forgets that before psycopg 3.2.4, and later
        # does not go together with a handler, so what comes by itself is read by hand.
        connection.add_notify_handler(lambda notification: heard.append(notification.payload))
        self._execute(connection, f"LISTEN {CHANNEL}")
        self._apply(connection)
        self.connected = True
        reconnecting.succeeded()
        # Only now, and only then: whatever was announced before this LISTEN is in the table to be found.
        self._on_wake(None)
        check_at = monotonic() + _CHECK_EVERY
        # Not select(), which knows no file numbers above 1023: a web server may have more files open.
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(poked, selectors.EVENT_READ)
            while not self.stopping.is_set():
                ready = selector.select(max(0.0, check_at - monotonic()))
                if any(key.fileobj is poked for key, _ in ready):
                    with contextlib.suppress(BlockingIOError):
                        poked.recv(4096)
                gained = self._apply(connection)
                if monotonic() >= check_at:
                    self._execute(connection, "SELECT 1")
                    check_at = monotonic() + _CHECK_EVERY
                # After every statement: a notification that comes with an answer leaves nothing to read on the socket.
                connection.pgconn.consume_input()
                while (notification := connection.pgconn.notifies()) is not None:
                    heard.append(notification.extra.decode(connection.info.encoding))
                queues = {*gained, *self._queues_of(heard)}
                heard.clear()
                if queues:
                    self._on_wake(frozenset(queues))

    def _queues_of(self, payloads: Iterable[str]) -> Iterable[str]:
        for payload in payloads:
            oid, _, queue = payload.partition(" ")
            if oid == str(self._oid) and queue:
                yield queue

    def _apply(self, connection: psycopg.Connection[Any]) -> set[str]:
        """Take and release locks until they are those wanted; return the queues that were gained."""
        if self._worker is not None and self._worker != self._held_worker:
            if self._held_worker is not None:
                self._lock(connection, "pg_advisory_unlock", "worker", str(self._held_worker))
            self._lock(connection, "pg_advisory_lock", "worker", str(self._worker))
            self._held_worker = self._worker
        wanted = self._wanted
        gained = wanted - self._held
        for queue in self._held - wanted:
            self._lock(connection, "pg_advisory_unlock_shared", "queue", queue)
        for queue in gained:
            self._lock(connection, "pg_advisory_lock_shared", "queue", queue)
        self._held = set(wanted)
        return set(gained)

    def _lock(self, connection: psycopg.Connection[Any], function: str, kind: str, name: str) -> None:
        self._execute(connection, statements.advisory_lock(function), (f"{kind}:{name}", self._oid))

    def _execute(
        self, connection: psycopg.Connection[Any], sql: str, parameters: tuple[Any, ...] | None = None
    ) -> None:
        self._busy_until = monotonic() + _CHECK_TIMEOUT
        try:
            connection.execute(sql.encode(), parameters)
        finally:
            self._busy_until = None

    def _poke(self) -> None:
        if self._poke_in is not None:
            # Full: the thread has yet to read what says the same. Closed: it has ended.
            with contextlib.suppress(OSError):
                self._poke_in.send(b".")
