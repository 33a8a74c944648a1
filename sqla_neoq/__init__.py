"""sqla_neoq: background jobs in the SQL database you already have, inside the SQLAlchemy transaction you already hold.

Everything an application needs is here; the rest of the package is for reading. Names are imported when they are first
asked for: Alembic loads this package in the middle of its own import, for the plugin, and must not pay for a worker.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from sqla_neoq._version import __version__

if _TYPE_CHECKING:
    from sqla_neoq.config import RunnerConfig
    from sqla_neoq.context import JobContext, current_job
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
    from sqla_neoq.handles import configure
    from sqla_neoq.insertion import Enqueued
    from sqla_neoq.models import DeadJob, Failure, Job, Meta, Worker
    from sqla_neoq.newjob import NewJob
    from sqla_neoq.producer import (
        cancel,
        cancel_async,
        enqueue,
        enqueue_async,
        enqueue_many,
        enqueue_many_async,
        requeue,
        requeue_async,
        requeue_many,
        requeue_many_async,
    )
    from sqla_neoq.retries import Discard, Retry, Snooze, constant, exponential, sidekiq
    from sqla_neoq.runner import Ended, Health, Runner
    from sqla_neoq.tally import Counts
    from sqla_neoq.tasks import Handler, Task, handler, task

_HOMES = {
    "config": ("RunnerConfig",),
    "context": ("JobContext", "current_job"),
    "errors": (
        "ClaimLost",
        "ConfigurationError",
        "DatabaseUnavailable",
        "DuplicateTask",
        "JobCancelled",
        "JobTimeout",
        "NeoqError",
        "NeoqWarning",
        "NoCurrentJob",
        "SchemaError",
        "TaskNotFound",
    ),
    "handles": ("configure",),
    "insertion": ("Enqueued",),
    "models": ("DeadJob", "Failure", "Job", "Meta", "Worker"),
    "newjob": ("NewJob",),
    "producer": (
        "cancel",
        "cancel_async",
        "enqueue",
        "enqueue_async",
        "enqueue_many",
        "enqueue_many_async",
        "requeue",
        "requeue_async",
        "requeue_many",
        "requeue_many_async",
    ),
    "retries": ("Discard", "Retry", "Snooze", "constant", "exponential", "sidekiq"),
    "runner": ("Ended", "Health", "Runner"),
    "tally": ("Counts",),
    "tasks": ("Handler", "Task", "handler", "task"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


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
    "cancel_async",
    "configure",
    "constant",
    "current_job",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
    "exponential",
    "handler",
    "requeue",
    "requeue_async",
    "requeue_many",
    "requeue_many_async",
    "sidekiq",
    "task",
]
