"""Figures as a table for people, as JSON for machines, and as a block in the documents."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

START: Final = "<!-- bench:start -->"
END: Final = "<!-- bench:end -->"
_HEAD: Final = ("what", "sqla_neoq", "beside", "its figure", "ratio")


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: stands for it in the JSON.
        title: what was done.
        unit: ``jobs/s``, where more is better, or ``ms``, where less is.
        ours: the library's figure of each round.
        beside: what it is compared with.
        theirs: the figure of that in each round.
        detail: further facts for the JSON.
    """

    name: str
    title: str
    unit: str
    ours: Sequence[float]
    beside: str
    theirs: Sequence[float]
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The best of the rounds."""
        return self._best(self.ours)

    @property
    def other(self) -> float:
        """The best of the other's rounds."""
        return self._best(self.theirs)

    @property
    def ratio(self) -> float:
        """Ours divided by the other's: 1 is as good; for ``jobs/s`` more is better, for ``ms`` less."""
        return self.value / self.other

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        return self.title, self._said(self.value), self.beside, self._said(self.other), f"{self.ratio:.2f}"

    def record(self) -> dict[str, Any]:
        """Return the line for the JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "value": self.value,
            "rounds": list(self.ours),
            "beside": self.beside,
            "other": self.other,
            "other_rounds": list(self.theirs),
            "ratio": self.ratio,
            **self.detail,
        }

    def _best(self, rounds: Sequence[float]) -> float:
        return min(rounds) if self.unit == "ms" else max(rounds)

    def _said(self, value: float) -> str:
        return f"{value:.2f} ms" if self.unit == "ms" else f"{value:,.0f}/s"


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


def markdown(figures: Sequence[Figure], facts: dict[str, Any], rounds: int) -> str:
    """Return the figures as a Markdown table, and a line that says what they were measured on."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|--:|---|--:|--:|"]
    lines += ["| " + " | ".join(figure.cells()) + " |" for figure in figures]
    return "\n".join([*lines, "", measured_on(facts, rounds)])


def measured_on(facts: dict[str, Any], rounds: int) -> str:
    """Say in a sentence or two what the figures belong to."""
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    return (
        f"Measured on {facts['date']}: {facts['cores']} cores ({facts['cpu']}) for the runner and the server together, "
        f"PostgreSQL {facts['postgresql']} ({facts['server']}, {facts['transport']}; {settings}), "
        f"Python {facts['python']}, SQLAlchemy {facts['sqlalchemy']}, psycopg {facts['psycopg']}. "
        f"Throughput is the best of {rounds} rounds that alternate with what stands beside it; "
        f"the machine's load average before the run was {facts['load_before']}."
    )


def to_json(figures: Sequence[Figure], facts: dict[str, Any], *, rounds: int, smoke: bool) -> str:
    """Return everything as JSON."""
    records = [figure.record() for figure in figures]
    return json.dumps({"facts": facts, "rounds": rounds, "smoke": smoke, "figures": records}, indent=2) + "\n"


def update(document: Path, block: str) -> bool:
    """Put the block between the two marks of a document. Returns whether it has them."""
    if not document.exists():
        return False
    text = document.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        return False
    document.write_text(f"{before}{START}\n{block}\n{END}{after}", encoding="utf-8")
    return True
