"""What a runner and its child processes say to each other, and the socket that carries it.

Messages are MessagePack after four bytes of length. The runner sends one ``Setup`` and then an ``Assignment`` a job;
the child answers with ``Ready`` and a ``Report`` each. The end of the file says that the other
side is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sqla_neoq.context import ClaimedJob  # noqa: TC001 - msgspec reads the annotation when it runs
from sqla_neoq.outcomes import Outcome, Verb

if TYPE_CHECKING:
    import socket


class Setup(msgspec.Struct, array_like=True):
    """What a child has to know before its first job.

    Attributes:
        homes: where its tasks and handlers are, each as ``module:name``.
        database: where ``job.session`` leads: a URL, or ``module:name``; None: nowhere.
        schema: the schema of the tables, if it is fixed.
        delete: whether processed jobs are deleted at once.
        logs: the arguments of :func:`sqla_neoq.logs.configure`; None leaves logging as Python has it.
    """

    homes: list[str]
    database: str | None
    schema: str | None
    delete: bool
    logs: tuple[str, str, str | None] | None


class Ready(msgspec.Struct, array_like=True):
    """The child has imported its tasks; or could not, for this error."""

    error: str | None = None
    traceback: str | None = None


class Assignment(msgspec.Struct, array_like=True):
    """One job to run."""

    home: str
    job: ClaimedJob


class Report(msgspec.Struct, array_like=True):
    """What became of a run: the fields of an Outcome, without the job."""

    verb: Verb
    delay: float | None
    reason: str | None
    kind: str | None
    message: str | None
    traceback: str | None
    written: bool
    joined: bool

    @classmethod
    def of(cls, outcome: Outcome) -> Report:
        """Make the report of an outcome."""
        return cls(
            outcome.verb,
            outcome.delay,
            outcome.reason,
            outcome.kind,
            outcome.message,
            outcome.traceback,
            outcome.written,
            outcome.joined,
        )

    def outcome(self, job: ClaimedJob) -> Outcome:
        """Return the outcome that was reported."""
        return Outcome(
            job,
            self.verb,
            delay=self.delay,
            reason=self.reason,
            kind=self.kind,
            message=self.message,
            traceback=self.traceback,
            written=self.written,
            joined=self.joined,
        )


class Channel:
    """One end of the line; one thread sends, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._received = bytearray()

    def send(self, message: Setup | Ready | Assignment | Report) -> None:
        """Send a message.

        Raises:
            OSError: the other side is gone.
        """
        text = msgspec.msgpack.encode(message)
        self.end.sendall(len(text).to_bytes(4, "big") + text)

    def receive(self) -> bytes | None:
        """Return the next message, encoded; None at the end of the file.

        Raises:
            TimeoutError: the socket has a timeout, and it is over; what has come so far is kept.
            OSError: the line is broken.
        """
        while len(self._received) < 4 or len(self._received) < 4 + self._length:
            chunk = self.end.recv(65_536)
            if not chunk:
                return None
            self._received += chunk
        end = 4 + self._length
        message = bytes(self._received[4:end])
        del self._received[:end]
        return message

    @property
    def _length(self) -> int:
        return int.from_bytes(self._received[:4], "big")

    def close(self) -> None:
        """Hang up."""
        self.end.close()
