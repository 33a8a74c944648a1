"""The runner: composes connections, threads and services into one worker, and knows how it starts and stops."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Engine
from sqlalchemy.exc import SQLAlchemyError

from sqla_neoq import migrations, statements, targets
from sqla_neoq.claim import Claimant, Want
from sqla_neoq.config import RunnerConfig
from sqla_neoq.context import StopReason
from sqla_neoq.dialects import dialect_of, engine_of, read_committed, schema_of
from sqla_neoq.dispatcher import Dispatcher
from sqla_neoq.errors import ConfigurationError, DatabaseUnavailable
from sqla_neoq.eventloop import EventLoop
from sqla_neoq.link import Link
from sqla_neoq.listener import Listener
from sqla_neoq.maintenance import DEAD_AFTER, Housekeeper, Lease, LeaseEvents
from sqla_neoq.memory import MemoryLimit, megabytes, resident
from sqla_neoq.newjob import checked_queue
from sqla_neoq.payloads import encode
from sqla_neoq.pool import WorkPool
from sqla_neoq.processes import Children
from sqla_neoq.services import Services
from sqla_neoq.signals import Signals
from sqla_neoq.tally import Counts, Tally
from sqla_neoq.tasks import Handler, Task, checked_concurrency
from sqla_neoq.timekeeper import Timekeeper
from sqla_neoq.transaction import AsyncRunTransaction, AsyncSessions, RunSession, RunTransaction
from sqla_neoq.wire import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from typing import Self

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from sqla_neoq.context import ClaimedJob
    from sqla_neoq.outcomes import Outcome
    from sqla_neoq.tasks import Definition

log = logging.getLogger("sqla_neoq.runner")

_CONNECTIONS_BESIDE_JOBS: Final = 1


class Ended(Enum):
    """How a run ended."""

    CLEAN = "clean"
    FORCED = "forced"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Health:
    """How a runner is.

    Attributes:
        live: its threads run. If not, restart the process.
        ready: it also reaches the database and keeps its lease.
        detail: the facts behind both, for people.
    """

    live: bool
    ready: bool
    detail: dict[str, object]


class Runner:
    """One worker: claims jobs and runs them in threads.

    Usable as a context manager, or with :meth:`start` and :meth:`stop`, inside another program; :meth:`run` is what a
    worker process calls. A runner is started once.

    Args:
        database: a URL, for an engine of its own; or the application's Engine, on psycopg.
        tasks: modules, tasks and handlers: what it can run.
        queues: the queues to work on, each with the number of its jobs that may run at once (None: as many as there
            are slots). By default the queues of the tasks and handlers.
        config: the settings.
        sessionmaker: makes the sessions that jobs get; by default ``Session(engine)``, in READ COMMITTED.
        async_sessionmaker: makes those of ``job.async_session()``, on an async engine that no other event loop uses. By
            default they are on an engine made from the URL; without a URL there are none.

    Raises:
        TypeError: an argument of the wrong type.
        ConfigurationError: a database or setting that cannot work.
        DuplicateTask: two functions under one name, or two handlers for one queue.
    """

    def __init__(
        self,
        database: str | URL | Engine,
        tasks: ModuleType | Task[..., Any] | Handler | Iterable[ModuleType | Task[..., Any] | Handler],
        *,
        queues: Mapping[str, int | None] | None = None,
        config: RunnerConfig | None = None,
        sessionmaker: Callable[[], Session] | None = None,
        async_sessionmaker: Callable[[], AsyncSession] | None = None,
    ) -> None:
        self.config = RunnerConfig() if config is None else config
        self._own_engine = not isinstance(database, Engine)
        if isinstance(database, Engine):
            self._engine = database
        elif isinstance(database, str | URL):
            self._engine = engine_of(database, size=self.config.concurrency)
        else:
            raise TypeError(f"database={database!r}: expected a URL or an Engine, got {type(database).__name__}")
        self._dialect = dialect_of(self._engine)
        if self.config.schema is not None:
            self._engine = self._engine.execution_options(neoq_schema=self.config.schema)
        self._schema = schema_of(self._engine)
        self._options = {} if self._schema is None else {"schema_translate_map": {None: self._schema}}
        committed = read_committed(self._engine)
        self._make_session = sessionmaker or (lambda: RunSession(committed))
        self._async_sessions = AsyncSessions(async_sessionmaker, committed, size=self.config.concurrency)
        found_tasks, found_handlers = targets.sort_out(tasks)
        self.tasks: Mapping[str, Task[..., Any]] = MappingProxyType(found_tasks)
        self.handlers: Mapping[str, Handler] = MappingProxyType(found_handlers)
        self.queues: Mapping[str, int] = MappingProxyType(self._limits(queues))
        self._delete = self.config.retention is not None and not self.config.retention
        runnables: list[targets.Runnable] = [*self.tasks.values(), *self.handlers.values()]
        self._homes: dict[Definition, str] = {
            definition: targets.address_of(definition) for definition in runnables if definition.in_process
        }
        self._child_database = self._reachable_by_children(database, sessionmaker)
        self._memory = None if self.config.max_memory is None else MemoryLimit(self.config.max_memory)
        self._tally = Tally()
        self._ended: Ended | None = None
        self._stop_requested = threading.Event()
        self._forced = threading.Event()
        self._quiet = False
        self._told_to_stop = False
        self._stopped = False
        self._over = threading.Event()
        self._clean = False
        self._lock = threading.Lock()
        self._services: Services | None = None

    def __repr__(self) -> str:
        return f"<Runner of {len(self.tasks)} tasks and {len(self.handlers)} handlers on {sorted(self.queues)}>"

    # --- what it is ---

    @property
    def counts(self) -> Counts:
        """How many attempts ended, and how."""
        return self._tally.counts

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return 0 if self._services is None else self._services.pool.running

    def health(self) -> Health:
        """Say how the runner is; cheap, and without asking the database."""
        services = self._services
        if services is None:
            return Health(live=not self._stopped, ready=False, detail={"state": "stopped" if self._stopped else "new"})
        since_beat = time.monotonic() - services.lease.last_beat
        state = "stopping" if self._stop_requested.is_set() else "quiet" if self._quiet else "running"
        live = services.dispatcher.alive and services.lease.alive
        ready = live and state == "running" and not services.dispatcher.away and since_beat < DEAD_AFTER
        detail: dict[str, object] = {
            "state": state,
            "database": "away" if services.dispatcher.away else "ok",
            "listening": services.listener is not None and services.listener.connected,
            "seconds_since_heartbeat": round(since_beat, 3),
            "running": services.pool.running,
            "stuck": services.pool.stuck,
            "queues": dict(self.queues),
        }
        return Health(live=live, ready=ready, detail=detail)

    # --- start and stop ---

    def check(self) -> None:
        """Connect, and check that the tables are such as this release can use.

        Raises:
            DatabaseUnavailable: no connection.
            SchemaError: the tables are missing, too old or too new; its ``remedy`` holds the lines to paste.
        """
        try:
            with self._engine.connect() as connection:
                # Or it stays open in the pool of a runner that may never start.
                connection.detach()
                migrations.verify(connection, schema=self._schema)
        except (SQLAlchemyError, OSError) as error:
            where = self._engine.url.render_as_string(hide_password=True)
            raise DatabaseUnavailable(f"cannot connect to {where}: {error}") from error
        self._check_pool()

    def start(self) -> None:
        """Check the database, register, and begin to work. Returns once the runner is registered.

        Raises:
            RuntimeError: it was started before.
            DatabaseUnavailable: no connection.
            SchemaError: the tables are not usable.
        """
        with self._lock:
            if self._services is not None or self._stopped:
                raise RuntimeError("a Runner is started once; make another one")
            self.check()
            try:
                self._services = self._compose()
            except (SQLAlchemyError, OSError) as error:
                raise DatabaseUnavailable(f"the runner cannot register: {error}") from error
        self._warn_of_a_small_limit()
        log.info(
            "runner started",
            extra={"neoq": {"event": "started", "queues": dict(self.queues), "concurrency": self.config.concurrency}},
        )

    def quiet(self) -> None:
        """Claim nothing more; finish what runs, give back what has not started, and wait for ``stop``."""
        self._quiet = True
        services = self._services
        if services is not None:
            services.dispatcher.claiming = False
            services.pool.poke()

    def request_stop(self, ended: Ended = Ended.CLEAN) -> None:
        """Ask a blocking :meth:`run` to end; from any thread or signal handler."""
        if self._ended is None:
            self._ended = ended
        self._stop_requested.set()

    def force_stop(self) -> None:
        """Cut a stop short: cancel what runs and give it back; from any thread or signal handler."""
        self._forced.set()
        self._stop_requested.set()

    def stop(self, timeout: timedelta | None = None) -> bool:
        """Stop claiming, let running jobs finish, then cancel and give back the rest.

        Safe before ``start`` and to call twice; a call during another waits for the same end.

        Args:
            timeout: how long running jobs may take; None means the config's ``shutdown_timeout``.

        Returns:
            Whether every job finished in time.
        """
        limit = (self.config.shutdown_timeout if timeout is None else timeout).total_seconds()
        self._stop_requested.set()
        with self._lock:
            services = self._services
            already = self._stopped
            self._stopped = True
        if services is None:
            if self._own_engine:
                self._engine.dispose()
            return True
        if already:
            self._over.wait()
            return self._clean
        try:
            self._clean = services.stop(limit, self._forced)
        finally:
            self._over.set()
            if self._own_engine:
                self._engine.dispose()
        log.info("runner stopped", extra={"neoq": {"event": "stopped", "clean": self._clean}})
        return self._clean

    def on_signal(self, number: int) -> None:
        """Do what a worker does on that signal."""
        if number == getattr(signal, "SIGTSTP", None):
            self.quiet()
        elif number == getattr(signal, "SIGHUP", None):
            self.request_stop(Ended.RESTART)
        elif number == getattr(signal, "SIGQUIT", None) or self._told_to_stop:
            self.force_stop()
        else:
            # The first one drains, also when a restart is under way: that is called off, not cut short.
            self._told_to_stop = True
            self._ended = Ended.CLEAN
            self.request_stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *, burst: bool = False) -> Ended:
        """Start, work until told to stop, and stop.

        In the main thread it takes over the signals of a worker while it runs: SIGTERM and SIGINT stop it, a second
        one, or SIGQUIT, at once; SIGTSTP makes it quiet; SIGHUP ends it for a restart.

        Args:
            burst: end once nothing is due and nothing runs.

        Raises:
            DatabaseUnavailable, SchemaError: as :meth:`start`; in a burst also when the database refuses a claim.
        """
        with Signals(self.on_signal):
            self.start()
            try:
                if burst:
                    self._on_drained(self.request_stop)
                self._stop_requested.wait()
            finally:
                clean = self.stop()
        self._raise_refusal()
        if self._forced.is_set():
            return Ended.FORCED
        if self._ended is Ended.RESTART:
            return Ended.RESTART  # also when jobs outlasted the shutdown_timeout: they were given back
        return Ended.CLEAN if clean else Ended.FORCED

    def drain(self) -> Counts:
        """Run all that is due until nothing is, then stop. Returns how the attempts ended.

        Starts the runner if need be. Jobs whose ``run_after`` lies ahead are left alone.

        Raises:
            DatabaseUnavailable, SchemaError: as :meth:`start`; and when the database refuses a claim for good.
        """
        drained = threading.Event()
        if self._services is None:
            self.start()
        try:
            self._on_drained(drained.set)
            while not drained.wait(1.0) and not self._stop_requested.is_set():
                pass
        finally:
            self.stop()
        self._raise_refusal()
        return self._tally.counts

    # --- inside ---

    def _raise_refusal(self) -> None:
        """A drain or a burst does not wait for tables or rights to come back."""
        refusal = None if self._services is None else self._services.dispatcher.refusal
        if refusal is not None:
            raise DatabaseUnavailable(f"the database refuses what the runner asks: {refusal}") from refusal

    def _on_drained(self, callback: Callable[[], None]) -> None:
        assert self._services is not None
        self._services.dispatcher.on_drained = callback
        self._services.pool.poke()

    def _limits(self, queues: Mapping[str, int | None] | None) -> dict[str, int]:
        if queues is None:
            named: dict[str, int | None] = {task.queue: None for task in self.tasks.values()}
            named.update({queue: handler.concurrency for queue, handler in self.handlers.items()})
        else:
            if not isinstance(queues, Mapping):
                raise TypeError(
                    f"queues={queues!r}: expected a mapping of names to concurrency, such as {{'emails': 10}}"
                )
            named = dict(queues)
            for name, limit in named.items():
                checked_queue(name, "queues")
                checked_concurrency(limit, f"queues[{name!r}]")
                if limit is None and name in self.handlers:
                    named[name] = self.handlers[name].concurrency
        if not named:
            raise ConfigurationError("queues={}: a runner needs at least one queue")
        return {name: self.config.concurrency if limit is None else limit for name, limit in named.items()}

    def _reachable_by_children(self, database: str | URL | Engine, sessionmaker: object) -> str | None:
        """Return where ``job.session`` leads in a child process; None if that cannot be said to one."""
        named = self.config.child_database
        if named is not None:
            if "://" in named:
                engine_of(named, pool=False)
            elif self._homes:
                targets.load_object(named)
            return named
        if sessionmaker is not None or isinstance(database, Engine):
            return None
        return self._engine.url.render_as_string(hide_password=False)

    def _check_pool(self) -> None:
        """Warn when the application's own pool is smaller than what the jobs can ask of it."""
        if self._own_engine:
            return
        pool: Any = self._engine.pool
        size, overflow = getattr(pool, "size", None), getattr(pool, "_max_overflow", None)
        if not callable(size) or not isinstance(overflow, int) or overflow < 0:
            return
        needed = self.config.concurrency + _CONNECTIONS_BESIDE_JOBS
        if size() + overflow < needed:
            log.warning(
                "the engine's pool gives at most %d connections, and %d jobs that use job.session at once need %d: "
                "raise pool_size or lower the concurrency",
                size() + overflow,
                self.config.concurrency,
                needed,
            )

    def _compose(self) -> Services:
        """Build the services bottom up, and start them."""
        config = self.config
        name = config.name or "runner"
        links = {part: Link(self._engine, self._dialect, name) for part in ("dispatch", "lease", "housekeeping")}
        with links["lease"].use() as connection:
            oid = connection.scalar(statements.jobs_oid(), {"table": self._dialect.table_name(self._schema)})
        listener = None
        if config.listen:
            listener = Listener(
                lambda: self._dialect.listening_connection(self._engine, config.listen_url, name),
                int(oid),
                lambda queues: dispatcher.wake(queues),  # noqa: PLW0108 - the dispatcher is made below
            )
        loop = EventLoop(at_end=self._async_sessions.dispose)
        children = None
        if self._homes:
            setup = Setup(
                sorted(self._homes.values()), self._child_database, self._schema, self._delete, config.child_logs
            )
            children = Children(setup, self._homes, max_memory=config.max_memory)
        pool = WorkPool(
            self.queues,
            handlers=self.handlers,
            concurrency=config.concurrency,
            resolve=self._resolve,
            make_transaction=self._transaction,
            loop=loop,
            children=children,
        )
        wants = [Want(queue, 1, queue in self.handlers) for queue in self.queues]
        tasks = encode(sorted(self.tasks))
        dispatcher = Dispatcher(
            links["dispatch"],
            pool,
            Claimant(0, tasks, self._options),
            config=config,
            listener=listener,
            on_settled=self._settled,
        )
        housekeeper = Housekeeper(links["housekeeping"], config, self._options)

        def registered(worker: int) -> None:
            dispatcher.claimant = Claimant(worker, tasks, self._options)
            if listener is not None:
                listener.set_worker(worker)

        def lost() -> None:
            # What has not started must not: another runner may have it by now.
            pool.give_back_ready()
            pool.ask_to_stop(None, StopReason.LOST)

        lease = Lease(
            links["lease"],
            config,
            self.queues,
            asking=(wants, tasks),
            oid=int(oid),
            listening=listener is not None,
            options=self._options,
            events=LeaseEvents(
                registered=registered,
                lost=lost,
                rescued=lambda: dispatcher.wake(None),
                suspects=dispatcher.suspects_due,
                overdue=housekeeper.overdue,
                cancels=lambda ids: _aside(lambda: pool.ask_to_stop(ids, StopReason.CANCELLED)),
            ),
        )
        lease.register()
        definitions = [*self.tasks.values(), *self.handlers.values()]
        timekeeper = Timekeeper(
            pool,
            [definition.timeout for definition in definitions if definition.timeout is not None],
            [*links.values(), *([] if listener is None else [listener])],
            stuck_limit=config.stuck_limit or config.concurrency,
            on_stuck=lambda: self.request_stop(Ended.RESTART),
            chores=[self._watch_memory, *([] if children is None else [children.tidy])],
        )
        services = Services(pool, loop, dispatcher, lease, housekeeper, timekeeper, listener, children)
        if self._quiet:
            dispatcher.claiming = False
        try:
            services.start()
        except BaseException:
            # Such as a machine without another thread to give: what did start must not go on, nor look alive.
            services.stop(0.0, self._forced)
            raise
        return services

    def _transaction(self, definition: Definition) -> RunTransaction | AsyncRunTransaction:
        if definition.on_loop:
            return AsyncRunTransaction(self._async_sessions, self._options, delete=self._delete)
        return RunTransaction(self._make_session, self._options, delete=self._delete)

    def _resolve(self, job: ClaimedJob) -> Definition:
        return self.handlers[job.queue] if job.task is None else self.tasks[job.task]

    def _settled(self, outcomes: Sequence[Outcome], lost: set[int]) -> None:
        self._tally.settled(outcomes, lost)
        if self._memory is not None:
            self._memory.job_ended()
        if self.config.max_jobs is not None and self.counts.total >= self.config.max_jobs:
            self.request_stop(Ended.RESTART)

    def _warn_of_a_small_limit(self) -> None:
        limit, held = self.config.max_memory, resident()
        if limit is not None and held is not None and held > limit:
            log.warning(
                "max_memory is %s, and the process holds %s before its first job: every job will end it for a restart",
                megabytes(limit),
                megabytes(held),
            )

    def _watch_memory(self, now: float) -> None:
        if self._memory is None or self._stop_requested.is_set():
            return
        if (held := self._memory.exceeded(now)) is not None:
            assert self.config.max_memory is not None
            log.warning(
                "the process holds %s after %d jobs, more than its limit of %s; it ends for a restart",
                megabytes(held),
                self.counts.total,
                megabytes(self.config.max_memory),
            )
            self.request_stop(Ended.RESTART)


def _aside(work: Callable[[], object]) -> None:
    """Do it in a thread of its own: cancelling a statement asks the server, and a heartbeat does not wait for that."""
    threading.Thread(target=work, name="neoq-cancel", daemon=True).start()
