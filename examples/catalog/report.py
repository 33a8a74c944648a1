"""Does the database hold what it should? Compares it, file by file, with a count made without the queue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import func, literal, select, union_all
from sqlalchemy.orm import Session

from catalog.count import Count, count_folder
from catalog.models import SourceFile
from catalog.tasks import count_file
from sqla_neoq import DeadJob, Failure, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Engine, Row, Select, Subquery

UNFINISHED = ("new", "running", "failed")
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What was compared, as lines to print, and every difference found."""

    lines: list[str]
    differences: list[str]

    def show(self) -> bool:
        """Print the report; return whether everything is equal."""
        for line in self.lines:
            click.echo(line)
        for difference in self.differences[:SHOWN]:
            click.echo(f"  {difference}")
        if len(self.differences) > SHOWN:
            click.echo(f"  ... and {len(self.differences) - SHOWN:,} more")
        click.echo("equal" if not self.differences else f"NOT equal: {len(self.differences):,} differences")
        return not self.differences


def compare(engine: Engine, root: Path) -> Report:
    """Compare what the jobs wrote about the files under ``root`` with an independent count."""
    expected = count_folder(root)
    with Session(engine) as session:
        rows = {row.path: row for row in session.execute(_files()) if Path(row.path).is_relative_to(root)}
        jobs = session.scalar(select(func.count()).select_from(_jobs())) or 0
        files = session.scalar(select(func.count()).select_from(SourceFile)) or 0
        workers = session.execute(_jobs_by_worker()).all()
    differences = [
        f"{path}: {difference}"
        for path in sorted(expected.keys() | rows.keys())
        for difference in _differences(path, expected, rows)
    ]
    if jobs > files:
        differences.append(f"there are {jobs:,} jobs for {files:,} files")
    lines = [*_totals(expected, rows), "", *_dead(root, rows), ""]
    lines += [f"worker {row.worker_id} finished {row.jobs:,} jobs" for row in workers]
    return Report(lines, differences)


def _jobs() -> Subquery:
    """Every job of the application, dead or not: its status and the worker that had it last."""
    return union_all(
        select(Job.status, Job.worker_id).where(Job.queue == count_file.queue),
        select(literal("dead"), DeadJob.worker_id).where(DeadJob.queue == count_file.queue),
    ).subquery()


def _jobs_by_worker() -> Select[Any]:
    job = _jobs()
    ended = job.c.status.not_in(UNFINISHED)
    return select(job.c.worker_id, func.count().label("jobs")).where(ended).group_by("worker_id").order_by("worker_id")


def _files() -> Select[Any]:
    """Every file with what became of its job; a job processed long ago has no row any more."""
    last_traceback = (
        select(Failure.traceback)
        .where(Failure.job_id == SourceFile.job_id, Failure.kind == "error")
        .order_by(Failure.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    return (
        select(
            SourceFile.path,
            SourceFile.lines,
            SourceFile.functions,
            SourceFile.classes,
            SourceFile.times_counted,
            Job.status,
            DeadJob.reason,
            last_traceback.label("traceback"),
        )
        .outerjoin(Job, Job.id == SourceFile.job_id)
        .outerjoin(DeadJob, DeadJob.id == SourceFile.job_id)
    )


def _differences(path: str, expected: Mapping[str, Count | None], rows: Mapping[str, Row[Any]]) -> Iterator[str]:
    if path not in rows:
        yield "not in the database"
        return
    if path not in expected:
        yield "in the database, but no longer there"
        return
    count, row = expected[path], rows[path]
    if row.status in UNFINISHED:
        yield f"its job is left undone, with the status {row.status}"
    elif count is None:
        if row.times_counted:
            yield "does not parse, and was counted"
        if row.reason != "exhausted" or "Error" not in (row.traceback or ""):
            yield f"does not parse, and its job is not dead with a traceback (reason: {row.reason})"
    elif row.reason:
        yield f"parses, and its job is dead (reason: {row.reason})"
    elif row.times_counted != 1:
        yield f"counted {row.times_counted} times"
    elif _count(row) != count:
        yield f"the database says {_count(row)}, the independent count {count}"


def _count(row: Row[Any]) -> Count:
    return Count(row.lines, row.functions, row.classes)


def _totals(expected: Mapping[str, Count | None], rows: Mapping[str, Row[Any]]) -> Iterator[str]:
    counted = [_count(row) for row in rows.values() if row.times_counted]
    apart = [count for count in expected.values() if count is not None]
    yield f"{'':24}{'database':>12}{'independent':>16}"
    yield _line("files", len(rows), len(expected))
    yield _line(
        "unparsable, job dead", sum(row.reason is not None for row in rows.values()), len(expected) - len(apart)
    )
    for field, name in enumerate(Count._fields):
        yield _line(name, sum(count[field] for count in counted), sum(count[field] for count in apart))


def _line(name: str, left: int, right: int) -> str:
    return f"{name:24}{left:>12,}{right:>16,}"


def _dead(root: Path, rows: Mapping[str, Row[Any]]) -> Iterator[str]:
    dead = {path: row for path, row in sorted(rows.items()) if row.reason}
    yield f"{len(dead):,} dead jobs" + (", each with its traceback, which ends:" if dead else "")
    for path, row in dead.items():
        ending = (row.traceback or "no traceback").rstrip().rsplit("\n", 1)[-1]
        yield f"  {Path(path).relative_to(root)}: {ending[:100]}"
