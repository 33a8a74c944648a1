"""Insert jobs at an even rate from a process of its own: ``python -m benchmarks.producer DSN RATE SECONDS [CHANNEL]``.

With psycopg alone: through SQLAlchemy 2,000 transactions a second would take a processor of their own. With a channel
each transaction notifies there too, for the raw loop. At the end it writes as JSON when each COMMIT was answered, by
the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import psycopg

from benchmarks.jobs import QUEUE, mark


def main(dsn: str, rate: int, seconds: float, channel: str | None) -> None:
    """Share the rate among as many connections as can keep it."""
    connections = max(1, min(16, rate // 100))
    total = int(rate * seconds)
    answers: dict[int, float] = {}
    opened = threading.Barrier(connections + 1)
    begin: list[float] = []

    def produce(first: int) -> None:
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=0) as connection:
            opened.wait()
            opened.wait()
            for number in range(first, total, connections):
                pause = begin[0] + number / rate - time.monotonic()
                if pause > 0:
                    time.sleep(pause)
                parameters = (QUEUE, mark.name, f'{{"number":{number}}}')
                insert = "INSERT INTO neoq_jobs (queue, task, payload) VALUES (%s, %s, %s)"
                if channel is None:
                    connection.execute(insert, parameters)
                else:
                    notify = "SELECT pg_notify(%s, %s) FROM added"
                    connection.execute(f"WITH added AS ({insert} RETURNING 1) {notify}", (*parameters, channel, QUEUE))
                answers[number] = time.monotonic()

    threads = [threading.Thread(target=produce, args=(first,)) for first in range(connections)]
    for thread in threads:
        thread.start()
    opened.wait()
    begin.append(time.monotonic())
    opened.wait()
    for thread in threads:
        thread.join()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
