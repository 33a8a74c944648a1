"""What holds for all statements; and the life of jobs, in any order of events, beside a model of it in Python.

What each statement does is tested where it is used: test_insertion, test_producer, test_claim, test_maintenance,
test_status. What it costs: test_plans.
"""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import create_engine, select, text
from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.pool import NullPool

import sqla_neoq
from sqla_neoq import DeadJob, Failure, Job, models, statements
from sqla_neoq.statements import looking

SOURCES = Path(sqla_neoq.__file__).parent


NAMES = sorted(
    {*statements.__all__, *(name for name in dir(looking) if name.startswith(("count_", "running_")))} - {"running"}
)
NO_STATEMENTS = {"advisory_lock", "array_literal"}
MAKERS = {
    name: getattr(statements, name, None) or getattr(looking, name) for name in NAMES if name not in NO_STATEMENTS
}
EACH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def sql(statement):
    return str(statement.compile(dialect=asyncpg.dialect()))


@pytest.fixture(scope="module")
def one_engine(worker_database):
    engine = create_engine(worker_database, poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(one_engine):
    with one_engine.connect() as connection:
        yield connection


@EACH
def test_a_statement_is_made_once_and_says_what_it_is_for(make):
    assert make() is make()
    assert inspect.getdoc(make)


@EACH
def test_a_statement_can_be_prepared_so_every_parameter_has_its_type(make, connection):
    connection.exec_driver_sql(f"PREPARE it AS {sql(make())}", execution_options={"no_parameters": True})
    untyped = "SELECT count(*) FROM pg_prepared_statements WHERE 'unknown'::regtype = ANY (parameter_types)"
    assert connection.scalar(text(untyped)) == 0
    connection.exec_driver_sql("DEALLOCATE it")


@EACH
def test_the_clock_is_the_database_s_at_the_statement(make):
    said = sql(make())
    # The one exception is a job enqueued without a time, due since its transaction began.
    allowed = "coalesce(" if make is statements.insert_jobs else "?"
    for match in re.finditer(r"\bnow\(\)|CURRENT_TIMESTAMP|clock_timestamp|transaction_timestamp", said):
        assert allowed in said[: match.start()].rsplit("SELECT", 1)[-1]


@EACH
def test_what_must_match_a_partial_index_is_constant_sql(make):
    said = sql(make())
    for operand in re.findall(r"\.status (?:=|IN|<>|!=) ?(\S+)", said):
        assert operand.startswith(("'", "('")), said
    # Word for word, or ON CONFLICT does not find the index.
    if "ON CONFLICT (queue" in said:
        assert f"WHERE {models.UNFINISHED_SQL} DO NOTHING" in said


FENCED = ["complete", "complete_and_delete", "fail", "bury", "put_back", "finish_cancelled"]


@pytest.mark.parametrize("name", FENCED)
def test_every_write_from_running_repeats_the_fence(name):
    said = sql(getattr(statements, name)())
    assert "neoq_jobs.claim_token = outcome.token" in said
    assert "= 'running'" in said


def test_nothing_elsewhere_writes_to_the_tables():
    writing = {"insert", "update", "delete"}
    for path in SOURCES.rglob("*.py"):
        if path.parent.name in {"statements", "migrations"}:
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sqlalchemy"):
                assert writing.isdisjoint(alias.name for alias in node.names), path
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"\b(INSERT INTO|UPDATE|DELETE FROM) \S*neoq_", node.value), path


@pytest.mark.parametrize("numbers", [[], [1], [1, -2, 2**63 - 1], range(3)])
def test_an_array_literal_reads_back(connection, numbers):
    cast = text("SELECT CAST(CAST(:array AS text) AS bigint[])")
    assert connection.scalar(cast, {"array": statements.array_literal(numbers)}) == list(numbers)


# The life of jobs ----------------------------------------------------------------------------------------------------

QUEUES = ("a", "b")
PRIORITIES = (-1, 0, 5)
VERBS = st.sampled_from(FENCED)
LATER = 3600


