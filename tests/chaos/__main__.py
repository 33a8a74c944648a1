"""``python -m chaos``: play the scenarios, print their figures, keep the JSON. Exits with 1 when a promise broke."""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psycopg

from chaos import report, soak
from chaos.scenario import Result, run
from chaos.scenarios import SCENARIOS
from chaos.world import World

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "design" / "guarantees.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what was asked for. Returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)
    # A shell starts what it puts in the background with these ignored, and a runner that inherits that keeps it so.
    for number in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if options.list:
        for scenario in SCENARIOS.values():
            limit = "-" if scenario.limit is None else f"{scenario.limit:g} s"
            print(f"{scenario.name:<28} {'smoke' if scenario.smoke else '':<6} {limit:>6}  {scenario.faults}")
        return 0
    if options.update_docs is not None:
        return _update(options.update_docs)
    names = options.only or [name for name, scenario in SCENARIOS.items() if scenario.smoke or not options.smoke]
    chosen = [soak.scenario(options.soak)] if options.soak else [SCENARIOS[name] for name in names]
    make = partial(
        World,
        seed=options.seed,
        seconds=options.seconds or (3.0 if options.smoke else 60.0),
        smoke=options.smoke,
        keep=options.keep,
    )
    results: list[Result] = []
    for scenario in chosen:
        results.append(run(scenario, make))
        print(report.line(results[-1]), flush=True)
        for complaint in results[-1].complaints:
            print(f"     {complaint}", flush=True)
        if options.json is not None:
            options.json.write_text(
                report.to_json(results, seed=options.seed, postgresql=_postgresql()), encoding="utf-8"
            )
    return int(not all(result.passed for result in results))


def _update(paths: Sequence[Path]) -> int:
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    # The last result of each counts.
    scenarios = {one["name"]: one for document in documents for one in document["scenarios"]}
    block = report.markdown({"facts": documents[0]["facts"], "scenarios": list(scenarios.values())})
    if not report.update(DOCUMENT, block):
        print(f"{DOCUMENT} has no {report.START} ... {report.END} to replace", file=sys.stderr)
        return 2
    return 0


def _postgresql() -> str:
    from sqla_neoq.embedded import EmbeddedServer

    with EmbeddedServer() as server, psycopg.connect(server.url.replace("+psycopg", "")) as connection:
        return str(connection.info.parameter_status("server_version"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chaos", description="Break what the queue stands on, and see whether its promises hold."
    )
    parser.add_argument("--list", action="store_true", help="say which scenarios there are")
    parser.add_argument("--only", action="append", choices=SCENARIOS, metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="the short ones, with few faults: a minute in all")
    parser.add_argument("--soak", type=int, metavar="JOBS", help="only this: so many jobs, a fault every few seconds")
    parser.add_argument("--seconds", type=float, help="how long faults go on where that is open (60; with --smoke 3)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is left to chance (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the machine-readable result")
    parser.add_argument("--keep", action="store_true", help="leave ledgers and logs in the temporary directory")
    parser.add_argument("--update-docs", type=Path, nargs="+", metavar="JSON", help="only put these results into docs/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
