"""A backend of ``django.tasks``, which came with Django 6.

A result is the job's own row, with what the task returned in its payload. So it is there for as long as the workers
keep finished jobs (``--retention``).
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.tasks import Task, TaskResult, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TaskError
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_enqueued
from django.utils import timezone
from django.utils.module_loading import import_string

from sqla_neoq import enqueue
from sqla_neoq.contrib.django.models import DeadJob, Failure, Job
from sqla_neoq.newjob import checked_retries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NAME: Final = "django.tasks"
"""The task of every job that this backend enqueues; its function is in :mod:`.worker`."""

_OPTIONS: Final = {"database", "max_retries", "timeout"}
_STATUSES: Final = {
    "new": TaskResultStatus.READY,
    "failed": TaskResultStatus.READY,  # it will be tried again
    "running": TaskResultStatus.RUNNING,
    "processed": TaskResultStatus.SUCCESSFUL,
    "cancelled": TaskResultStatus.FAILED,
}


class NeoqBackend(BaseTaskBackend):
    """Enqueues Django's tasks as jobs, in the open transaction of a database of the settings.

    ``OPTIONS``: ``database``, an alias (``"default"``); ``max_retries``, how often a task that raised is tried again
    (None means 23); ``timeout``, the seconds that one attempt may take (30; None for ever).
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        where = f"TASKS[{alias!r}]['OPTIONS']"
        if unknown := self.options.keys() - _OPTIONS:
            raise ImproperlyConfigured(f"{where}: {sorted(unknown)} mean nothing here; there are {sorted(_OPTIONS)}")
        self.database: str = self.options.get("database", DEFAULT_DB_ALIAS)
        self.timeout: float | None = self.options.get("timeout", 30)
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and self.timeout > 0):
            raise ImproperlyConfigured(f"{where}['timeout']={self.timeout!r}: expected seconds above 0, or None")
        try:
            self.max_retries = checked_retries(self.options.get("max_retries"))
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(f"{where}: {error}") from error

    def enqueue(self, task: Task, args: Iterable[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Enqueue it; the job exists if the open transaction commits."""
        self.validate_task(task)
        result = TaskResult(
            task=task,
            id="",
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        payload = {
            "backend": self.alias,
            "path": task.module_path,
            "args": result.args,
            "kwargs": result.kwargs,
        }
        run_after = task.run_after
        if run_after is not None:
            payload["run_after"] = run_after.isoformat()
            if timezone.is_naive(run_after):
                run_after = timezone.make_aware(run_after)
        # Outside atomic() this is a transaction of its own; inside it adds nothing.
        with transaction.atomic(using=self.database, savepoint=False):
            enqueued = enqueue(
                connections[self.database],
                task.queue_name,
                payload,
                task=NAME,
                run_after=run_after,
                priority=int(task.priority),
                max_retries=self.max_retries,
            )
            enqueued_at = Job.objects.using(self.database).values_list("created_at", flat=True).get(id=enqueued.id)
        # As Django's own backends do with a dataclass that is frozen for everybody else.
        object.__setattr__(result, "id", str(enqueued.id))
        object.__setattr__(result, "enqueued_at", enqueued_at)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return what is known of a job.

        Raises:
            TaskResultDoesNotExist: there is none, or not any more, or it is not one of this backend.
        """
        id_ = int(result_id) if re.fullmatch(r"[0-9]{1,18}", str(result_id)) else -1
        wanted = {"id": id_, "task": NAME, "payload__backend": self.alias}
        # In one snapshot each, and the dead last: a job may die in between, but none comes back to life.
        job = Job.objects.using(self.database).filter(**wanted).first()
        if job is None:
            job = DeadJob.objects.using(self.database).filter(**wanted).first()
        if job is None:
            raise TaskResultDoesNotExist(result_id)
        return self._result(job)

    def _result(self, job: Job | DeadJob) -> TaskResult:
        dead = isinstance(job, DeadJob)
        status = TaskResultStatus.FAILED if dead else _STATUSES[job.status]
        failures = list(Failure.objects.using(self.database).filter(job_id=job.id).order_by("id"))
        workers = [failure.worker_id for failure in failures]
        if not dead and status in {TaskResultStatus.RUNNING, TaskResultStatus.SUCCESSFUL}:
            workers.append(job.worker_id)
        starts = [failure.started_at for failure in failures if failure.started_at is not None]
        finished = status in {TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL}
        ended = job.died_at if dead else job.finished_at
        result = TaskResult(
            task=_task_of(job),
            id=str(job.id),
            status=status,
            enqueued_at=job.created_at,
            started_at=starts[0] if starts else job.ran_at,
            finished_at=ended if finished else None,
            last_attempted_at=job.ran_at,
            args=job.payload["args"],
            kwargs=job.payload["kwargs"],
            backend=self.alias,
            errors=[_error_of(failure) for failure in failures],
            worker_ids=[str(worker) for worker in workers],
        )
        object.__setattr__(result, "_return_value", job.payload.get("result"))
        return result


def task_at(path: str) -> Task:
    """Return the task at a dotted path.

    Raises:
        ImportError: there is none.
    """
    found = import_string(path)
    if not isinstance(found, Task):
        raise ImportError(  # noqa: TRY004 - as import_string says that there is none
            f"{path} is no task but a {type(found).__name__}; decorate it with @task of django.tasks"
        )
    return found


def _task_of(job: Job | DeadJob) -> Task:
    task = task_at(job.payload["path"])
    deferred = job.payload.get("run_after")
    return task.using(
        priority=job.priority,
        queue_name=job.queue,
        run_after=None if deferred is None else datetime.fromisoformat(deferred),
        backend=job.payload["backend"],
    )


def _error_of(failure: Failure) -> TaskError:
    """Return a failure as Django has it, with the path of the exception's class, as far as the traceback tells."""
    name = re.escape(failure.message.partition(":")[0])
    found = re.findall(rf"^((?:[\w.<>]+\.)?{name})(?::|$)", failure.traceback or "", re.MULTILINE)
    path = found[-1] if found else "Exception"
    return TaskError(
        exception_class_path=path if "." in path else f"builtins.{path}", traceback=failure.traceback or failure.message
    )
