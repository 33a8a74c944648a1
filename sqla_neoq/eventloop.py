"""One thread with one event loop, for ``async def`` tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, cast

from sqla_neoq.executor import execute_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqla_neoq.outcomes import Outcome
    from sqla_neoq.pool import Run
    from sqla_neoq.transaction import AsyncRunTransaction

log = logging.getLogger("sqla_neoq.runner")


class EventLoop:
    """Started with the first run, so that a runner without ``async def`` tasks has no such thread.

    Args:
        at_end: awaited on the loop when the runs have ended, to close what they shared there.
    """

    def __init__(self, at_end: Callable[[], Awaitable[None]] | None = None) -> None:
        self._at_end = at_end
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start_run(self, run: Run, on_end: Callable[[Run, Outcome], None]) -> None:
        """Start a run on the loop; ``on_end`` is called there with its outcome."""
        loop = self._started()

        async def body() -> None:
            transaction = cast("AsyncRunTransaction", run.transaction)  # as the runner makes them for such tasks
            on_end(run, await execute_async(run.job, run.definition, run.context, transaction))

        def begin() -> None:
            task = loop.create_task(body())
            # The loop keeps weak references only.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            run.interrupt = lambda: _call(loop, task.cancel)
            if run.context.stop_reason is not None:
                # After its first step: a task that is cancelled before it never runs, and nobody would call on_end.
                loop.call_soon(task.cancel)

        _call(loop, begin)

    def close(self) -> None:
        """Cancel what still runs and end the thread. Safe to call twice."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            _call(loop, lambda: loop.create_task(self._wind_up(loop)))
            # A task that blocks the loop cannot be ended; its thread is a daemon.
            thread.join(timeout=5.0)

    async def _wind_up(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        if self._at_end is not None:
            try:
                await asyncio.wait_for(self._at_end(), timeout=2.0)
            except Exception:
                log.warning("what the async tasks shared could not be closed", exc_info=True)
        await loop.shutdown_asyncgens()
        loop.stop()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="neoq-event-loop", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        while not _ran_to_its_end(loop):
            pass
    finally:
        loop.close()


def _ran_to_its_end(loop: asyncio.AbstractEventLoop) -> bool:
    """Run the loop; False when something threw it out, though nobody had stopped it."""
    try:
        loop.run_forever()
    except BaseException:
        # asyncio lets the SystemExit of a task pass through the loop. That of a run is caught; this one came from a
        # task or callback that a run started beside itself, and must not cost every other run its loop.
        log.exception("something beside a run tried to end the event loop; it goes on")
        return False
    return True


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
