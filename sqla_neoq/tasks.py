"""A function and its options, under a name: what a runner can run and a producer can enqueue."""

from __future__ import annotations

import functools
import inspect
import warnings
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    overload,
)

from sqla_neoq.arguments import Signature
from sqla_neoq.errors import NeoqWarning
from sqla_neoq.insertion import Enqueued, insert, insert_async
from sqla_neoq.models import DEFAULT_MAX_RETRIES, MAX_TASK_LENGTH
from sqla_neoq.newjob import (
    NewJob,
    Options,
    checked_priority,
    checked_queue,
    checked_retries,
    checked_text,
    with_payload,
)
from sqla_neoq.retries import DEFAULT_BACKOFF, Backoff

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self, Unpack

    from sqla_neoq.context import JobContext
    from sqla_neoq.handles import AsyncHandle, Handle

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TIMEOUT: Final = timedelta(seconds=30)
DEFAULT_QUEUE: Final = "default"

Executor: TypeAlias = Literal["thread", "process"]
"""Where attempts run: in the runner (a thread, or the event loop), or in a child process, which can be killed."""


class Definition(Protocol):
    """What the runner needs to know of a task or a handler."""

    name: str
    queue: str
    timeout: float | None
    backoff: Backoff
    on_loop: bool
    in_process: bool

    def run(self, job: JobContext) -> Any:
        """Call the function for this job; for an ``async def``, return its coroutine."""
        ...

    def retries_of(self, max_retries: int | None) -> int:
        """Return how many retries a job with that column value may have."""
        ...


