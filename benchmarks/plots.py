"""The figures as plots: SVG files that are the same, byte for byte, for the same figures.

The background is left open and all colours are of middle lightness, so that they can be read on white and on black.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.figures import Figure

    Named = Mapping[str, Figure]

_GREY: Final = "#808890"
_OURS: Final = "#2f81f7"
_RAW: Final = "#d9772b"
_SHADES: Final = {"pick-up": "#2f81f7", "pick-up-10": "#3a9c5f", "pick-up-200": "#a871d8", "pick-up-2000": "#d1495b"}

_STYLE: Final = {
    "svg.hashsalt": "sqla_neoq",
    # Text as text: it can be selected and found, and no font's outlines are in the file.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.color": _GREY,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.titlecolor": _GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GREY,
    "grid.alpha": 0.25,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


def draw(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """Write each plot whose figures are there. Returns the files."""
    named = {figure.name: figure for figure in figures}
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, plot in _PLOTS.items():
        picture = plot(named)
        if picture is not None:
            path = directory / f"{name}.svg"
            path.write_bytes(picture)
            written.append(path)
    return written


def _backlog(named: Named) -> bytes | None:
    drains = sorted(
        (figure for figure in named.values() if "backlog" in figure.detail), key=lambda one: one.detail["backlog"]
    )
    if len(drains) < 2:
        return None
    sizes = [figure.detail["backlog"] for figure in drains]
    with _axes("Drain: throughput against backlog", "jobs in the backlog", "jobs/s") as (axes, made):
        axes.semilogx(sizes, [figure.other for figure in drains], "o--", color=_RAW, label="raw loop, no Python code")
        axes.semilogx(sizes, [figure.value for figure in drains], "o-", color=_OURS, label="sqla_neoq, 20 threads")
        axes.set_xticks(sizes, [_counted(size) for size in sizes])
        axes.minorticks_off()
    return made.getvalue()


def _horizon(named: Named) -> bytes | None:
    figure = named.get("pinned")
    if figure is None:
        return None
    title = "Drain under one snapshot: throughput against its age"
    with _axes(title, "jobs finished since the snapshot was taken", "jobs/s") as (axes, made):
        for key, style, color, label in (
            ("free_series", "o:", _GREY, "sqla_neoq, no snapshot held"),
            ("series", "o-", _OURS, "sqla_neoq, snapshot held"),
            ("raw_series", "o--", _RAW, "raw loop, snapshot held"),
        ):
            ages, rates = zip(*figure.detail[key], strict=True)
            axes.plot(ages, rates, style, color=color, label=label)
        axes.xaxis.set_major_formatter(lambda value, _: _counted(value))
    return made.getvalue()


def _pick_up(named: Named) -> bytes | None:
    found = {name: named[f"{name}-p50"] for name in _SHADES if f"{name}-p50" in named}
    if not found:
        return None
    percents = range(1, 100)
    title = "Pick-up: from the answer to COMMIT to the start of the job"
    with _axes(title, "milliseconds", "percent of jobs started", zero=False) as (axes, made):
        for name, figure in found.items():
            rate = name.removeprefix("pick-up").removeprefix("-")
            label = f"{int(rate):,} jobs/s" if rate else "one at a time"
            axes.plot(_positive(figure.detail["percentiles"]), percents, color=_SHADES[name], label=label)
            if not rate:
                raw = _positive(figure.detail["other_percentiles"])
                axes.plot(raw, percents, "--", color=_RAW, label="one at a time, raw LISTEN and claim")
        axes.set_xscale("log")
        ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_ylim(0, 100)
    return made.getvalue()


_PLOTS: Final[Mapping[str, Callable[[Named], bytes | None]]] = {
    "backlog": _backlog,
    "horizon": _horizon,
    "pick-up": _pick_up,
}


@contextmanager
def _axes(title: str, across: str, up: str, *, zero: bool = True) -> Iterator[tuple[Any, io.BytesIO]]:
    """Yield axes to draw on, and where the SVG will be once the block has ended."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    made = io.BytesIO()
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(7.2, 3.8), layout="constrained")
        axes = canvas.subplots()
        axes.set(title=title, xlabel=across, ylabel=up)
        yield axes, made
        if zero:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.legend()
        canvas.savefig(made, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def _positive(values: Sequence[float]) -> list[float]:
    # A job may start before its producer has read the answer: on a logarithmic axis, as early as can be shown.
    return [max(value, 0.1) for value in values]


def _counted(count: float) -> str:
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}k" if count else "0"
