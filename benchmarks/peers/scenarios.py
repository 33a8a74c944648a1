"""The measurements, the same for each peer. Each takes a peer and a place and returns what the table shows of it.

A drain is timed from the start of the first job to when the database says that none is left, so outcomes that a peer
still holds in memory do not count as done. Starting the process is not in it.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from benchmarks.peers.places import Inside, UnavailableError, own_database

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import URL

    from benchmarks.peers.catalogue import Entry

_START: Final = 60.0


@dataclass(frozen=True)
class Sizes:
    """How much is done, and how long at most."""

    small: int = 20_000
    large: int = 100_000
    singles: int = 2_000
    pickups: int = 100
    drain_cap: float = 60.0
    rescue_cap: float = 120.0
    quick: float = 5_000.0


SMOKE: Final = Sizes(small=300, large=600, singles=50, pickups=5, drain_cap=20.0, rescue_cap=3.0)
Result = dict[str, Any]


def drain(entry: Entry, server: URL, count: int, cap: float) -> tuple[float, Result]:
    """Enqueue that many no-op jobs in bulk, then work them off. Returns the drain's rate, and the figures."""
    with own_database(server) as dsn:
        _installed(entry, dsn)
        with Inside(entry, "bulk", dsn, count) as producer:
            said = producer.wait_for("done", time.monotonic() + _START + cap)
            if said is None:
                raise UnavailableError(f"{count:,} jobs were not enqueued within {_START + cap:.0f} s")
            bulk = count / said["seconds"]
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE)")
            connection.execute("CHECKPOINT")
            done, seconds = _worked_off(entry, dsn, connection, count, cap)
    rate = done / seconds
    result: Result = {f"drain_{count}": rate, f"bulk_{count}": bulk}
    if done < count:
        result[f"drain_{count}_done"] = done
    return rate, result


def _worked_off(
    entry: Entry, dsn: str, connection: psycopg.Connection[Any], count: int, cap: float
) -> tuple[int, float]:
    with Inside(entry, "drain", dsn, count) as worker:
        first = worker.wait_for("first", time.monotonic() + _START)
        if first is None:
            raise UnavailableError(f"began no job within {_START:.0f} s")
        end = first["at"] + cap
        if worker.wait_for("last", end) is None:
            return count - _left(connection, entry), time.monotonic() - first["at"]
        while (left := _left(connection, entry)) and time.monotonic() < end:
            time.sleep(0.005)
        return count - left, time.monotonic() - first["at"]


def singles(entry: Entry, server: URL, sizes: Sizes) -> Result:
    """Enqueue one by one in a transaction."""
    with own_database(server) as dsn:
        _installed(entry, dsn)
        with Inside(entry, "singles", dsn, sizes.singles) as producer:
            said = producer.wait_for("done", time.monotonic() + _START)
            if said is None:
                raise UnavailableError("one by one took too long")
            return {"singles": sizes.singles / said["seconds"]}


def pick_up(entry: Entry, server: URL, sizes: Sizes) -> Result:
    """Commit a job now and then; how long until an idle worker starts it."""
    with own_database(server) as dsn:
        _installed(entry, dsn)
        with Inside(entry, "mark", dsn) as worker:
            worker.wait_for("started", time.monotonic() + _START)
            time.sleep(2.0)  # it says that it starts; what it does then it says nowhere
            with Inside(entry, "paced", dsn, sizes.pickups) as producer:
                waits = []
                for _ in range(sizes.pickups):
                    committed = producer.wait_for("committed", time.monotonic() + _START)
                    began = worker.wait_for("began", time.monotonic() + _START)
                    if committed is None or began is None or committed["number"] != began["number"]:
                        raise UnavailableError("a job was not picked up in its turn")
                    waits.append((began["at"] - committed["at"]) * 1000)
    return {"pickup_p50": statistics.median(waits), "pickup_p99": percentile(waits, 99), "pickups": waits}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many percent of ``values`` do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def rescue(entry: Entry, server: URL, sizes: Sizes) -> Result:
    """Kill a worker in the middle of a job, another one idle beside it; how long until that one starts the job."""
    with own_database(server) as dsn:
        _installed(entry, dsn)
        with Inside(entry, "hold", dsn) as first, Inside(entry, "paced", dsn, 1) as producer:
            producer.finish(_START)
            if first.wait_for("began", time.monotonic() + _START) is None:
                raise UnavailableError("began no job")
            with Inside(entry, "hold", dsn) as second:
                second.wait_for("started", time.monotonic() + _START)
                time.sleep(2.0)
                first.kill()
                killed = time.monotonic()
                again = second.wait_for("began", killed + sizes.rescue_cap)
    return {"rescue": None if again is None else again["at"] - killed, "rescue_cap": sizes.rescue_cap}


def rescues(entries: Sequence[Entry], server: URL, sizes: Sizes) -> dict[str, Result]:
    """The same for all at once: nearly all of it is waiting."""

    def one(entry: Entry) -> Result:
        try:
            return rescue(entry, server, sizes)
        except UnavailableError as error:
            return {"rescue_error": str(error)}

    with ThreadPoolExecutor(max_workers=max(1, len(entries))) as pool:
        return dict(zip([entry.name for entry in entries], pool.map(one, entries), strict=True))


def _installed(entry: Entry, dsn: str) -> None:
    with Inside(entry, "install", dsn) as installer:
        installer.finish(_START)


def _left(connection: psycopg.Connection[Any], entry: Entry) -> int:
    row = connection.execute(entry.left.encode()).fetchone()
    assert row is not None
    return int(row[0])
