"""The server to measure on: the one that ``NEOQ_BENCH_DATABASE_URL`` names, or an embedded one that keeps its commits.

Either way the jobs go into a database made for this run and dropped after it: a benchmark empties its tables.
"""

from __future__ import annotations

import os
import platform
import sys
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.pool import NullPool

from sqla_neoq import migrations
from sqla_neoq.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE: Final = "NEOQ_BENCH_DATABASE_URL"
# PostgreSQL's own defaults are for any machine there is: with 1,000,000 jobs, 128 MB of buffers and a checkpoint each
# GB of WAL cost the library and the raw loop a quarter of their throughput alike.
_SIZED: Final = {"shared_buffers": "1GB", "max_wal_size": "4GB"}
_SETTINGS: Final = ("fsync", "synchronous_commit", "shared_buffers", "autovacuum", "max_wal_size")


@dataclass(frozen=True)
class Database:
    """Where to measure.

    Attributes:
        url: for SQLAlchemy; the tables are there.
        dsn: the same for psycopg.
        facts: what a reader must know of the place to judge a figure.
    """

    url: str
    dsn: str
    facts: dict[str, Any]

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection in autocommit."""
        return psycopg.connect(self.dsn, autocommit=True)


@contextmanager
def open_database() -> Iterator[Database]:
    """Yield a fresh database with the tables in it; it is gone afterwards."""
    given = os.environ.get(VARIABLE)
    if given:
        url = make_url(given).set(drivername="postgresql+psycopg")
        with _own_database(url) as own:
            yield _prepared(own, f"from {VARIABLE}")
    else:
        with EmbeddedServer(durable=True, options=_SIZED) as server:
            yield _prepared(make_url(server.url), "embedded")


@contextmanager
def _own_database(server: URL) -> Iterator[URL]:
    name = f"neoq_bench_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(_dsn(server), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield server.set(database=name)
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _prepared(url: URL, origin: str) -> Database:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        migrations.upgrade(connection)
    dsn = _dsn(url)
    with psycopg.connect(dsn, autocommit=True) as driver_connection:
        facts = _facts(driver_connection, origin)
    return Database(url.render_as_string(hide_password=False), dsn, facts)


def _dsn(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def _facts(connection: psycopg.Connection[Any], origin: str) -> dict[str, Any]:
    settings = {name: connection.execute(f"SHOW {name}").fetchone()[0] for name in _SETTINGS}  # type: ignore[index]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),
        "postgresql": connection.info.parameter_status("server_version"),
        "server": origin,
        "transport": "unix socket" if connection.info.host.startswith("/") else "TCP",
        "settings": settings,
        "python": platform.python_version(),
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "sqlalchemy": version("sqlalchemy"),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "sqla_neoq": _own_version(),
    }


def _own_version() -> str:
    from sqla_neoq._version import __version__

    return __version__


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
