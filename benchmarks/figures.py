"""What a measurement yields: the library's figure, and that of what it is compared with."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Unit(NamedTuple):
    """How a unit is written, and which way is better."""

    form: str
    more_is_better: bool


UNITS: Final[Mapping[str, Unit]] = {
    "jobs/s": Unit("{:,.0f}/s", more_is_better=True),
    "commits/s": Unit("{:,.0f} commits/s", more_is_better=True),
    "% of ideal": Unit("{:.0f} %", more_is_better=True),
    "ms": Unit("{:.2f} ms", more_is_better=False),
    "s": Unit("{:.2f} s", more_is_better=False),
    "µs/job": Unit("{:.0f} µs", more_is_better=False),
    "MB": Unit("{:.1f} MB", more_is_better=False),
    "bytes/job": Unit("{:,.0f} bytes", more_is_better=False),
    "/s": Unit("{:.2f}/s", more_is_better=False),
    "/job": Unit("{:.4f}", more_is_better=False),
    "% of a core": Unit("{:.2f} %", more_is_better=False),
}


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: stands for it in the JSON.
        title: what was done.
        unit: one of :data:`UNITS`.
        ours: the library's figure of each round.
        beside: what it is compared with; empty if there is no such thing.
        theirs: the figure of that in each round.
        detail: further facts for the JSON.
        topic: what it is listed under.
    """

    name: str
    title: str
    unit: str
    ours: Sequence[float]
    beside: str = ""
    theirs: Sequence[float] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""

    @property
    def value(self) -> float:
        """The best of the rounds."""
        return self._best(self.ours)

    @property
    def other(self) -> float | None:
        """The best of the other's rounds."""
        return self._best(self.theirs) if self.theirs else None

    @property
    def ratio(self) -> float | None:
        """Ours divided by the other's: 1 is as good, and which way is better the unit says.

        None if one of them is not positive: a job may begin before the producer has read the answer to its COMMIT.
        """
        return self.value / self.other if self.other and min(self.value, self.other) > 0 else None

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        form = UNITS[self.unit].form
        other = "" if self.other is None else form.format(self.other)
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return self.title, form.format(self.value), self.beside, other, ratio

    def record(self) -> dict[str, Any]:
        """Return the line for the JSON."""
        return {
            "name": self.name,
            "topic": self.topic,
            "title": self.title,
            "unit": self.unit,
            "value": self.value,
            "rounds": list(self.ours),
            "beside": self.beside,
            "other": self.other,
            "other_rounds": list(self.theirs),
            "ratio": self.ratio,
            "detail": dict(self.detail),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Figure:
        """Return what :meth:`record` wrote down."""
        return cls(
            record["name"],
            record["title"],
            record["unit"],
            record["rounds"],
            record.get("beside", ""),
            record.get("other_rounds", ()),
            record.get("detail", {}),
            record.get("topic", ""),
        )

    def _best(self, rounds: Sequence[float]) -> float:
        return max(rounds) if UNITS[self.unit].more_is_better else min(rounds)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many percent of ``values`` do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
