"""``python -m benchmarks``: run the scenarios, print the table, keep the JSON."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.database import VARIABLE, open_database
from benchmarks.scenarios import SCENARIOS, SMOKE, Bench, Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.report import Figure

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for. Returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    names = options.only or [name for name, scenario in SCENARIOS.items() if scenario.always]
    rounds = options.rounds or (1 if options.smoke else 3)
    figures: list[Figure] = []
    with open_database() as database:
        bench = Bench(database, SMOKE if options.smoke else Sizes(), rounds)
        try:
            for name in names:
                started = time.monotonic()
                figures += SCENARIOS[name].measure(bench)
                print(f"{name}: done in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        finally:
            bench.close()
        facts = database.facts
    print(report.table(figures))
    print()
    print(report.measured_on(facts, rounds))
    path = options.json or ROOT / "benchmarks" / "results" / f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.to_json(figures, facts, rounds=rounds, smoke=options.smoke), encoding="utf-8")
    if options.update_docs:
        block = report.markdown(figures, facts, rounds)
        for document in DOCUMENTS:
            if not report.update(document, block):
                print(f"{document} has no {report.START} ... {report.END} to replace", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    more = ", ".join(name for name, scenario in SCENARIOS.items() if not scenario.always)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the library beside the raw SQL loop in the same run.",
        epilog=f"{VARIABLE} names the server to measure on, by a role that may create databases and run CHECKPOINT; "
        "without it an embedded one is started that keeps its commits. In a plain run are not: " + more + ".",
    )
    parser.add_argument("--smoke", action="store_true", help="small sizes: whether it works, not how fast it is")
    parser.add_argument("--only", action="append", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--rounds", type=int, help="how often each measurement is repeated (3; with --smoke 1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to keep the result (benchmarks/results/)")
    parser.add_argument("--update-docs", action="store_true", help="put the table into README.md and docs/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
