"""The measurements. Each alternates between the library and its counterpart, so that both meet the same load.

Throughput is the best of the rounds: whatever else the machine does can only make a round slower.

========================  ==================================================================================
:mod:`.draining`          backlogs of every size, and what stands beside them in the table
:mod:`.pinned`            the same while a long transaction holds its snapshot
:mod:`.scaling`           more than one process
:mod:`.working`           tasks that wait, and tasks that write
:mod:`.producing`         enqueueing
:mod:`.picking_up`        how long a committed job waits for its start
:mod:`.costs`             start, idleness, WAL and queries a job, memory
========================  ==================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.scenarios import costs, draining, picking_up, pinned, producing, scaling, working

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.bench import Bench
    from benchmarks.figures import Figure


class Scenario(NamedTuple):
    """A measurement, what it is listed under, and whether a plain run includes it."""

    topic: str
    measure: Callable[[Bench], Iterator[Figure]]
    always: bool = False


_DRAIN: Final = "Draining a backlog of jobs that do nothing"
_BESIDE: Final = "The same beside what else is in the table"
_SCALE: Final = "Threads and processes"
_WORK: Final = "Jobs that do something"
_PRODUCE: Final = "Enqueueing"
_PICK_UP: Final = "Picking up: from the answer to COMMIT to the first line of the task"
_COST: Final = "What a runner costs"

SCENARIOS: Final[dict[str, Scenario]] = {
    "drain-20k": Scenario(_DRAIN, draining.drain_20k, always=True),
    "drain-100k": Scenario(_DRAIN, draining.drain_100k, always=True),
    "drain-300k": Scenario(_DRAIN, draining.drain_300k),
    "drain-million": Scenario(_DRAIN, draining.drain_million),
    "future": Scenario(_BESIDE, draining.future),
    "history": Scenario(_BESIDE, draining.history),
    "unknown": Scenario(_BESIDE, draining.unknown),
    "lanes": Scenario(_BESIDE, draining.lanes),
    "pinned": Scenario(_BESIDE, pinned.pinned),
    "reader": Scenario(_BESIDE, pinned.reader),
    "threads": Scenario(_SCALE, draining.threads),
    "processes": Scenario(_SCALE, scaling.processes),
    "naps": Scenario(_WORK, working.naps),
    "in-session": Scenario(_WORK, working.in_session, always=True),
    "bulk": Scenario(_PRODUCE, producing.bulk, always=True),
    "one-by-one": Scenario(_PRODUCE, producing.one_by_one, always=True),
    "rush": Scenario(_PRODUCE, producing.rush),
    "pick-up": Scenario(_PICK_UP, picking_up.idle, always=True),
    "pick-up-rates": Scenario(_PICK_UP, picking_up.at_rates),
    "start": Scenario(_COST, costs.start, always=True),
    "idle": Scenario(_COST, costs.idle),
    "per-job": Scenario(_COST, costs.per_job),
    "memory": Scenario(_COST, costs.memory),
}
