"""What the hot statements touch, as PostgreSQL's own counts: it must not grow with the backlog or the history.

Each statement is explained under its generic plan, on a connection as its user has it, over the same skewed table three
times: with fresh statistics, with those of a table of ten rows, and with none. Rows and pages are counted by EXPLAIN
ANALYZE; no clock decides anything here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from operator import itemgetter

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine, func, make_url, select
from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.pool import NullPool
from support.servers import libpq

from sqla_neoq import statements
from sqla_neoq.dialects import PostgresDialect
from sqla_neoq.models import Job

FINISHED = 70_000
BACKLOG = 20_000
FUTURE = 10_000
RUNNING = 500
LANES = 12
"""Four queues, each with two priorities that are due and one that is not."""
CLAIM = 50
GAPS = [{"above": 101, "below": 0}, {"above": 0, "below": -101}]
"""Where the lanes are of which only priority 0 is known."""
BRIN_RANGE = 128
"""Pages that a BRIN index, which only knows ranges, may read too many."""

# Mostly finished rows, the oldest ones, as in life; a backlog over four queues and two priorities; future jobs at the
# top priority of these queues and of a fifth that has nothing else; and a few hundred running ones.
FILL = """
INSERT INTO neoq_jobs (queue, status, finished_at)
SELECT 'q' || n % 4, 'processed', now() - interval '1 day' - n * interval '1 second'
FROM generate_series({finished}, 1, -1) AS n;

INSERT INTO neoq_jobs (queue, priority, fingerprint, run_after, deadline)
SELECT 'q' || n % 4, n / 4 % 2 * 10, 'key ' || n, now() - interval '1 hour' + n * interval '1 millisecond',
    CASE WHEN n % 2 = 0 THEN now() + interval '1 day' END
FROM generate_series(1, {backlog}) AS n;

INSERT INTO neoq_jobs (queue, priority, run_after)
SELECT 'q' || n % 5, 100, now() + interval '1 day' + n * interval '1 millisecond'
FROM generate_series(1, {future}) AS n;

INSERT INTO neoq_jobs (queue, status, claim_token, worker_id, ran_at)
SELECT 'q' || n % 4, 'running', n, 1, now() FROM generate_series(1, {running}) AS n;

