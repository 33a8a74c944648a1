"""The benchmarks' smoke form: every scenario runs and says something. Figures of so small a run mean nothing."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url
from support.processes import ROOT
from support.servers import libpq

from benchmarks import report
from benchmarks.database import VARIABLE
from benchmarks.scenarios import SCENARIOS, percentile

FIGURES = {
    "drain-small": {"drain-small"},
    "drain-large": {"drain-large"},
    "in-session": {"in-session"},
    "bulk": {"bulk", "bulk-insert"},
    "one-by-one": {"one-by-one"},
    "pick-up": {"pick-up-p50", "pick-up-p95", "pick-up-p99"},
    "drain-million": {"drain-million"},
    "future": {"future", "future-raw"},
    "history": {"history", "history-raw"},
    "lanes": {"lanes", "lanes-raw"},
}


@pytest.fixture
def measure(run_process, server_url, tmp_path):
    def run(*arguments: str) -> Mapping[str, Any]:
        path = tmp_path / "made" / "result.json"
        process = run_process(
            "--smoke", "--json", str(path), *arguments, module="benchmarks", env={VARIABLE: server_url}, cwd=ROOT
        )
        assert process.wait(within=120) == 0, process.output
        result = json.loads(path.read_text())
        # The table shows every figure of the JSON.
        assert [figure["title"] for figure in result["figures"] if figure["title"] not in process.stdout] == []
        return result

    return run


def databases_of(server_url: str) -> set[str]:
    with psycopg.connect(libpq(make_url(server_url))) as connection:
        rows = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'neoq_bench%'")
        return {row[0] for row in rows}


def test_a_plain_run_measures_every_scenario_beside_the_raw_loop(measure, server_url):
    result = measure()
    names = [figure["name"] for figure in result["figures"]]
    assert set(names) == set().union(*(FIGURES[name] for name, scenario in SCENARIOS.items() if scenario.always))
    assert len(names) == len(set(names))
    for figure in result["figures"]:
        assert figure["value"] in figure["rounds"]
        assert figure["other"] in figure["other_rounds"]
        assert math.isclose(figure["ratio"], figure["value"] / figure["other"])
        assert figure["ratio"] > 0
    assert result["smoke"] is True
    assert result["facts"]["settings"].keys() >= {"fsync", "synchronous_commit", "shared_buffers"}
    assert databases_of(server_url) == set()


def test_the_other_scenarios_run_when_asked_for(measure):
    asked = [name for name, scenario in SCENARIOS.items() if not scenario.always]
    result = measure(*(f"--only={name}" for name in asked))
    assert {figure["name"] for figure in result["figures"]} == set().union(*(FIGURES[name] for name in asked))


def test_more_jobs_a_second_are_better_and_more_milliseconds_are_worse():
    fast = report.Figure("a", "a", "jobs/s", [10.0, 30.0, 20.0], "raw", [60.0])
    slow = report.Figure("b", "b", "ms", [10.0, 30.0, 20.0], "raw", [5.0])
    assert (fast.value, fast.ratio) == (30.0, 0.5)
    assert (slow.value, slow.ratio) == (10.0, 2.0)


def test_percentiles_are_those_of_the_sample():
    values = [float(number) for number in range(101)]
    assert [percentile(values, percent) for percent in (50, 95, 99)] == [50.0, 95.0, 99.0]


def test_the_block_in_a_document_is_replaced_and_the_rest_stays(tmp_path: Path):
    document = tmp_path / "README.md"
    document.write_text(f"# Before\n\n{report.START}\nold\n{report.END}\n\nafter\n")
    assert report.update(document, "new\n\ntable")
    assert document.read_text() == f"# Before\n\n{report.START}\nnew\n\ntable\n{report.END}\n\nafter\n"


@pytest.mark.parametrize("text", [None, "no marks", f"{report.START} never ends", f"{report.END}\n{report.START}"])
def test_a_document_without_both_marks_is_left_alone(tmp_path: Path, text: str | None):
    document = tmp_path / "README.md"
    if text is not None:
        document.write_text(text)
    assert not report.update(document, "new")
    assert (document.read_text() if document.exists() else None) == text


def test_both_documents_say_what_the_figures_were_measured_on():
    facts = {
        "date": "2026-01-02",
        "cores": 2,
        "cpu": "Some CPU",
        "postgresql": "18.6",
        "server": "embedded",
        "transport": "unix socket",
        "settings": {"fsync": "on", "synchronous_commit": "on", "shared_buffers": "128MB"},
        "python": "3.11.7",
        "sqlalchemy": "2.1.9",
        "psycopg": "3.3.9 (binary)",
        "load_before": 0.1,
    }
    text = report.markdown([report.Figure("a", "a drain", "jobs/s", [30.0], "raw", [60.0])], facts, rounds=3)
    assert "| a drain | 30/s | raw | 60/s | 0.50 |" in text
    assert all(fact in text for fact in ("2 cores (Some CPU)", "PostgreSQL 18.6", "synchronous_commit=on", "3.11.7"))
