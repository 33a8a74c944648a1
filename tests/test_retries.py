"""When a job is tried again: pure policy, no clock and no database."""

import random
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqla_neoq import Discard, NeoqError, Retry, Snooze, constant, exponential, sidekiq
from sqla_neoq.retries import DEFAULT_BACKOFF, LONGEST_DELAY, checked_delay

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)


class Least(random.Random):
    """No jitter."""

    def random(self):
        return 0.0

    def randrange(self, *_):
        return 0


class Most(random.Random):
    """All the jitter there can be."""

    def random(self):
        return 1.0

    def randrange(self, stop):
        return stop - 1


@pytest.mark.parametrize("retries", [0, 1, 2, 5, 14, 22])
def test_sidekiq_s_curve_is_its_formula_within_its_jitter(retries):
    low, high = (sidekiq(rng=rng())(retries) for rng in (Least, Most))
    assert low == timedelta(seconds=retries**4 + 15)
    assert high == timedelta(seconds=retries**4 + 15 + 29 * (retries + 1))


def test_twenty_four_attempts_take_about_two_weeks():
    shortest, longest = (sum((sidekiq(rng=rng())(n) for n in range(23)), timedelta()) for rng in (Least, Most))
    assert 13 * DAY < shortest < longest < 14 * DAY


def test_the_first_retry_has_jitter_too():
    delay = sidekiq(rng=random.Random(1))
    assert len({delay(0) for _ in range(200)}) == 30


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_no_number_of_retries_makes_a_delay_longer_than_the_cap(retries):
    for policy in (sidekiq(), sidekiq(cap=DAY), exponential(cap=DAY), exponential(factor=1000, jitter=1, cap=DAY)):
        assert timedelta(0) <= policy(retries) <= 7 * DAY
    assert sidekiq(cap=DAY)(retries) <= DAY
    assert exponential(cap=DAY, jitter=1)(retries) <= DAY


def test_the_cap_of_the_default_is_a_week():
    assert DEFAULT_BACKOFF(1000) == 7 * DAY


def test_exponential_multiplies_from_the_first_to_the_cap():
    delay = exponential(SECOND, factor=3, cap=100 * SECOND, jitter=0)
    assert [delay(n).total_seconds() for n in range(6)] == [1, 3, 9, 27, 81, 100]
    assert delay(10**6) == 100 * SECOND


def test_exponential_s_jitter_is_a_share_of_the_delay():
    assert exponential(10 * SECOND, jitter=0.5, rng=Least())(0) == 10 * SECOND
    assert exponential(10 * SECOND, jitter=0.5, rng=Most())(0) == 15 * SECOND
    assert exponential(10 * SECOND, jitter=0.5, cap=12 * SECOND, rng=Most())(0) == 12 * SECOND


def test_a_factor_of_one_is_constant_but_for_the_jitter():
    assert {exponential(SECOND, factor=1, jitter=0)(n) for n in range(50)} == {SECOND}


def test_a_first_delay_of_zero_stays_zero():
    delay = exponential(timedelta(0), factor=10)
    assert delay(0) == delay(5) == delay(400) == timedelta(0)


def test_constant_is():
    assert {constant(5 * SECOND)(n) for n in (0, 1, 1000)} == {5 * SECOND}
    assert constant(timedelta(0))(3) == timedelta(0)


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: constant(-SECOND), ValueError, "delay=.*cannot be negative"),
        (lambda: constant(5), TypeError, r"delay=5: expected a timedelta, got int; write timedelta\(seconds=...\)"),
        (lambda: constant(timedelta.max), ValueError, "delay=.*cannot be longer than 36525 days"),
        (lambda: exponential(-SECOND), ValueError, "first=.*cannot be negative"),
        (lambda: exponential(1.0), TypeError, "first=1.0: expected a timedelta"),
        (lambda: exponential(cap=-SECOND), ValueError, "cap=.*cannot be negative"),
        (lambda: exponential(cap=60), TypeError, "cap=60: expected a timedelta"),
        (lambda: exponential(factor=0.5), ValueError, "factor=0.5: expected a number from 1 to 1000"),
        (lambda: exponential(factor=float("nan")), ValueError, "factor=nan"),
        (lambda: exponential(factor=float("inf")), ValueError, "factor=inf"),
        (lambda: exponential(jitter=1.1), ValueError, "jitter=1.1: expected a share from 0 to 1"),
        (lambda: exponential(jitter=-0.1), ValueError, "jitter=-0.1"),
        (lambda: exponential(jitter=float("nan")), ValueError, "jitter=nan"),
        (lambda: sidekiq(cap=-SECOND), ValueError, "cap=.*cannot be negative"),
        (lambda: sidekiq(cap=3600), TypeError, "cap=3600: expected a timedelta"),
        (lambda: Snooze(-SECOND), ValueError, "for_=.*cannot be negative"),
        (lambda: Snooze(60), TypeError, "for_=60: expected a timedelta"),
        (lambda: Snooze(None), TypeError, "for_=None: expected a timedelta"),
        (lambda: Retry(after=-SECOND), ValueError, "after=.*cannot be negative"),
        (lambda: Retry(after=60), TypeError, "after=60: expected a timedelta"),
    ],
    ids=range(20),
)
def test_what_cannot_be_is_refused_when_it_is_made(make, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        make()


def test_the_verbs_say_why_and_when():
    assert str(Retry("the API is down")) == "the API is down"
    assert Retry().after is None
    assert Retry(after=5 * SECOND).after == 5 * SECOND
    assert Retry(after=timedelta(0)).after == timedelta(0)
    assert Snooze(timedelta(minutes=5)).for_ == timedelta(minutes=5)
    assert str(Snooze(timedelta(minutes=5))) == "snoozed for 0:05:00"
    assert str(Discard("no such user")) == "no such user"
    assert str(Discard()) == "discarded"


def test_no_except_clause_for_the_library_s_errors_catches_a_verb():
    for verb in (Retry(), Snooze(SECOND), Discard()):
        assert isinstance(verb, Exception)
        assert not isinstance(verb, NeoqError)


@settings(deadline=None)
@given(st.timedeltas())
def test_a_delay_is_kept_or_refused(value):
    if timedelta(0) <= value <= LONGEST_DELAY:
        assert checked_delay("x", value) is value
    else:
        with pytest.raises(ValueError, match=r"^x="):
            checked_delay("x", value)