INSERT INTO neoq_failures (job_id, attempt, kind, message, failed_at)
SELECT n, 1, 'error', 'no', now() - interval '1 day' - n * interval '1 second'
FROM generate_series({finished} / 7, 1, -1) AS n;
"""
# What autovacuum does in life; it is off here, so that the statistics stay as they are made.
SUMMARIZE = "SELECT brin_summarize_new_values('neoq_jobs_finished_idx')"
ANALYZE = "VACUUM ANALYZE neoq_jobs, neoq_failures, neoq_workers"


@dataclass(frozen=True)
class Node:
    """One node of an executed plan."""

    plan: Mapping
    inputs: list["Node"] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Mapping) -> "Node":
        return cls(plan, [cls.of(inner) for inner in plan.get("Plans", ())])

    def __iter__(self) -> Iterator["Node"]:
        yield self
        for inner in self.inputs:
            yield from inner

    @property
    def kind(self) -> str:
        return self.plan["Node Type"]

    @property
    def rows(self) -> float:
        """How many rows it gave, over all its loops."""
        return self.plan["Actual Rows"] * self.plan["Actual Loops"]

    @property
    def looked_at(self) -> float:
        """How many rows it read to give those."""
        lossy = self.plan.get("Rows Removed by Index Recheck", 0) + self.plan.get("Rows Removed by Filter", 0)
        return self.rows + lossy * self.plan["Actual Loops"]

    @property
    def pages(self) -> int:
        return self.plan["Shared Hit Blocks"] + self.plan["Shared Read Blocks"]


@dataclass(frozen=True)
class Plan:
    """What a statement did."""

    nodes: list[Node]

    def scans(self, table: str = "neoq_jobs") -> list[Node]:
        return [node for node in self.nodes if "Scan" in node.kind and node.plan.get("Relation Name") == table]

    def kinds_of_scans(self, table: str = "neoq_jobs") -> set[str]:
        return {node.kind for node in self.scans(table)}

    @property
    def indexes(self) -> set[str]:
        return {node.plan["Index Name"] for node in self.nodes if "Index Name" in node.plan}

    def looked_at(self, table: str = "neoq_jobs") -> float:
        return sum(node.looked_at for node in self.scans(table))

    @property
    def gathered(self) -> float:
        """The most rows that one node took in before it gave any."""
        gathering = {"Sort", "Hash", "Aggregate", "WindowAgg", "Materialize", "BitmapAnd", "BitmapOr"}
        return max(
            (sum(inner.rows for inner in node.inputs) for node in self.nodes if node.kind in gathering), default=0
        )

    @property
    def pages(self) -> int:
        return self.nodes[0].pages

    def pages_read_of(self, table: str = "neoq_jobs") -> int:
        """The pages of a table and its indexes that were read to find its rows."""
        # By its place a row is found without reading any but its own. What such a scan counts besides is the query that
        # told the places, whose scans are here too, and its locks: one more page for each row that vacuum has seen.
        return sum(node.pages for node in self.scans(table) if node.kind != "Tid Scan")


class Connection:
    """A connection that explains."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._dialect = asyncpg.dialect()

    def explain(self, statement, **parameters) -> Plan:
        """Run the statement under its generic plan, undo it, and return what it did."""
        # Numbered parameters are the only form that PREPARE takes; the SQL is otherwise that of psycopg's dialect.
        compiled = statement.compile(dialect=self._dialect)
        values = compiled.construct_params(parameters)
        places = sql.SQL(", ").join([sql.Literal(values[name]) for name in compiled.positiontup])
        execute = sql.SQL("EXECUTE explained ({})" if compiled.positiontup else "EXECUTE explained").format(places)
        with self._connection.transaction(force_rollback=True):
            self._connection.execute(f"PREPARE explained AS {compiled}".encode())
            try:
                explained = self._scalar(sql.SQL("EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT JSON) ") + execute)
                assert self._scalar("SELECT generic_plans FROM pg_prepared_statements WHERE name = 'explained'") == 1
            finally:
                self._connection.execute("DEALLOCATE explained")
        return Plan(list(Node.of(explained[0]["Plan"])))

    def outcomes(self, count: int, **more) -> dict:
        """Return the parameters that say ``more`` of some running jobs."""
        query = (
            "SELECT json_build_object('id', id, 'token', claim_token) FROM neoq_jobs WHERE status = 'running' LIMIT %s"
        )
        records = [record | more for (record,) in self._connection.execute(query, [count])]
        assert len(records) == count
        ids, tokens = ([record[name] for record in sorted(records, key=itemgetter("id"))] for name in ("id", "token"))
        return {
            "outcomes": json.dumps(records),
            "ids": statements.array_literal(ids),
            "tokens": statements.array_literal(tokens),
        }

    def position(self, queue: str, number: int) -> dict:
        """Return where so many jobs of the queue's lowest lane lie before."""
        return self._scalar(
            sql.SQL(
                "SELECT json_build_object('since', date_part('epoch', run_after), 'last', id) FROM neoq_jobs "
                "WHERE queue = {} AND priority = 0 AND status = 'new' ORDER BY run_after, id OFFSET {} LIMIT 1"
            ).format(queue, number)
        )

    def _scalar(self, query: str | sql.Composed) -> object:
        return self._connection.execute(query).fetchone()[0]


@dataclass(frozen=True)
class Table:
    """A database full of jobs, and connections to it."""

    application: Connection
    """As a host has them, once PostgreSQL has moved its prepared statements to generic plans."""
    runner: Connection
    """As the runner opens its own."""
    dsn: str
    execute: Callable[[str], object]


@pytest.fixture(scope="module")
def make_table(databases) -> Iterator[Callable[..., Table]]:
    with ExitStack() as stack:

        def make(statistics: str, *, finished=FINISHED, backlog=BACKLOG, future=FUTURE, running=RUNNING) -> Table:
            url = databases.create(template=databases.template)
            stack.callback(databases.drop, url)
            connection = stack.enter_context(closing(psycopg.connect(libpq(make_url(url)), autocommit=True)))
            for name in ("neoq_jobs", "neoq_failures", "neoq_workers"):
                connection.execute(f"ALTER TABLE {name} SET (autovacuum_enabled = off)")
            connection.execute(
                "INSERT INTO neoq_workers (name, host, pid, queues, version) VALUES ('', '', 1, '[]', '')"
            )
            if statistics == "of ten rows":
                connection.execute(FILL.format(finished=7, backlog=2, future=1, running=0))
                connection.execute(ANALYZE)
                connection.execute("DELETE FROM neoq_jobs")
            connection.execute(FILL.format(finished=finished, backlog=backlog, future=future, running=running))
            connection.execute(SUMMARIZE)
            if statistics == "fresh":
                connection.execute(ANALYZE)
            connection.execute("SET plan_cache_mode = force_generic_plan")
            runner = stack.enter_context(PostgresDialect().connect(create_engine(url, poolclass=NullPool), "plans"))
            runner_connection = Connection(runner.connection.dbapi_connection)
            return Table(Connection(connection), runner_connection, libpq(make_url(url)), connection.execute)

        yield make


