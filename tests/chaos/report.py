"""The table of figures, for people and for the documents, and the machine-readable result."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from chaos.scenario import Result

START, END = "<!-- chaos:start -->", "<!-- chaos:end -->"


def line(result: Result) -> str:
    """Return one result as a line for a terminal."""
    if result.not_run is not None:
        return f"-    {result.name:<28} not run: {result.not_run}"
    times = "/".join(_seconds(result.quantile(share)) for share in (0.5, 0.99, 1.0))
    return (
        f"{'ok' if result.passed else 'FAIL':<4} {result.name:<28} faults {result.injected:>4} · "
        f"jobs {result.jobs:>7} · lost {result.lost} · doubled {result.doubled} · fence {result.fence_broken} · "
        f"reruns {result.reruns} · recovery {times} s (limit {_seconds(result.limit)}) · {result.seconds:.0f} s"
    )


def to_json(results: Sequence[Result], **facts: Any) -> str:
    """Return everything as JSON."""
    return json.dumps({"facts": {**_facts(), **facts}, "scenarios": [r.as_json() for r in results]}, indent=1) + "\n"


def markdown(document: dict[str, Any]) -> str:
    """Return the table for the documents, from the machine-readable result."""
    facts, scenarios = document["facts"], document["scenarios"]
    rows = [
        "| scenario | what is done | faults | jobs | lost | doubled | fence broken | p50 | p99 | max | limit |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in scenarios:
        if one["not_run"] is not None:
            rows.append(f"| `{one['name']}` | {one['faults']} | | | | | | | | | not run: {one['not_run']} |")
            continue
        times = " | ".join(_seconds(one[name]) for name in ("p50", "p99", "max", "limit"))
        rows.append(
            f"| `{one['name']}` | {one['faults']} | {one['injected']} | {one['jobs']:,} | {one['lost']} | "
            f"{one['doubled']} | {one['fence_broken']} | {times} |"
        )
    ran = [one for one in scenarios if one["not_run"] is None]
    rows += [
        "",
        (
            f"In all {sum(one['injected'] for one in ran):,} faults and {sum(one['jobs'] for one in ran):,} jobs in "
            f"{sum(one['seconds'] for one in ran) / 60:.0f} minutes. Times in seconds. {facts['date']}, "
            f"{facts['cores']} cores shared with other work, Python {facts['python']}, PostgreSQL "
            f"{facts['postgresql']}, seed {facts['seed']}."
        ),
    ]
    return "\n".join(rows)


def update(document: Path, block: str) -> bool:
    """Put the table between the marks of a document; returns whether it has them."""
    text = document.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        return False
    document.write_text(f"{before}{START}\n{block}\n{END}{after}", encoding="utf-8")
    return True


def _facts() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "sqlalchemy": version("sqlalchemy"),
        "psycopg": version("psycopg"),
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
