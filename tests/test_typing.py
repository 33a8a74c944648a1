"""The types of the public API, as mypy sees them in typing/api.py."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.processes import ROOT, environment, python

API = Path(__file__).parent / "typing" / "api.py"
IGNORED = re.compile(r"  # type: ignore\[([\w, -]+)\]$", re.MULTILINE)


def mypy(path):
    # A cache for each test process: two that fill one from cold at the same time can make each other fail.
    cache = f"--cache-dir=.mypy_cache/{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    how = ["--strict", "--no-error-summary", "--hide-error-context", "--no-pretty", cache]
    command = python("-m", "mypy", *how, str(path))
    result = subprocess.run(command, cwd=ROOT, env=environment({}), capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def without_ignores(tmp_path):
    path = tmp_path / "api.py"
    path.write_text(IGNORED.sub("", API.read_text()))
    return path


def test_the_public_api_is_typed_and_wrong_use_is_caught_where_it_should_be():
    # --strict warns of an ignore that ignores nothing, so every line that must be wrong is.
    assert mypy(API) == (0, "")


def test_the_lines_that_must_be_wrong_are_the_only_ones(without_ignores):
    expected = [number for number, line in enumerate(API.read_text().splitlines(), 1) if IGNORED.search(line)]
    code, output = mypy(without_ignores)
    wrong = {int(number) for number in re.findall(r"api\.py:(\d+): error", output)}
    assert code == 1, output
    assert sorted(wrong) == expected
    assert len(expected) >= 30