@pytest.fixture(scope="module", params=["fresh", "of ten rows", "none"])
def table(request, make_table) -> Table:
    return make_table(request.param)


@pytest.fixture(params=["application", "runner"])
def any_connection(request, table: Table) -> Connection:
    return getattr(table, request.param)


def wanted(*queues: str, slots: int = CLAIM) -> str:
    return json.dumps([{"queue": queue, "slots": slots, "handler": True} for queue in queues])


def claiming(*queues: str, total: int = CLAIM) -> dict:
    asked = {"worker": 1, "tasks": '["a", "b"]', "wanted": wanted(*queues, slots=total), "total": total}
    return {**asked, "ids": "{}", "tokens": "{}"}


BEAT = {"worker": 1, "stale": 5.0, "wanted": wanted("q0", "q1"), "tasks": "[]", "deadlines": True}


def assert_frugal(plan: Plan, rows: float) -> None:
    """It reads no more rows than it is about, by an index, and gathers no more before it goes on."""
    assert "Seq Scan" not in plan.kinds_of_scans()
    assert plan.looked_at() <= rows
    assert plan.gathered <= rows


def test_what_is_measured_here_shows_when_a_statement_reads_the_whole_table(table):
    plan = table.application.explain(select(func.count()).where(Job.error == "no"))
    assert plan.kinds_of_scans() == {"Seq Scan"}
    assert plan.looked_at() == pytest.approx(FINISHED + BACKLOG + FUTURE + RUNNING, rel=0.01)
    plan = table.application.explain(select(Job.id).where(Job.status == "new").order_by(Job.created_at, Job.id))
    assert plan.gathered == pytest.approx(BACKLOG + FUTURE, rel=0.01)


def test_a_claim_walks_the_claim_index_alone(table):
    plan = table.runner.explain(statements.claim_due(), **claiming("q0", "q1", "q2", "q3", "nothing here"))
    assert plan.nodes[0].rows == CLAIM
    # One probe for each lane and queue's end; then they are picked, and then written where they are.
    assert plan.looked_at() <= LANES + 5 + 2 * CLAIM
    assert_frugal(plan, 4 * CLAIM)
    # The primary key: for the completions, of which there are none.
    assert plan.indexes - {"neoq_workers_pkey"} == {"neoq_jobs_claim_idx", "neoq_jobs_pkey"}


def test_a_queue_that_may_have_less_than_the_claim_in_all_is_counted_up_to_that(table):
    asked = claiming("q0", "q1", "q2", "q3", "nothing here") | {"total": CLAIM + 1}
    plan = table.runner.explain(statements.claim_due(), **asked)
    assert plan.nodes[0].rows == CLAIM + 1
    # In all lanes but the last of each queue.
    assert_frugal(plan, LANES + 5 + CLAIM * (LANES - 4) + 2 * (CLAIM + 1))


def test_a_claim_from_one_queue_reads_little_more_than_it_takes(table):
    plan = table.runner.explain(statements.claim_due(), **claiming("q0"))
    assert plan.nodes[0].rows == CLAIM
    assert_frugal(plan, 3 + 1 + 4 * CLAIM)


def test_a_claim_that_finds_nothing_due_passes_over_no_future_jobs(table):
    plan = table.runner.explain(statements.claim_due(), **claiming("q4", "nothing here"))
    assert plan.nodes[0].rows == 1
    # The one lane, that there are no others, and the next job that falls due.
    assert plan.looked_at() <= 3
    assert_frugal(plan, 15)


def test_completions_that_ride_in_a_claim_are_written_by_their_ids(table):
    claim, done = claiming("q0"), table.runner.outcomes(100)
    plan = table.runner.explain(statements.claim_due(), **claim | done)
    assert plan.nodes[0].rows == CLAIM
    assert_frugal(plan, 3 + 1 + 4 * CLAIM + 2 * 100)
    assert plan.indexes - {"neoq_workers_pkey"} == {"neoq_jobs_claim_idx", "neoq_jobs_pkey"}


