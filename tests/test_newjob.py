"""Every option is checked before any I/O; the sentence names the argument, the value and the remedy."""

import enum
import inspect
import json
import re
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqla_neoq import NewJob, newjob, payloads
from sqla_neoq.newjob import Options, checked_text, records

SOON = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def of(queue="q", payload=None, **options):
    return NewJob.of(queue, {} if payload is None else payload, **options)


def record(job):
    (run,) = json.loads(records([job]))
    (payload,) = run.pop("payloads")
    return {**run, "payload": payload}


def test_what_is_not_said_is_left_to_the_task_and_to_the_database():
    assert record(of()) == {"queue": "q", "priority": 0, "payload": {}}


def test_jobs_alike_and_side_by_side_are_one_record():
    jobs = [of(payload=1), of(payload=[None]), of(payload=3, priority=1), of(payload=4), of(payload=5, unique=True)]
    runs = [(run["priority"], "fingerprint" in run, run["payloads"]) for run in json.loads(records(jobs))]
    assert runs == [(0, False, [1, [None]]), (1, False, [3]), (0, False, [4]), (0, True, [5])]


@pytest.mark.parametrize(
    "options",
    [{"run_after": SOON}, {"run_after": timedelta(1)}, {"deadline": SOON}, {"max_retries": 1}],
)
def test_no_option_is_taken_over_from_the_job_before(options):
    assert len(json.loads(records([of(), of(**options), of()]))) == 3


class Names(enum.StrEnum):
    QUEUE = "emails"
    KEY = "key"

    def __str__(self):
        return "not this"


def test_a_name_may_be_of_a_class_of_str():
    # A member equals its text, so what was cached for the one would hide the other.
    newjob._usual_head.cache_clear()
    job = of(Names.QUEUE, task=Names.KEY, fingerprint=Names.KEY)
    assert record(job) == {"queue": "emails", "task": "key", "fingerprint": "key", "priority": 0, "payload": {}}
    assert {type(job.queue), type(job.task), type(job.fingerprint)} == {str}
    assert of(task=Names.KEY, unique=True) == of(task="key", unique=True)


def test_everything_that_is_said_is_in_the_record():
    job = of(task="m:f", priority=3, run_after=SOON, deadline=SOON, max_retries=0, fingerprint='"\\ü', payload=[1])
    assert record(job) == {
        "queue": "q",
        "task": "m:f",
        "priority": 3,
        "run_at": SOON.isoformat(),
        "deadline_at": SOON.isoformat(),
        "max_retries": 0,
        "fingerprint": '"\\ü',
        "payload": [1],
    }


def test_a_timedelta_travels_as_seconds_and_a_datetime_as_its_instant():
    job = of(run_after=timedelta(minutes=1.5), deadline=SOON)
    assert (job.run_in, job.run_at, job.deadline_in, job.deadline_at) == (90.0, None, None, SOON)
    assert record(job)["deadline_at"] == "2030-01-02T03:04:05.678901+00:00"
    job = of(run_after=SOON, deadline=timedelta(0))
    assert (job.run_in, job.run_at, job.deadline_in, job.deadline_at) == (None, SOON, 0.0, None)


@pytest.mark.parametrize(
    "zone",
    [
        timezone(timedelta(hours=5, minutes=45)),
        # PostgreSQL refuses these two as offsets.
        timezone(timedelta(hours=-23)),
        timezone(timedelta(microseconds=1)),
        ZoneInfo("America/New_York"),
    ],
)
def test_a_datetime_of_any_zone_is_its_instant(zone):
    job = of(run_after=SOON.astimezone(zone), deadline=SOON.astimezone(zone))
    assert job.run_at == job.deadline_at == SOON
    assert record(job)["run_at"] == record(job)["deadline_at"] == SOON.isoformat()


def test_a_repeated_hour_is_told_apart():
    first = datetime(2030, 11, 3, 1, 30, tzinfo=ZoneInfo("America/New_York"))
    assert record(of(run_after=first))["run_at"] == "2030-11-03T05:30:00+00:00"
    assert record(of(run_after=first.replace(fold=1)))["run_at"] == "2030-11-03T06:30:00+00:00"