class _Policy:
    """The options that tasks and handlers share."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        queue: str,
        max_retries: int | None,
        timeout: timedelta | None,
        backoff: Backoff | None,
        executor: Executor,
    ) -> None:
        if not callable(function):
            raise TypeError(f"{function!r}: a task is made of a function")
        if timeout is not None:
            if not isinstance(timeout, timedelta):
                raise TypeError(f"timeout={timeout!r}: expected a timedelta or None, got {type(timeout).__name__}")
            if timeout <= timedelta(0):
                raise ValueError(f"timeout={timeout!r}: expected a positive time, or None for none")
        if backoff is not None and not callable(backoff):
            raise TypeError(f"backoff={backoff!r}: expected a function from the number of retries to a timedelta")
        # First, because it copies the function's own attributes over ours.
        functools.update_wrapper(cast("Any", self), function)
        self.name = checked_text("name", name, MAX_TASK_LENGTH)
        self.queue = checked_queue(queue)
        self.max_retries = checked_retries(max_retries)
        self.timeout = None if timeout is None else timeout.total_seconds()
        self.backoff = DEFAULT_BACKOFF if backoff is None else backoff
        self.is_async = inspect.iscoroutinefunction(function)
        self.executor = _checked_executor(executor)
        self.in_process = executor == "process"
        self.on_loop = self.is_async and not self.in_process
        self.function: Callable[..., Any] = function

    def retries_of(self, max_retries: int | None) -> int:
        """Return how many retries a job may have: as its row says, else as this says, else 23."""
        if max_retries is not None:
            return max_retries
        return DEFAULT_MAX_RETRIES if self.max_retries is None else self.max_retries


class Task(_Policy, Generic[P, R]):
    """A function that jobs can name. Calling it runs the function here and now, as if it were not decorated."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        max_retries: int | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        backoff: Backoff | None = None,
        executor: Executor = "thread",
    ) -> None:
        super().__init__(
            function,
            name=name,
            queue=queue,
            max_retries=max_retries,
            timeout=timeout,
            backoff=backoff,
            executor=executor,
        )
        self.priority = checked_priority(priority)
        self.signature = Signature.of(function, name=name)
        self.options: Options = {}
        self._template = self.job_of({})

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on queue {self.queue!r}>"

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function itself."""
        result: R = self.function(*args, **kwargs)
        return result

    def run(self, job: JobContext) -> Any:
        """Call the function with the arguments in the job's payload.

        Raises:
            PayloadMismatch: the payload does not fit the signature.
        """
        return self.function(**self.signature.load(job.payload))

    def using(self, **options: Unpack[Options]) -> Self:
        """Return this task with other options for the jobs it makes: queue, run_after, priority, and so on.

        Raises:
            TypeError: an option that does not exist, or a value of the wrong type.
            ValueError: a value that cannot be.
        """
        unknown = set(options) - Options.__annotations__.keys()
        if unknown:
            raise TypeError(f"using() has no option {sorted(unknown)}; there are {sorted(Options.__annotations__)}")
        merged: Options = {**self.options, **options}
        # Checked here, at the call that gives the options, and not at the enqueue that uses them.
        template = self.job_of({}, **merged)
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.options = merged
        copy._template = template
        return copy

    def job(self, /, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """Make a job of a call to this task, for ``enqueue_many``.

        Raises:
            TypeError: the call does not fit the function's signature, or an argument its annotation.
            ValueError: an argument that JSON cannot hold.
        """
        payload = self.signature.bind(args, kwargs)
        if self.options.get("unique"):
            return self.job_of(payload, **self.options)
        # The options are checked already: 2 µs a job instead of 5, in batches of thousands.
        return with_payload(self._template, payload)

    def job_of(self, payload: Any, **options: Unpack[Options]) -> NewJob:
        """Make a job of a payload that is bound already, the task's own options standing in for those left out."""
        queue = options.get("queue", self.queue)
        if options.get("priority") is None:
            options["priority"] = self.priority
        if options.get("max_retries") is None:
            options["max_retries"] = self.max_retries
        rest: dict[str, Any] = {name: value for name, value in options.items() if name != "queue"}
        return NewJob.of(queue, payload, task=self.name, **rest)

    def enqueue(self, session: Handle, /, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue a call to this task in the session's open transaction; see :func:`sqla_neoq.enqueue`."""
        return insert(session, [self.job(*args, **kwargs)])[0]

    async def enqueue_async(self, session: AsyncHandle, /, *args: P.args, **kwargs: P.kwargs) -> Enqueued:
        """Enqueue a call to this task in an async session's open transaction."""
        return (await insert_async(session, [self.job(*args, **kwargs)]))[0]


class Handler(_Policy):
    """The one function that takes whatever lands on a queue without naming a task: neoq's form."""

    def __init__(
        self,
        function: Callable[[JobContext], Any],
        *,
        queue: str,
        concurrency: int | None = None,
        max_retries: int | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        backoff: Backoff | None = None,
        executor: Executor = "thread",
    ) -> None:
        super().__init__(
            function,
            name=_name_of(function, stacklevel=4),
            queue=queue,
            max_retries=max_retries,
            timeout=timeout,
            backoff=backoff,
            executor=executor,
        )
        self.concurrency = checked_concurrency(concurrency)

    def __repr__(self) -> str:
        return f"<Handler of queue {self.queue!r}>"

    def __call__(self, job: JobContext) -> Any:
        """Run the function itself."""
        return self.function(job)

    def run(self, job: JobContext) -> Any:
        """Call the function with the job."""
        return self.function(job)


@overload
def task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def task(
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    max_retries: int | None = None,
    timeout: timedelta | None = DEFAULT_TIMEOUT,
    backoff: Backoff | None = None,
    executor: Executor = "thread",
) -> Callable[[Callable[P, R]], Task[P, R]]: ...
def task(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    max_retries: int | None = None,
    timeout: timedelta | None = DEFAULT_TIMEOUT,
    backoff: Backoff | None = None,
    executor: Executor = "thread",
) -> Task[P, R] | Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function a task: ``@task`` or ``@task(queue="emails", max_retries=5)``.

    Args:
        function: a plain or ``async def`` function. Its arguments travel as JSON, converted by their annotations.
        name: what jobs call it; by default ``module:qualname``. Keep it when you move the function.
        queue: the queue its jobs go to.
        priority: -100 to 100, higher runs first.
        max_retries: how often a failed job is tried again; None means 23.
        timeout: how long one attempt may take; None for ever.
        backoff: from the number of retries so far to the delay before the next; None means Sidekiq's curve.
        executor: ``"process"`` runs each attempt in a child process, which is killed when its time is up; for code
            that hangs, crashes or cannot be stopped otherwise.

    Raises:
        TypeError: a function that cannot be a task, or an option of the wrong type.
        ValueError: an option that cannot be.
    """

    def decorate(function: Callable[P, R], stacklevel: int = 3) -> Task[P, R]:
        return Task(
            function,
            name=_name_of(function, stacklevel) if name is None else name,
            queue=queue,
            priority=priority,
            max_retries=max_retries,
            timeout=timeout,
            backoff=backoff,
            executor=executor,
        )

    return decorate if function is None else decorate(function, stacklevel=4)


def handler(
    queue: str,
    /,
    *,
    concurrency: int | None = None,
    max_retries: int | None = None,
    timeout: timedelta | None = DEFAULT_TIMEOUT,
    backoff: Backoff | None = None,
    executor: Executor = "thread",
) -> Callable[[Callable[[JobContext], Any]], Handler]:
    """Make a function the handler of a queue; it gets each job as a :class:`JobContext`.

    Args:
        queue: the queue; it has one handler, and may have tasks beside it.
        concurrency: how many jobs of this queue may run at once in one runner; None: as many as the runner has slots.
        max_retries: how often a failed job is tried again; None means 23. A job's own number goes first.
        timeout: how long one attempt may take; None for ever.
        backoff: from the number of retries so far to the delay before the next; None means Sidekiq's curve.
        executor: ``"process"`` runs each attempt in a child process, which is killed when its time is up; for code
            that hangs, crashes or cannot be stopped otherwise.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an option that cannot be.
    """
    if callable(queue):
        raise TypeError("@handler needs the queue it handles: @handler('greetings')")
    checked_queue(queue)

    def decorate(function: Callable[[JobContext], Any]) -> Handler:
        return Handler(
            function,
            queue=queue,
            concurrency=concurrency,
            max_retries=max_retries,
            timeout=timeout,
            backoff=backoff,
            executor=executor,
        )

    return decorate


def checked_concurrency(concurrency: object, name: str = "concurrency") -> int | None:
    """Return a concurrency if it is one: a whole number from 1, or None for no limit of its own."""
    if concurrency is None:
        return None
    if isinstance(concurrency, bool) or not isinstance(concurrency, int):
        raise TypeError(f"{name}={concurrency!r}: expected int or None, got {type(concurrency).__name__}")
    if concurrency < 1:
        raise ValueError(f"{name}={concurrency!r}: expected at least 1; with 0 nothing would ever run")
    return concurrency


def _checked_executor(executor: object) -> Executor:
    if executor in get_args(Executor):
        return cast("Executor", executor)
    wrong = ValueError if isinstance(executor, str) else TypeError
    raise wrong(f"executor={executor!r}: expected 'thread' or 'process'")


def _name_of(function: Callable[..., Any], stacklevel: int) -> str:
    module = getattr(function, "__module__", None)
    name = f"{module}:{getattr(function, '__qualname__', repr(function))}"
    if module == "__main__":
        warnings.warn(
            f"the task {name!r} is defined in __main__, where a worker will not find it under that name; "
            "move it to a module, or give it a name",
            NeoqWarning,
            stacklevel=stacklevel,
        )
    return name
