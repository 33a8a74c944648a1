from datetime import timedelta

import pytest
from support.running import claimed

from sqla_neoq import Discard, Retry, Snooze, task
from sqla_neoq.context import StopReason
from sqla_neoq.errors import ClaimLost, JobCancelled, JobTimeout
from sqla_neoq.outcomes import Verb, failure, judge
from sqla_neoq.retries import LONGEST_DELAY, constant


@task(name="m:f", max_retries=3, backoff=constant(timedelta(seconds=40)))
def some_task(): ...


def judged(error, stop=None, definition=some_task, **job):
    return judge(error, claimed(**job), definition, stop)


def with_backoff(backoff):
    return task(name="m:g", backoff=backoff)(lambda: None)


def test_an_exception_is_a_failure_with_its_message_and_where_it_happened():
    try:
        raise KeyError("gone")
    except KeyError as error:
        outcome = judged(error)
    assert (outcome.verb, outcome.delay, outcome.kind) == (Verb.FAIL, 40.0, "error")
    assert outcome.message == "KeyError: 'gone'"
    assert "test_outcomes.py" in outcome.traceback
    assert outcome.traceback.endswith("KeyError: 'gone'\n")


def test_the_cause_of_an_exception_is_part_of_its_traceback():
    try:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise RuntimeError("second") from error
    except RuntimeError as error:
        outcome = judged(error)
    assert "ValueError: first" in outcome.traceback


@pytest.mark.parametrize(("retries", "verb"), [(0, Verb.FAIL), (2, Verb.FAIL), (3, Verb.BURY), (4, Verb.BURY)])
def test_a_job_dies_when_its_retries_are_used_up(retries, verb):
    outcome = judged(ValueError(), retries=retries)
    assert outcome.verb is verb
    assert outcome.reason == ("exhausted" if verb is Verb.BURY else None)


def test_the_jobs_own_number_of_retries_goes_before_its_tasks():
    assert judged(ValueError(), retries=3, max_retries=9).verb is Verb.FAIL
    assert judged(ValueError(), retries=0, max_retries=0).verb is Verb.BURY


def test_snoozing_puts_the_job_back_and_is_no_failure():
    outcome = judged(Snooze(timedelta(minutes=2)), retries=3)
    assert (outcome.verb, outcome.delay, outcome.kind, outcome.message) == (Verb.PUT_BACK, 120.0, None, None)


def test_discarding_buries_the_job_whatever_retries_it_has():
    outcome = judged(Discard("nobody wants it"))
    assert (outcome.verb, outcome.reason, outcome.kind) == (Verb.BURY, "discarded", "discarded")
    assert outcome.message == "Discard: nobody wants it"


def test_retry_is_a_failure_whose_delay_the_task_chose():
    outcome = judged(Retry("later", after=timedelta(seconds=7)))
    assert (outcome.verb, outcome.delay, outcome.kind) == (Verb.FAIL, 7.0, "retry")
    assert judged(Retry()).delay == 40.0
    assert judged(Retry(after=timedelta(0))).delay == 0.0


def test_retry_cannot_have_more_retries_than_there_are():
    assert judged(Retry(after=timedelta(seconds=7)), retries=3).reason == "exhausted"


def test_a_lost_claim_is_a_failure_that_the_fence_has_the_last_word_on():
    outcome = judged(ClaimLost("x"))
    assert (outcome.verb, outcome.written) == (Verb.FAIL, False)


def test_a_run_whose_worker_was_declared_dead_writes_nothing():
    assert judged(ClaimLost("x"), StopReason.LOST).verb is Verb.LOST


@pytest.mark.parametrize("error", [JobCancelled("x"), ValueError("x"), SystemExit(1)])
def test_who_stops_because_the_runner_shuts_down_has_not_failed(error):
    outcome = judged(error, StopReason.SHUTDOWN)
    assert (outcome.verb, outcome.delay, outcome.kind) == (Verb.PUT_BACK, None, None)


@pytest.mark.parametrize("error", [JobCancelled("x"), ValueError("x"), Retry()])
def test_who_stops_because_the_job_was_cancelled_ends_cancelled(error):
    assert judged(error, StopReason.CANCELLED).verb is Verb.CANCEL


def test_a_task_may_cancel_itself():
    assert judged(JobCancelled("not wanted any more")).verb is Verb.CANCEL


