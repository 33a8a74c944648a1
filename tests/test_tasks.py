"""A function with options under a name: as its caller, as the producer and as the runner see it."""

import asyncio
import dataclasses
import enum
import functools
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TypedDict

import pydantic
import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from support.databases import truncate
from support.running import claimed

from sqla_neoq import (
    Handler,
    Job,
    JobContext,
    NeoqWarning,
    NewJob,
    Task,
    constant,
    enqueue_many,
    handler,
    payloads,
    task,
)
from sqla_neoq.arguments import PayloadMismatch
from sqla_neoq.models import DEFAULT_MAX_RETRIES
from sqla_neoq.newjob import Options
from sqla_neoq.retries import DEFAULT_BACKOFF
from sqla_neoq.tasks import checked_concurrency

SOON = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Row(TypedDict):
    name: str
    when: date


class Model(pydantic.BaseModel):
    price: Decimal
    at: datetime | None = None


@task
def add(a: int, b: int = 2, *, note: str = "") -> int:
    """Add two numbers."""
    return a + b


@task
async def add_async(a: int, b: int = 2) -> int:
    return a + b


def context(payload=None, **row):
    return JobContext(claimed(payload=payloads.encode(payload or {}), **row), None)


# Decorating ----------------------------------------------------------------------------------------------------------


def test_a_decorated_function_is_still_that_function():
    assert add(1) == 3
    assert add(1, b=5) == 6
    assert asyncio.run(add_async(1)) == 3
    assert (add.__name__, add.__doc__, add.__module__) == ("add", "Add two numbers.", __name__)
    assert add.__wrapped__ is add.function
    assert (add.is_async, add_async.is_async) == (False, True)


def test_without_options_it_gets_the_defaults():
    assert add.name == f"{__name__}:add"
    assert (add.queue, add.priority, add.max_retries, add.timeout) == ("default", 0, None, 30.0)
    assert add.backoff is DEFAULT_BACKOFF
    assert add.retries_of(None) == DEFAULT_MAX_RETRIES == 23
    assert repr(add) == f"<Task '{__name__}:add' on queue 'default'>"


def test_with_options_it_keeps_them():
    policy = constant(timedelta(seconds=5))

    @task(name="m:t", queue="emails", priority=-5, max_retries=0, timeout=None, backoff=policy)
    def mine(): ...

    assert (mine.name, mine.queue, mine.priority, mine.max_retries, mine.timeout) == ("m:t", "emails", -5, 0, None)
    assert mine.backoff is policy
    assert mine.retries_of(None) == 0
    assert mine.retries_of(4) == 4


def test_called_without_options_it_is_the_same():
    @task()
    def mine(): ...

    assert isinstance(mine, Task)
    assert mine.name.endswith("test_called_without_options_it_is_the_same.<locals>.mine")


def test_attributes_of_the_function_do_not_become_the_task_s():
    def mine(): ...

    mine.queue = mine.priority = mine.function = mine.note = "the function's own"
    made = task(queue="q")(mine)
    assert (made.queue, made.priority, made.function, made.note) == ("q", 0, mine, "the function's own")


def test_a_decorator_below_is_run_and_the_inner_signature_counts():
    calls = []

    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            calls.append(kwargs)
            return function(*args, **kwargs)

        return wrapper

    @task
    @logged
    def double(n: int) -> int:
        return 2 * n

    assert double.run(context({"n": 4})) == 8
    assert calls == [{"n": 4}]
    with pytest.raises(TypeError, match="must be int"):
        double.job("4")


