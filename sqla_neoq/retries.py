"""When is a failed job tried again: pure policy, and the exceptions by which a task steers its own outcome.

Nothing here reads a clock or a database: the number of retries goes in, a delay comes out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeAlias

Backoff: TypeAlias = Callable[[int], timedelta]
"""How long to wait before the next try, given how many retries there have been (0 after the first failure)."""

LONGEST_DELAY: Final = timedelta(days=36_525)
"""A hundred years: past it a delay is a mistake, and far past it no database can hold the time."""

_jitter: Final = random.Random()  # noqa: S311 - jitter, not a secret


def checked_delay(name: str, value: object, *, what: str = "a timedelta") -> timedelta:
    """Return ``value`` if it is a delay that can be meant.

    Raises:
        TypeError: it is no timedelta.
        ValueError: it is negative or longer than :data:`LONGEST_DELAY`.
    """
    if not isinstance(value, timedelta):
        raise TypeError(f"{name}={value!r}: expected {what}, got {type(value).__name__}; write timedelta(seconds=...)")
    if value < timedelta(0):
        raise ValueError(f"{name}={value!r}: a delay cannot be negative")
    if value > LONGEST_DELAY:
        raise ValueError(f"{name}={value!r}: a delay cannot be longer than {LONGEST_DELAY.days} days")
    return value


class Retry(Exception):  # noqa: N818 - the verbs by which a task steers its outcome
    """Raised in a task: this attempt failed, try again ``after`` that long (None: as the back-off says).

    It is a failure like any other: it uses up a retry and leaves a row in ``neoq_failures``.
    """

    def __init__(self, reason: str = "retry asked for", *, after: timedelta | None = None) -> None:
        super().__init__(reason)
        self.after = None if after is None else checked_delay("after", after)


class Snooze(Exception):  # noqa: N818
    """Raised in a task: not now; run again ``for_`` that long from now. No failure, and no retry used up."""

    def __init__(self, for_: timedelta) -> None:
        self.for_ = checked_delay("for_", for_)
        super().__init__(f"snoozed for {for_}")


class Discard(Exception):  # noqa: N818
    """Raised in a task: never try this job again. It becomes a dead job with the reason ``discarded``."""

    def __init__(self, reason: str = "discarded") -> None:
        super().__init__(reason)


def sidekiq(*, cap: timedelta = timedelta(days=7), rng: random.Random = _jitter) -> Backoff:
    """Return Sidekiq's curve: ``n⁴ + 15 + rand(30) · (n + 1)`` seconds after ``n`` retries, at most ``cap``.

    From 15-44 s after the first failure over 10 hours at ``n`` = 14 to 2.7 days at ``n`` = 22; 24 attempts take
    about two weeks. The formula is that of Sidekiq's "Error Handling" page; neoq's own left the first retry without
    jitter.

    Raises:
        ValueError: ``cap`` is negative, or longer than :data:`LONGEST_DELAY`.
    """
    checked_delay("cap", cap)

    def delay(retries: int) -> timedelta:
        # Compared before it becomes a timedelta: n⁴ outgrows a timedelta at n = 17,000.
        seconds = retries**4 + 15 + rng.randrange(30) * (retries + 1)
        return min(timedelta(seconds=min(seconds, 10**10)), cap)

    return delay


def exponential(
    first: timedelta = timedelta(seconds=1),
    *,
    factor: float = 2.0,
    cap: timedelta = timedelta(hours=1),
    jitter: float = 0.1,
    rng: random.Random = _jitter,
) -> Backoff:
    """Return a curve that multiplies ``first`` by ``factor`` after each retry, up to ``cap``.

    Args:
        first: the delay after the first failure.
        factor: at least 1.
        cap: no delay is longer, jitter included.
        jitter: the share of each delay that is random, 0 to 1, so that jobs that failed together part.
        rng: where the randomness comes from.

    Raises:
        ValueError: for an option out of its range.
    """
    checked_delay("first", first)
    checked_delay("cap", cap)
    if not 1 <= factor <= 1000:  # also refuses NaN
        raise ValueError(f"factor={factor!r}: expected a number from 1 to 1000")
    if not 0 <= jitter <= 1:
        raise ValueError(f"jitter={jitter!r}: expected a share from 0 to 1")
    shortest, longest = first.total_seconds(), cap.total_seconds()
    # A float overflows at once where an int would grow for minutes.
    base = float(factor)

    def delay(retries: int) -> timedelta:
        try:
            seconds = shortest * base**retries
        except OverflowError:
            seconds = longest if shortest else 0.0
        seconds = min(seconds, longest)
        return timedelta(seconds=min(seconds * (1 + jitter * rng.random()), longest))

    return delay


def constant(delay: timedelta) -> Backoff:
    """Return a policy that always waits ``delay``."""
    checked_delay("delay", delay)
    return lambda _retries: delay


DEFAULT_BACKOFF: Final = sidekiq()