def test_a_claim_above_a_floor_starts_there(table):
    at = table.runner.position("q0", BACKLOG // 16)
    known = json.dumps([{"queue": "q0", "slots": CLAIM, "handler": True, "priority": 0} | at])
    gaps = json.dumps([{"queue": "q0", "slots": CLAIM, "handler": True} | gap for gap in GAPS])
    plan = table.runner.explain(statements.claim_due(), **claiming("q0") | {"wanted": gaps, "known": known})
    assert plan.nodes[0].rows == CLAIM
    # The same as from the start: three lanes, of which two are counted, and the job at the floor itself.
    assert_frugal(plan, 4 + 1 + 5 * CLAIM)
    assert plan.indexes - {"neoq_workers_pkey"} == {"neoq_jobs_claim_idx", "neoq_jobs_pkey"}


def test_a_suspect_is_found_without_looking_at_the_innocent(table):
    parameters = {"worker": 1, "tasks": "[]", "wanted": wanted("q0", "q1")}
    assert_frugal(table.runner.explain(statements.claim_suspect(), **parameters), 10)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (statements.complete(), {}),
        (statements.complete_and_delete(), {}),
        (statements.finish_cancelled(), {}),
        (statements.put_back(), {"delay": None}),
        (statements.put_back(), {"delay": 5}),
        (statements.fail(), {"delay": 5, "kind": "error", "message": "no", "traceback": "none"}),
        (statements.bury(), {"reason": "exhausted", "kind": "error", "message": "no", "traceback": "none"}),
    ],
    ids=["complete", "complete_and_delete", "finish_cancelled", "put_back", "snooze", "fail", "bury"],
)
@pytest.mark.parametrize("count", [1, 100])
def test_outcomes_are_written_by_their_ids_and_read_no_other_job(any_connection, statement, said, count):
    plan = any_connection.explain(statement, **any_connection.outcomes(count, **said))
    assert plan.nodes[0].rows == 0, "some were lost"
    # By neoq_jobs_running_idx they would read all that runs and, where vacuum is held up, all that ever ran.
    assert plan.indexes <= {"neoq_jobs_pkey", "neoq_jobs_claim_idx"}
    assert_frugal(plan, count)


def test_a_beat_reads_what_runs_and_nothing_that_waits(table):
    plan = table.runner.explain(statements.beat(), **BEAT)
    assert plan.looked_at() == 0
    # The one worker, and what is below it.
    assert_frugal(plan, 2)


def test_orphans_are_sought_where_no_worker_is_and_strays_among_what_runs(table):
    plan = table.runner.explain(statements.orphans())
    assert plan.looked_at() == 0
    assert_frugal(plan, 2)
    # Once to lock them, once to write them: here all that runs is a stray.
    assert_frugal(table.runner.explain(statements.put_back_strays(), worker=1, tokens="{1,2}"), 2 * RUNNING)


def test_a_rescue_reads_no_more_than_what_runs(table):
    orphans = json.loads(table.runner.outcomes(100)["outcomes"])
    plan = table.runner.explain(statements.rescue(), orphans=json.dumps(orphans), limit=3)
    assert "Seq Scan" not in plan.kinds_of_scans()
    assert plan.looked_at() <= RUNNING + 2 * len(orphans)


def test_inserting_reads_no_jobs(table):
    new = [{"queue": f"q{n % 4}", "priority": 0, "payloads": [{}], "fingerprint": f"key {n}"} for n in range(1, 101)]
    plan = table.application.explain(statements.insert_jobs(), jobs=json.dumps([*new, {**new[0], "fingerprint": None}]))
    assert plan.nodes[0].rows == 1
    assert_frugal(plan, 0)


@pytest.mark.parametrize("count", [1, 1000])
def test_duplicates_are_looked_up_by_their_key(table, count):
    keys = [{"queue": f"q{n % 4}", "fingerprint": f"key {n}"} for n in range(1, count + 1)]
    plan = table.application.explain(statements.find_unfinished(), keys=json.dumps(keys))
    assert plan.nodes[0].rows == count
    assert plan.indexes == {"neoq_jobs_fingerprint_key"}
    assert_frugal(plan, count)


def test_cancelling_reads_one_job(table):
    assert_frugal(table.application.explain(statements.cancel_job(), job=5), 1)


