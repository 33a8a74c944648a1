"""``python -m benchmarks.peers``: measure the peers, print the table, keep the JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import make_url

from benchmarks.database import VARIABLE, open_database
from benchmarks.peers import report, scenarios
from benchmarks.peers.catalogue import ENTRIES
from benchmarks.peers.places import ROOT, UnavailableError, interpreter
from benchmarks.report import update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import URL

    from benchmarks.peers.catalogue import Entry
    from benchmarks.peers.scenarios import Sizes

SCENARIOS = ("drain", "singles", "pick-up", "rescue")
DOCUMENT = ROOT / "docs" / "performance.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for. Returns the exit code."""
    options = _parser().parse_args(arguments)
    sizes = scenarios.SMOKE if options.smoke else scenarios.Sizes()
    entries = [entry for entry in ENTRIES if not options.only or entry.name in options.only]
    asked = options.scenario or SCENARIOS
    results: dict[str, dict[str, Any]] = {}
    with open_database() as database:
        server = make_url(database.url)
        for entry in entries:
            started = time.monotonic()
            results[entry.name] = _measured(entry, server, sizes, asked)
            print(f"{entry.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if "rescue" in asked:
            able = [entry for entry in entries if entry.rescues and "error" not in results[entry.name]]
            for name, result in scenarios.rescues(able, server, sizes).items():
                results[name] |= result
        facts = database.facts
    block = report.markdown(results, entries, facts)
    print(block)
    path = options.json or ROOT / "benchmarks" / "results" / f"peers-{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {entry.name: {"requirements": entry.requirements, "settings": entry.settings} for entry in entries}
    record = {"facts": facts, "smoke": options.smoke, "peers": versions, "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if options.update_docs and not update(DOCUMENT, block, start=report.START, end=report.END):
        print(f"{DOCUMENT} has no {report.START} ... {report.END} to replace", file=sys.stderr)
    return 0


def _measured(entry: Entry, server: URL, sizes: Sizes, asked: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one peer, or why there are none: one that breaks stops nobody else."""
    result: dict[str, Any] = {}
    try:
        interpreter(entry)
        if "drain" in asked:
            result |= _drains(entry, server, sizes)
        if "singles" in asked:
            result |= scenarios.singles(entry, server, sizes)
        if "pick-up" in asked and entry.paced:
            result |= scenarios.pick_up(entry, server, sizes)
    except UnavailableError as error:
        return result | {"error": str(error)}
    return result


def _drains(entry: Entry, server: URL, sizes: Sizes) -> dict[str, Any]:
    small, figures = scenarios.drain(entry, server, sizes.small, sizes.drain_cap)
    bulk = [figures[f"bulk_{sizes.small}"]]
    if small >= sizes.quick:
        # Whatever else the machine does can only make a drain slower: the better of two, where two are quick.
        again, second = scenarios.drain(entry, server, sizes.small, sizes.drain_cap)
        figures = second if again > small else figures
        _, large = scenarios.drain(entry, server, sizes.large, sizes.drain_cap)
        bulk += [second[f"bulk_{sizes.small}"], large[f"bulk_{sizes.large}"]]
        figures |= large
    named = {
        name.replace(str(sizes.small), "small").replace(str(sizes.large), "large"): value
        for name, value in figures.items()
    }
    return named | {"bulk": max(bulk)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measure other job queues on PostgreSQL beside this one. Installs them under .bench/.",
        epilog=f"{VARIABLE} names the server to measure on; without it an embedded one is started.",
    )
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--smoke", action="store_true", help="small sizes: whether it works, not how fast it is")
    parser.add_argument("--only", action="append", choices=names, metavar="PEER", help=", ".join(names))
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to keep the result (benchmarks/results/)")
    parser.add_argument("--update-docs", action="store_true", help="put the table into docs/performance.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
