"""What a scenario is, how one is run, and what comes out of it."""

import math
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos.world import World

PROCESSED = frozenset({"processed"})


class NotRunError(Exception):
    """The scenario needs something that this machine lacks; the message says what."""


@dataclass(frozen=True)
class Scenario:
    """One way to break things.

    Attributes:
        name: on the command line.
        promise: what is tried, in a few words.
        faults: what is done.
        limit: the seconds within which each fault must be recovered from; None where nothing is timed.
        play: does it.
        smoke: whether it is short enough for each run of the tests.
        settings: of the server.
        ends: the states in which jobs of a task may end, where that is not ``processed`` alone.
        quiet_within: the seconds after the play in which every job must have ended.
    """

    name: str
    promise: str
    faults: str
    limit: float | None
    play: Callable[["World"], None]
    smoke: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, Collection[str]] = field(default_factory=dict)
    quiet_within: float = 60.0

    def may_end(self, task: str | None) -> Collection[str]:
        """Return the states in which a job of this task may end."""
        return self.ends.get(task or "", PROCESSED)


@dataclass
class Result:
    """What came out of one run of a scenario.

    Attributes:
        recoveries: the seconds that each recovery took.
        complaints: what went wrong, in sentences; none means passed.
        notes: further figures, by name.
        not_run: why it was not run, if so.
    """

    name: str
    promise: str
    faults: str
    limit: float | None
    injected: int = 0
    jobs: int = 0
    starts: int = 0
    reruns: int = 0
    lost: int = 0
    doubled: int = 0
    fence_broken: int = 0
    recoveries: list[float] = field(default_factory=list)
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.complaints

    def quantile(self, share: float) -> float | None:
        """Return the recovery time that this share of the recoveries did not exceed."""
        if not self.recoveries:
            return None
        ordered = sorted(self.recoveries)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def as_json(self) -> dict[str, Any]:
        """Return everything, for the machine-readable result."""
        quantiles = {name: self.quantile(share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
        return {**asdict(self), **quantiles, "passed": self.passed}


class Registry(dict[str, Scenario]):
    """The scenarios by name, in the order in which they are declared."""

    def add(self, name: str, **facts: Any) -> Callable[[Callable[["World"], None]], Callable[["World"], None]]:
        """Declare the decorated function as a scenario; its facts are those of :class:`Scenario`."""

        def declare(play: Callable[["World"], None]) -> Callable[["World"], None]:
            self[name] = Scenario(name, play=play, **facts)
            return play

        return declare


def run(scenario: Scenario, make_world: Callable[[Scenario], "World"]) -> Result:
    """Play a scenario in a world of its own, and judge it. Never raises but for KeyboardInterrupt."""
    result = Result(scenario.name, scenario.promise, scenario.faults, scenario.limit)
    began = time.monotonic()
    try:
        with make_world(scenario) as world:
            try:
                scenario.play(world)
                world.settle(scenario.quiet_within)
            except NotRunError as reason:
                result.not_run = str(reason)
                return result
            except Exception:
                result.complaints.append(f"the scenario itself failed:\n{traceback.format_exc()}")
            world.judge(result)
    except Exception:
        result.complaints.append(f"the harness failed:\n{traceback.format_exc()}")
    result.seconds = time.monotonic() - began
    return result
