"""All SQL that touches the tables, each statement as a function that returns a SQLAlchemy executable.

Nothing here does I/O, and nothing elsewhere writes a job's status. Three habits recur:

* **Lists travel as one text parameter**, JSON or an array literal, so that each statement has one form for one job
  or ten thousand, on every driver, and is prepared once.
* **Every write from** ``running`` **is fenced**: it repeats ``status = 'running' AND claim_token = :token``, and the
  statement returns the ids of the outcomes that were *lost* because no such row was there any more.
* **The database's clock decides**, through ``statement_timestamp()``: ``now()`` is the transaction's start, which may
  be long ago in a caller's transaction, and in the runner's own may lie before the commit that woke it.

Where to look: :mod:`.producing` (enqueue, cancel, requeue), :mod:`.claiming`, :mod:`.outcomes`, :mod:`.liveness`
(workers and rescue), :mod:`.housekeeping`; :mod:`.parts` holds what they share.
"""

from sqla_neoq.statements.claiming import claim_due, claim_suspect
from sqla_neoq.statements.housekeeping import bury_overdue, prune_failures, prune_jobs
from sqla_neoq.statements.liveness import (
    advisory_lock,
    beat,
    jobs_oid,
    orphans,
    register_worker,
    remove_dead_workers,
    rescue,
    unregister_worker,
)
from sqla_neoq.statements.outcomes import (
    add_to_payload,
    bury,
    complete,
    complete_and_delete,
    fail,
    finish_cancelled,
    put_back,
    put_back_strays,
)
from sqla_neoq.statements.parts import array_literal
from sqla_neoq.statements.producing import cancel_job, find_unfinished, insert_jobs, requeue_dead

__all__ = [
    "add_to_payload",
    "advisory_lock",
    "array_literal",
    "beat",
    "bury",
    "bury_overdue",
    "cancel_job",
    "claim_due",
    "claim_suspect",
    "complete",
    "complete_and_delete",
    "fail",
    "find_unfinished",
    "finish_cancelled",
    "insert_jobs",
    "jobs_oid",
    "orphans",
    "prune_failures",
    "prune_jobs",
    "put_back",
    "put_back_strays",
    "register_worker",
    "remove_dead_workers",
    "requeue_dead",
    "rescue",
    "unregister_worker",
]