def test_a_static_method_can_be_a_task():
    class Mailer:
        @staticmethod
        @task
        def send(user_id: int) -> int:
            return user_id

    assert Mailer.send.job(5).payload == '{"user_id":5}'
    assert Mailer.send.run(context({"user_id": 5})) == 5


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"queue": ""}, ValueError, "queue='': cannot be empty"),
        ({"queue": None}, TypeError, "queue=None: expected str"),
        ({"queue": "a\0"}, ValueError, "queue=.*NUL"),
        ({"name": ""}, ValueError, "name='': cannot be empty"),
        ({"name": "n" * 256}, ValueError, "name=.*256 characters, the most are 255"),
        ({"name": 5}, TypeError, "name=5: expected str"),
        ({"priority": 101}, ValueError, "priority=101: expected -100 to 100"),
        ({"priority": True}, TypeError, "priority=True: expected int"),
        ({"max_retries": -1}, ValueError, "max_retries=-1: expected 0"),
        ({"max_retries": 1.0}, TypeError, "max_retries=1.0: expected int or None"),
        ({"timeout": 30}, TypeError, "timeout=30: expected a timedelta or None, got int"),
        ({"timeout": timedelta(0)}, ValueError, "timeout=.*: expected a positive time, or None for none"),
        ({"timeout": -timedelta(1)}, ValueError, "timeout=.*: expected a positive time"),
        ({"backoff": 5}, TypeError, "backoff=5: expected a function from the number of retries to a timedelta"),
        ({"executor": "fork"}, ValueError, "executor='fork': expected 'thread' or 'process'"),
        ({"executor": None}, TypeError, "executor=None: expected 'thread' or 'process'"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_where_the_task_is_made(options, error, sentence):
    with pytest.raises(error, match=sentence):
        task(**options)(lambda: None)


def generator():
    yield


class Thing:
    def method(self): ...


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (5, "5: a task is made of a function"),
        (generator, "is a generator, and calling it would run nothing"),
        (Thing().method, "is a bound method"),
        (Thing.method, "is a method, and a payload cannot carry its 'self'"),
        (print, "is not a function"),
        (Thing, "is not a function"),
        (lambda *args: None, r"takes \*args, and arguments travel by name"),
        (eval("lambda a, /: None"), "takes 'a' by position only"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_a_task_is_refused_where_it_is_made(function, sentence):
    with pytest.raises(TypeError, match=sentence):
        task(name="t")(function)


def test_a_task_in_a_script_is_warned_of_where_it_is_decorated():
    def mine(): ...

    mine.__module__ = "__main__"
    for decorate in (task, task(), handler("q")):
        with pytest.warns(
            NeoqWarning, match="'__main__:.*mine' is defined in __main__, where a worker will not"
        ) as said:
            decorate(mine)
        assert [warning.filename for warning in said] == [__file__]


def test_a_task_in_a_script_with_a_name_of_its_own_is_found_by_that():
    def mine(): ...

    mine.__module__ = "__main__"
    assert task(name="jobs:mine")(mine).name == "jobs:mine"


# Jobs ----------------------------------------------------------------------------------------------------------------


def test_a_call_becomes_a_job_with_the_arguments_by_name_and_the_task_s_policy():
    assert add.job(1, note="ü") == NewJob(queue="default", task=f"{__name__}:add", payload='{"a":1,"note":"ü"}')
    job = task(name="t", queue="q", priority=5, max_retries=2)(lambda: None).job()
    assert (job.queue, job.priority, job.max_retries, job.payload) == ("q", 5, 2, "{}")


def test_each_call_with_options_is_the_job_that_its_options_make():
    for options in (
        {"queue": "q", "priority": 3, "max_retries": 0},
        {"run_after": timedelta(hours=1), "deadline": datetime(2030, 1, 1, tzinfo=UTC)},
        {"unique": True},
        {"unique": True, "fingerprint": "mine"},
    ):
        assert add.using(**options).job(1) == add.job_of({"a": 1}, **options)
        assert add.using(**options).job(2) == add.job_of({"a": 2}, **options)


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        ((), {}, "missing 1 required positional argument: 'a'"),
        ((1, 2, 3), {}, "takes from 1 to 2 positional arguments but 3 were given"),
        ((1,), {"c": 1}, "unexpected keyword argument 'c'"),
        ((1,), {"a": 1}, "multiple values for argument 'a'"),
        (("1",), {}, r"add\(\) argument 'a' must be int, not '1'"),
        ((True,), {}, r"argument 'a' must be int, not True"),
        ((1.5,), {}, r"argument 'a' must be int, not 1.5"),
        ((None,), {}, r"argument 'a' must be int, not None"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_where_it_is_written(args, kwargs, sentence):
    with pytest.raises(TypeError, match=sentence):
        add.job(*args, **kwargs)


@task(name="typed")
def typed(
    at: datetime,
    day: date,
    key: uuid.UUID,
    price: Decimal,
    colour: Colour,
    point: Point,
    row: Row,
    model: Model,
    points: list[Point] | None = None,
    **rest: int,
):
    return locals()


ARGUMENTS = {
    "at": SOON,
    "day": date(2031, 2, 3),
    "key": uuid.UUID(int=5),
    "price": Decimal("1.10"),
    "colour": Colour.RED,
    "point": Point(1),
    "row": {"name": "ü", "when": date(2031, 2, 3)},
    "model": Model(price=Decimal("2.50"), at=SOON),
    "points": [Point(1, 2.0), Point(3)],
    "extra": 7,
}


def test_annotated_arguments_arrive_as_they_left(one_engine):
    with Session(one_engine) as session:
        typed.enqueue(session, **ARGUMENTS)
        payload = session.scalar(select(Job.payload))
    received = typed.run(context(payload))
    assert received.pop("rest") == {"extra": 7}
    assert received == {name: value for name, value in ARGUMENTS.items() if name != "extra"}


def test_a_payload_that_does_not_fit_any_more_is_said_in_the_worker():
    for payload in ({}, {"a": "1"}, {"a": 1, "gone": 2}, []):
        with pytest.raises(PayloadMismatch, match=r"add\(\)"):
            add.run(JobContext(claimed(payload=payloads.encode(payload)), None))


def test_an_async_task_s_run_is_its_coroutine():
    assert asyncio.run(add_async.run(context({"a": 1}))) == 3


# Other options -------------------------------------------------------------------------------------------------------


def test_using_makes_another_task_and_leaves_the_first_alone():
    urgent = add.using(priority=50)
    later = urgent.using(run_after=timedelta(hours=1), queue="slow")
    assert add.job(1).priority == 0
    assert (urgent.job(1).priority, urgent.job(1).queue) == (50, "default")
    job = later.job(1)
    assert (job.priority, job.queue, job.run_in) == (50, "slow", 3600.0)
    assert later.name == urgent.name == add.name
    assert later(1) == 3


def test_using_nothing_is_the_same():
    assert add.using().job(1) == add.job(1)


def test_every_option_can_be_used():
    options = {"queue": "q", "run_after": SOON, "priority": 1, "deadline": SOON, "max_retries": 0, "unique": True}
    assert options.keys() | {"fingerprint"} == Options.__annotations__.keys()
    job = add.using(**options).job(1)
    assert (job.queue, job.run_at, job.priority, job.deadline_at, job.max_retries) == ("q", SOON, 1, SOON, 0)
    assert job.fingerprint == payloads.fingerprint(add.name, {"a": 1})
    assert add.using(fingerprint="mine").job(1).fingerprint == "mine"


def test_an_option_can_be_taken_back():
    assert add.using(run_after=SOON, priority=5).using(run_after=None, priority=None).job(1) == add.job(1)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (
            {"colour": "red"},
            TypeError,
            r"using\(\) has no option \['colour'\]; there are \['deadline', 'fingerprint', ",
        ),
        ({"task": "t"}, TypeError, r"using\(\) has no option \['task'\]"),
        ({"payload": {}}, TypeError, r"using\(\) has no option \['payload'\]"),
        ({"queue": ""}, ValueError, "queue=''"),
        ({"queue": None}, TypeError, "queue=None"),
        ({"priority": 101}, ValueError, "priority=101"),
        ({"run_after": 5}, TypeError, "run_after=5"),
        ({"deadline": datetime(2030, 1, 1)}, ValueError, "deadline=.*naive"),
        ({"unique": "yes"}, TypeError, "unique='yes'"),
        ({"max_retries": -1}, ValueError, "max_retries=-1"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_used_is_refused_at_using(options, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        add.using(**options)


def test_arguments_named_as_options_or_as_the_session_are_arguments():
    @task(name="t")
    def mine(session: int, queue: int, priority: int, self: int = 0): ...

    assert mine.job(session=1, queue=2, priority=3, self=4).payload == '{"session":1,"queue":2,"priority":3,"self":4}'
    assert mine(session=1, queue=2, priority=3, self=4) is None


# Enqueuing -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_engine(worker_database):
    truncate(worker_database)
    engine = create_engine(worker_database, poolclass=NullPool)
    yield engine
    engine.dispose()


def test_enqueue_many_takes_the_jobs_of_several_tasks(one_engine):
    other = task(name="other", queue="o")(lambda: None)
    with Session(one_engine) as session:
        enqueue_many(session, [add.job(1), other.job(), add.using(priority=3).job(2)])
        rows = session.execute(select(Job.task, Job.queue, Job.priority, Job.payload).order_by(Job.id)).all()
    assert rows == [
        (add.name, "default", 0, {"a": 1}),
        ("other", "o", 0, {}),
        (add.name, "default", 3, {"a": 2}),
    ]


def test_a_session_is_given_by_position_so_that_a_task_may_have_an_argument_of_that_name(one_engine):
    @task(name="t")
    def mine(session: int): ...

    with Session(one_engine) as session:
        assert mine.enqueue(session, session=5).created
        assert session.scalar(select(Job.payload)) == {"session": 5}


def test_asynchronous_code_enqueues_as_well(one_engine):
    async def work():
        engine = create_async_engine(one_engine.url, poolclass=NullPool)
        async with AsyncSession(engine) as session:
            first = await add.using(unique=True).enqueue_async(session, 1, b=3)
            again = await add.using(unique=True).enqueue_async(session, b=3, a=1)
            assert (again.id, again.created) == (first.id, False)
            return await session.scalar(text("SELECT payload FROM neoq_jobs"))

    assert asyncio.run(work()) == {"a": 1, "b": 3}


def test_a_call_that_does_not_fit_is_refused_before_the_session_is_looked_at():
    with pytest.raises(TypeError, match="missing 1 required"):
        add.enqueue(None)
    with pytest.raises(TypeError, match="missing 1 required"):
        asyncio.run(add.enqueue_async(None))


# Handlers ------------------------------------------------------------------------------------------------------------


def test_a_handler_is_its_function_with_its_queue_and_its_policy():
    @handler("greetings", concurrency=8, max_retries=1, timeout=timedelta(minutes=1))
    def greet(job):
        return job.payload["message"]

    assert isinstance(greet, Handler)
    assert (greet.queue, greet.concurrency, greet.max_retries, greet.timeout) == ("greetings", 8, 1, 60.0)
    assert greet(context({"message": "hello"})) == greet.run(context({"message": "hello"})) == "hello"
    assert repr(greet) == "<Handler of queue 'greetings'>"
    assert greet.name.endswith(":" + greet.__qualname__)
    assert not greet.is_async


def test_an_async_handler_is_one():
    @handler("q")
    async def greet(job):
        return job.id

    assert greet.is_async
    assert greet.concurrency is None
    assert asyncio.run(greet.run(context())) == 1


def test_a_handler_needs_the_name_of_its_queue():
    with pytest.raises(TypeError, match=r"@handler needs the queue it handles: @handler\('greetings'\)"):

        @handler
        def greet(job): ...


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: handler(""), ValueError, "queue='': cannot be empty"),
        (lambda: handler(5), TypeError, "queue=5: expected str"),
        (
            lambda: handler("q", concurrency=0)(context),
            ValueError,
            "concurrency=0: expected at least 1; with 0 nothing",
        ),
        (lambda: handler("q", concurrency=True)(context), TypeError, "concurrency=True: expected int or None"),
        (lambda: handler("q", concurrency=1.5)(context), TypeError, "concurrency=1.5: expected int or None"),
        (lambda: handler("q", timeout=5)(context), TypeError, "timeout=5: expected a timedelta or None"),
        (lambda: handler("q", max_retries=-1)(context), ValueError, "max_retries=-1"),
        (lambda: handler("q", backoff="slow")(context), TypeError, "backoff='slow'"),
        (lambda: handler("q", executor="fork")(context), ValueError, "executor='fork'"),
        (lambda: handler("q")(5), TypeError, "5: a task is made of a function"),
    ],
    ids=range(10),
)
def test_a_handler_that_cannot_be_is_refused_where_it_is_made(make, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        make()


def test_a_concurrency_is_named_as_its_caller_calls_it():
    assert checked_concurrency(None) is None
    assert checked_concurrency(5) == 5
    with pytest.raises(ValueError, match=r"queues\['q'\]=0"):
        checked_concurrency(0, "queues['q']")