@pytest.mark.parametrize("name", ["run_after", "deadline"])
@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        (datetime(2030, 1, 1), ValueError, r"={value}: a naive datetime .* timezone, such as datetime\.now\(UTC\)"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), ValueError, "={value}: .*before the year 1"),
        (datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), ValueError, "={value}: .*after 9999"),
        (timedelta(microseconds=-1), ValueError, "={value}: a delay cannot be negative"),
        (timedelta.min, ValueError, "={value}: a delay cannot be negative"),
        (timedelta.max, ValueError, "={value}: a delay cannot be longer than 36525 days"),
        (timedelta(days=36_525, microseconds=1), ValueError, "={value}: a delay cannot be longer"),
        (1e18, TypeError, r"={value}: expected an aware datetime or a timedelta, got float; write timedelta\(seconds"),
        (float("nan"), TypeError, "={value}: expected an aware datetime or a timedelta, got float"),
        (60, TypeError, "={value}: expected an aware datetime or a timedelta, got int"),
        (True, TypeError, "={value}: expected an aware datetime or a timedelta, got bool"),
        ("tomorrow", TypeError, "={value}: expected an aware datetime or a timedelta, got str"),
        (SOON.date(), TypeError, "={value}: expected an aware datetime or a timedelta, got date"),
    ],
    ids=repr,
)
def test_a_moment_that_cannot_be_is_refused(name, value, error, sentence):
    with pytest.raises(error, match=name + sentence.replace("{value}", re.escape(repr(value)))):
        of(**{name: value})


@pytest.mark.parametrize("value", [datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)])
def test_the_ends_of_the_calendar_are_times_like_any(value):
    assert of(run_after=value, deadline=value).run_at == value


