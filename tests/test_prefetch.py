import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqla_neoq import prefetch


def test_a_queue_that_never_ran_a_job_claims_none_ahead():
    assert prefetch.ahead(10, None) == 0


def test_jobs_that_take_longer_than_the_horizon_are_not_hoarded():
    assert prefetch.ahead(1, 0.021) == 0
    assert prefetch.ahead(10, 30.0) == 0


def test_as_many_are_claimed_ahead_as_the_slots_will_start_within_the_horizon():
    assert prefetch.ahead(10, 0.002) == 100
    assert prefetch.ahead(1, 0.001) == 20


def test_the_number_is_bounded_however_short_the_jobs_are():
    assert prefetch.ahead(10_000, 0.0) == prefetch.LIMIT


def test_a_clock_that_did_not_tick_divides_nothing_by_zero():
    assert 0 < prefetch.ahead(1, 0.0) <= prefetch.LIMIT


@given(st.integers(1, 10_000), st.floats(0, 1e6), st.floats(0, 1e6))
def test_slower_jobs_never_mean_more_ahead(slots, one, other):
    fast, slow = sorted((one, other))
    assert prefetch.LIMIT >= prefetch.ahead(slots, fast) >= prefetch.ahead(slots, slow) >= 0


def test_the_first_duration_is_the_mean():
    assert prefetch.mean_of(None, 3.0) == 3.0


@pytest.mark.parametrize(("before", "jobs"), [(0.001, 50), (8e-6, 80)])
def test_the_mean_follows_a_change_within_some_dozens_of_jobs(before, jobs):
    mean = before
    for _ in range(jobs):
        mean = prefetch.mean_of(mean, 1.0)
    assert 0.9 < mean < 1.0


def test_tiny_jobs_that_have_become_slow_are_soon_claimed_no_more_than_can_be_started():
    mean = 8e-6
    for _ in range(35):
        mean = prefetch.mean_of(mean, 0.1)
    assert prefetch.ahead(20, mean) < 20


def test_one_job_whose_thread_lost_its_turn_makes_no_claim_small():
    assert prefetch.ahead(20, prefetch.mean_of(8e-6, 0.1)) == prefetch.LIMIT


def test_twenty_threads_that_lost_their_turns_make_the_next_claims_no_smaller():
    mean = 8e-6
    for _ in range(19):
        mean = prefetch.mean_of(mean, 0.02)
    assert prefetch.ahead(20, mean) >= prefetch.BATCH


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_mean_stays_between_what_it_was_and_what_came(mean, duration):
    low, high = sorted((mean, duration))
    slack = 1e-9 * max(1.0, high)
    assert low - slack <= prefetch.mean_of(mean, duration) <= high + slack
