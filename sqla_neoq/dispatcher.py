"""The runner's centre: one connection, and rounds.

Each round writes the outcomes of finished runs and claims jobs for the free slots, in one statement if all of them are
completions, and hands what it claimed to the worker threads: at once, or with a backlog of tiny jobs while the server
works on the next round.

When the next round comes:

* at once, when a wake-up says that a queue has work and there are free slots;
* with a backlog, when half of the jobs held ready, or half of those that may be, have been started: the threads never
  wait, and each round is large;
* otherwise when an outcome has waited a moment for others, or when polling is due.

A queue that gave less than it was asked for is *dry*, and the runner is *hungry* for it: it asks the listener to hold
the lock that makes inserts notify. A transaction that inserted before the lock was held, and commits after, notifies
nobody; so a runner that has just turned hungry looks once more at once, and then after 10, 20, 40 ... ms: such a job is
found within about twice the time its transaction still took.
"""

from __future__ import annotations

import logging
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from sqla_neoq import statements
from sqla_neoq.claim import Claimant, claim, claim_suspect, settle
from sqla_neoq.dialects import DATABASE_ERRORS, is_locked, is_missing, is_refusal
from sqla_neoq.floor import Floor
from sqla_neoq.lifecycle import Service
from sqla_neoq.link import Reconnecting
from sqla_neoq.outcomes import Outcome, Verb
from sqla_neoq.quarantine import Quarantine, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sqla_neoq.claim import Claimed, Want
    from sqla_neoq.config import RunnerConfig
    from sqla_neoq.context import ClaimedJob
    from sqla_neoq.link import Link
    from sqla_neoq.listener import Listener
    from sqla_neoq.pool import WorkPool

log = logging.getLogger("sqla_neoq.runner")

LINGER: Final = 0.002
"""Seconds an outcome may wait for company after a round, so that a busy runner writes many with one commit."""
_LINGER_WITH_BACKLOG: Final = 0.010
_FIRST_POLL: Final = 0.010
_MOST_BLOCKED: Final = 3
_UNBLOCK_EVERY: Final = 1.0
_FIRST_LOOK_FOR_STRAYS: Final = 1.0
_LOOK_FOR_STRAYS_EVERY: Final = 15.0
_RUSH_WINDOW: Final = 0.1
_RUSH_WAKES: Final = 30
"""Wake-ups within the window that make a rush: past some 300 a second, looking every few milliseconds is cheaper for
everybody than to be told each time."""
_RUSH_POLL: Final = 0.003


