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

from benchmarks import plots, report
from benchmarks.__main__ import main
from benchmarks.database import VARIABLE
from benchmarks.figures import UNITS, Figure, percentile
from benchmarks.report import Result
from benchmarks.scenarios import SCENARIOS, Scenario

FIGURES = {
    "future": {"future", "future-raw"},
    "history": {"history", "history-raw"},
    "unknown": {"unknown", "unknown-raw"},
    "lanes": {"lanes", "lanes-raw"},
    "bulk": {"bulk", "bulk-insert"},
    "rush": {"rush", "rush-alone"},
    "pinned": {"pinned", "pinned-raw", "pinned-fresh"},
    "reader": {"reader", "reader-p50", "reader-p99", "reader-cpu"},
    "processes": {"processes-2", "workers-2"},
    "naps": {"nap-1", "nap-10", "nap-100"},
    "pick-up": {f"{name}-p{percent}" for name in ("pick-up", "pick-up-sent") for percent in (50, 95, 99)},
    "pick-up-rates": {f"pick-up-{rate}-p{percent}" for rate in (10, 200, 2000) for percent in (50, 95, 99)},
    "idle": {"idle-queries", "idle-cpu"},
    "memory": {"memory-idle", "memory"},
    "per-job": {"wal", "commits", "queries"},
}
"""What a scenario yields; the others yield one figure, of their own name."""


def figures_of(scenario: str) -> set[str]:
    return FIGURES.get(scenario, {scenario})


FACTS = {
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


def test_every_scenario_yields_its_figures(measure, server_url):
    result = measure()
    names = [figure["name"] for figure in result["figures"]]
    assert set(names) == set().union(*map(figures_of, SCENARIOS))
    assert len(names) == len(set(names))
    for figure in result["figures"]:
        assert figure["topic"]
        assert figure["value"] in figure["rounds"]
        if figure["beside"]:
            assert figure["other"] in figure["other_rounds"]
            if figure["unit"] == "ms" and min(figure["value"], figure["other"]) <= 0:
                # With a handful of jobs: they began before the answer to their COMMIT was read.
                assert figure["ratio"] is None
                continue
            assert math.isclose(figure["ratio"], figure["value"] / figure["other"])
            assert figure["ratio"] > 0
        else:
            assert figure["other"] is None
    assert (result["smoke"], result["failed"]) == (True, {})
    assert result["facts"]["settings"].keys() >= {"fsync", "synchronous_commit", "shared_buffers"}
    assert databases_of(server_url) == set()


def test_only_what_was_asked_for_is_measured(measure):
    result = measure("--only=drain-20k", "--only=one-by-one", "--only=drain-20k")
    assert [figure["name"] for figure in result["figures"]] == ["drain-20k", "one-by-one"]


def test_a_scenario_that_fails_is_reported_and_the_others_run(monkeypatch, server_url, tmp_path, capsys):
    def fails(bench):
        yield Figure("half", "half of it", "jobs/s", [1.0])
        raise RuntimeError("as it must")

    monkeypatch.setenv(VARIABLE, server_url)
    monkeypatch.setitem(SCENARIOS, "drain-20k", Scenario("topic", fails, always=True))
    path = tmp_path / "result.json"
    code = main(["--smoke", "--only=drain-20k", "--only=one-by-one", f"--json={path}"])
    result = json.loads(path.read_text())
    assert code == 1
    assert result["failed"] == {"drain-20k": "RuntimeError: as it must"}
    assert [figure["name"] for figure in result["figures"]] == ["one-by-one"]
    assert "drain-20k: FAILED" in capsys.readouterr().err


def test_more_jobs_a_second_are_better_and_more_milliseconds_are_worse():
    fast = Figure("a", "a", "jobs/s", [10.0, 30.0, 20.0], "raw", [60.0])
    slow = Figure("b", "b", "ms", [10.0, 30.0, 20.0], "raw", [5.0])
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


def test_of_two_results_the_later_figure_counts_in_the_place_of_the_first():
    def result(date: str, *figures: Figure) -> Result:
        return Result({"date": date}, 1, False, figures, {})

    old = result("old", Figure("a", "a", "jobs/s", [1.0]), Figure("b", "b", "jobs/s", [2.0]))
    new = result("new", Figure("c", "c", "jobs/s", [3.0]), Figure("a", "a", "jobs/s", [4.0]))
    merged = report.merge([old, new])
    assert [(figure.name, figure.value) for figure in merged.figures] == [("a", 4.0), ("b", 2.0), ("c", 3.0)]
    assert merged.facts == {"date": "new"}


def test_results_are_read_back_as_they_were_written():
    figure = Figure("a", "a", "ms", [2.0, 1.0], "raw", [3.0], {"sample": [1, 2]}, "topic")
    result = Result({"date": "today"}, 2, False, [figure], {"b": "RuntimeError: no"})
    assert Result.of_json(result.to_json()) == result


def test_the_table_for_the_documents_is_grouped_by_topic():
    figures = [
        Figure("a", "first", "jobs/s", [1000.0], topic="A"),
        Figure("b", "second", "MB", [2.0], topic="B"),
        Figure("c", "third", "ms", [3.0], topic="A"),
    ]
    lines = report.markdown(Result(FACTS, 1, False, figures, {})).splitlines()
    assert lines[2:7] == [
        "| **A** | | | | |",
        "| first | 1,000/s |  |  |  |",
        "| third | 3.00 ms |  |  |  |",
        "| **B** | | | | |",
        "| second | 2.0 MB |  |  |  |",
    ]


def test_the_short_table_has_the_lines_that_matter():
    figures = [Figure(name, name, "jobs/s", [1.0]) for name in ("other", *reversed(report.THOSE_THAT_MATTER))]
    lines = report.markdown(Result(FACTS, 1, False, figures, {}), short=True).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:-2]] == [*report.THOSE_THAT_MATTER]


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_can_be_written(unit: str):
    assert "12" in Figure("a", "a", unit, [12.0]).cells()[1]


