"""The figures of all peers as a table, and what each was told and does differently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.peers.catalogue import Entry

START: Final = "<!-- peers:start -->"
END: Final = "<!-- peers:end -->"
_HEAD: Final = (
    "",
    "drain 20,000",
    "drain 100,000",
    "bulk enqueue",
    "one by one",
    "pick-up p50 / p99",
    "kill -9 to running again",
)


def markdown(results: Mapping[str, Mapping[str, Any]], entries: Sequence[Entry], facts: Mapping[str, Any]) -> str:
    """Return the table, the notes and what it was measured on."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|" + "--:|" * (len(_HEAD) - 1)]
    lines += ["| " + " | ".join(row(entry.name, results[entry.name])) + " |" for entry in entries]
    lines.append("")
    lines += [f"* **{entry.name}**{_versions(entry)}: {entry.said}. {_sentence(entry.note)}" for entry in entries]
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    lines += [
        "",
        (
            f"Measured on {facts['date']}: {facts['cores']} cores ({facts['cpu']}) for workers and server together, "
            f"PostgreSQL {facts['postgresql']} ({facts['server']}, {facts['transport']}; {settings}). "
            f"The machine's load average before the run was {facts['load_before']}."
        ),
    ]
    return "\n".join(lines)


def row(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one peer."""
    if "error" in result:
        return (name, f"could not be measured: {result['error']}", "", "", "", "", "")
    return (
        name,
        _drain(result, "small"),
        _drain(result, "large"),
        _rate(result.get("bulk")),
        _rate(result.get("singles")),
        _pick_up(result),
        _rescue(result),
    )


def _drain(result: Mapping[str, Any], size: str) -> str:
    rate = _rate(result.get(f"drain_{size}"))
    done = result.get(f"drain_{size}_done")
    return rate if done is None else f"{rate} ({done:,} within the time)"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}/s"


def _pick_up(result: Mapping[str, Any]) -> str:
    if "pickup_p50" not in result:
        return "-"
    return f"{result['pickup_p50']:.1f} / {result['pickup_p99']:.1f} ms"


def _rescue(result: Mapping[str, Any]) -> str:
    if "rescue" not in result:
        return "-"
    seconds = result["rescue"]
    return f"> {result['rescue_cap']:.0f} s" if seconds is None else f"{seconds:.1f} s"


def _versions(entry: Entry) -> str:
    return f" ({', '.join(entry.requirements)})" if entry.requirements else ""


def _sentence(note: str) -> str:
    return note[:1].upper() + note[1:] + "." if note else ""
