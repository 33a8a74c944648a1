"""What a runner does beside its jobs: keep its lease, rescue what the dead leave behind, and clean up.

Every runner does all of it; there is no leader. Whatever two of them start at once, the database lets only one finish.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy.exc import IntegrityError

from sqla_neoq import statements
from sqla_neoq._version import __version__
from sqla_neoq.dialects import DATABASE_ERRORS, is_locked
from sqla_neoq.lifecycle import Service
from sqla_neoq.link import Reconnecting
from sqla_neoq.payloads import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import Connection, Row

    from sqla_neoq.claim import Want
    from sqla_neoq.config import RunnerConfig
    from sqla_neoq.link import Link

log = logging.getLogger("sqla_neoq.maintenance")

SILENT_AFTER: Final = 4.0
"""Seconds of silence after which a worker is dead if the lock that lives with its process is free."""
DEAD_AFTER: Final = 30.0
"""Seconds of silence after which a worker is dead whatever its locks: frozen, cut off, or poll-only."""
RETURN_AFTER: Final = 10.0
"""Seconds after an outage until this runner declares others dead: twice the longest wait between their attempts."""
_LONGEST_BEAT: Final = 10.0
_LONGEST_SIGN_OFF: Final = 5.0
_DEADLINES_SHARE: Final = 0.005
"""How much of the time goes into looking for passed deadlines, at most. No claim takes such jobs: it may be late."""
_DEADLINES_EVERY: Final = 30.0
_RESCUE_BATCH: Final = 200
_PRUNE_BATCH: Final = 1000
_PRUNE_EVERY: Final = 60.0
_PRUNE_PAUSE: Final = 0.05
_REFERRED_TO: Final = re.compile(r"\(id\)=\((\d+)\)")
"""Where PostgreSQL names the row that a foreign key holds, in the detail of its error, in any language."""
_MOST_KEPT: Final = 1000
_SHORTEST_HISTORY: Final = 7 * 86_400.0


class LeaseEvents(NamedTuple):
    """Whom the lease tells what it saw."""

    registered: Callable[[int], None]
    lost: Callable[[], None]
    rescued: Callable[[], None]
    suspects: Callable[[], None]
    overdue: Callable[[], None]
    cancels: Callable[[Sequence[int]], None]


class Lease(Service):
    """The runner's row in ``neoq_workers``: entered, renewed, and looked around from.

    Args:
        link: a connection that only it uses, so that nothing delays the heartbeat.
        config: the runner's settings.
        limits: the queues and how many of their jobs may run at once.
        asking: what the runner can run: the queues wanted, and the tasks known as JSON.
        oid: the jobs table's oid, part of the liveness lock's name.
        listening: whether the runner holds a liveness lock.
        options: the execution options to find the tables by.
        events: whom to tell.
    """

    name = "heartbeat"

    def __init__(
        self,
        link: Link,
        config: RunnerConfig,
        limits: Mapping[str, int],
        *,
        asking: tuple[Sequence[Want], str],
        oid: int,
        listening: bool,
        options: dict[str, Any],
        events: LeaseEvents,
    ) -> None:
        super().__init__()
        self._link = link
        self._interval = config.heartbeat_interval.total_seconds()
        self._crash_limit = config.crash_limit
        self._name = config.name or f"{socket.gethostname()}:{os.getpid()}"
        self._limits = dict(limits)
        self._wanted = encode([want._asdict() for want in asking[0]])
        self._tasks = asking[1]
        self._oid = oid
        self._listening = listening
        self._options = options
        self._events = events
        self._worker: int | None = None
        self._judge_from = 0.0
        self._abandoned = False
        self._deadlines_at = 0.0
        self._reconnecting = Reconnecting()
        self.last_beat = monotonic()

    def register(self) -> int:
        """Enter the runner; returns its id."""
        with self._link.use() as connection:
            worker = self._execute(
                connection,
                statements.register_worker(),
                name=self._name,
                host=socket.gethostname(),
                pid=os.getpid(),
                queues=encode(self._limits),
                version=__version__,
                listening=self._listening,
            ).scalar_one()
        self._worker = int(worker)
        self.last_beat = monotonic()
        self._events.registered(self._worker)
        return self._worker

    def unregister(self) -> None:
        """Remove the runner's row; whatever still runs under its name is rescued by others, at once."""
        if self._worker is not None:
            try:
                self._sign_off()
            except DATABASE_ERRORS as error:
                log.warning("the runner could not sign off (%s); others will notice its silence", error)
            self._worker = None
        self._link.close()

    def _sign_off(self) -> None:
        # Twice: the server may have come back since the last beat, and only a new connection knows.
        for last in (False, True):
            try:
                with self._link.use(_LONGEST_SIGN_OFF) as connection:
                    self._execute(connection, statements.unregister_worker(), worker=self._worker)
            except DATABASE_ERRORS:
                if last:
                    raise
            else:
                return

    def cut(self) -> None:
        """Break the connection, so that a beat that waits on a silent server ends; from another thread."""
        self._link.cut_if_late(float("inf"))

    def abandon(self) -> None:
        """The thread does not end: let it close its connection when it does."""
        self._abandoned = True

    def serve(self) -> None:
        """Beat until stopped."""
        try:
            self._serve()
        finally:
            if self._abandoned:
                self._link.close()

    def _serve(self) -> None:
        while not self.stopping.is_set():
            try:
                delay = self._interval if self._beat() else 0.0
                self._reconnecting.succeeded()
            except DATABASE_ERRORS as error:
                # Whatever kept this heartbeat from the database may have kept the others' too: give them the time to
                # come back before any is declared dead, or after each restart of the server the living would kill
                # each other.
                self._judge_from = monotonic() + RETURN_AFTER
                delay = self._reconnecting.next_delay()
                log.warning("the heartbeat failed (%s); trying again in %.1f s", error, delay)
            self.stopping.wait(delay)

    def _beat(self) -> bool:
        """Renew the lease and do what needs doing; False when there is more to do at once."""
        began = monotonic()
        deadlines = began >= self._deadlines_at
        if deadlines:
            # Before it is asked: a look so long that it is cut off takes the heartbeat with it, and is not repeated.
            self._deadlines_at = began + _DEADLINES_EVERY
        with self._link.use(_LONGEST_BEAT) as connection:
            asked = monotonic()
            seen = self._execute(
                connection,
                statements.beat(),
                worker=self._worker,
                wanted=self._wanted,
                tasks=self._tasks,
                stale=SILENT_AFTER,
                deadlines=deadlines,
            ).one()
            if deadlines:
                took = monotonic() - asked
                self._deadlines_at = began + min(took / _DEADLINES_SHARE, _DEADLINES_EVERY)
            if seen.alive:
                self.last_beat = monotonic()
            rescued = self._rescue(connection) if seen.stale or seen.orphans else 0
        if not seen.alive:
            # Another runner found this one silent for too long and took its jobs: it was frozen, or cut off.
            log.error("this runner was declared dead; it gives up what it ran and registers anew")
            self._events.lost()
            self.register()
        if rescued:
            self._events.rescued()
        if seen.suspects:
            self._events.suspects()
        if seen.overdue:
            self._events.overdue()
        if seen.cancels:
            self._events.cancels(seen.cancels)
        # After a rescue look again at once: there may be more, and suspects among what was rescued.
        return not rescued

    def _rescue(self, connection: Connection) -> int:
        """Declare the silent dead, then take back what nobody runs; returns how many jobs that were."""
        if monotonic() >= self._judge_from:
            self._declare_dead(connection)
        orphans = self._execute(connection, statements.orphans()).all()[:_RESCUE_BATCH]
        if not orphans:
            return 0
        try:
            rescued = self._rescue_jobs(connection, orphans)
        except DATABASE_ERRORS:
            if connection.invalidated or connection.closed:
                raise
            log.exception("jobs could not be rescued together; trying each on its own")
            rescued = self._rescue_each(connection, orphans)
        return rescued

    def _declare_dead(self, connection: Connection) -> None:
        gone = self._execute(
            connection,
            statements.remove_dead_workers(),
            worker=self._worker,
            stale=SILENT_AFTER,
            dead=DEAD_AFTER,
            jobs=self._oid,
        ).all()
        for (worker,) in gone:
            log.warning("worker %d is dead", worker, extra={"neoq": {"event": "worker_dead", "worker_id": worker}})

    def _rescue_each(self, connection: Connection, orphans: Sequence[Row[Any]]) -> int:
        rescued = 0
        for orphan in orphans:
            try:
                rescued += self._rescue_jobs(connection, [orphan])
            except DATABASE_ERRORS as error:
                # Locked: the next beat is soon, and waiting for each in turn would cost this worker its own lease.
                if connection.invalidated or connection.closed or is_locked(error):
                    raise
                log.exception("job %d could not be rescued", orphan.id)
        return rescued

    def _rescue_jobs(self, connection: Connection, orphans: Sequence[Row[Any]]) -> int:
        rows = self._execute(
            connection,
            statements.rescue(),
            orphans=encode([orphan._asdict() for orphan in orphans], limit=sys.maxsize),
            limit=self._crash_limit,
        ).all()
        for job, reason in rows:
            log.warning(
                "job rescued from a dead worker" if reason is None else "job dead: its workers died under it",
                extra={"neoq": {"event": "rescued" if reason is None else "dead", "job_id": job, "reason": reason}},
            )
        return len(rows)

    def _execute(self, connection: Connection, statement: Any, **parameters: Any) -> Any:
        return connection.execute(statement, parameters, execution_options=self._options)