class Lives(RuleBasedStateMachine):
    """Jobs are enqueued, claimed, ended and called off in any order; the model says what there must be.

    One transaction, undone at the end.
    """

    connection = None

    def __init__(self):
        super().__init__()
        for table in (Job, DeadJob, Failure):
            self.connection.execute(table.__table__.delete())
        worker = {"name": "w", "host": "h", "pid": 1, "queues": "[]", "version": "0", "listening": False}
        self.worker = self.run(statements.register_worker(), **worker)[0][0]
        self.jobs = {}
        self.dead = {}
        self.failures = 0
        self.tokens = []

    def teardown(self):
        self.connection.rollback()

    def run(self, statement, **parameters):
        return self.connection.execute(statement, parameters).all()

    def unfinished(self, queue, fingerprint):
        return [
            id_
            for id_, job in self.jobs.items()
            if job["queue"] == queue
            and job["fingerprint"] == fingerprint
            and job["status"] in {"new", "failed", "running"}
        ]

    @initialize(priorities=st.lists(st.sampled_from(PRIORITIES), min_size=2, max_size=4))
    def some_run(self, priorities):
        for priority in priorities:
            self.enqueue("a", priority, None, later=False)
        self.claim((2, 0), 2)

    @rule(
        queue=st.sampled_from(QUEUES),
        priority=st.sampled_from(PRIORITIES),
        fingerprint=st.sampled_from([None, "x", "y"]),
        later=st.booleans(),
    )
    def enqueue(self, queue, priority, fingerprint, later):
        new = {"queue": queue, "priority": priority, "payload": {}, "fingerprint": fingerprint}
        rows = self.run(statements.insert_jobs(), jobs=json.dumps([new | {"run_in": LATER if later else None}]))
        there = self.unfinished(queue, fingerprint) if fingerprint else []
        if there:
            assert rows == []
            keys = json.dumps([{"queue": queue, "fingerprint": fingerprint}])
            assert self.run(statements.find_unfinished(), keys=keys) == [(*there, queue, fingerprint)]
        else:
            ((id_, *_),) = rows
            self.jobs[id_] = {**new, "status": "new", "retries": 0, "token": None, "due": not later, "stop": False}
            del self.jobs[id_]["payload"]

    @rule(slots=st.tuples(st.integers(0, 3), st.integers(0, 3)), total=st.integers(1, 5))
    def claim(self, slots, total):
        wanted = [{"queue": q, "slots": n, "handler": True} for q, n in zip(QUEUES, slots, strict=True) if n]
        rows = self.run(statements.claim_due(), worker=self.worker, tasks="[]", wanted=json.dumps(wanted), total=total)
        waiting = {id_: job for id_, job in self.jobs.items() if job["status"] in {"new", "failed"} and job["due"]}
        # The best of each queue up to its slots, then the best of these up to the total.
        best = []
        for queue, number in zip(QUEUES, slots, strict=True):
            of_queue = sorted(-job["priority"] for job in waiting.values() if job["queue"] == queue)
            best += of_queue[:number]
        expected = sorted(best)[:total]
        claimed = [row for row in rows if row.id is not None]
        assert [-row.priority for row in claimed] == expected
        assert len({row.claim_token for row in claimed}) <= 1
        for row in claimed:
            job = self.jobs[row.id]
            assert row.id in waiting
            assert all(row.claim_token > token for _, token in self.tokens if token != row.claim_token)
            job["retries"] += job["status"] == "failed"
            job["status"], job["token"] = "running", row.claim_token
            assert row.retries == job["retries"]
        for queue, number in zip(QUEUES, slots, strict=True):
            assert sum(row.queue == queue for row in claimed) <= number
        self.tokens += [(row.id, row.claim_token) for row in claimed]

    @precondition(lambda self: self.tokens)
    @rule(verb=VERBS, data=st.data(), later=st.booleans(), late=st.booleans())
    def end(self, verb, data, later, late):
        """End some runs; if late, of those as well whose job others own by now."""
        own = [run for run in self.tokens if self.jobs.get(run[0], {}).get("token") == run[1]]
        runs = self.tokens if late or not own else own
        ending = data.draw(st.lists(st.sampled_from(runs), min_size=1, max_size=4, unique_by=lambda run: run[0]))
        said = {
            "delay": LATER if later else 0,
            "kind": "error",
            "message": "no",
            "traceback": "",
            "reason": "exhausted",
        }
        rows = self.run(
            getattr(statements, verb)(),
            outcomes=json.dumps([{"id": id_, "token": token, **said} for id_, token in ending]),
        )
        owned = [id_ for id_, token in ending if self.jobs.get(id_, {}).get("token") == token]
        assert sorted(id_ for (id_,) in rows) == sorted({id_ for id_, _ in ending} - set(owned))
        for id_ in owned:
            job = self.jobs[id_]
            asked_to_stop = job["stop"]
            job |= {"token": None, "stop": False}
            if verb in {"fail", "put_back"}:
                job["due"] = not later
                job["status"] = "cancelled" if asked_to_stop else "failed" if verb == "fail" else "new"
            elif verb in {"complete", "finish_cancelled"}:
                job["status"] = "processed" if verb == "complete" else "cancelled"
            else:
                del self.jobs[id_]
                if verb == "bury":
                    self.dead[id_] = job
        self.failures += len(owned) * (verb in {"fail", "bury"})

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        running = [id_ for id_, job in self.jobs.items() if job["status"] == "running"]
        id_ = data.draw(st.sampled_from(sorted(self.jobs)) | st.sampled_from(running or sorted(self.jobs)))
        job = self.jobs[id_]
        rows = self.run(statements.cancel_job(), job=id_)
        if job["status"] in {"new", "failed"}:
            job["status"] = "cancelled"
            assert rows == [("cancelled",)]
        elif job["status"] == "running":
            job["stop"] = True
            assert rows == [("running",)]
        else:
            assert rows == []

    @rule(keep=st.integers(0, 2))
    def lose_an_answer(self, keep):
        """The runner forgets what it claimed but for some, and puts the rest back."""
        held = sorted({token for _, token in self.tokens})[:keep] or [0]
        rows = self.run(statements.put_back_strays(), worker=self.worker, tokens=statements.array_literal(held))
        strays = [id_ for id_, job in self.jobs.items() if job["token"] is not None and job["token"] not in held]
        assert sorted(id_ for (id_,) in rows) == sorted(strays)
        for id_ in strays:
            job = self.jobs[id_]
            job |= {"status": "cancelled" if job["stop"] else "new", "token": None, "stop": False}

    @rule(limit=st.integers(1, 3))
    def prune(self, limit):
        finished = [id_ for id_, job in self.jobs.items() if job["status"] in {"processed", "cancelled"}]
        self.connection.execute(statements.prune_jobs(), {"age": -1.0, "limit": limit, "kept": "{0}"})
        left = {id_ for (id_,) in self.run(select(Job.id))}
        gone = self.jobs.keys() - left
        assert gone <= set(finished)
        assert len(gone) == min(limit, len(finished))
        for id_ in gone:
            del self.jobs[id_]

    @invariant()
    def the_tables_are_as_the_model_says(self):
        columns = ("queue", "priority", "fingerprint", "status", "retries")
        query = select(
            Job.id,
            *(getattr(Job, name) for name in columns),
            Job.claim_token,
            Job.run_after <= text("statement_timestamp()"),
            (Job.status == "running") & Job.cancel_requested_at.is_not(None),
        )
        names = (*columns, "token", "due", "stop")
        there = {row[0]: dict(zip(names, row[1:], strict=True)) for row in self.run(query)}
        assert there == self.jobs
        dead = {row.id: (row.queue, row.retries) for row in self.run(select(DeadJob.__table__))}
        assert dead == {id_: (job["queue"], job["retries"]) for id_, job in self.dead.items()}
        assert len(self.run(select(Failure.id))) == self.failures


def test_jobs_live_as_the_model_says_whatever_happens_in_whatever_order(connection):
    Lives.connection = connection
    options = settings(
        deadline=None, max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck), print_blob=True
    )
    run_state_machine_as_test(Lives, settings=options)
