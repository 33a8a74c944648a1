"""Waiting for what another thread or process will bring about."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T], *, within: float = 10.0, why: str | Callable[[], object] = "") -> T:
    """Return what ``predicate`` returns as soon as that is true; fail when it is not within ``within`` seconds.

    The limit only bounds a failing test: make it no part of what a test asserts. ``why`` (or what it returns) is added
    to the failure's message. An exception in ``predicate`` is the test's own and passes through.
    """
    deadline = time.monotonic() + within
    pause = 0.002
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            reason = why() if callable(why) else why
            raise AssertionError(f"not within {within:g} s; the last value was {value!r}. {reason}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
