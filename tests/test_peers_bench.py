"""The comparison with other queues: what needs neither them nor a network."""

from __future__ import annotations

from benchmarks.peers import report
from benchmarks.peers.catalogue import ENTRIES


def test_a_peer_that_could_not_be_measured_says_why_in_its_row() -> None:
    assert report.row("one", {"error": "no such version"})[1] == "could not be measured: no such version"


def test_a_rescue_that_did_not_come_within_the_cap_is_no_figure() -> None:
    assert report.row("one", {"rescue": None, "rescue_cap": 120.0})[-1] == "> 120 s"
    assert report.row("one", {"rescue": 3.21, "rescue_cap": 120.0})[-1] == "3.2 s"


def test_a_drain_cut_off_says_how_much_it_did() -> None:
    row = report.row("one", {"drain_small": 450.0, "drain_small_done": 9000})
    assert row[1] == "450/s (9,000 within the time)"


def test_every_peer_is_pinned_to_versions() -> None:
    assert all("==" in requirement for entry in ENTRIES for requirement in entry.requirements)
