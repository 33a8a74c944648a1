"""The tables, as declarative SQLAlchemy classes: what a job is, and what is remembered of it.

The DDL itself lives in :mod:`sqla_neoq.migrations` as numbered steps; these classes describe its result for queries,
``session.add(Job(...))`` and the host's relationships. A test keeps the two equal.

The tables name no schema: they are found by the connection's ``search_path``, or in the schema that the engine's
execution option ``neoq_schema`` names.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    SmallInteger,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

MAX_QUEUE_LENGTH: Final = 128
MAX_TASK_LENGTH: Final = 255
MAX_FINGERPRINT_LENGTH: Final = 255
MIN_PRIORITY: Final = -100
MAX_PRIORITY: Final = 100
DEFAULT_MAX_RETRIES: Final = 23
"""As in neoq and Sidekiq: 24 attempts over about two weeks. Applies where neither the job nor its task says another."""

# The index predicates are constant SQL, never bound values: ON CONFLICT must repeat them word for word, and a bound
# value stops matching once PostgreSQL has moved a prepared statement to its generic plan.
WAITING_SQL: Final = "status IN ('new', 'failed')"
UNFINISHED_SQL: Final = "fingerprint IS NOT NULL AND status IN ('new', 'running', 'failed')"


def _in_calendar(column: str) -> str:
    """Return the condition that Python's datetime can hold a time, which 'infinity' is not."""
    return f"{column} >= '0001-01-01 UTC' AND {column} < '10000-01-01 UTC'"


_json = JSON().with_variant(JSONB(), "postgresql")
_time = DateTime(timezone=True)


class Base(DeclarativeBase):
    """The declarative base of the library's own tables; hosts keep theirs."""

    metadata = MetaData()


claim_tokens = Sequence("neoq_claim_tokens", metadata=Base.metadata, data_type=BigInteger)
"""Where fencing tokens come from: each claim's is higher than every earlier one's."""


class Job(Base):
    """One job that is waiting, running, or finished within the retention.

    ``session.add(Job(queue="greetings", payload={"message": "hello"}))`` is a valid enqueue for jobs without a
    fingerprint; everything but ``queue`` has a default in the database. Where ``neoq_schema`` names the tables' schema,
    only ``enqueue()`` follows it: a flush goes by the search_path, or the engine's own ``schema_translate_map``.
    Nothing but :mod:`sqla_neoq.statements` changes ``status``.
    """

    __tablename__ = "neoq_jobs"

    id: Mapped[int] = mapped_column(BigInteger, Identity())
    queue: Mapped[str] = mapped_column(Text)
    task: Mapped[str | None] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, server_default=text("'new'"))
    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    payload: Mapped[Any] = mapped_column(_json, nullable=False, server_default=text("'{}'::jsonb"))
    fingerprint: Mapped[str | None] = mapped_column(Text)
    run_after: Mapped[datetime] = mapped_column(_time, server_default=text("now()"))
    deadline: Mapped[datetime | None] = mapped_column(_time)
    retries: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    # NULL means "as the task says": a producer that only knows a queue's name cannot know its handler's policy.
    max_retries: Mapped[int | None] = mapped_column(Integer)
    crashes: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    created_at: Mapped[datetime] = mapped_column(_time, server_default=text("now()"))
    ran_at: Mapped[datetime | None] = mapped_column(_time)
    finished_at: Mapped[datetime | None] = mapped_column(_time)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(_time)
    worker_id: Mapped[int | None] = mapped_column(BigInteger)
    claim_token: Mapped[int | None] = mapped_column(BigInteger)
    error: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (
        PrimaryKeyConstraint("id", name="neoq_jobs_pkey"),
        CheckConstraint(f"length(queue) BETWEEN 1 AND {MAX_QUEUE_LENGTH}", name="neoq_jobs_queue_length"),
        CheckConstraint(f"length(task) BETWEEN 1 AND {MAX_TASK_LENGTH}", name="neoq_jobs_task_length"),
        CheckConstraint(
            f"length(fingerprint) BETWEEN 1 AND {MAX_FINGERPRINT_LENGTH}", name="neoq_jobs_fingerprint_length"
        ),
        CheckConstraint(
            "status IN ('new', 'running', 'failed', 'processed', 'cancelled')", name="neoq_jobs_status_known"
        ),
        CheckConstraint(f"priority BETWEEN {MIN_PRIORITY} AND {MAX_PRIORITY}", name="neoq_jobs_priority_in_range"),
        CheckConstraint("retries >= 0", name="neoq_jobs_retries_not_negative"),
        CheckConstraint("max_retries >= 0", name="neoq_jobs_max_retries_not_negative"),
        CheckConstraint("crashes >= 0", name="neoq_jobs_crashes_not_negative"),
        *(
            CheckConstraint(_in_calendar(column), name=f"neoq_jobs_{column}_in_calendar")
            for column in ("run_after", "deadline", "created_at")
        ),
        CheckConstraint("(status = 'running') = (claim_token IS NOT NULL)", name="neoq_jobs_running_has_token"),
        CheckConstraint(
            "(status IN ('processed', 'cancelled')) = (finished_at IS NOT NULL)",
            name="neoq_jobs_finished_has_time",
        ),
        # The claim walks this in order, one (queue, priority) lane at a time.
        Index(
            "neoq_jobs_claim_idx",
            "queue",
            text("priority DESC"),
            "run_after",
            "id",
            postgresql_where=text(WAITING_SQL),
        ),
        Index(
            "neoq_jobs_fingerprint_key",
            "queue",
            "fingerprint",
            unique=True,
            postgresql_where=text(UNFINISHED_SQL),
        ),
        # The second column, for those that somebody asked to stop: few, while of each worker there are many.
        Index("neoq_jobs_running_idx", "worker_id", "cancel_requested_at", postgresql_where=text("status = 'running'")),
        Index(
            "neoq_jobs_deadline_idx",
            "deadline",
            postgresql_where=text(f"deadline IS NOT NULL AND {WAITING_SQL}"),
        ),
        # Suspects: jobs under which a worker died twice. They are few, and claimed apart from all others.
        Index(
            "neoq_jobs_suspect_idx",
            "queue",
            "run_after",
            postgresql_where=text(f"crashes > 1 AND {WAITING_SQL}"),
        ),
        # BRIN, because pruning may be slow to look but must cost the completion of a job next to nothing.
        Index("neoq_jobs_finished_idx", "finished_at", postgresql_using="brin"),
    )