class Housekeeper(Service):
    """Removes what is over, in small batches that lock nothing a claim wants."""

    name = "housekeeper"

    def __init__(self, link: Link, config: RunnerConfig, options: dict[str, Any]) -> None:
        super().__init__()
        self._link = link
        self._retention = None if config.retention is None else config.retention.total_seconds()
        self._options = options
        self._kept: set[int] = set()
        self._called = threading.Event()
        self._overdue = False
        self._reconnecting = Reconnecting()

    def overdue(self) -> None:
        """Jobs are past their deadline; from any thread."""
        self._overdue = True
        self._called.set()

    def interrupt(self) -> None:
        """Wake the thread."""
        self._called.set()

    def serve(self) -> None:
        """Clean up when called and every minute, until stopped."""
        prune_at = monotonic()
        while not self.stopping.is_set():
            try:
                if self._overdue:
                    self._overdue = False
                    self._bury_overdue()
                if self._retention is not None and monotonic() >= prune_at:
                    self._prune(self._retention)
                    prune_at = monotonic() + _PRUNE_EVERY
                self._reconnecting.succeeded()
                delay = max(0.0, prune_at - monotonic()) if self._retention is not None else _PRUNE_EVERY
            except DATABASE_ERRORS as error:
                delay = self._reconnecting.next_delay()
                self._overdue = True
                log.warning("housekeeping failed (%s); trying again in %.1f s", error, delay)
            self._called.wait(delay)
            # Before what it announced is looked at, so that no call in between is lost.
            self._called.clear()
        self._link.close()

    def _bury_overdue(self) -> None:
        with self._link.use() as connection:
            while not self.stopping.is_set():
                rows = connection.execute(
                    statements.bury_overdue(), {"limit": _PRUNE_BATCH}, execution_options=self._options
                ).all()
                for (job,) in rows:
                    log.warning(
                        "job dead: its deadline passed",
                        extra={"neoq": {"event": "dead", "job_id": job, "reason": "deadline"}},
                    )
                if len(rows) < _PRUNE_BATCH:
                    return

    def _prune(self, age: float) -> None:
        while not self.stopping.is_set() and self._prune_jobs(age) == _PRUNE_BATCH:
            # A breath between batches: whoever runs jobs goes first.
            self.stopping.wait(_PRUNE_PAUSE)
        # What failed is worth knowing for a week even where success is forgotten at once.
        history = {"age": max(age, _SHORTEST_HISTORY), "limit": _PRUNE_BATCH}
        while not self.stopping.is_set() and self._execute(statements.prune_failures(), history) == _PRUNE_BATCH:
            self.stopping.wait(_PRUNE_PAUSE)

    def _prune_jobs(self, age: float) -> int:
        """Delete a batch; a job that the application's own tables still refer to stays, and stops no other."""
        while True:
            kept = statements.array_literal(self._kept or {0})
            try:
                return self._execute(statements.prune_jobs(), {"age": age, "limit": _PRUNE_BATCH, "kept": kept})
            except IntegrityError as error:
                named = _REFERRED_TO.search(str(error.orig))
                if named is None or len(self._kept) >= _MOST_KEPT:
                    raise
                self._kept.add(int(named[1]))
                log.warning("job %s is not pruned: %s", named[1], str(error.orig).partition("\n")[0])

    def _execute(self, statement: Any, parameters: dict[str, Any]) -> int:
        with self._link.use() as connection:
            return int(connection.execute(statement, parameters, execution_options=self._options).rowcount)
