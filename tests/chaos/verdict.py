"""Compares what the ledger, the effects and the moves say of the same jobs.

*lost*
    a committed job that did not end as it should: processed, with its one effect if its task writes one; or dead or
    cancelled where the scenario says that it will be.
*doubled*
    more than one committed effect of a job.
*fence broken*
    anything that only a run that no longer owned its job can have done: an effect whose transaction did not complete
    that job under that run's token; a completion without an end that the run itself noted; a run that began twice under
    one token; a job that ran without having been committed; a move that is in no table of states, or does not begin
    where the last one ended; a token that does not rise.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from chaos.ledger import Ledger, Line
from chaos.server import Server

WITH_EFFECT = {"chaos:effect", "chaos:fails", "chaos:core", "chaos:driver", "chaos:coroutine", "chaos:own"}
_MOVES = {
    ("new", "running"),
    ("failed", "running"),
    ("running", "processed"),
    ("running", "failed"),
    ("running", "new"),
    ("running", "cancelled"),
    ("running", "dead"),
    ("new", "cancelled"),
    ("failed", "cancelled"),
    ("new", "dead"),
    ("failed", "dead"),
}
_MOST_EXAMPLES = 5


@dataclass
class Found:
    """What the comparison found; the lists hold sentences, each about one job."""

    jobs: int = 0
    starts: int = 0
    reruns: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    fence: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """The first few of each kind."""
        kinds = {"lost": self.lost, "doubled": self.doubled, "fence broken": self.fence}
        return [f"{kind}: {one}" for kind, all_of in kinds.items() for one in all_of[:_MOST_EXAMPLES]]


class Record:
    """The ledger, read once."""

    def __init__(self, ledger: Ledger) -> None:
        self.committed: set[int] = set()
        self.unknown: set[int] = set()
        self.starts: list[Line] = []
        self.ends: dict[tuple[int, int], float] = {}
        for line in ledger.lines():
            match line.kind:
                case "committed":
                    self.committed.add(line.key)
                case "unknown":
                    self.unknown.add(line.key)
                case "start":
                    self.starts.append(line)
                case "end":
                    self.ends[line.key, line.token] = line.at

    def interrupted(self, pid: int, at: float) -> set[int]:
        """Return the keys that the process was running when it was killed at that time."""
        return {
            line.key
            for line in self.starts
            if line.pid == pid and line.at <= at and (line.key, line.token) not in self.ends
        }

    def next_starts(self, keys: Collection[int], after: float, not_by: int) -> dict[int, float]:
        """Return, for each key that another process began after that time, the seconds until it did."""
        found: dict[int, float] = {}
        for line in self.starts:
            if line.key in keys and line.at > after and line.pid != not_by and line.key not in found:
                found[line.key] = line.at - after
        return found

    def first_start_by(self, pid: int, after: float) -> float | None:
        """Return the seconds until that process began a job after that time."""
        return next((line.at - after for line in self.starts if line.pid == pid and line.at > after), None)


def compare(server: Server, record: Record, may_end: Callable[[str | None], Collection[str]]) -> Found:
    """Compare everything at the end of a scenario.

    Args:
        server: with the tables.
        record: the ledger.
        may_end: says for a task's name in which states its jobs may end; the usual is ``{"processed"}``.
    """
    ended: dict[int, tuple[str, str]] = {}
    for key, task, status in server.rows(
        "SELECT (payload ->> 'key')::bigint, task, status FROM neoq_jobs "
        "UNION ALL SELECT (payload ->> 'key')::bigint, task, 'dead:' || reason FROM neoq_dead_jobs"
    ):
        ended[key] = (task, status)
    effects: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for key, token, tx in server.rows("SELECT key, token, tx::text FROM chaos_effects"):
        effects[key].append((token, tx))

    jobs = record.committed | {key for key in record.unknown if key in ended}
    tries = Counter(line.key for line in record.starts)
    found = Found(jobs=len(jobs), starts=len(record.starts))
    found.reruns = sum(tries.values()) - len(tries)
    for key in jobs:
        task, status = ended.get(key, ("?", "gone"))
        if status.partition(":")[0] not in {end.partition(":")[0] for end in may_end(task)} or (
            status.startswith("dead") and status not in may_end(task) and "dead" not in may_end(task)
        ):
            found.lost.append(f"job {key} ({task}) ended {status}, after {tries[key]} starts")
        elif status == "processed" and task in WITH_EFFECT and not effects[key]:
            found.lost.append(f"job {key} ({task}) is processed without its effect")
    found.doubled = [f"job {key} has {len(rows)} effects" for key, rows in effects.items() if len(rows) > 1]
    found.fence = _breaches(server, record, jobs, effects)
    return found


def _breaches(
    server: Server, record: Record, jobs: Collection[int], effects: dict[int, list[tuple[int, str]]]
) -> list[str]:
    breaches = []
    last: dict[int, str] = {}
    tokens: dict[int, int] = {}
    completed: set[tuple[int, int, str]] = set()
    for job, key, was, became, token, tx in server.rows(
        "SELECT job, key, was, became, token, tx::text FROM chaos_moves ORDER BY n"
    ):
        if (was, became) not in _MOVES:
            breaches.append(f"job {key} went from {was} to {became}")
        if last.get(job, "new") != was:
            breaches.append(f"job {key} was {last.get(job, 'new')} and then left {was}")
        last[job] = became
        if became == "running":
            if token <= tokens.get(job, 0):
                breaches.append(f"job {key} was claimed under token {token} after {tokens[job]}")
            tokens[job] = token
        if became == "processed":
            completed.add((key, token, tx))
            if (key, token) not in record.ends:
                breaches.append(f"job {key} was completed under token {token}, and that run never came to its end")
    for key, rows in effects.items():
        breaches += [
            f"job {key} has an effect of token {token} that came without its completion"
            for token, tx in rows
            if (key, token, tx) not in completed
        ]
    runs = Counter((line.key, line.token) for line in record.starts)
    breaches += [
        f"job {key} began {count} times under token {token}" for (key, token), count in runs.items() if count > 1
    ]
    breaches += [f"job {key} ran, and was never committed" for key in {key for key, _ in runs} - set(jobs)]
    return breaches
