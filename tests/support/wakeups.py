"""What a listening runner would hear: a raw connection that is hungry, and knows when it has heard everything."""

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
from sqlalchemy import URL, make_url

from sqla_neoq import statements
from support.servers import libpq
from support.waiting import eventually


class Ears:
    """A connection that LISTENs, and holds the shared lock of each queue it is hungry for."""

    def __init__(self, connection: psycopg.Connection, table: str) -> None:
        self._connection = connection
        self._oid = connection.execute("SELECT %s::regclass::oid::bigint", [table]).fetchone()[0]
        self._numbers = itertools.count()
        self._payloads: list[str] = []
        connection.add_notify_handler(lambda notify: self._payloads.append(notify.payload))
        connection.execute("LISTEN neoq")

    def be_hungry(self, *queues: str) -> None:
        for queue in queues:
            self._connection.execute(statements.advisory_lock("pg_advisory_lock_shared"), [f"queue:{queue}", self._oid])

    def heard(self) -> list[str]:
        """Return the queues announced by the transactions that have committed, each time it was said.

        Notifications come in the order of the commits: what was said before is there when its own word is.
        """
        last = f"{next(self._numbers)} said to myself"
        self._connection.execute("SELECT pg_notify('neoq', %s)", [last])
        eventually(lambda: self._connection.execute("SELECT 1") and last in self._payloads)
        said = self._payloads[: self._payloads.index(last)]
        del self._payloads[: len(said) + 1]
        tables, queues = zip(*(payload.split(" ", 1) for payload in said), strict=True) if said else ((), ())
        assert set(tables) <= {str(self._oid)}
        return list(queues)


@contextmanager
def ears(url: str | URL, *queues: str, table: str = "neoq_jobs") -> Iterator[Ears]:
    """Listen at ``url``, hungry for ``queues``."""
    with closing(psycopg.connect(libpq(make_url(url)), autocommit=True)) as connection:
        listening = Ears(connection, table)
        listening.be_hungry(*queues)
        yield listening
