"""``python -m benchmarks``: run the scenarios, print the table, keep the JSON."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import plots, report
from benchmarks.bench import SMOKE, Bench, Sizes
from benchmarks.database import VARIABLE, open_database
from benchmarks.report import Result
from benchmarks.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.figures import Figure

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what was asked for. Returns the exit code: 1 if a scenario failed."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    if options.merge:
        result = report.merge([Result.of_json(path.read_text(encoding="utf-8")) for path in options.merge])
        if options.json:
            _keep(options.json, result)
    else:
        path = options.json or ROOT / "benchmarks" / "results" / f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.json"
        result = _measure(_chosen(options), path, rounds=options.rounds, smoke=options.smoke)
    print(report.table(result.figures))
    print()
    print(report.measured_on(result))
    if options.update_docs:
        _update_docs(result)
    if plots_to := options.plots or (ROOT / "docs" / "plots" if options.update_docs else None):
        for drawn in plots.draw(result.figures, plots_to):
            print(drawn, file=sys.stderr)
    return 1 if result.failed else 0


def _chosen(options: argparse.Namespace) -> list[str]:
    if options.only:
        return list(dict.fromkeys(options.only))
    everything = options.all or options.smoke
    return [name for name, scenario in SCENARIOS.items() if everything or scenario.always]


def _measure(names: Sequence[str], path: Path, *, rounds: int | None, smoke: bool) -> Result:
    """Run the scenarios, and write down after each what there is: an abort loses no more than the one it meets."""
    rounds = rounds or (1 if smoke else 3)
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    began = time.monotonic()
    with open_database() as database:
        result = Result(database.facts, rounds, smoke, figures, failed)
        bench = Bench(database, SMOKE if smoke else Sizes(), rounds)
        try:
            for name in names:
                scenario, started = SCENARIOS[name], time.monotonic()
                try:
                    figures += [replace(figure, topic=scenario.topic) for figure in scenario.measure(bench)]
                except Exception as error:
                    traceback.print_exc()
                    failed[name] = f"{type(error).__name__}: {error}"
                _keep(path, result)
                now = time.monotonic()
                ended = "FAILED" if name in failed else "done"
                print(f"{name}: {ended} in {now - started:.1f} s ({now - began:.0f} s)", file=sys.stderr, flush=True)
        finally:
            bench.close()
    return result


def _keep(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.to_json(), encoding="utf-8")


def _update_docs(result: Result) -> None:
    for document, short in ((ROOT / "README.md", True), (ROOT / "docs" / "performance.md", False)):
        if not report.update(document, report.markdown(result, short=short)):
            print(f"{document} has no {report.START} ... {report.END} to replace", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    plain = ", ".join(name for name, scenario in SCENARIOS.items() if scenario.always)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the library beside the raw SQL loop in the same run.",
        epilog=f"{VARIABLE} names the server to measure on, by a role that may create databases and run CHECKPOINT; "
        f"without it an embedded one is started that keeps its commits. A plain run measures {plain}.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every scenario, which takes under half an hour")
    which.add_argument("--only", action="append", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS))
    which.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing; put the results in these files together, of two figures with one name the later",
    )
    parser.add_argument("--smoke", action="store_true", help="small sizes: whether it works, not how fast it is")
    parser.add_argument("--rounds", type=int, help="how often a measurement is repeated at most (3; with --smoke 1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to keep the result (benchmarks/results/)")
    parser.add_argument("--update-docs", action="store_true", help="put the tables and plots into README.md and docs/")
    parser.add_argument(
        "--plots", type=Path, metavar="DIRECTORY", help="draw the plots there (with --update-docs: docs/plots)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