def test_pruning_reads_little_more_than_it_deletes(table):
    plan = table.runner.explain(statements.prune_jobs(), age=3600.0, limit=500, kept="{0}")
    assert "Seq Scan" not in plan.kinds_of_scans()
    assert plan.looked_at() <= 2 * 500
    plan = table.runner.explain(statements.prune_failures(), age=3600.0, limit=500, kept="{0}")
    assert plan.looked_at("neoq_failures") <= 2 * 500


def test_pruning_that_finds_nothing_old_enough_reads_only_the_newest_pages(table):
    plan = table.runner.explain(statements.prune_jobs(), age=3600.0 * 24 * 365, limit=500, kept="{0}")
    assert "Seq Scan" not in plan.kinds_of_scans()
    assert plan.pages <= BRIN_RANGE + 10


def test_overdue_jobs_are_found_by_their_deadline(table):
    plan = table.runner.explain(statements.bury_overdue(), limit=500)
    assert_frugal(plan, 0)


@pytest.fixture(scope="module")
def small_and_large(make_table) -> tuple[Table, Table]:
    small = make_table("fresh", finished=1_000, backlog=1_000, future=100)
    return small, make_table("fresh")


def test_a_claim_costs_no_more_with_a_larger_backlog_more_future_and_more_history(small_and_large):
    plans = [
        table.runner.explain(statements.claim_due(), **claiming("q0", "q1", "q2", "q3")) for table in small_and_large
    ]
    small, large = plans
    assert large.looked_at() == pytest.approx(small.looked_at(), rel=0.1)
    # A hundred times the rows make a B-tree one level deeper.
    assert large.pages_read_of() <= small.pages_read_of() + sum(scan.plan["Actual Loops"] for scan in large.scans())


def test_an_outcome_costs_no_more_with_a_larger_backlog(small_and_large):
    small, large = (
        table.runner.explain(statements.complete(), **table.runner.outcomes(100)) for table in small_and_large
    )
    assert large.looked_at() == small.looked_at() == 100
    assert large.pages_read_of() <= small.pages_read_of() + 100


# While vacuum is held up ---------------------------------------------------------------------------------------------

# Of queue q0 many were claimed, finished and would be vacuumed; these wait.
DRAINED = """
INSERT INTO neoq_jobs (queue, run_after, deadline)
SELECT 'q0', now() - interval '1 hour' + n * interval '1 millisecond', now() - interval '1 minute'
FROM generate_series(1, 8000) AS n;
UPDATE neoq_jobs SET status = 'running', worker_id = 1, claim_token = 9 WHERE status = 'new';
UPDATE neoq_jobs SET status = 'processed', claim_token = NULL, finished_at = now() WHERE status = 'running';
INSERT INTO neoq_jobs (queue) SELECT 'q0' FROM generate_series(1, 200) AS n;
INSERT INTO neoq_jobs (queue, status, claim_token, worker_id) SELECT 'q1', 'running', 9, 1 FROM generate_series(1, 20);
"""


@pytest.fixture(scope="module")
def pinned(make_table) -> Iterator[Table]:
    """A table under somebody's snapshot, which keeps the index entries of all that was claimed since."""
    table = make_table("fresh", finished=0, backlog=0, future=0, running=0)
    with closing(psycopg.connect(table.dsn)) as snapshot:
        snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM neoq_jobs")
        table.execute(DRAINED)
        table.execute(ANALYZE)
        yield table


def test_a_claim_walks_over_what_vacuum_may_not_remove_and_one_above_the_floor_does_not(pinned):
    everywhere = pinned.runner.explain(statements.claim_due(), **claiming("q0"))
    known = json.dumps(
        [{"queue": "q0", "slots": CLAIM, "handler": True, "priority": 0} | pinned.runner.position("q0", 9)]
    )
    gaps = json.dumps([{"queue": "q0", "slots": CLAIM, "handler": True} | gap for gap in GAPS])
    above = pinned.runner.explain(statements.claim_due(), **claiming("q0") | {"wanted": gaps, "known": known})
    assert everywhere.nodes[0].rows == above.nodes[0].rows == CLAIM
    # Both read the pages of what they take; the other also those of all that was claimed.
    assert everywhere.pages_read_of() > above.pages_read_of() + 100
    assert above.pages_read_of() <= 3 * CLAIM + 20


def test_a_beat_reads_nothing_of_what_ran_once(pinned):
    assert pinned.runner.explain(statements.beat(), **BEAT).pages_read_of() > 100
    assert pinned.runner.explain(statements.beat(), **BEAT | {"deadlines": False}).pages_read_of() <= 20
    assert pinned.runner.explain(statements.orphans()).pages_read_of() <= 20
