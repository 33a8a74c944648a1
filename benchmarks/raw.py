"""The same work with psycopg alone, on the same tables: what a loop by hand would reach, without any Python handler.

The loops are made to be fast and not to be weak: prepared statements, the library's own batch size, the outcomes of
one batch written in the transaction that claims the next, index scans.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks.jobs import QUEUE, noop

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from benchmarks.database import Database

BATCH: Final = 1000
"""As many as the library claims at once when jobs take no time."""
CHANNEL: Final = "neoq_bench"

# Not "id IN (SELECT ...)", as such loops are mostly written: in a generic plan that becomes a hash join with the whole
# table, which made this loop half as fast at 100,000 jobs and every figure beside it look better than it is.
_CLAIM: Final = """
UPDATE neoq_jobs SET status = 'running', worker_id = 0, claim_token = 1, ran_at = statement_timestamp()
WHERE id = ANY (ARRAY(
    SELECT id FROM neoq_jobs
    WHERE {which} AND status IN ('new', 'failed') AND run_after <= statement_timestamp()
    ORDER BY priority DESC, run_after, id
    LIMIT %s
    FOR UPDATE SKIP LOCKED
))
RETURNING id, task, payload::text
"""
_CLAIM_ONE_QUEUE: Final = _CLAIM.format(which="queue = %s")
_CLAIM_TASK: Final = _CLAIM.format(which="queue = %s AND task = %s")
_CLAIM_QUEUES: Final = _CLAIM.format(which="queue = ANY (%s)")
_COMPLETE: Final = """
UPDATE neoq_jobs SET status = 'processed', finished_at = statement_timestamp(), claim_token = NULL
WHERE id = ANY (%s::bigint[])
"""
_COMPLETE_ONE: Final = """
UPDATE neoq_jobs SET status = 'processed', finished_at = statement_timestamp(), claim_token = NULL
WHERE id = %s AND status = 'running' AND claim_token = 1
"""
_INSERT: Final = "INSERT INTO neoq_jobs (queue, task, payload) VALUES "


def drain(database: Database, queues: Sequence[str] = (QUEUE,), *, task: str | None = None) -> None:
    """Claim and complete until nothing is left, or nothing of that task."""
    asked: list[Any]
    if len(queues) > 1:
        statement, asked = _CLAIM_QUEUES, [list(queues)]
    elif task is None:
        statement, asked = _CLAIM_ONE_QUEUE, [queues[0]]
    else:
        statement, asked = _CLAIM_TASK, [queues[0], task]
    done: list[int] = []
    with _connected(database) as connection:
        while True:
            with connection.transaction():
                if done:
                    connection.execute(_COMPLETE, ("{" + ",".join(map(str, done)) + "}",))
                rows = connection.execute(statement, (*asked, BATCH)).fetchall()
            if not rows and not done:
                return
            done = [row[0] for row in rows]


def drain_writing(database: Database, threads: int) -> None:
    """Claim everything; then each thread, on a connection of its own, writes a row and completes a job at a time."""
    claimed: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _connected(database) as connection:
        while rows := connection.execute(_CLAIM_ONE_QUEUE, (QUEUE, BATCH)).fetchall():
            for row in rows:
                claimed.put(row[0])

    def work() -> None:
        with _connected(database) as connection:
            while True:
                try:
                    job = claimed.get_nowait()
                except queue.Empty:
                    return
                with connection.transaction():
                    connection.execute("INSERT INTO bench_effects (job) VALUES (%s)", (job,))
                    connection.execute(_COMPLETE_ONE, (job,))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def copy(connection: psycopg.Connection[Any], count: int) -> None:
    """Insert jobs with COPY, in one transaction."""
    with (
        connection.transaction(),
        connection.cursor() as cursor,
        cursor.copy("COPY neoq_jobs (queue, task, payload) FROM STDIN") as rows,
    ):
        for number in range(count):
            rows.write_row((QUEUE, noop.name, f'{{"number":{number}}}'))


def insert_rows(connection: psycopg.Connection[Any], count: int) -> None:
    """Insert jobs with one INSERT of many rows that returns their ids, in one transaction."""
    statement = _INSERT + ", ".join(["(%s, %s, %s)"] * count) + " RETURNING id"
    parameters: list[str] = []
    for number in range(count):
        parameters += (QUEUE, noop.name, f'{{"number":{number}}}')
    with connection.transaction():
        connection.execute(statement, parameters).fetchall()


def insert_one_by_one(connection: psycopg.Connection[Any], count: int) -> None:
    """Insert jobs with an INSERT each, in one transaction."""
    statement = _INSERT + "(%s, %s, %s) RETURNING id"
    with connection.transaction():
        for number in range(count):
            connection.execute(statement, (QUEUE, noop.name, f'{{"number":{number}}}'), prepare=True).fetchone()


class Waiter(threading.Thread):
    """Listens, and claims on each notification: the least that a pick-up can take.

    Args:
        database: where.
        most: how many jobs to claim at once. One is enough for one at a time; under load more keeps up.
    """

    def __init__(self, database: Database, most: int = 1) -> None:
        super().__init__(daemon=True)
        self._database = database
        self._most = most
        self.arrivals: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self.listening = threading.Event()
        self.stopping = threading.Event()

    def run(self) -> None:
        """Serve until ``stopping`` is set and one more notification comes, however many are still unread."""
        with _connected(self._database) as listening, _connected(self._database) as claiming:
            listening.execute(f"LISTEN {CHANNEL}")
            self.listening.set()
            for _ in listening.notifies():
                if self.stopping.is_set():
                    return
                rows = claiming.execute(_CLAIM_ONE_QUEUE, (QUEUE, self._most)).fetchall()
                now = time.monotonic()
                for row in rows:
                    self.arrivals.put((json.loads(row[2])["number"], now))
                if rows:
                    claiming.execute(_COMPLETE, ("{" + ",".join(str(row[0]) for row in rows) + "}",))


def _connected(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    connection.prepare_threshold = 0
    # As the library's own connections do: planned anew, the claim costs more than it does.
    connection.execute(
        "SELECT set_config('plan_cache_mode', 'force_generic_plan', false), set_config('jit', 'off', false)"
    )
    return connection
