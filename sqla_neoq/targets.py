"""What a command line points at: modules, the tasks in them, and objects by name.

There is no app object and no registry. A module's tasks are the ``Task`` and ``Handler`` objects among its attributes,
whether it defines or imports them. What cannot be found is a ``TaskNotFound`` with a sentence; what goes wrong *inside*
the application's own module comes out as it is, so that its traceback can be shown.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, TypeAlias

from sqlalchemy import Engine

from sqla_neoq.errors import ConfigurationError, DuplicateTask, TaskNotFound
from sqla_neoq.tasks import Handler, Task

Runnable: TypeAlias = Task[..., Any] | Handler
"""What a runner can run: a task, or the handler of a queue."""


def discover(module: ModuleType) -> list[Runnable]:
    """Return the tasks and handlers among a module's attributes, each once, in the module's order."""
    # By type, not isinstance: that would ask proxies (Django's settings, Flask's request) for their class, and so set
    # off whatever they stand for.
    found = [value for value in vars(module).values() if issubclass(type(value), Task | Handler)]
    return list({id(value): value for value in found}.values())


def load(target: str) -> list[Runnable]:
    """Import a target and return its tasks.

    Args:
        target: ``myapp.tasks``, a module; ``myapp``, a package, to which its submodule ``tasks`` belongs if it has one;
            or ``myapp.tasks:name``, one task or an iterable of tasks.

    Raises:
        TaskNotFound: the module or name does not exist, or holds no task.
    """
    if ":" in target:
        value = load_object(target)
        candidates = [value] if isinstance(value, Task | Handler) or not isinstance(value, Iterable) else list(value)
        for candidate in candidates:
            if not isinstance(candidate, Task | Handler):
                raise TaskNotFound(
                    f"{target} is not a task but a {type(candidate).__name__}; decorate it with @task or @handler"
                )
        return candidates
    module = _import(target)
    found = discover(module)
    if hasattr(module, "__path__") and importlib.util.find_spec(f"{target}.tasks"):
        found += (task for task in discover(_import(f"{target}.tasks")) if task not in found)
    if not found:
        raise TaskNotFound(
            f"module {target} has no tasks; decorate a function in it with @task or @handler, or import one"
        )
    return found


def load_object(target: str) -> Any:
    """Import and return what ``module:name`` says; the name may have dots.

    Raises:
        TaskNotFound: there is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = target.partition(":")
    module = _import(module_name)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        raise TaskNotFound(f"module {module_name} has no {attribute!r}") from None


def load_engine(target: str) -> Engine:
    """Return the Engine that ``module:name`` is, or that it returns when called without arguments.

    Raises:
        TaskNotFound: there is no such module or name.
        ConfigurationError: it is something else.
    """
    value = load_object(target)
    engine = value if isinstance(value, Engine) or not callable(value) else value()
    if not isinstance(engine, Engine):
        raise ConfigurationError(
            f"{target} is no SQLAlchemy Engine, nor a function that returns one, but a {type(engine).__name__}"
        )
    return engine


def address_of(runnable: Runnable) -> str:
    """Return the ``module:name`` under which another process finds a task or handler.

    Raises:
        ConfigurationError: none does: it is in ``__main__``, inside a function, or in a module made by hand.
    """
    own = getattr(runnable.function, "__module__", None)
    for name in [own, *sys.modules]:
        module = sys.modules.get(name or "")
        # A module without a spec was not imported, and cannot be: __main__, or one that was made by hand.
        if module is None or name == "__main__" or getattr(module, "__spec__", None) is None:
            continue
        if name == own and _is_at(module, runnable.function.__qualname__, runnable):
            return f"{name}:{runnable.function.__qualname__}"
        for attribute, value in list(vars(module).items()):
            if _is_same(value, runnable):
                return f"{name}:{attribute}"
    raise ConfigurationError(
        f"{runnable!r} has executor='process', and a child process cannot import it: {_where(runnable)} is not at the "
        "top of a module that can be imported; move it to one, or leave executor= out"
    )


def _is_at(module: ModuleType, path: str, runnable: Runnable) -> bool:
    try:
        return _is_same(operator.attrgetter(path)(module), runnable)
    except AttributeError:
        return False


def _is_same(value: object, runnable: Runnable) -> bool:
    # By type first, as in discover(). A copy that using() made is the same task to a job.
    return issubclass(type(value), Task | Handler) and (
        value is runnable
        or (
            type(value) is type(runnable)
            and getattr(value, "function", None) is runnable.function
            and getattr(value, "name", None) == runnable.name
            and getattr(value, "executor", None) == runnable.executor
        )
    )


def sort_out(tasks: Any) -> tuple[dict[str, Task[..., Any]], dict[str, Handler]]:
    """Tell tasks from handlers: tasks by name, handlers by queue, with modules taken apart.

    Raises:
        TypeError: something that is no module, task or handler.
        DuplicateTask: two functions under one task name, or two handlers for one queue.
        ConfigurationError: nothing to run.
    """
    given = [tasks] if isinstance(tasks, ModuleType | Task | Handler) else tasks
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"tasks={tasks!r}: expected modules, tasks or handlers, got {type(tasks).__name__}")
    found_tasks: dict[str, Task[..., Any]] = {}
    found_handlers: dict[str, Handler] = {}
    for item in given:
        for one in discover(item) if isinstance(item, ModuleType) else [item]:
            if isinstance(one, Task):
                # The same function again, as using() and imports from elsewhere give it, is no conflict.
                first = found_tasks.setdefault(one.name, one)
                if first.function is not one.function:
                    raise DuplicateTask(
                        f"two tasks are called {one.name!r}: {_where(first)} and {_where(one)}; "
                        "give one of them another name="
                    )
            elif isinstance(one, Handler):
                other = found_handlers.setdefault(one.queue, one)
                if other.function is not one.function:
                    raise DuplicateTask(
                        f"queue {one.queue!r} has two handlers: {_where(other)} and {_where(one)}; a queue has one"
                    )
            else:
                raise TypeError(f"tasks: expected modules, tasks or handlers, got {one!r}")
    if not found_tasks and not found_handlers:
        raise ConfigurationError("tasks: nothing to run; decorate a function with @task or @handler")
    return found_tasks, found_handlers


def _where(one: Task[..., Any] | Handler) -> str:
    return f"{one.function.__module__}:{one.function.__qualname__}"


def _import(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        hint = (
            f"; did you mean {name.removesuffix('.py').strip('/').replace('/', '.')}?" if name.endswith(".py") else ""
        )
        raise TaskNotFound(f"{name!r} is not a module's name; write it with dots, like myapp.tasks{hint}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the target itself, or a package on the way to it, may be missing here. Any other name is one that the
        # application's code asked for.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        parent, _, last = name.rpartition(".")
        hint = f"; did you mean {parent}:{last}?" if _has(parent, last) else "; is --app-dir right?"
        raise TaskNotFound(f"there is no module {error.name}{hint}") from None


def _has(module_name: str, attribute: str) -> bool:
    try:
        return bool(module_name) and hasattr(importlib.import_module(module_name), attribute)
    except ImportError:
        return False
