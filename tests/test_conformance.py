"""Conformance with neoq: the table in ``docs/reference/neoq.md`` is complete and tells the truth about the tests.

The tests of its rows are in ``tests/conformance/``, by subject, each marked ``neoq("S50", "N01")`` with the rows it
shows; ``pytest -m neoq`` runs them all.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "reference" / "neoq.md"
SUITE = "tests/conformance"
IDS = [f"{kind}{number:02}" for kind, last in (("S", 65), ("N", 20), ("T", 50)) for number in range(1, last + 1)]
REASONS = ("not yet: ", "no meaning: ")
"""How the third column begins in a row without a test."""


class Entry(NamedTuple):
    """One row of the table."""

    id: str
    neoq: str
    here: str
    tests: tuple[str, ...]


@cache
def entries() -> list[Entry]:
    rows = re.findall(r"^\| ([SNT]\d+) \|(.*)\|(.*)\|(.*)\|$", TABLE.read_text("utf-8"), re.MULTILINE)
    return [Entry(i, neoq.strip(), here.strip(), tuple(re.findall(r"`([^`]+)`", by))) for i, neoq, here, by in rows]


@cache
def rows_by_test(file: Path) -> dict[str, list[str]]:
    """Return the tests of a file, each with the rows that it is marked with."""
    functions = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    return {test.name: [row for mark in test.decorator_list for row in rows_of(mark)] for test in tests}


def rows_of(decorator: ast.expr) -> list[str]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.neoq":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


def marked() -> dict[str, list[str]]:
    """Return every marked test of the repository, by its node id, with its rows."""
    found = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, rows in rows_by_test(file).items():
            if rows:
                found[f"{file.relative_to(ROOT).as_posix()}::{name}"] = rows
    return found


def test_every_row_is_there_once_and_in_its_order():
    assert [entry.id for entry in entries()] == IDS


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_a_row_says_what_neoq_does_and_what_happens_here_and_names_tests_that_exist(entry):
    assert entry.neoq
    assert entry.here
    if not entry.tests:
        assert entry.here.startswith(REASONS), f"{entry.id} has neither a test nor a reason"
    for node in entry.tests:
        file, _, name = node.partition("::")
        assert name in rows_by_test(ROOT / file), f"{entry.id} names {node}, which does not exist"


def test_the_rows_that_a_test_is_marked_with_are_those_that_name_it():
    named: dict[str, list[str]] = {}
    for entry in entries():
        for node in entry.tests:
            if node.startswith(SUITE):
                named.setdefault(node, []).append(entry.id)
    assert {node: sorted(rows) for node, rows in marked().items()} == {node: sorted(named[node]) for node in named}


def test_every_test_of_the_suite_is_marked_and_no_test_twice_with_one_row():
    for file in sorted((ROOT / SUITE).glob("test_*.py")):
        for name, rows in rows_by_test(file).items():
            assert rows, f"{file.name}::{name} shows no row"
            assert set(Counter(rows).values()) == {1}, f"{file.name}::{name} is marked twice with a row"
