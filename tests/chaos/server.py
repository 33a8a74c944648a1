"""A PostgreSQL of the harness's own, with the ways in which servers go away and come back."""

import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import make_url
from support.databases import migrate
from support.servers import libpq
from support.waiting import eventually

from sqla_neoq.embedded import EmbeddedServer

# A crash of the server must lose no commit, and a crash of the machine is not among the faults: the log is written, and
# not synced.
_SETTINGS = {"synchronous_commit": "on", "max_connections": "100"}

_TABLES = """
CREATE TABLE chaos_effects (
    key bigint NOT NULL, token bigint NOT NULL, tx xid8 NOT NULL DEFAULT pg_current_xact_id()
);
CREATE TABLE chaos_moves (
    n bigint GENERATED ALWAYS AS IDENTITY, job bigint NOT NULL, key bigint, was text NOT NULL, became text NOT NULL,
    token bigint, tx xid8 NOT NULL DEFAULT pg_current_xact_id(), at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE FUNCTION chaos_note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO chaos_moves (job, key, was, became, token)
        VALUES (OLD.id, (OLD.payload ->> 'key')::bigint, OLD.status, 'dead', OLD.claim_token);
        RETURN OLD;
    END IF;
    IF OLD.status = NEW.status AND OLD.claim_token IS NOT DISTINCT FROM NEW.claim_token THEN
        RETURN NEW;  -- cancel() asks a running job to stop
    END IF;
    INSERT INTO chaos_moves (job, key, was, became, token) VALUES (
        NEW.id, (NEW.payload ->> 'key')::bigint, OLD.status, NEW.status, coalesce(OLD.claim_token, NEW.claim_token)
    );
    RETURN NEW;
END $$;
CREATE TRIGGER chaos_note AFTER UPDATE OF status OR DELETE ON neoq_jobs FOR EACH ROW EXECUTE FUNCTION chaos_note();
"""


class Server:
    """Started with the queue's tables, the effects, and the trigger that notes the moves.

    Args:
        settings: further server settings.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="neoq-chaos-", ignore_cleanup_errors=True)
        self._embedded = EmbeddedServer(
            Path(self._home.name, "postgresql"), durable=False, options={**_SETTINGS, **(settings or {})}
        )

    def start(self) -> None:
        """Start it and install the tables."""
        self._embedded.start()
        migrate(self.url, None)
        with self.connect() as connection:
            connection.execute(_TABLES.encode())

    def close(self) -> None:
        """Stop it for good."""
        self._embedded.stop()
        self._home.cleanup()

    @property
    def url(self) -> str:
        """The SQLAlchemy URL, over the unix socket."""
        return self._embedded.url

    @property
    def socket(self) -> str:
        """The path of its socket."""
        return f"{make_url(self.url).query['host']}/.s.PGSQL.5432"

    @property
    def log(self) -> str:
        """What the server says."""
        return (self._embedded.data_dir / "server.log").read_text(errors="replace")

    @contextmanager
    def connect(self, within: float = 60.0) -> Any:
        """Yield an autocommit connection of the harness's own; waits for a server that is on its way up."""
        until = time.monotonic() + within
        while True:
            try:
                connection = psycopg.connect(
                    libpq(make_url(self.url)), autocommit=True, application_name="chaos", connect_timeout=5
                )
                break
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        with connection:
            yield connection

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with self.connect() as connection:
            return connection.execute(query.encode(), parameters or None).fetchall()

    def value(self, query: str, *parameters: Any) -> Any:
        """Return the first value of the first row."""
        return self.rows(query, *parameters)[0][0]

    def execute(self, *statements: str) -> None:
        """Execute statements, each in a transaction of its own."""
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    # --- faults ---

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT is PostgreSQL's fast shutdown, SIGQUIT the immediate one, SIGKILL a crash."""
        if how is signal.SIGINT:
            self._embedded.stop()
            return
        pid = self._postmaster()
        os.kill(pid, how)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), within=30)
        self._embedded.stop()

    def start_again(self) -> None:
        """Start it on the same data, at the same URL."""
        self._embedded.start()

    def kill_a_backend(self) -> None:
        """Kill one backend with SIGKILL: the server throws everybody out and recovers."""
        pid = self.value(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() LIMIT 1"
        )
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def terminate(self, where: str = "true", limit: int = 1000) -> int:
        """Terminate the backends of others; returns how many."""
        return int(
            self.value(
                "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity WHERE "
                f"backend_type = 'client backend' AND application_name <> 'chaos' AND ({where}) "
                f"ORDER BY random() LIMIT {limit}) AS victim"
            )
        )

    def set(self, **settings: str | None) -> None:
        """Change settings of the whole server, and have them read; None takes one back."""
        for name, value in settings.items():
            self.execute(f"ALTER SYSTEM RESET {name}" if value is None else f"ALTER SYSTEM SET {name} = '{value}'")
        self.execute("SELECT pg_reload_conf()")

    def _postmaster(self) -> int:
        lines = (self._embedded.data_dir / "data" / "postmaster.pid").read_text().splitlines()
        return int(lines[0])
