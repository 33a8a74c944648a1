"""The run's databases: one server for all xdist workers, one database a worker, cloned from a migrated template."""

import fcntl
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateSchema

from sqla_neoq import migrations
from support.servers import libpq

# An earlier test's transaction that is still open must fail this one with its statement, not hang it.
_TRUNCATE = r"""
DO $$
DECLARE
    names text;
BEGIN
    SELECT string_agg(format('%I.%I', schemaname, tablename), ', ') INTO STRICT names
    FROM pg_tables WHERE tablename LIKE 'neoq\_%' AND tablename <> 'neoq_meta';
    SET LOCAL lock_timeout = '5s';
    EXECUTE 'TRUNCATE ' || names || ' RESTART IDENTITY';
END $$
"""
_OTHERS = """
SELECT pid, state, query FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
"""


@dataclass(frozen=True)
class Databases:
    """Makes and drops databases on the run's server; all of their names begin with ``prefix``."""

    server_url: str
    prefix: str
    timezone: str
    schema: str | None

    @property
    def template(self) -> str:
        return f"{self.prefix}_template"

    def create(self, name: str | None = None, *, template: str | None = None) -> str:
        """Create a database, empty or as a copy of ``template``, and return its URL.

        Its sessions have the time zone of ``--pg-timezone``, and with ``--pg-schema`` that schema on their search_path.
        """
        name = name or f"{self.prefix}_{uuid.uuid4().hex[:12]}"
        target = sql.Identifier(name)
        with self._admin() as connection:
            source = sql.Identifier(template or "template0")
            connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(target, source))
            settings = {"timezone": sql.Literal(self.timezone)}
            if self.schema is not None:
                settings["search_path"] = sql.SQL("{}, public").format(sql.Identifier(self.schema))
            for setting, value in settings.items():
                statement = sql.SQL("ALTER DATABASE {} SET {} TO {}")
                connection.execute(statement.format(target, sql.Identifier(setting), value))
        return make_url(self.server_url).set(database=name).render_as_string(hide_password=False)

    def create_template(self) -> None:
        migrate(self.create(self.template), self.schema)

    def drop(self, name_or_url: str) -> None:
        """Drop a database, with whatever is still connected to it."""
        name = make_url(name_or_url).database if "://" in name_or_url else name_or_url
        with self._admin() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(str(name))))

    def _admin(self) -> AbstractContextManager[psycopg.Connection]:
        return closing(psycopg.connect(libpq(make_url(self.server_url)), autocommit=True))


def migrate(url: str, schema: str | None) -> None:
    """Install the tables at ``url``, in a schema made for them if one is named."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        if schema is not None:
            connection.execute(CreateSchema(schema, if_not_exists=True))
        migrations.upgrade(connection, schema=schema)


def truncate(url: str) -> None:
    """Empty the tables and restart their ids, whichever schema they are in."""
    with closing(psycopg.connect(libpq(make_url(url)), autocommit=True)) as connection:
        try:
            connection.execute(_TRUNCATE)
        except psycopg.errors.LockNotAvailable as error:
            others = connection.execute(_OTHERS).fetchall()
            raise AssertionError(f"an earlier test left a transaction open: {others}") from error


@contextmanager
def shared(
    directory: Path, open_server: Callable[[], AbstractContextManager[str]], *, timezone: str, schema: str | None
) -> Iterator[Databases]:
    """Open the run's server once for all processes that share ``directory``.

    The first to come opens it, and closes it when the last has left: each user holds a shared lock meanwhile, which the
    kernel lets go when a worker crashes.
    """
    state = directory / "postgresql.json"
    with (
        (directory / "postgresql.users").open("w") as users,
        (directory / "postgresql.lock").open("w") as opening,
        ExitStack() as stack,
    ):
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(opening, fcntl.LOCK_EX)
        if state.exists():
            databases = Databases(**json.loads(state.read_text()), timezone=timezone, schema=schema)
        else:
            url = stack.enter_context(open_server())
            databases = Databases(url, f"neoq_test_{uuid.uuid4().hex[:8]}", timezone, schema)
            stack.callback(databases.drop, databases.template)
            databases.create_template()
            state.write_text(json.dumps({"server_url": url, "prefix": databases.prefix}))
            stack.callback(state.unlink)
            stack.callback(fcntl.flock, users, fcntl.LOCK_EX)
        fcntl.flock(opening, fcntl.LOCK_UN)
        yield databases
