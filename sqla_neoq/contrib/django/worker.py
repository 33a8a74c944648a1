"""What a worker runs for ``django.tasks``; ``manage.py neoq_worker`` adds it when the settings have such a backend."""

from __future__ import annotations

from datetime import timedelta
from traceback import format_exception
from typing import Any, Final

from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
from django.tasks.base import TaskError
from django.tasks.signals import task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json

from sqla_neoq import Discard, Retry, Snooze, current_job, statements, task
from sqla_neoq.contrib.django.backend import NAME, NeoqBackend, task_at
from sqla_neoq.payloads import encode

BACKENDS: Final = [backend for backend in task_backends.all() if isinstance(backend, NeoqBackend)]


def _timeout() -> timedelta | None:
    """Return the longest of the backends': all their tasks are one to the runner."""
    seconds = [backend.timeout for backend in BACKENDS]
    return None if None in seconds else timedelta(seconds=max(one for one in seconds if one is not None))


@task(name=NAME, timeout=_timeout())
def perform(backend: str, path: str, args: list[Any], kwargs: dict[str, Any], **_: Any) -> None:
    """Run one of Django's tasks; what it returns is written into its payload, with the completion."""
    job = current_job()
    found = task_at(path)
    sender = task_backends[backend]
    result = sender.get_result(str(job.id))
    task_started.send(type(sender), task_result=result)
    context = [TaskContext(task_result=result)] if found.takes_context else []
    try:
        value = normalize_json(found.call(*context, *args, **kwargs))
    except (Retry, Snooze, Discard):
        raise
    except BaseException as error:
        if job.retries >= perform.retries_of(job.max_retries):
            _finish(result, TaskResultStatus.FAILED)
            path_of_class = f"{type(error).__module__}.{type(error).__qualname__}"
            result.errors.append(
                TaskError(exception_class_path=path_of_class, traceback="".join(format_exception(error)))
            )
            task_finished.send(type(sender), task_result=result)
        raise
    if value is not None:
        job.connection.execute(statements.add_to_payload(), {"job": job.id, "more": encode({"result": value})})
    _finish(result, TaskResultStatus.SUCCESSFUL)
    object.__setattr__(result, "_return_value", value)
    task_finished.send(type(sender), task_result=result)


def _finish(result: TaskResult, status: TaskResultStatus) -> None:
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", timezone.now())
