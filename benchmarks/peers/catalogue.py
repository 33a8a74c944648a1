"""Who is compared, with which versions and settings, and what each does differently: a table of facts, no code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Entry:
    """A queue, with one choice of settings.

    Attributes:
        name: what the table calls it.
        adapter: the module that drives it.
        requirements: what its venv holds; none: ours.
        left: counts the jobs that have not been completed.
        settings: what the adapter is told.
        said: the settings in words.
        note: what a reader must know to compare it.
        rescues: whether the kill is measured: only once for each queue, with its defaults.
        paced: whether single jobs can be told apart, for the pick-up.
        python: the interpreter it needs, at least.
    """

    name: str
    adapter: str
    requirements: tuple[str, ...]
    left: str
    settings: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    note: str = ""
    rescues: bool = True
    paced: bool = True
    python: tuple[int, int] = (3, 11)

    @property
    def venv(self) -> str:
        """The name of its venv: one for each queue, however many settings it is measured with."""
        return self.adapter


_PSYCOPG: Final = "psycopg[binary,pool]==3.3.9"
_OUR_LEFT: Final = "SELECT count(*) FROM neoq_jobs WHERE status <> 'processed'"

ENTRIES: Final = (
    Entry(
        "raw",
        "raw",
        (),
        _OUR_LEFT,
        said="psycopg alone on our tables, batches of 1,000, no Python call for a job",
        note="what the server allows: COPY, one claiming connection, LISTEN",
        rescues=False,
    ),
    Entry(
        "sqla_neoq",
        "ours",
        (),
        _OUR_LEFT,
        {"concurrency": 20},
        "20 threads (the default is 10)",
        "threads; each outcome fenced; completed jobs are kept as rows",
    ),
    Entry(
        "procrastinate",
        "procrastinate",
        ("procrastinate==3.10.0", _PSYCOPG),
        "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
        {"concurrency": 20},
        "concurrency 20 (the default is 1)",
        "an event loop; a stalled job is left to the application, its documentation shows a periodic task for that",
    ),
    Entry(
        "pgqueuer",
        "pgqueuer",
        ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
        "SELECT count(*) FROM pgqueuer",
        {"batch_size": 100},
        "asyncpg, uvloop, batch_size 100",
        "an event loop",
        rescues=False,
    ),
    Entry(
        "pgqueuer, defaults",
        "pgqueuer",
        ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
        "SELECT count(*) FROM pgqueuer",
        {"batch_size": 10},
        "asyncpg, uvloop, batch_size 10 (the default)",
        "as above",
    ),
    Entry(
        "oban-py",
        "oban",
        ("oban==0.7.0", _PSYCOPG),
        "SELECT count(*) FROM oban_jobs WHERE state <> 'completed'",
        {"limit": 20},
        "limit 20, pool of 10",
        "an event loop",
        python=(3, 12),
    ),
    Entry(
        "awa",
        "awa",
        ("awa-pg==0.6.9", _PSYCOPG),
        "SELECT count(*) FROM awa.jobs WHERE state NOT IN ('completed', 'failed', 'cancelled')",
        {"workers": 20},
        "20 workers",
        "a Rust core with Python tasks",
    ),
)
