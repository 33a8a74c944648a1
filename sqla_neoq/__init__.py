"""sqla_neoq: background jobs in the SQL database you already have, inside the SQLAlchemy transaction you already hold.

Everything an application needs is here; the rest of the package is for reading.
"""

from sqla_neoq._version import __version__
from sqla_neoq.config import RunnerConfig
from sqla_neoq.context import JobContext, current_job
from sqla_neoq.enqueue import cancel, enqueue, enqueue_async, enqueue_many, enqueue_many_async
from sqla_neoq.errors import (
    ClaimLost,
    ConfigurationError,
    DatabaseUnavailable,
    DuplicateTask,
    JobCancelled,
    JobTimeout,
    NeoqError,
    NeoqWarning,
    NoCurrentJob,
    SchemaError,
    TaskNotFound,
)
from sqla_neoq.insertion import Enqueued
from sqla_neoq.models import DeadJob, Failure, Job, Meta, Worker
from sqla_neoq.newjob import NewJob
from sqla_neoq.retries import Discard, Retry, Snooze, constant, exponential, sidekiq
from sqla_neoq.runner import Ended, Health, Runner
from sqla_neoq.tally import Counts
from sqla_neoq.tasks import Handler, Task, handler, task

__all__ = [
    "ClaimLost",
    "ConfigurationError",
    "Counts",
    "DatabaseUnavailable",
    "DeadJob",
    "Discard",
    "DuplicateTask",
    "Ended",
    "Enqueued",
    "Failure",
    "Handler",
    "Health",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobTimeout",
    "Meta",
    "NeoqError",
    "NeoqWarning",
    "NewJob",
    "NoCurrentJob",
    "Retry",
    "Runner",
    "RunnerConfig",
    "SchemaError",
    "Snooze",
    "Task",
    "TaskNotFound",
    "Worker",
    "__version__",
    "cancel",
    "constant",
    "current_job",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
    "exponential",
    "handler",
    "sidekiq",
    "task",
]
