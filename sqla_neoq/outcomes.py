"""What became of a run, as a value; and the pure policy that makes one of an exception."""

from __future__ import annotations

import logging
import traceback as traceback_module
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

from sqla_neoq.context import StopReason
from sqla_neoq.errors import JobCancelled, JobTimeout
from sqla_neoq.payloads import clean_text
from sqla_neoq.retries import DEFAULT_BACKOFF, LONGEST_DELAY, Discard, Retry, Snooze

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqla_neoq.context import ClaimedJob
    from sqla_neoq.tasks import Definition

log = logging.getLogger("sqla_neoq.jobs")

_MESSAGE_LIMIT: Final = 2_000
_TRACEBACK_LIMIT: Final = 20_000


class Verb(Enum):
    """What is to be written for a run that ended."""

    COMPLETE = "processed"
    FAIL = "failed"
    BURY = "dead"
    PUT_BACK = "new"
    CANCEL = "cancelled"
    LOST = "lost"


@dataclass(slots=True)
class Outcome:
    """One run's end.

    Attributes:
        job: the claimed row; its id and token are the fence.
        verb: what to write.
        delay: for FAIL and PUT_BACK, the seconds until it is due again; None leaves ``run_after`` alone.
        reason: for BURY, why it is dead.
        kind: of the failure, for ``neoq_failures``; None writes no row there.
        message: the failure in a line or a few.
        traceback: where it happened.
        written: the run wrote its completion itself, in its own session's transaction.
        joined: the run wrote its completion in a transaction of the task's own, which may have committed or not.
        duration: how many seconds the run took; None for a job that was never started.
    """

    job: ClaimedJob
    verb: Verb
    delay: float | None = None
    reason: str | None = None
    kind: str | None = None
    message: str | None = None
    traceback: str | None = None
    written: bool = False
    joined: bool = False
    duration: float | None = None


def judge(error: BaseException, job: ClaimedJob, definition: Definition, stop: StopReason | None) -> Outcome:
    """Turn what a task raised into an outcome.

    ``stop`` says whether, and why, the run had been asked to stop: a run that stops because it was told to has not
    failed. Never raises.
    """
    try:
        return _judge(error, job, definition, stop)
    except Exception:
        # Such as a Snooze whose subclass forgot to say for how long. Without an outcome the job would run for ever.
        log.exception("what %s raised cannot be understood; it counts as a failure", definition.name)
        return failure(error, job, definition)


def _judge(error: BaseException, job: ClaimedJob, definition: Definition, stop: StopReason | None) -> Outcome:
    match error:
        case _ if stop is StopReason.LOST:
            # The row may still be running under this run's token, until somebody rescues it: "cancelled", which is how
            # a run usually stops when asked, would pass the fence, and the job would never run again.
            return Outcome(job, Verb.LOST)
        case Snooze():
            return Outcome(job, Verb.PUT_BACK, delay=error.for_.total_seconds())
        case Discard():
            return _described(Outcome(job, Verb.BURY, reason="discarded", kind="discarded"), error)
        case _ if stop is StopReason.SHUTDOWN:
            return Outcome(job, Verb.PUT_BACK)
        case _ if stop is StopReason.CANCELLED:
            return Outcome(job, Verb.CANCEL)
        case JobCancelled():
            return Outcome(job, Verb.CANCEL)
        case Retry():
            return failure(error, job, definition, kind="retry", after=error.after)
        case _ if stop is StopReason.TIMEOUT:
            return failure(error, job, definition, kind="timeout")
        case JobTimeout():
            return failure(error, job, definition, kind="timeout")
        case _:
            # A ClaimLost as well: if another owns the job, the fence refuses this. If not, because the task itself
            # changed its own job's row, it has failed, and must not stay "running" for ever.
            return failure(error, job, definition)


def failure(
    error: BaseException,
    job: ClaimedJob,
    definition: Definition,
    *,
    kind: str = "error",
    after: timedelta | None = None,
) -> Outcome:
    """Return the outcome of a failed attempt: another try, or death when the retries are used up."""
    if job.retries >= definition.retries_of(job.max_retries):
        return _described(Outcome(job, Verb.BURY, reason="exhausted", kind=kind), error)
    delay = _backoff(definition, job) if after is None else after
    return _described(Outcome(job, Verb.FAIL, delay=delay.total_seconds(), kind=kind), error)


def _backoff(definition: Definition, job: ClaimedJob) -> timedelta:
    """Ask the task's policy; a policy that fails itself must not cost the job its retry."""
    try:
        delay = definition.backoff(job.retries)
        if not isinstance(delay, timedelta):
            raise TypeError(f"backoff({job.retries}) returned {delay!r}: expected a timedelta")
    except BaseException:
        log.exception("the back-off of %s failed; using the default", definition.name)
        delay = DEFAULT_BACKOFF(job.retries)
    return min(max(delay, timedelta(0)), LONGEST_DELAY)


def _described(outcome: Outcome, error: BaseException) -> Outcome:
    name = type(error).__name__
    message = _written(lambda: f"{name}: {error}", f"{name} (its message cannot be read)")
    traceback = _written(lambda: "".join(traceback_module.format_exception(error)), f"{name} (no traceback)")
    outcome.message = clean_text(message, _MESSAGE_LIMIT)
    outcome.traceback = clean_text(traceback, _TRACEBACK_LIMIT)
    return outcome


def _written(write: Callable[[], str], otherwise: str) -> str:
    """Call what writes an exception out: that runs the application's code, and may raise anything."""
    try:
        return write()
    except BaseException:  # noqa: BLE001 - a failure that cannot be described is still one to record
        return otherwise
