"""What the server refuses while the tables are looked at or changed, as a sentence and what to do about it.

Only what the machine around the migration decides is explained: rights, locks, timeouts, names that are taken. Anything
else is a defect, and passes as it is.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from sqla_neoq.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

_LEFTOVERS: Final = (
    "If they are left over from a broken installation, the lines of python -m sqla_neoq.migrate sql --from 1 --to 0 "
    "remove them, with the jobs in them; if they are yours, give sqla_neoq a schema of its own: "
    "migrate(..., schema='neoq')."
)

_KNOWN: Final = {
    "42501": (
        "the database role lacks a right that this needs",
        (
            "Whoever migrates owns the tables and may CREATE in their schema; whoever runs or enqueues jobs was named "
            "to python -m sqla_neoq.migrate up --grant ROLE."
        ),
    ),
    "55P03": (
        "a statement waited longer than lock_timeout for a lock that another transaction holds",
        (
            "Try again when that transaction has ended (pg_stat_activity shows it), or pass migrate() a longer "
            "lock_timeout: what waits makes the others wait behind it."
        ),
    ),
    "40P01": (
        "the migration and another transaction waited for each other, and the server gave up this one",
        "Try again.",
    ),
    "57014": (
        "a statement was cancelled, by statement_timeout or by somebody",
        "Migrate as a role without it (ALTER ROLE ... SET statement_timeout = 0), or SET LOCAL it in the revision.",
    ),
    "3F000": (
        "the schema is not there",
        "Create it first: op.execute('CREATE SCHEMA ...') in the revision, or up --create-schema.",
    ),
    "2BP01": (
        "something of the application's depends on the tables",
        "Remove the foreign key or view that is named first, in the same revision or a later one.",
    ),
    "42P01": ("a table, index or sequence that belongs to the installed version is not there", _LEFTOVERS),
    "42703": ("a column that belongs to the installed version is not there", _LEFTOVERS),
    "42P07": ("a name that sqla_neoq uses is taken", _LEFTOVERS),
    "42710": ("a name that sqla_neoq uses is taken", _LEFTOVERS),
    "42723": ("a name that sqla_neoq uses is taken", _LEFTOVERS),
    "25006": ("the connection is read-only", "Migrate on the primary server, in a transaction that may write."),
}


@contextmanager
def explained(consequence: str = "nothing was changed") -> Iterator[None]:
    """Raise what the server refuses as a SchemaError: a sentence, the server's own, and the remedy."""
    try:
        yield
    except DBAPIError as error:
        known = _KNOWN.get(_sqlstate(error))
        if known is None:
            raise
        sentence, remedy = known
        said = " ".join(str(error.orig).split())
        raise SchemaError(f"{sentence}; {consequence}: {said}", remedy) from error


def _sqlstate(error: DBAPIError) -> str:
    # psycopg and asyncpg call it sqlstate, psycopg2 pgcode.
    orig: Any = error.orig
    return str(getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None))


def in_transaction(connection: Connection) -> bool:
    """Return whether what is executed stays undone until a commit; in autocommit it does not."""
    connection.execute(text("SELECT set_config('neoq.probe', 'set', true)"))
    return bool(connection.scalar(text("SELECT current_setting('neoq.probe', true) = 'set'")))


def refuse_autocommit(connection: Connection) -> None:
    """Refuse a connection on which a step that fails would stay half done.

    Raises:
        SchemaError: it is in autocommit.
    """
    if not in_transaction(connection):
        raise SchemaError(
            "the connection is in autocommit, so a migration that fails would stay half done; nothing was changed",
            "Migrate on a connection with transactions: without isolation_level='AUTOCOMMIT' in env.py.",
        )


def refuse_foreign(names: list[str]) -> None:
    """Refuse what has our names and no version that says it is ours.

    Raises:
        SchemaError: there is any.
    """
    if names:
        raise SchemaError(
            f"there is {', '.join(names)} already, which this release did not make; nothing was changed", _LEFTOVERS
        )
