"""What ``sqla-neoq status`` shows: the queues, the workers, and the jobs that none of the modules named could run."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from sqla_neoq.statements.looking import count_dead, count_jobs, count_waiting_by_task, running_workers
from sqla_neoq.tasks import Handler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection, Executable

    from sqla_neoq.runner import Runner
    from sqla_neoq.targets import Runnable

Rows = list[dict[str, Any]]
Report = dict[str, Rows]

_STATUSES: Final = ("new", "failed", "running", "processed", "cancelled")


def collect(connection: Connection, runnables: Iterable[Runnable] | None = None) -> Report:
    """Read the state of the queue; changes nothing and commits nothing.

    Args:
        connection: a connection whose search path or translate map finds the tables.
        runnables: the tasks and handlers of some runner; with them the report says what that runner could not run.

    Returns:
        ``jobs`` (queue, status, jobs, oldest_due: seconds or None), ``dead`` (queue, reason, jobs), ``workers`` (with
        the seconds since the last heartbeat) and, given ``runnables``, ``unclaimable`` (queue, task, jobs).
    """

    def rows(statement: Executable) -> Rows:
        return [dict(row) for row in connection.execute(statement).mappings()]

    report = {"jobs": rows(count_jobs()), "dead": rows(count_dead()), "workers": rows(running_workers())}
    if runnables is not None:
        known = list(runnables)
        handled = {one.queue for one in known if isinstance(one, Handler)}
        names = {one.name for one in known if not isinstance(one, Handler)}
        report["unclaimable"] = [
            row
            for row in rows(count_waiting_by_task())
            if (row["queue"] not in handled if row["task"] is None else row["task"] not in names)
        ]
    return report


def as_json(report: Report) -> str:
    """Return the report as one JSON object."""
    return json.dumps(report, default=str)


def as_text(report: Report) -> str:
    """Return the report as plain tables."""
    queues = sorted({row["queue"] for row in report["jobs"] + report["dead"]})
    counts = {(row["queue"], row["status"]): row["jobs"] for row in report["jobs"]}
    dead = {queue: sum(row["jobs"] for row in report["dead"] if row["queue"] == queue) for queue in queues}
    waits = {
        queue: [row["oldest_due"] for row in report["jobs"] if row["queue"] == queue and row["oldest_due"] is not None]
        for queue in queues
    }
    parts = [
        _table(
            ("QUEUE", *map(str.upper, _STATUSES), "DEAD", "OLDEST DUE"),
            [
                (queue, *(counts.get((queue, status), 0) for status in _STATUSES), dead[queue], _age(waits[queue]))
                for queue in queues
            ],
            "no jobs",
        ),
        _table(
            ("WORKER", "NAME", "HOST", "PID", "QUEUES", "RUNNING", "UP", "HEARTBEAT"),
            [
                (
                    worker["id"],
                    worker["name"],
                    worker["host"],
                    worker["pid"],
                    ",".join(map(str, worker["queues"])),
                    worker["running"],
                    _age([worker["up_for"]]),
                    f"{_age([worker['heartbeat']])} ago",
                )
                for worker in report["workers"]
            ],
            "no workers",
        ),
    ]
    if "unclaimable" in report:
        parts.append(
            _table(
                ("QUEUE", "TASK", "WAITING", ""),
                [
                    (row["queue"], "(handler)" if row["task"] is None else row["task"], row["jobs"], "unclaimable")
                    for row in report["unclaimable"]
                ],
                "every waiting job can be run by these modules",
            )
        )
    return "\n\n".join(parts)


def describe(runner: Runner) -> str:
    """Return the tasks, handlers and queues of a runner as plain tables."""
    runnables = [
        *((name, task.queue, task) for name, task in sorted(runner.tasks.items())),
        *(("(handler)", queue, handler) for queue, handler in sorted(runner.handlers.items())),
    ]
    # Not those that may hold a password, nor what the command line says to its own children.
    shown = [
        (field.name, getattr(runner.config, field.name))
        for field in fields(runner.config)
        if field.name != "listen_url" and not field.name.startswith("child_")
    ]
    return "\n\n".join(
        [
            _table(
                ("TASK", "QUEUE", "RETRIES", "TIMEOUT"),
                [
                    (name, queue, one.retries_of(None), "none" if one.timeout is None else f"{one.timeout:g}s")
                    for name, queue, one in runnables
                ],
                "no tasks",
            ),
            _table(("QUEUE", "AT ONCE"), sorted(runner.queues.items()), "no queues"),
            _table(("SETTING", "VALUE"), shown, "no settings"),
        ]
    )


def _age(seconds: Sequence[float]) -> str:
    """Write the greatest of these ages: ``0.8s``, ``42s``, ``12m``, ``3h``, ``5d``; a dash when there is none."""
    if not seconds:
        return "-"
    age = max(0.0, *seconds)
    if age < 10:
        return f"{age:.1f}s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if age >= 2 * size:
            return f"{age // size:.0f}{unit}"
    return f"{age:.0f}s"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], when_empty: str) -> str:
    if not rows:
        return when_empty
    lines = [head, *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [all(isinstance(value, int) for value in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    text = str(value)
    # A queue's name may hold anything, a line break too.
    return text if text.isprintable() else json.dumps(text)
