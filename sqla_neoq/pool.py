"""Worker threads and the jobs they hold: the one place where threads meet.

Everything shared is guarded by one lock, taken once a job: to hand in the last outcome and take the next job. What
waits on it are idle threads (``_work``) and the dispatcher (``_attention``). Three numbers are kept at all times: the
jobs *ready* (claimed, not started; those that were accepted and not handed out too), the runs *running*, and the
outcomes not yet collected.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from contextvars import copy_context
from itertools import groupby
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from sqla_neoq import prefetch
from sqla_neoq.claim import Want
from sqla_neoq.context import ClaimedJob, JobContext, StopReason
from sqla_neoq.errors import JobTimeout
from sqla_neoq.executor import execute
from sqla_neoq.outcomes import Outcome, Verb, failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqla_neoq.eventloop import EventLoop
    from sqla_neoq.processes import Children
    from sqla_neoq.tasks import Definition
    from sqla_neoq.transaction import AsyncRunTransaction, RunTransaction

log = logging.getLogger("sqla_neoq.jobs")

_FAR: Final = float("inf")
_queue_of: Final = attrgetter("queue")


class Run:
    """One execution of one claimed job."""

    __slots__ = ("context", "definition", "expires", "interrupt", "job", "lane", "over", "started", "transaction")

    def __init__(
        self, job: ClaimedJob, definition: Definition, lane: Lane, transaction: RunTransaction | AsyncRunTransaction
    ) -> None:
        self.job = job
        self.definition = definition
        self.lane = lane
        self.transaction = transaction
        self.context = JobContext(job, transaction)
        self.start_clock()
        self.over = False
        # Stops what the run waits for outside its thread: an event loop's task, a child process.
        self.interrupt: Callable[[], None] | None = None

    def start_clock(self) -> None:
        """Start its time: now, or later if what is to run it is not ready yet."""
        self.started = monotonic()
        self.expires = _FAR if self.definition.timeout is None else self.started + self.definition.timeout

    def ask_to_stop(self, reason: StopReason) -> None:
        """Ask the task to stop, and stop what it waits for, where that can be done from outside."""
        self.context.ask_to_stop(reason)
        if self.interrupt is not None:
            self.interrupt()
        self.transaction.cancel()


class Ready(NamedTuple):
    """A claimed job that has not started, and the ``monotonic()`` time at which its claim began."""

    job: ClaimedJob
    since: float

    def overdue(self, now: float) -> bool:
        """Whether its deadline has passed, by the database's clock: that of the claim, and the time since."""
        return self.job.deadline is not None and self.job.ran_at + (now - self.since) > self.job.deadline


class Lane:
    """The jobs of one queue in this runner."""

    __slots__ = ("backlog", "coming", "handler", "limit", "mean", "queue", "ready", "running", "waiting_turn")

    def __init__(self, queue: str, limit: int, *, handler: bool) -> None:
        self.queue = queue
        self.limit = limit
        self.handler = handler
        self.ready: deque[Ready] = deque()
        self.coming = 0
        self.running = 0
        self.mean: float | None = None
        self.backlog = True
        self.waiting_turn = False


