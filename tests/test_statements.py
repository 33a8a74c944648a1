"""What holds for all statements; and the life of jobs, in any order of events, beside a model of it in Python.

What each statement does is tested where it is used: test_insertion, test_producer, test_claim, test_maintenance,
test_status. What it costs: test_plans.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.dialects.postgresql import asyncpg
from sqlalchemy.pool import NullPool

import sqla_neoq
from sqla_neoq import models, statements
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
    # Two exceptions: a job enqueued without a time, due since its transaction began; and a claim that times itself.
    allowed = "coalesce(" if make is statements.insert_jobs else "?"
    if make is statements.claim_due:
        assert said.count("clock_timestamp()") == 2
        said = said.replace("clock_timestamp()", "")
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
    assert "neoq_jobs.claim_token = outcome.token" in said or (
        "neoq_jobs.claim_token = (SELECT fences.tokens" in said and "[width_bucket(neoq_jobs.id, " in said
    )
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
