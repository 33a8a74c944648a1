"""The life of jobs in random order: several runners and producers on a real PostgreSQL, beside a model of what must be.

The model is in ``support/lives.py``. Every step is a transaction that commits, or is undone on
purpose, so that each runner sees what the others did and no more. Time passes by moving the rows' times back, never by
waiting; what races is forced in ``test_races.py``.

``HYPOTHESIS_PROFILE=long`` runs it for some minutes; the default takes seconds.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select, text
from sqlalchemy.orm import Session
from support.lives import CRASH_LIMIT, ENDS, LATER, QUEUES, UNFINISHED, Life, Model

from sqla_neoq import (
    ClaimLost,
    DeadJob,
    Enqueued,
    Failure,
    Job,
    Worker,
    cancel,
    enqueue,
    requeue_many,
    statements,
)
from sqla_neoq.claim import Claimant, Want, claim, claim_suspect, settle
from sqla_neoq.context import ClaimedJob
from sqla_neoq.dialects import PostgresDialect
from sqla_neoq.outcomes import Outcome
from sqla_neoq.transaction import RunTransaction

PROFILES = {"short": (60, 50), "long": (2000, 80)}
"""Examples, and steps in each."""
PRIORITIES = (-1, 0, 5)


class Slot:
    """A place where runner processes run, one after the other, each with its connections."""

    def __init__(self, engine, *, listening: bool) -> None:
        self.connection = PostgresDialect().connect(engine, "stateful")
        self.locks = PostgresDialect().listening_connection(engine, None, "stateful")
        self.listening = listening
        self.worker = 0

    def close(self) -> None:
        self.connection.close()
        self.locks.close()


class Lives(RuleBasedStateMachine):
    """Rules are what may happen; after each, the tables must be as the model says."""

    engine: Any = None
    slots: tuple[Slot, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.runs: list[ClaimedJob] = []
        self.made: set[int] = set()
        with self.engine.begin() as connection:
            for table in (Job, DeadJob, Failure, Worker):
                connection.execute(table.__table__.delete())
            connection.execute(text("DELETE FROM effects"))
            oid = connection.execute(statements.jobs_oid(), {"table": "neoq_jobs"}).scalar_one()
        self.oid = oid
        for slot in self.slots:
            self.register(slot)

    # --- helpers ---

    def ask(self, slot: Slot, statement: Any, **parameters: Any) -> list[Any]:
        return list(slot.connection.execute(statement, parameters).all())

    def register(self, slot: Slot) -> None:
        """Start a process: its row, and the lock that lives as long as it does."""
        slot.locks.execute("SELECT pg_advisory_unlock_all()")
        self.model.locked.discard(slot.worker)
        about = {"name": "w", "host": "h", "pid": 1, "queues": "[]", "version": "0", "listening": slot.listening}
        ((slot.worker,),) = self.ask(slot, statements.register_worker(), **about)
        self.model.silent[slot.worker] = 0
        if slot.listening:
            slot.locks.execute(statements.advisory_lock("pg_advisory_lock"), (f"worker:{slot.worker}", self.oid))
            self.model.locked.add(slot.worker)
            self.model.listening.add(slot.worker)

    def started(self, slot: Slot, jobs: list[ClaimedJob]) -> None:
        """These jobs were claimed: all under one token, higher than any before."""
        tokens = {job.token for job in jobs}
        assert len(tokens) <= 1
        assert all(token > run.token for token in tokens for run in self.runs)
        for job in jobs:
            life = self.model.jobs[job.id]
            assert life.startable
            life.retries += life.status == "failed"
            life.status, life.token, life.worker = "running", job.token, slot.worker
            assert (job.retries, job.crashes, job.max_retries) == (life.retries, life.crashes, life.max_retries)
        self.runs += jobs

    def owns(self, run: ClaimedJob) -> bool:
        life = self.model.jobs.get(run.id)
        return life is not None and life.token == run.token

    def silence(self, worker: int, seconds: float) -> None:
        with self.engine.begin() as connection:
            connection.execute(
                text("UPDATE neoq_workers SET heartbeat_at = now() - make_interval(secs => :s) WHERE id = :id"),
                {"s": seconds, "id": worker},
            )
        self.model.silent[worker] = seconds

    # --- producers ---

    @initialize(priorities=st.lists(st.sampled_from(PRIORITIES), min_size=2, max_size=4))
    def some_run(self, priorities):
        for priority in priorities:
            self.enqueue("a", priority, None, False, None, 1, True)
        self.claim(0, (2, 0), 2)

    @rule(
        queue=st.sampled_from(QUEUES),
        priority=st.sampled_from(PRIORITIES),
        key=st.sampled_from([None, "x", "y"]),
        later=st.booleans(),
        deadline=st.sampled_from([None, None, LATER]),
        max_retries=st.sampled_from([None, 0, 1, 2]),
        commit=st.sampled_from([True, True, True, False]),
    )
    def enqueue(self, queue, priority, key, later, deadline, max_retries, commit):
        life = Life(queue, priority, key, max_retries, not later, None if deadline is None else True)
        twin = self.model.twin(life)
        with self.engine.connect() as connection:
            options = {"run_after": LATER if later else None, "deadline": deadline, "max_retries": max_retries}
            made = enqueue(connection, queue, priority=priority, fingerprint=key, **options)
            connection.commit() if commit else connection.rollback()
        if twin is not None:
            assert made == Enqueued(twin, created=False)
            return
        assert made.created
        assert made.id not in self.made
        if commit:
            self.made.add(made.id)
            self.model.jobs[made.id] = life

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data(), commit=st.booleans())
    def cancel(self, data, commit):
        ids = sorted(self.model.jobs)
        id_ = data.draw(st.sampled_from(self.model.some(status="running") or ids) | st.sampled_from(ids))
        life = self.model.jobs[id_]
        with self.engine.connect() as connection:
            assert cancel(connection, id_) == (life.status in UNFINISHED)
            connection.commit() if commit else connection.rollback()
        if commit and life.waiting:
            life.end("cancelled")
        elif commit and life.status == "running":
            life.asked = True

    @precondition(lambda self: self.model.dead)
    @rule(data=st.data(), commit=st.sampled_from([True, True, False]))
    def requeue(self, data, commit):
        known = sorted(self.model.dead.keys() | self.model.jobs.keys() | self.model.forgotten)
        some = st.lists(st.sampled_from(sorted(self.model.dead)) | st.sampled_from(known), min_size=1, max_size=4)
        ids = data.draw(some)
        with self.engine.connect() as connection:
            results = requeue_many(connection, ids)
            connection.commit() if commit else connection.rollback()
        before = (dict(self.model.jobs), dict(self.model.dead))
        expected: dict[int, Enqueued] = {}
        for id_ in sorted({id_ for id_ in ids if id_ in self.model.dead}):
            life, _ = self.model.dead[id_]
            twin = self.model.twin(life)
            expected[id_] = Enqueued(id_ if twin is None else twin, created=twin is None)
            if twin is None:
                del self.model.dead[id_]
                in_time = True if life.in_time else None
                self.model.jobs[id_] = replace(
                    life, status="new", retries=0, crashes=0, due=True, in_time=in_time, worker=None
                )
        assert results == [expected.get(id_) for id_ in ids]
        if not commit:
            self.model.jobs, self.model.dead = before

    # --- runners ---

    @rule(slot=st.integers(0, 2), slots=st.tuples(st.integers(0, 3), st.integers(0, 3)), total=st.integers(1, 5))
    def claim(self, slot, slots, total):
        assert self.round(self.slots[slot], slots, total, []) == set()

    @precondition(lambda self: self.runs)
    @rule(slot=st.integers(0, 2), total=st.integers(1, 5), data=st.data())
    def complete_and_claim(self, slot, total, data):
        """Claim, and in the same statement complete runs, of which some have lost their jobs."""
        own = [run for run in self.runs if self.owns(run)]
        some = st.sampled_from(own or self.runs) | st.sampled_from(self.runs)
        done = data.draw(st.lists(some, min_size=1, max_size=4, unique_by=lambda run: run.id))
        owned = {run.id for run in done if self.owns(run)}
        lost = self.round(self.slots[slot], (3, 3), total, [ENDS["success"](run) for run in done])
        assert lost == {run.id for run in done} - owned
        event(f"completed by a claim: {len(owned)}, refused: {len(lost)}")
        for id_ in owned:
            self.ended(id_, "success", delete=False)

    def round(self, who: Slot, slots: tuple[int, int], total: int, completed: list[Outcome]) -> frozenset[int]:
        """Claim, and return what the fence refused of the completed."""
        wants = [Want(queue, number, True) for queue, number in zip(QUEUES, slots, strict=True) if number]
        claimant = Claimant(who.worker, "[]", {})
        claimed = claim(who.connection, claimant, wants, total, completed=completed)
        jobs = claimed.jobs
        # The best of each queue up to its slots, then the best of these up to the total.
        best: list[int] = []
        for want in wants:
            there = [life for life in self.model.jobs.values() if life.queue == want.queue]
            best += sorted(-life.priority for life in there if life.startable and not life.suspect)[: want.slots]
            assert sum(job.queue == want.queue for job in jobs) <= want.slots
        assert [-job.priority for job in jobs] == (sorted(best)[:total] if who.worker in self.model.silent else [])
        assert not any(self.model.jobs[job.id].suspect for job in jobs)
        self.started(who, jobs)
        if not jobs and who.worker in self.model.silent:
            later = [
                life
                for life in self.model.jobs.values()
                if life.waiting and not life.due and life.queue in {want.queue for want in wants}
            ]
            assert (claimed.next_due is not None) == bool(later)
        return claimed.lost

    @rule(slot=st.integers(0, 2))
    def claim_suspect(self, slot):
        who = self.slots[slot]
        jobs = claim_suspect(who.connection, Claimant(who.worker, "[]", {}), [Want(queue, 1, True) for queue in QUEUES])
        suspects = [life for life in self.model.jobs.values() if life.startable and life.suspect]
        assert len(jobs) == (1 if suspects and who.worker in self.model.silent else 0)
        assert all(self.model.jobs[job.id].suspect for job in jobs)
        self.started(who, jobs)

    @precondition(lambda self: self.model.some(status="running"))
    @rule(slot=st.integers(0, 2), data=st.data(), delete=st.sampled_from([False, False, True]))
    def end(self, slot, data, delete):
        self.write(self.slots[slot], [run for run in self.runs if self.owns(run)], data, delete=delete)

    @precondition(lambda self: self.runs)
    @rule(slot=st.integers(0, 2), data=st.data())
    def end_late(self, slot, data):
        """Among these runs are some that have lost their jobs; best those whose job another one runs by now."""
        running = self.model.some(status="running")
        zombies = [run for run in self.runs if run.id in running and not self.owns(run)]
        self.write(self.slots[slot], zombies or self.runs, data, delete=False)

    @rule(total=st.integers(1, 3))
    def change_hands(self, total):
        """One runner gives back what it has not started, and another one claims it."""
        own = [run for run in self.runs if self.owns(run)]
        for run in own[:total]:
            assert settle(self.slots[0].connection, [ENDS["given back"](run)], {}) == set()
            self.ended(run.id, "given back", delete=False)
        self.claim(1, (3, 3), total)

    def write(self, slot: Slot, runs: list[ClaimedJob], data: Any, *, delete: bool) -> None:
        """Write some runs' outcomes together, as a runner does."""
        ending = data.draw(st.lists(st.sampled_from(runs), min_size=1, max_size=4, unique_by=lambda run: run.id))
        # In turn and not by chance, or some would hardly ever come.
        turn = data.draw(st.integers(0, len(ENDS) - 1)) + len(self.runs)
        how = [list(ENDS)[(turn + place) % len(ENDS)] for place in range(len(ending))]
        outcomes = [ENDS[end](run) for run, end in zip(ending, how, strict=True)]
        owned = {run.id for run in ending if self.owns(run)}
        written = {run.id for run, end in zip(ending, how, strict=True) if end != "taken away"}
        assert settle(slot.connection, outcomes, {}, delete=delete) == written - owned
        for run, end in zip(ending, how, strict=True):
            event(end if run.id in owned else "refused")
            if run.id in owned:
                self.ended(run.id, end, delete=delete)

    def ended(self, id_: int, end: str, *, delete: bool) -> None:
        life = self.model.jobs[id_]
        match end:
            case "success" if delete:
                del self.model.jobs[id_]
                self.model.forgotten.add(id_)
            case "success":
                life.end("processed")
            case "error" | "error, tried later":
                self.model.fail(id_, "error", due=end == "error")
            case "retry" | "timeout":
                self.model.fail(id_, end, due=True)
            case "snooze":
                life.due = False
                life.go_back("new")
            case "discard":
                self.model.failures[id_, life.retries + 1, "discarded"] += 1
                self.model.bury(id_, "discarded")
            case "given back":
                life.go_back("new")
            case "cancelled":
                life.end("cancelled")
            case "too late to start":
                self.model.bury(id_, "deadline")

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end_in_its_own_session(self, data):
        """Work written through the job's session happens if, and only if, the run still owns the job."""
        run = data.draw(st.sampled_from(self.runs))
        transaction = RunTransaction(lambda: Session(self.engine), {})
        transaction.session.execute(text("INSERT INTO effects VALUES (:id)"), {"id": run.id})
        if self.owns(run):
            transaction.complete(run)
            self.model.jobs[run.id].end("processed")
            self.model.effects[run.id] += 1
            event("in session")
        else:
            with pytest.raises(ClaimLost):
                transaction.complete(run)
            transaction.rollback()

    @rule(slot=st.integers(0, 2), keep=st.integers(0, 2))
    def lose_an_answer(self, slot, keep):
        """A runner forgets what it claimed but for some, and puts the rest back."""
        who = self.slots[slot]
        held = sorted({run.token for run in self.runs})[:keep] or [0]
        rows = self.ask(who, statements.put_back_strays(), worker=who.worker, tokens=statements.array_literal(held))
        strays = [
            id_ for id_ in self.model.some(worker=who.worker, status="running") if self.life(id_).token not in held
        ]
        assert sorted(id_ for (id_,) in rows) == sorted(strays)
        for id_ in strays:
            self.life(id_).go_back("new")

    def life(self, id_: int) -> Life:
        return self.model.jobs[id_]

    # --- leases ---

    @rule(slot=st.integers(0, 2))
    def beat(self, slot):
        who = self.slots[slot]
        wanted = json.dumps([Want(queue, 1, True)._asdict() for queue in QUEUES])
        (seen,) = self.ask(
            who, statements.beat(), worker=who.worker, stale=4.0, wanted=wanted, tasks="[]", deadlines=True
        )
        alive = who.worker in self.model.silent
        lives = self.model.jobs.values()
        assert seen.alive == alive
        assert seen.stale == any(s > 4 for worker, s in self.model.silent.items() if worker != who.worker)
        assert seen.orphans == bool(self.model.orphans())
        assert seen.overdue == any(life.waiting and life.in_time is False for life in lives)
        assert seen.suspects == any(life.startable and life.suspect for life in lives)
        assert sorted(seen.cancels) == sorted(self.model.some(worker=who.worker, status="running", asked=True))
        if alive:
            self.model.silent[who.worker] = 0
        else:
            self.register(who)

    @rule(data=st.data(), seconds=st.sampled_from([5, 31]))
    def fall_silent(self, data, seconds):
        """A process is frozen, or cut off, or has died before."""
        if self.model.silent:
            self.silence(data.draw(st.sampled_from(sorted(self.model.silent))), seconds)

    @rule(slot=st.integers(0, 2))
    def die(self, slot):
        """The process is killed, and another one takes its place: under a new name."""
        self.register(self.slots[slot])

    @rule(slot=st.integers(0, 2))
    def sign_off(self, slot):
        """A process ends, with jobs still running under its name."""
        who = self.slots[slot]
        who.connection.execute(statements.unregister_worker(), {"worker": who.worker})
        self.model.silent.pop(who.worker, None)
        self.register(who)

    @rule(slot=st.integers(0, 2))
    def declare_dead(self, slot):
        judge = self.slots[slot].worker
        rows = self.ask(
            self.slots[slot], statements.remove_dead_workers(), worker=judge, stale=4.0, dead=30.0, jobs=self.oid
        )
        gone = {
            worker
            for worker, seconds in self.model.silent.items()
            if worker != judge
            and (seconds > 30 or (seconds > 4 and worker in self.model.listening - self.model.locked))
        }
        assert {worker for (worker,) in rows} == gone
        for worker in gone:
            del self.model.silent[worker]

    @rule(slot=st.integers(0, 2), data=st.data())
    def rescue(self, slot, data):
        """Take orphans back; also when asked about jobs that are none, as after a look that others overtook."""
        who = self.slots[slot]
        seen = dict(map(tuple, self.ask(who, statements.orphans())))
        assert seen == {id_: self.life(id_).token for id_ in self.model.orphans()}
        # And others that it saw before: claims that have ended, or that somebody owns.
        others = data.draw(st.lists(st.sampled_from(self.runs), max_size=3)) if self.runs else []
        asked = {*seen.items(), *((run.id, run.token) for run in others)}
        orphans = json.dumps([{"id": id_, "token": token} for id_, token in sorted(asked)])
        rows = self.ask(who, statements.rescue(), orphans=orphans, limit=CRASH_LIMIT)
        assert sorted(id_ for id_, _ in rows) == sorted(seen)
        for id_, reason in rows:
            self.model.crash(id_)
            event(f"rescued: {reason}")
            assert reason == (self.model.dead[id_][1] if id_ in self.model.dead else None)

    @rule(data=st.data(), victim=st.integers(1, 2), times=st.integers(1, 3))
    def be_killed_again_and_again(self, data, victim, times):
        """What it takes to make suspects, and to bury them."""
        for _ in range(times):
            who = self.slots[victim]
            self.claim(victim, (3, 3), 6)
            self.claim_suspect(victim)
            if self.model.some(status="running") and data.draw(st.booleans()):
                self.cancel(data, True)
            worker = who.worker
            self.die(victim)
            if worker in self.model.silent:
                self.silence(worker, 5 if who.listening else 31)
            self.declare_dead(0)
            self.rescue(0, data)

    # --- time, and what cleans up ---

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data(), what=st.sampled_from(["run_after", "deadline"]))
    def time_passes(self, data, what):
        """An hour and more for one job: it falls due, or its deadline passes."""
        id_ = data.draw(st.sampled_from(sorted(self.model.jobs)))
        with self.engine.begin() as connection:
            connection.execute(
                text(f"UPDATE neoq_jobs SET {what} = {what} - interval '2 hours' WHERE id = :id"), {"id": id_}
            )
        if what == "run_after":
            self.life(id_).due = True
        elif self.life(id_).in_time:
            self.life(id_).in_time = False

    @rule(slot=st.integers(0, 2), limit=st.integers(1, 3))
    def bury_overdue(self, slot, limit):
        late = [id_ for id_, life in self.model.jobs.items() if life.waiting and life.in_time is False]
        rows = [id_ for (id_,) in self.ask(self.slots[slot], statements.bury_overdue(), limit=limit)]
        assert set(rows) <= set(late)
        assert len(rows) == min(limit, len(late))
        for id_ in rows:
            self.model.bury(id_, "deadline")

    @rule(slot=st.integers(0, 2), limit=st.integers(1, 3))
    def prune(self, slot, limit):
        self.slots[slot].connection.execute(statements.prune_jobs(), {"age": -1.0, "limit": limit, "kept": "{0}"})
        with self.engine.connect() as connection:
            gone = self.model.jobs.keys() - set(connection.scalars(select(Job.id)))
        finished = {id_ for id_, life in self.model.jobs.items() if life.status in {"processed", "cancelled"}}
        assert gone <= finished
        assert len(gone) == min(limit, len(finished))
        for id_ in gone:
            del self.model.jobs[id_]
        self.model.forgotten |= gone

    # --- what must hold after each step ---

    @invariant()
    def the_tables_are_as_the_model_says(self):
        with self.engine.connect() as connection:
            rows = connection.execute(
                text(
                    "SELECT id, queue, priority, fingerprint, max_retries, run_after <= statement_timestamp(), "
                    "deadline > statement_timestamp(), status, retries, crashes, claim_token, worker_id, "
                    "cancel_requested_at IS NOT NULL AND status = 'running' FROM neoq_jobs"
                )
            ).all()
            dead = connection.execute(
                text(
                    "SELECT id, queue, priority, fingerprint, max_retries, run_after <= statement_timestamp(), "
                    "deadline > statement_timestamp(), 'dead', retries, crashes, NULL, worker_id, false, reason "
                    "FROM neoq_dead_jobs"
                )
            ).all()
            failures = Counter(map(tuple, connection.execute(select(Failure.job_id, Failure.attempt, Failure.kind))))
            workers = set(connection.scalars(select(Worker.id)))
            effects = Counter(connection.scalars(text("SELECT job FROM effects")))
        assert {row[0]: Life(*row[1:]) for row in rows} == self.model.jobs
        assert {row[0]: (Life(*row[1:-1]), row[-1]) for row in dead} == self.model.dead
        assert failures == self.model.failures
        assert workers == self.model.silent.keys()
        assert effects == self.model.effects

    @invariant()
    def every_committed_job_is_in_exactly_one_place(self):
        places = [*self.model.jobs, *self.model.dead, *self.model.forgotten]
        assert Counter(places) == Counter(self.made)

    @invariant()
    def every_running_job_has_one_owner_its_latest_claim(self):
        latest = {run.id: run.token for run in self.runs}
        for id_ in self.model.some(status="running"):
            assert self.life(id_).token == latest[id_]

    @invariant()
    def work_in_a_jobs_session_happens_once(self):
        assert all(number == 1 for number in self.model.effects.values())


def test_jobs_live_as_the_model_says_whatever_happens_in_whatever_order(engine):
    examples, steps = PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "short")]
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (job bigint)"))
    slots = [Slot(engine, listening=True), Slot(engine, listening=True), Slot(engine, listening=False)]
    Lives.engine, Lives.slots = engine, tuple(slots)
    options = settings(
        deadline=None,
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    try:
        run_state_machine_as_test(Lives, settings=options)
    finally:
        for slot in slots:
            slot.close()
        engine.dispose()
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE effects"))