@pytest.mark.parametrize("error", [JobCancelled("x"), JobTimeout("x"), ValueError("x"), Retry()])
def test_who_stops_because_the_job_is_no_longer_its_own_writes_nothing(error):
    assert judged(error, StopReason.LOST).verb is Verb.LOST


@pytest.mark.parametrize(("error", "stop"), [(JobTimeout("x"), None), (ValueError("x"), StopReason.TIMEOUT)])
def test_a_timeout_is_a_failure_of_its_own_kind(error, stop):
    outcome = judged(error, stop)
    assert (outcome.verb, outcome.kind) == (Verb.FAIL, "timeout")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_the_process_is_only_that_jobs_failure(error):
    assert judged(error).verb is Verb.FAIL


def test_nul_and_lone_surrogates_are_stored_as_something_that_can_be():
    outcome = judged(ValueError("a\x00b\ud800c"))
    for text in (outcome.message, outcome.traceback):
        assert "\x00" not in text
        text.encode()
    assert outcome.message.startswith("ValueError: a")


def test_long_messages_and_tracebacks_are_bounded():
    try:
        raise ValueError("x" * 1_000_000)
    except ValueError as error:
        outcome = judged(error)
    assert len(outcome.message) <= 2_000
    assert len(outcome.traceback) <= 20_000


class Unspeakable(Exception):
    def __init__(self, what):
        self.what = what

    def __str__(self):
        raise self.what

    __repr__ = __str__


@pytest.mark.parametrize("what", [RuntimeError("no"), SystemExit(1), KeyboardInterrupt()])
def test_an_exception_that_cannot_be_written_out_is_recorded_all_the_same(what):
    outcome = judged(Unspeakable(what))
    assert outcome.verb is Verb.FAIL
    assert outcome.message.startswith("Unspeakable")
    assert outcome.traceback


class Unprintable(Exception):
    @property
    def __cause__(self):
        raise RuntimeError("not even its cause")


def test_an_exception_whose_traceback_cannot_be_formatted_is_recorded_all_the_same():
    outcome = judged(Unprintable("x"))
    assert outcome.verb is Verb.FAIL
    assert outcome.message == "Unprintable: x"


class CarelessSnooze(Snooze):
    def __init__(self):
        """Forgets its parent's."""


class CarelessRetry(Retry):
    def __init__(self):
        """Forgets its parent's."""


@pytest.mark.parametrize("error", [CarelessSnooze(), CarelessRetry()])
def test_a_verb_that_lacks_what_it_should_say_is_a_plain_failure(error):
    outcome = judged(error)
    assert (outcome.verb, outcome.delay, outcome.kind) == (Verb.FAIL, 40.0, "error")


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1), KeyboardInterrupt()])
def test_a_backoff_that_raises_costs_the_job_nothing_but_the_default_delay(error, caplog):
    def backoff(retries):
        raise error

    outcome = judged(ValueError(), definition=with_backoff(backoff))
    assert outcome.verb is Verb.FAIL
    assert 15 <= outcome.delay <= 15 + 30
    assert "the back-off of m:g failed" in caplog.text


@pytest.mark.parametrize("delay", [5, None, float("nan"), "1s"])
def test_a_backoff_that_returns_no_timedelta_is_replaced_and_said(delay, caplog):
    assert 15 <= judged(ValueError(), definition=with_backoff(lambda _: delay)).delay <= 45
    assert "expected a timedelta" in caplog.text


@pytest.mark.parametrize(
    ("delay", "kept"),
    [(timedelta(seconds=-5), timedelta(0)), (timedelta.max, LONGEST_DELAY), (timedelta(1), timedelta(1))],
)
def test_a_backoff_stays_within_what_a_database_can_hold(delay, kept):
    assert judged(ValueError(), definition=with_backoff(lambda _: delay)).delay == kept.total_seconds()


def test_the_backoff_is_asked_with_the_number_of_retries_so_far():
    asked = []

    def backoff(retries):
        asked.append(retries)
        return timedelta(0)

    for retries in (0, 1, 5):
        judged(ValueError(), definition=with_backoff(backoff), retries=retries)
    assert asked == [0, 1, 5]


def test_a_failure_can_be_made_for_a_run_that_never_came_back():
    outcome = failure(JobTimeout("too long"), claimed(), some_task, kind="timeout")
    assert (outcome.verb, outcome.kind, outcome.message) == (Verb.FAIL, "timeout", "JobTimeout: too long")