class DeadJob(Base):
    """A job that will not be tried again, with everything that was known of it."""

    __tablename__ = "neoq_dead_jobs"

    id: Mapped[int] = mapped_column(BigInteger, autoincrement=False)
    queue: Mapped[str] = mapped_column(Text)
    task: Mapped[str | None] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(SmallInteger)
    payload: Mapped[Any] = mapped_column(_json, nullable=False)
    fingerprint: Mapped[str | None] = mapped_column(Text)
    run_after: Mapped[datetime] = mapped_column(_time)
    deadline: Mapped[datetime | None] = mapped_column(_time)
    retries: Mapped[int] = mapped_column(Integer)
    max_retries: Mapped[int | None] = mapped_column(Integer)
    crashes: Mapped[int] = mapped_column(SmallInteger)
    created_at: Mapped[datetime] = mapped_column(_time)
    ran_at: Mapped[datetime | None] = mapped_column(_time)
    died_at: Mapped[datetime] = mapped_column(_time, server_default=text("now()"))
    reason: Mapped[str] = mapped_column(Text)
    worker_id: Mapped[int | None] = mapped_column(BigInteger)
    error: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (
        PrimaryKeyConstraint("id", name="neoq_dead_jobs_pkey"),
        CheckConstraint(
            "reason IN ('exhausted', 'discarded', 'deadline', 'crashed')", name="neoq_dead_jobs_reason_known"
        ),
        Index("neoq_dead_jobs_died_idx", "died_at"),
    )


class Worker(Base):
    """One running runner. The row is its lease: while the heartbeat is fresh, its running jobs are its own."""

    __tablename__ = "neoq_workers"

    id: Mapped[int] = mapped_column(BigInteger, Identity())
    name: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(Integer)
    queues: Mapped[Any] = mapped_column(_json, nullable=False)
    started_at: Mapped[datetime] = mapped_column(_time, server_default=text("now()"))
    heartbeat_at: Mapped[datetime] = mapped_column(_time, server_default=text("now()"))
    # Whether it holds an advisory lock that dies with its process: then silence and a free lock prove its death.
    listening: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    version: Mapped[str] = mapped_column(Text)

    __table_args__ = (PrimaryKeyConstraint("id", name="neoq_workers_pkey"),)


class Failure(Base):
    """One attempt that did not succeed: what happened, when, and where."""

    __tablename__ = "neoq_failures"

    id: Mapped[int] = mapped_column(BigInteger, Identity())
    # No foreign key: history must never hold up the work it is about.
    job_id: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(Integer)
    worker_id: Mapped[int | None] = mapped_column(BigInteger)
    started_at: Mapped[datetime | None] = mapped_column(_time)
    failed_at: Mapped[datetime] = mapped_column(_time, server_default=text("now()"))
    kind: Mapped[str] = mapped_column(Text)
    message: Mapped[str] = mapped_column(Text)
    traceback: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (
        PrimaryKeyConstraint("id", name="neoq_failures_pkey"),
        CheckConstraint(
            "kind IN ('error', 'retry', 'timeout', 'discarded', 'crashed')", name="neoq_failures_kind_known"
        ),
        Index("neoq_failures_job_idx", "job_id"),
        Index("neoq_failures_failed_idx", "failed_at", postgresql_using="brin"),
    )


class Meta(Base):
    """One row: the version of the tables."""

    __tablename__ = "neoq_meta"

    id: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"), autoincrement=False)
    version: Mapped[int] = mapped_column(Integer)

    __table_args__ = (
        PrimaryKeyConstraint("id", name="neoq_meta_pkey"),
        CheckConstraint("id = 1", name="neoq_meta_one_row"),
    )


TABLES: Final = frozenset(Base.metadata.tables)
"""The names of all the tables."""