class WorkPool:
    """A fixed number of slots over named lanes.

    Args:
        limits: how many jobs of each queue may run at once.
        handlers: the queues that have a handler here.
        concurrency: how many jobs may run at once in all.
        resolve: finds the task or handler of a claimed job.
        make_transaction: makes the transaction of one run.
        loop: runs ``async def`` tasks.
        children: run the tasks with ``executor="process"``; None when there are none.
    """

    def __init__(
        self,
        limits: Mapping[str, int],
        *,
        handlers: Iterable[str],
        concurrency: int,
        resolve: Callable[[ClaimedJob], Definition],
        make_transaction: Callable[[Definition], RunTransaction | AsyncRunTransaction],
        loop: EventLoop,
        children: Children | None = None,
    ) -> None:
        handled = frozenset(handlers)
        self._lanes = {name: Lane(name, limit, handler=name in handled) for name, limit in limits.items()}
        self._concurrency = concurrency
        self._resolve = resolve
        self._make_transaction = make_transaction
        self._loop = loop
        self._children = children
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._attention = threading.Condition(self._lock)
        self._turns: deque[Lane] = deque()
        self._accepted: Sequence[ClaimedJob] = ()
        self._accepted_at = 0.0
        self._ready = 0
        self._idle = 0
        self._threads = 0
        self._runs: set[Run] = set()
        self._given_up: set[Run] = set()
        self._outcomes: list[Outcome] = []
        self._low = -1
        self._enough = 0
        self._waiting = False
        self._poked = False
        self._closing = False

    # --- the dispatcher's side ---

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self._concurrency):
            self._start_thread()

    def close(self) -> None:
        """Let idle threads end; those that run a job end after it."""
        with self._lock:
            self._closing = True
            self._work.notify_all()

    def wants(self) -> tuple[list[Want], int]:
        """Return how many jobs of each queue could be started soon, and how many in all."""
        with self._lock:
            return self._wants()

    def _wants(self) -> tuple[list[Want], int]:
        wants = []
        most_ahead = 0
        room = self._concurrency - len(self._runs) - self._ready
        for lane in self._lanes.values():
            slots = min(lane.limit, self._concurrency)
            ahead = prefetch.ahead(slots, lane.mean)
            most_ahead = max(most_ahead, ahead)
            want = slots + ahead - lane.running - len(lane.ready) - lane.coming
            if want > 0:
                wants.append(Want(lane.queue, want, lane.handler))
        total = min(room + most_ahead, prefetch.BATCH)
        self._enough = most_ahead // 2
        return (wants, total) if total > 0 else ([], 0)

    def accept(self, jobs: Sequence[ClaimedJob], since: float) -> None:
        """Take claimed jobs, best first, onto the books; the threads get them with :meth:`hand_out`.

        Args:
            jobs: best first.
            since: the ``monotonic()`` time at which their claim began.
        """
        with self._lock:
            self._spread()
            self._accepted, self._accepted_at = jobs, since
            self._ready += len(jobs)
            for queue, number in Counter(map(_queue_of, jobs)).items():
                self._lanes[queue].coming += number

    def hand_out(self) -> None:
        """Let the threads have what was accepted."""
        with self._lock:
            self._spread()
            self._work.notify(min(self._ready, self._idle))

    @property
    def holds_back(self) -> bool:
        """Whether something was accepted and not handed out."""
        return bool(self._accepted)

    def _spread(self) -> None:
        """Under the lock: put what was accepted into its lanes."""
        jobs, self._accepted = self._accepted, ()
        for queue, group in groupby(jobs, key=_queue_of):
            lane = self._lanes[queue]
            lane.coming = 0
            lane.ready.extend([Ready(job, self._accepted_at) for job in group])
            if not lane.waiting_turn and lane.running < lane.limit:
                lane.waiting_turn = True
                self._turns.append(lane)

    def wait(self, until: float, *, low: int, linger: float) -> None:
        """Wait for something to do: until poked, until few jobs are ready, or until a time.

        Args:
            until: a ``monotonic()`` time.
            low: return when no more than this many jobs are ready and one has ended; -1: do not return for that.
            linger: outcomes are worth returning for, from this ``monotonic()`` time on.
        """
        with self._lock:
            self._low = low
            self._waiting = True
            try:
                while not self._poked:
                    if self._outcomes and self._ready <= low:
                        break
                    now = monotonic()
                    end = min(until, linger) if self._outcomes else until
                    if now >= end:
                        break
                    self._attention.wait(end - now)
            finally:
                self._waiting = False
                self._poked = False

    def low_water(self) -> int:
        """Return at how many ready jobs the next round shall begin: half of what is held, or may be held.

        So with tiny jobs it begins at once, and the threads run the last claim's jobs while the server works on it.
        """
        return max(self._ready // 2, self._enough)

    def calls_for_a_round(self, *, backlog: bool) -> bool:
        """Whether the next round shall begin before what the last one brought is handed out.

        With tiny jobs, of which many are held: the server works on the next round while the threads run these.
        """
        with self._lock:
            if self._enough < prefetch.BATCH // 2:
                return False
            return (backlog and self._ready <= self._enough) or len(self._outcomes) >= prefetch.BATCH // 2

    def poke(self) -> None:
        """Make ``wait`` return; from any thread."""
        with self._lock:
            self._poked = True
            if self._waiting:
                self._attention.notify()

    def take_outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def give_back_ready(self) -> None:
        """Turn every job that has not started into an outcome that puts it back untouched."""
        with self._lock:
            self._spread()
            for lane in self._lanes.values():
                self._give_back(lane)

    def give_back_stale(self, now: float) -> float:
        """Give back what waits behind jobs that take longer than their queue's did; return when to look again.

        Up to a thousand short jobs may be held ready, and one long one per slot is enough to block them all.
        """
        with self._lock:
            soonest = _FAR
            for lane in self._lanes.values():
                if not lane.ready:
                    continue
                stale_at = lane.ready[0].since + prefetch.PATIENCE
                if stale_at <= now:
                    # The mean has not seen what runs now, and would have as many claimed again.
                    lane.mean = max(lane.mean or 0.0, prefetch.PATIENCE)
                    self._give_back(lane)
                else:
                    soonest = min(soonest, stale_at)
            return soonest

    def _give_back(self, lane: Lane) -> None:
        self._outcomes.extend(Outcome(ready.job, Verb.PUT_BACK) for ready in lane.ready)
        self._ready -= len(lane.ready)
        lane.ready.clear()
        if lane.waiting_turn:
            lane.waiting_turn = False
            self._turns.remove(lane)

    @property
    def in_flight(self) -> int:
        """How many claimed jobs have not ended."""
        with self._lock:
            return len(self._runs) + self._ready

    @property
    def at_rest(self) -> bool:
        """Whether every claimed job has ended, and every outcome been taken."""
        with self._lock:
            return not (self._runs or self._ready or self._outcomes)

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return len(self._runs)

    @property
    def stuck(self) -> int:
        """How many runs were given up and have not ended: they hold their threads, or the event loop."""
        return len(self._given_up)

    def tokens(self) -> set[int]:
        """Return the claim tokens of all jobs held here."""
        with self._lock:
            held = {run.job.token for run in self._runs}
            held.update(job.token for job in self._accepted)
            held.update(ready.job.token for lane in self._lanes.values() for ready in lane.ready)
            held.update(outcome.job.token for outcome in self._outcomes)
            return held

    # --- stopping runs from outside ---

    def expire(self, now: float) -> float:
        """Give up the runs that are past their timeout; return when the next one will be."""
        self.cancel_given_up()
        with self._lock:
            late = [run for run in self._runs if run.expires <= now]
            soonest = min((run.expires for run in self._runs if run.expires > now), default=_FAR)
            for run in late:
                run.context.ask_to_stop(StopReason.TIMEOUT)
                error = JobTimeout(f"job {run.job.id} ran past its timeout of {run.definition.timeout:g} s")
                self._abandon(run, failure(error, run.job, run.definition, kind="timeout"), now)
        for run in late:
            run.ask_to_stop(StopReason.TIMEOUT)
        return soonest

    def cancel_given_up(self) -> None:
        """Cancel what given-up runs wait for in the database: it may have begun after they were told to stop."""
        with self._lock:
            runs = list(self._given_up)
        for run in runs:
            run.transaction.cancel()

    def give_up_running(self, reason: StopReason) -> int:
        """Ask every run to stop and put its job back, whether or not its thread obeys; return how many there were."""
        with self._lock:
            runs = list(self._runs)
            for run in runs:
                run.context.ask_to_stop(reason)
                self._abandon(run, Outcome(run.job, Verb.PUT_BACK), monotonic())
        for run in runs:
            run.ask_to_stop(reason)
        return len(runs)

    def ask_to_stop(self, ids: Iterable[int] | None, reason: StopReason) -> None:
        """Ask some runs, or with None all, to stop; each ends as it will."""
        wanted = None if ids is None else frozenset(ids)
        with self._lock:
            runs = [run for run in self._runs if wanted is None or run.job.id in wanted]
        for run in runs:
            run.ask_to_stop(reason)

    def _abandon(self, run: Run, outcome: Outcome, now: float) -> None:
        """Under the lock: end a run on the books, and replace the thread that may never come back."""
        run.over = True
        self._end(run, outcome, now)
        self._given_up.add(run)
        if not run.definition.on_loop:
            if not self._closing:
                self._start_thread()
        elif self._turns:
            # It held a slot and no thread, so no thread comes back to take the next job.
            self._work.notify()

    # --- the threads' side ---

    def _start_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=self._loop_of_a_thread, name=f"neoq-job-{self._threads}", daemon=True).start()

    def _loop_of_a_thread(self) -> None:
        run: Run | None = None
        outcome: Outcome | None = None
        while True:
            with self._lock:
                if run is not None and outcome is not None and not self._hand_in(run, outcome):
                    self._given_up.discard(run)
                    return
                run = self._take()
                while run is None:
                    if self._closing:
                        return
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                    run = self._take()
            if run.definition.on_loop:
                self._loop.start_run(run, self._end_async)
                run = None
            elif run.definition.in_process:
                assert self._children is not None
                outcome = self._children.execute(run)
            else:
                # In a copy of the context: what one job sets must not be there for the thread's next.
                transaction = cast("RunTransaction", run.transaction)
                outcome = copy_context().run(execute, run.job, run.definition, run.context, transaction)

    def _hand_in(self, run: Run, outcome: Outcome) -> bool:
        """Under the lock: end a run that ended by itself; False when it had been given up before."""
        if run.over:
            return False
        run.over = True
        self._end(run, outcome, monotonic())
        return True

    def _end_async(self, run: Run, outcome: Outcome) -> None:
        with self._lock:
            if not self._hand_in(run, outcome):
                self._given_up.discard(run)
            if self._turns:
                self._work.notify()

    def _end(self, run: Run, outcome: Outcome, now: float) -> None:
        outcome.duration = now - run.started
        lane = run.lane
        lane.mean = prefetch.mean_of(lane.mean, outcome.duration)
        lane.running -= 1
        if lane.ready and not lane.waiting_turn:
            lane.waiting_turn = True
            # No thread is woken for it: the one that ends this run takes the next.
            self._turns.append(lane)
        self._runs.discard(run)
        self._outcomes.append(outcome)
        if self._waiting and (self._ready <= self._low or len(self._outcomes) == 1):
            self._attention.notify()

    def _take(self) -> Run | None:
        """Under the lock: start the next ready job whose queue is below its limit, the queues taking turns."""
        while self._turns and len(self._runs) < self._concurrency:
            lane = self._turns[0]
            ready = lane.ready.popleft()
            self._ready -= 1
            lane.running += 1
            if not lane.ready or lane.running >= lane.limit:
                self._turns.popleft()
                lane.waiting_turn = False
            elif len(self._turns) > 1:
                self._turns.rotate(-1)
            definition = self._resolve(ready.job)
            run = Run(ready.job, definition, lane, self._make_transaction(definition))
            self._runs.add(run)
            if not ready.overdue(run.started):
                return run
            run.over = True
            message = "the deadline passed before the job could start"
            self._end(run, Outcome(ready.job, Verb.BURY, reason="deadline", message=message), run.started)
        return None
