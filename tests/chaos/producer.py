"""``python -m chaos.producer``: enqueues jobs in transactions of its own until told to stop, and notes what committed.

One JSON object on the command line says what: ``url``, ``number`` (keys are number · 10⁹ and up), ``rate`` in jobs a
second, ``jobs`` at most, ``tasks`` to choose from, ``seconds`` that a job takes, and at most ``batch`` jobs in each
transaction, and ``using``, options in seconds. It ends on SIGTERM, or when its number of jobs is reached.
"""

import json
import random
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from chaos import pooled, tasks
from chaos.ledger import Ledger, here
from sqla_neoq import enqueue_many
from sqla_neoq.dialects import engine_of

TASKS = {task.name: task for task in vars(tasks).values() if hasattr(task, "enqueue")}


class Producer:
    """One producer; ``told_to_stop`` is set by the signal.

    Args:
        options: the JSON object.
        ledger: where to note.
    """

    def __init__(self, options: dict[str, Any], ledger: Ledger) -> None:
        self._options = options
        self._ledger = ledger
        self._key = options["number"] * 10**9
        self._random = random.Random(options["number"])
        self.told_to_stop = False

    def run(self) -> None:
        """Produce."""
        engine = pooled.engine() if self._options.get("pooled") else engine_of(self._options["url"], pool=False)
        began, made = time.monotonic(), 0
        most = self._options.get("jobs") or 10**12
        while not self.told_to_stop and made < most:
            try:
                with engine.connect() as connection:
                    while not self.told_to_stop and made < most:
                        made += self._one_transaction(connection, most - made)
                        ahead = made / self._options["rate"] - (time.monotonic() - began)
                        if ahead > 0:
                            time.sleep(ahead)
            except (SQLAlchemyError, OSError):
                time.sleep(0.1)
        engine.dispose()

    def _one_transaction(self, connection: Connection, most: int) -> int:
        count = min(most, self._random.randint(1, self._options.get("batch", 3)))
        keys = [self._key + number for number in range(count)]
        self._key += count
        seconds = self._options.get("seconds", 0.0)
        using = {name: timedelta(seconds=value) for name, value in self._options.get("using", {}).items()}
        transaction = connection.begin()
        jobs = []
        for key in keys:
            task = TASKS[self._random.choice(self._options["tasks"])]
            more = {"seconds": seconds} if seconds and task.name in {"chaos:effect", "chaos:plain"} else {}
            jobs.append(task.using(**using).job(key=key, **more))
        enqueue_many(connection, jobs)
        try:
            transaction.commit()
        except (SQLAlchemyError, OSError):
            self._ledger.note_all("unknown", keys)
            raise
        self._ledger.note_all("committed", keys)
        return count


def main() -> None:
    """Read the options and produce."""
    producer = Producer(json.loads(sys.argv[1]), here())

    def stop(*_: Any) -> None:
        producer.told_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    producer.run()


if __name__ == "__main__":
    main()