@pytest.mark.parametrize("short", [False, True])
def test_both_documents_say_what_the_figures_were_measured_on(short: bool):
    figure = Figure("drain-20k", "a drain", "jobs/s", [30.0], "raw", [60.0])
    text = report.markdown(Result(FACTS, 3, False, [figure], {}), short=short)
    assert "| a drain | 30/s | raw | 60/s | 0.50 |" in text
    assert all(fact in text for fact in ("2 cores (Some CPU)", "PostgreSQL 18.6", "synchronous_commit=on", "3.11.7"))


def plotted() -> list[Figure]:
    curve = [float(number) for number in range(1, 100)]
    slices = [[0, 100.0], [1000, 90.0]]
    return [
        Figure("drain-20k", "a", "jobs/s", [30.0], "raw", [60.0], {"backlog": 20_000}),
        Figure("drain-100k", "a", "jobs/s", [40.0], "raw", [50.0], {"backlog": 100_000}),
        Figure(
            "pinned",
            "a",
            "jobs/s",
            [90.0],
            "raw",
            [80.0],
            dict.fromkeys(("series", "free_series", "raw_series"), slices),
        ),
        Figure("pick-up-p50", "a", "ms", [1.0], "raw", [1.0], {"percentiles": curve, "other_percentiles": curve}),
        Figure("pick-up-10-p50", "a", "ms", [1.0], "raw", [1.0], {"percentiles": curve, "other_percentiles": curve}),
    ]


def test_the_same_figures_give_the_same_plots(tmp_path: Path):
    first, second = (plots.draw(plotted(), tmp_path / name) for name in ("first", "second"))
    assert [path.name for path in first] == ["backlog.svg", "horizon.svg", "pick-up.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_what_was_not_measured_is_not_plotted(tmp_path: Path):
    assert plots.draw([figure for figure in plotted() if figure.name != "pinned"], tmp_path) == [
        tmp_path / "backlog.svg",
        tmp_path / "pick-up.svg",
    ]
    assert plots.draw([], tmp_path / "none") == []
