"""Figures as a table for people, as JSON for machines, and as blocks in the documents."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

START: Final = "<!-- bench:start -->"
END: Final = "<!-- bench:end -->"
_HEAD: Final = ("what", "sqla_neoq", "beside", "its figure", "ratio")

THOSE_THAT_MATTER: Final = (
    "drain-20k",
    "drain-million",
    "future",
    "history",
    "bulk",
    "rush",
    "in-session",
    "pick-up-p50",
    "pick-up-p99",
    "memory",
)
"""The lines of the short table."""


class Result(NamedTuple):
    """What a run found.

    Attributes:
        facts: where it ran.
        rounds: how often each measurement was repeated at most.
        smoke: whether the sizes were small ones, so that the figures mean nothing.
        figures: what was measured.
        failed: the scenarios that did not get to an end, each with its error.
    """

    facts: Mapping[str, Any]
    rounds: int
    smoke: bool
    figures: Sequence[Figure]
    failed: Mapping[str, str]

    def to_json(self) -> str:
        """Return everything as JSON."""
        content = self._asdict() | {"figures": [figure.record() for figure in self.figures]}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def of_json(cls, text: str) -> Result:
        """Return what :meth:`to_json` wrote."""
        content = json.loads(text)
        return cls(
            content["facts"],
            content.get("rounds", 1),
            content.get("smoke", False),
            [Figure.of_record(record) for record in content["figures"]],
            content.get("failed", {}),
        )


def merge(results: Sequence[Result]) -> Result:
    """Put the figures of several runs together: of two with one name the later counts, in the place of the first."""
    figures: dict[str, Figure] = {}
    for result in results:
        figures.update({figure.name: figure for figure in result.figures})
    last = results[-1]
    return Result(
        last.facts,
        max(result.rounds for result in results),
        any(result.smoke for result in results),
        list(figures.values()),
        last.failed,
    )


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as aligned text."""
    lines = [_HEAD, *(figure.cells() for figure in figures)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEAD))]
    numbers = {1, 3, 4}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(result: Result, *, short: bool = False) -> str:
    """Return a Markdown table, and a line that says what the figures were measured on.

    Grouped by topic, or short: the lines of :data:`THOSE_THAT_MATTER`.
    """
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|--:|---|--:|--:|"]
    if short:
        named = {figure.name: figure for figure in result.figures}
        lines += map(_row, [named[name] for name in THOSE_THAT_MATTER if name in named])
    else:
        lines += _grouped(result.figures)
    return "\n".join([*lines, "", measured_on(result)])


def measured_on(result: Result) -> str:
    """Say in a sentence or two what the figures belong to."""
    facts = result.facts
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    return (
        f"Measured on {facts['date']}: {facts['cores']} cores ({facts['cpu']}) for the runner and the server together, "
        f"PostgreSQL {facts['postgresql']} ({facts['server']}, {facts['transport']}; {settings}), "
        f"Python {facts['python']}, SQLAlchemy {facts['sqlalchemy']}, psycopg {facts['psycopg']}. "
        f"Throughput is the best of up to {result.rounds} rounds that alternate with what stands beside it; "
        f"the machine's load average before the run was {facts['load_before']}."
    )


def update(document: Path, block: str, *, start: str = START, end: str = END) -> bool:
    """Put the block between two marks of a document. Returns whether it has them."""
    if not document.exists():
        return False
    text = document.read_text(encoding="utf-8")
    before, begun, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        return False
    document.write_text(f"{before}{start}\n{block}\n{end}{after}", encoding="utf-8")
    return True


def _grouped(figures: Sequence[Figure]) -> Iterator[str]:
    places = {topic: place for place, topic in reversed([*enumerate(figure.topic for figure in figures)])}
    for topic, group in groupby(sorted(figures, key=lambda figure: places[figure.topic]), lambda figure: figure.topic):
        if topic:
            yield f"| **{topic}** | | | | |"
        yield from map(_row, group)


def _row(figure: Figure) -> str:
    return "| " + " | ".join(figure.cells()) + " |"