class Dispatcher(Service):
    """Claims, hands out, and writes down.

    Args:
        link: the connection that only it uses.
        pool: the worker threads.
        claimant: who claims; replaced when the runner has to register anew.
        config: the runner's settings.
        listener: None polls only.
        on_settled: called with each batch of outcomes after its commit, and the ids that the fence refused.
    """

    name = "dispatcher"

    def __init__(
        self,
        link: Link,
        pool: WorkPool,
        claimant: Claimant,
        *,
        config: RunnerConfig,
        listener: Listener | None,
        on_settled: Callable[[Sequence[Outcome], set[int]], None],
    ) -> None:
        super().__init__()
        self.claimant = claimant
        self.claiming = True
        self.quarantine = Quarantine()
        self.wakes = 0
        # Set in burst mode; called once nothing is due and nothing is in flight.
        self.on_drained: Callable[[], None] | None = None
        # What the database said when it refused a round of a drain for good.
        self.refusal: BaseException | None = None
        self._link = link
        self._pool = pool
        self._listener = listener
        self._on_settled = on_settled
        self._poll_interval = config.poll_interval.total_seconds()
        self._delete = config.retention is not None and not config.retention
        self._unwritten: list[Outcome] = []
        # Outcomes whose rows somebody else's open transaction holds; they are tried again by themselves, now and then.
        self._blocked: list[Outcome] = []
        self._next_unblock = 0.0
        # Outcomes whose COMMIT was not answered: if the fence refuses them later, that write was the reason.
        self._doubtful: set[int] = set()
        self._floor = Floor()
        self._reconnecting = Reconnecting()
        self._look_for_strays_at = 0.0
        self._look_for_strays_after = _FIRST_LOOK_FOR_STRAYS
        self._poll_after = _FIRST_POLL
        self._next_poll = 0.0
        self._rush_until = 0.0
        self._rush_began = 0.0
        self._rush_wakes = 0
        self._wakes_seen = 0
        self._hungry: frozenset[str] = frozenset()
        self._backlog = False
        self._given_up = False

    # --- called from other threads ---

    def wake(self, queues: frozenset[str] | None) -> None:
        """There may be work on these queues; None: anywhere."""
        self.wakes += 1
        if queues is None or queues & self._hungry:
            # Also after the lock of a queue was gained: this is the look once more, and the polls start over.
            self._poll_after = _FIRST_POLL
        self._pool.poke()

    def suspects_due(self) -> None:
        """There are suspects to run."""
        if not self.quarantine.due:
            self.quarantine.due = True
            self._pool.poke()

    def interrupt(self) -> None:
        """Wake the thread."""
        self._pool.poke()

    def give_up(self) -> None:
        """End without what could not be written in time; its jobs are rescued as from a dead runner."""
        self._given_up = True
        self._link.cut_if_late(float("inf"))
        self._pool.poke()

    @property
    def away(self) -> bool:
        """Whether the database did not answer the last time."""
        return self._reconnecting.failures > 0

    # --- the thread ---

    def serve(self) -> None:
        """Go round until stopped, then until everything that was claimed here is written, or given up."""
        while True:
            outcomes = self._unwritten + self._pool.take_outcomes()
            self._unwritten = outcomes
            if self._given_up:
                log.error("%d outcomes could not be written before the runner had to end", len(outcomes))
                self._link.close()
                return
            if not self.claiming:
                self._pool.give_back_ready()
                outcomes += self._pool.take_outcomes()
                if self.stopping.is_set() and not outcomes and not self._blocked and self._pool.at_rest:
                    self._link.close()
                    return
            now = monotonic()
            blocked = bool(self._blocked) and now >= self._next_unblock
            if blocked or now >= self._look_for_strays_at:
                self._pool.hand_out()  # what follows may wait long, for rows that somebody holds
                try:
                    if now >= self._look_for_strays_at:
                        self._put_back_strays(now)
                    if blocked:
                        self._unblock(now)
                except DATABASE_ERRORS as error:
                    self._wait_for_database(error)
                    continue
            turn = self.quarantine.turn(now, self._pool.in_flight) if self.claiming else Turn.NOTHING
            wants, total = self._pool.wants() if turn is not Turn.NOTHING else ([], 0)
            claims = bool(wants) and (turn is Turn.SUSPECT or self._worth_a_claim(now, wants))
            if outcomes or claims:
                try:
                    self._round(outcomes, wants if claims else [], total, turn)
                except DATABASE_ERRORS as error:
                    self._wait_for_database(error)
                    continue
            if claims and self.claiming and turn is Turn.OTHERS and self._pool.calls_for_a_round(backlog=self._backlog):
                continue  # and hand out while the server works on the next round
            self._pool.hand_out()
            if not self.claiming and self.stopping.is_set() and self._pool.in_flight == 0 and not self._blocked:
                continue  # nobody is left to wake it
            if self.claiming and self.quarantine.turn(monotonic(), self._pool.in_flight) is not turn:
                continue  # this round has changed what may be claimed, and nobody will say so
            self._wait(turn, free=bool(wants) or not self.claiming)

    def _worth_a_claim(self, now: float, wants: Sequence[Want]) -> bool:
        if self._backlog or now >= self._next_poll or self.wakes != self._wakes_seen:
            return True
        if now >= self._rush_until and any(want.queue not in self._hungry for want in wants):
            # A queue that was at its limit has a free slot: jobs may wait there, and no insert would have told.
            return True
        return self.on_drained is not None and self._pool.in_flight == 0

    def _round(self, outcomes: list[Outcome], wants: Sequence[Want], total: int, turn: Turn) -> None:
        jobs: list[ClaimedJob] = []
        claimed: Claimed | None = None
        began = monotonic()
        view = self._floor.view(began)
        if wants and turn is Turn.OTHERS:
            # Before the claim: a wake-up that comes while it is under way asks for another.
            self._wakes_seen = self.wakes
        to_write = [o for o in outcomes if not o.written and o.verb is not Verb.LOST]
        # Those that their task's own transaction completed, if it committed.
        self._doubtful.update(outcome.job.id for outcome in to_write if outcome.joined)
        # Nearly always: nothing but completions, which the claim's own statement writes.
        rides = bool(wants) and turn is Turn.OTHERS and not self._delete
        rides = rides and all(outcome.verb is Verb.COMPLETE for outcome in to_write)
        if not rides:
            # Only the claim's own statement is awaited with something to do meanwhile.
            self._pool.hand_out()
        use = self._link.transaction if to_write and not rides else self._link.use
        lost: set[int] = set()
        try:
            with use() as connection:
                if not rides:
                    lost = settle(connection, to_write, self.claimant.options, delete=self._delete)
                if turn is Turn.SUSPECT:
                    jobs = claim_suspect(connection, self.claimant, wants)
                elif wants:
                    riding = to_write if rides else ()
                    claimed = claim(
                        connection,
                        self.claimant,
                        wants,
                        total,
                        view=view,
                        completed=riding,
                        # A pipeline has its price, 0.1 ms or two: an idle runner has nothing to do meanwhile.
                        meanwhile=self._pool.hand_out if self._pool.holds_back else None,
                    )
                    jobs = claimed.jobs
                    lost |= claimed.lost
        except DATABASE_ERRORS as error:
            if not to_write or not (is_refusal(error) or is_locked(error)):
                if not is_missing(error):
                    self._doubtful.update(outcome.job.id for outcome in outcomes)
                raise
            # One outcome is to blame, or the row that it is about; nothing of this round was committed.
            outcomes, lost = self._settle_one_by_one(outcomes)
            jobs, claimed = [], None
            # Nor was anything claimed, and the wake-up that asked for it will not come again.
            self._next_poll = 0.0
        self._unwritten = []
        if self._doubtful:
            lost -= self._doubtful
            self._doubtful.difference_update(outcome.job.id for outcome in outcomes)
        self._reconnecting.succeeded()
        self._pool.accept(jobs, began)
        if len(jobs) < total:
            # No backlog to send for first: whoever waits for these has waited long enough.
            self._pool.hand_out()
        if turn is Turn.SUSPECT:
            self.quarantine.claimed(monotonic(), jobs[0].id if jobs else None)
        if outcomes:
            self.quarantine.ended([outcome.job.id for outcome in outcomes if outcome.job.crashes])
            self._on_settled(outcomes, lost)
            self._note_delays(outcomes)
        if claimed is not None:
            self._plan(claimed, wants, total, everywhere=view.everywhere)

    def _note_delays(self, outcomes: Iterable[Outcome]) -> None:
        """Look again when a job that was put off is due: nothing announces it, and the next poll may be far away."""
        delays = [outcome.delay for outcome in outcomes if outcome.delay is not None]
        if delays:
            self._next_poll = min(self._next_poll, monotonic() + min(delays))

    def _put_back_strays(self, now: float) -> None:
        """Put back what a claim took whose answer never arrived.

        On each new connection, and then again and again: the server does not notice that a client has gone until it
        answers, so a claim may be committed long after the connection broke that it was sent on. This thread alone
        claims, and it is not claiming now, so what runs under this worker's name and no token known here is a stray.
        """
        tokens = self._pool.tokens() | {outcome.job.token for outcome in self._unwritten + self._blocked}
        # Never empty, or "different from all" would be true of nothing held and put back nothing claimed.
        parameters = {"worker": self.claimant.worker, "tokens": statements.array_literal(tokens or {0})}
        with self._link.use() as connection:
            rows = connection.execute(
                statements.put_back_strays(), parameters, execution_options=self.claimant.options
            ).all()
        self._look_for_strays_at = now + self._look_for_strays_after
        self._look_for_strays_after = min(self._look_for_strays_after * 2, _LOOK_FOR_STRAYS_EVERY)
        if rows:
            log.warning("%d jobs of a claim whose answer was lost were put back", len(rows))

    def _settle_one_by_one(
        self, outcomes: Sequence[Outcome], most_blocked: int = _MOST_BLOCKED
    ) -> tuple[list[Outcome], set[int]]:
        """One outcome cannot be written: write the others; that one as a plain failure, or later if it is blocked.

        Returns the outcomes as they were written, and the ids that the fence refused.
        """
        written: list[Outcome] = []
        blocked: list[Outcome] = []
        lost: set[int] = set()
        blocked_in_a_row = 0
        for place, outcome in enumerate(outcomes):
            if blocked_in_a_row >= most_blocked:
                # Somebody may hold the whole table: waiting for each row would take minutes. Those go first next time.
                blocked = [*outcomes[place:], *blocked]
                break
            try:
                attempt, refused = self._settle_one(outcome)
            except DATABASE_ERRORS as error:
                if not (is_refusal(error) or is_locked(error)):
                    if not is_missing(error):
                        self._doubtful.add(outcome.job.id)
                    raise
                blocked.append(outcome)
                blocked_in_a_row += is_locked(error)
                continue
            blocked_in_a_row = 0
            written.append(attempt)
            lost |= refused - self._doubtful
            # Should the database go away before the last one: written, and not to be called lost.
            self._doubtful.add(outcome.job.id)
        # Of no others: some may be blocked, or wait for their round.
        self._doubtful.difference_update(outcome.job.id for outcome in written)
        if blocked:
            # Only now: had the database gone away, they would all be tried again, and these must not be twice.
            self._blocked += blocked
            self._next_unblock = monotonic() + _UNBLOCK_EVERY
        return written, lost

    def _settle_one(self, outcome: Outcome) -> tuple[Outcome, set[int]]:
        """Write one outcome; if the server refuses it, as a plain failure; return which, and the ids refused."""
        try:
            with self._link.use() as connection:
                return outcome, settle(connection, [outcome], self.claimant.options, delete=self._delete)
        except DATABASE_ERRORS as error:
            if not is_refusal(error):
                raise
            log.warning("the outcome of job %d cannot be written: %s", outcome.job.id, _first_line(error))
        plain = _plain_failure(outcome)
        with self._link.use() as connection:
            return plain, settle(connection, [plain], self.claimant.options, delete=self._delete)

    def _unblock(self, now: float) -> None:
        """Try the outcomes again whose rows somebody else held."""
        blocked, self._blocked = self._blocked, []
        self._next_unblock = now + _UNBLOCK_EVERY
        try:
            # No longer than for one row: whoever waits to be claimed waits as well.
            written, lost = self._settle_one_by_one(blocked, most_blocked=1)
        except DATABASE_ERRORS:
            # To the others: while it is still known which of them may have been written.
            self._unwritten = blocked + self._unwritten
            raise
        if written:
            self.quarantine.ended([outcome.job.id for outcome in written if outcome.job.crashes])
            self._on_settled(written, lost)
            self._note_delays(written)

    def _plan(self, claimed: Claimed, wants: Sequence[Want], total: int, *, everywhere: bool) -> None:
        """After a claim: who is dry, whether to be hungry, and when to look again."""
        now = monotonic()
        jobs, next_due = claimed.jobs, claimed.next_due
        full = len(jobs) >= total
        got = Counter(job.queue for job in jobs)
        dry = frozenset() if full else frozenset(want.queue for want in wants if got[want.queue] < want.slots)
        self._backlog = full or len(dry) < len(wants)
        if everywhere:
            self._floor.looked_everywhere(now, claimed.walked, jobs, at=claimed.at, short=dry)
        else:
            self._floor.looked_above(claimed.walked, jobs)
            if self.on_drained is not None and not jobs and self._pool.at_rest:
                # Nothing is done meanwhile, and the drain ends only with a look everywhere.
                self._floor.due = now
        if self._in_rush(now, found=bool(jobs)):
            self._be_hungry(frozenset())
            self._next_poll = now + _RUSH_POLL
            return
        # Below the floor there may be jobs for which no insert would notify: it turns hungry only after a look there.
        self._be_hungry(dry if everywhere else dry & self._hungry)
        if jobs or dry - self._hungry:
            self._poll_after = _FIRST_POLL
        wait = self._poll_after
        self._poll_after = min(self._poll_after * 2, self._poll_interval)
        if next_due is not None:
            # A job falls due by the server's clock: a touch late finds it, a touch early would only look in vain.
            wait = min(wait, max(next_due, 0.0) + 0.0005)
        if not everywhere:
            wait = min(wait, max(self._floor.due - now, 0.0))
        self._next_poll = now + wait
        if everywhere and not jobs and next_due != 0.0 and not self._backlog and self.on_drained is not None:
            self._look_for_suspects_or_end()

    def _look_for_suspects_or_end(self) -> None:
        # A run that ended during the claim may be due again at once: its outcome comes first.
        if self._pool.at_rest and not self._unwritten and not self._blocked and self.on_drained is not None:
            began = monotonic()
            with self._link.use() as connection:
                wants, _ = self._pool.wants()
                suspects = claim_suspect(connection, self.claimant, wants)
            if suspects:
                self.quarantine.claimed(monotonic(), suspects[0].id)
                self._pool.accept(suspects, began)
                self._pool.hand_out()
            else:
                self.on_drained()

    def _be_hungry(self, dry: frozenset[str]) -> None:
        if dry - self._hungry:
            self._poll_after = _FIRST_POLL
        self._hungry = dry
        if self._listener is not None:
            self._listener.set_hungry(dry)

    def _in_rush(self, now: float, *, found: bool) -> bool:
        if now - self._rush_began > _RUSH_WINDOW:
            if self.wakes - self._rush_wakes > _RUSH_WAKES * (now - self._rush_began) / _RUSH_WINDOW:
                self._rush_until = now + _RUSH_WINDOW
            self._rush_began, self._rush_wakes = now, self.wakes
        if now < self._rush_until and found:
            self._rush_until = now + _RUSH_WINDOW
        return now < self._rush_until

    def _wait(self, turn: Turn, *, free: bool) -> None:
        now = monotonic()
        until = min(now + self._poll_interval, self._look_for_strays_at)
        low = -1
        linger = LINGER
        if self.claiming:
            until = min(until, self._pool.give_back_stale(now))
            # Without free slots nothing but the end of a run can change anything.
            if free and turn is Turn.OTHERS:
                until = min(until, self._next_poll)
            if (change := self.quarantine.changes_at(now)) is not None:
                until = min(until, change)
        if self.claiming and self._backlog:
            low = self._pool.low_water()
            linger = _LINGER_WITH_BACKLOG
        elif self.claiming and now < self._rush_until:
            # What ends rides with the next look, instead of a transaction of its own just before.
            linger = max(linger, self._next_poll - now)
        if self._blocked:
            until = min(until, self._next_unblock)
        self._pool.wait(until, low=low, linger=now + linger)

    def _wait_for_database(self, error: BaseException) -> None:
        self._pool.hand_out()
        delay = self._reconnecting.next_delay()
        # A table or a right that is missing: it may come back, in a deploy, but a drain does not wait for that.
        refused = is_missing(error)
        if self._reconnecting.failures == 1 or self._reconnecting.failures % 20 == 0:
            what = "the database refuses what the runner asks" if refused else _trouble(error)
            log.warning("%s (%s); trying again in %.1f s", what, _first_line(error), delay)
        if refused and self.on_drained is not None:
            self.refusal = error
            self.on_drained()
        self._link.close()
        self._floor.forget()
        self._look_for_strays_at = 0.0
        self._look_for_strays_after = _FIRST_LOOK_FOR_STRAYS
        self._backlog = False
        self._next_poll = 0.0
        if self.stopping.is_set():
            self._pool.wait(monotonic() + delay, low=-1, linger=monotonic() + delay)
        else:
            self.stopping.wait(delay)


def _plain_failure(outcome: Outcome) -> Outcome:
    message = "the outcome of this attempt could not be written; see the worker's log"
    return Outcome(outcome.job, Verb.FAIL, delay=60.0, kind="error", message=message)


def _trouble(error: BaseException) -> str:
    return "somebody holds the jobs table" if is_locked(error) else "the database is away"


def _first_line(error: BaseException) -> Any:
    return str(error).partition("\n")[0] or type(error).__name__