def test_the_longest_delay_is_a_hundred_years():
    assert of(run_after=timedelta(days=36_525)).run_in == 36_525 * 86_400


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"priority": 101}, ValueError, "priority=101: expected -100 to 100; higher runs first"),
        ({"priority": -101}, ValueError, "priority=-101: expected -100 to 100"),
        ({"priority": 10**30}, ValueError, "priority=1000000"),
        ({"priority": True}, TypeError, "priority=True: expected int, got bool"),
        ({"priority": 1.0}, TypeError, r"priority=1\.0: expected int, got float"),
        ({"priority": "1"}, TypeError, "priority='1': expected int, got str"),
        ({"max_retries": -1}, ValueError, r"max_retries=-1: expected 0 \(one attempt\) to 2147483647"),
        ({"max_retries": 2**31}, ValueError, "max_retries=2147483648: expected 0"),
        ({"max_retries": False}, TypeError, "max_retries=False: expected int or None, got bool"),
        ({"max_retries": 2.5}, TypeError, r"max_retries=2\.5: expected int or None, got float"),
        ({"unique": 1}, TypeError, "unique=1: expected True or False; a key of your own goes into fingerprint="),
        (
            {"unique": "key"},
            TypeError,
            "unique='key': expected True or False; a key of your own goes into fingerprint=",
        ),
        ({"unique": None}, TypeError, "unique=None: expected True or False"),
        ({"fingerprint": ""}, ValueError, "fingerprint='': cannot be empty"),
        ({"fingerprint": "f" * 256}, ValueError, r"fingerprint='f+'\.\.\.: 256 characters, the most are 255"),
        ({"fingerprint": "a\0b"}, ValueError, "fingerprint='a.x00b': cannot hold a NUL"),
        ({"fingerprint": "\ud800"}, ValueError, "fingerprint='.ud800': cannot hold a lone surrogate"),
        ({"fingerprint": 5}, TypeError, "fingerprint=5: expected str, got int"),
        ({"task": ""}, ValueError, "task='': cannot be empty"),
        ({"task": "t" * 256}, ValueError, "task=.*: 256 characters, the most are 255"),
        ({"task": "a\0"}, ValueError, "task='a.x00': cannot hold a NUL"),
        ({"task": 5}, TypeError, "task=5: expected str, got int"),
        ({"queue": ""}, ValueError, "queue='': cannot be empty"),
        ({"queue": "q" * 129}, ValueError, r"queue='q+'\.\.\.: 129 characters, the most are 128"),
        ({"queue": "a\0b"}, ValueError, "queue='a.x00b': cannot hold a NUL"),
        ({"queue": "\udcff"}, ValueError, "queue='.udcff': cannot hold a lone surrogate"),
        ({"queue": None}, TypeError, "queue=None: expected str, got NoneType"),
        ({"queue": b"q"}, TypeError, "queue=b'q': expected str, got bytes"),
        ({"payload": float("nan")}, ValueError, "payload is nan"),
        ({"payload": {"a": [1, float("inf")]}}, ValueError, r"payload\['a'\]\[1\] is inf"),
        ({"payload": {"a": "b\0"}}, ValueError, r"payload\['a'\] has a NUL"),
        ({"payload": {"a\0": 1}}, ValueError, "the key 'a.x00' of payload has a NUL"),
        ({"payload": {"\ud800": 1}}, ValueError, "the key '.ud800' of payload has the lone surrogate"),
        ({"payload": ["\udc00"]}, ValueError, r"payload\[0\] has the lone surrogate"),
        ({"payload": {1: 2}}, TypeError, "payload has the key 1, and JSON keys are str"),
        ({"payload": {1, 2}}, TypeError, "payload is {1, 2}, and JSON has no set: pass a sorted list"),
        ({"payload": type}, TypeError, "payload is <class"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_with_its_name_and_value(options, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        of(**options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="delay"):
        of(delay=5)


def test_the_ends_of_every_range_are_in_it():
    job = of("q" * 128, task="t" * 255, fingerprint="f" * 255, priority=-100, max_retries=2**31 - 1)
    assert (job.priority, job.max_retries) == (-100, 2**31 - 1)
    assert of(priority=100, max_retries=0).max_retries == 0


def test_true_names_and_keys_of_every_kind_are_taken_as_they_are():
    for text in ("ünïcödé", "🚀" * 128, " leading", "a\nb", '"', "'", "%s", ":x", "\\", "\x7f", "ﬀ"):
        assert checked_text("queue", text, 128) is text


def test_numbers_that_are_int_enough_become_ints():
    class Level(int):
        pass

    job = of(priority=Level(5), max_retries=Level(3))
    assert type(job.priority) is int
    assert type(job.max_retries) is int


def test_unique_makes_the_fingerprint_of_task_and_payload():
    one = of(payload={"b": 1, "a": 2}, unique=True).fingerprint
    assert one == of("other queue", {"a": 2, "b": 1}, unique=True).fingerprint
    assert one == payloads.fingerprint(None, {"a": 2, "b": 1})
    assert one != of(payload={"a": 2, "b": 1}, task="t", unique=True).fingerprint
    assert one != of(payload={"a": 2, "b": 1.0}, unique=True).fingerprint


def test_a_key_of_one_s_own_goes_before_unique():
    assert of(unique=True, fingerprint="mine").fingerprint == "mine"
    assert of(unique=False).fingerprint is None


def test_how_large_a_payload_may_be_is_the_engine_s_say():
    assert len(of(payload="x" * (payloads.MAX_PAYLOAD_BYTES + 1)).payload) > payloads.MAX_PAYLOAD_BYTES


def test_a_new_job_is_a_value():
    assert of(payload={"a": 1}, run_after=SOON) == of(payload={"a": 1}, run_after=SOON)
    assert len({of(), of(), of(priority=1)}) == 2
    with pytest.raises(AttributeError):
        of().queue = "other"


def test_the_typed_options_are_those_that_a_job_takes():
    takes = set(inspect.signature(NewJob.of).parameters) - {"queue", "payload", "task"}
    assert Options.__annotations__.keys() == takes | {"queue"}


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=128)
scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(queue=texts, payload=values)
def test_the_record_is_json_whatever_is_in_the_job(queue, payload):
    made = record(NewJob.of(queue, payload, fingerprint=queue))
    assert (made["queue"], made["fingerprint"]) == (queue, queue)
    assert made["payload"] == payload
