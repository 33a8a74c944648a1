"""The seam between what is to be done and the handle through which it is done."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from sqla_neoq.errors import NeoqWarning
from sqla_neoq.payloads import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from sqlalchemy import Executable

T = TypeVar("T")
H = TypeVar("H")

Rows: TypeAlias = "Sequence[Sequence[Any]]"


class Query(NamedTuple):
    """One statement of :mod:`sqla_neoq.statements` with its parameters."""

    statement: Executable
    parameters: dict[str, Any]


Steps: TypeAlias = "Generator[Query, Rows, T]"
"""Yields queries, is sent their rows by position, and returns a result."""
Plan: TypeAlias = "Callable[[int], Steps[T]]"
"""Takes the most bytes that a payload may have. What it does before its first query is done before any I/O."""


class Settings(NamedTuple):
    """Where the tables are, and how large a payload may be."""

    schema: str | None = None
    max_payload: int = MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class Configured(Generic[H]):
    """A handle with settings of its own; made by :func:`configure`."""

    handle: H
    schema: str | None
    max_payload: int | None

    def over(self, settings: Settings) -> Settings:
        """Return the settings with those of this one put over them."""
        return Settings(
            settings.schema if self.schema is None else self.schema,
            settings.max_payload if self.max_payload is None else self.max_payload,
        )


def configure(handle: H, *, schema: str | None = None, max_payload: int | None = None) -> Configured[H]:
    """Return the handle with settings, to be passed as ``session`` to everything that takes one.

    A SQLAlchemy engine has execution options for the same; this is for the other handles.

    Args:
        handle: what holds your transaction.
        schema: the schema of the tables; None leaves it to the connection's ``search_path``.
        max_payload: the most bytes of JSON a payload may have; None means 1 MiB.

    Raises:
        TypeError: a setting of the wrong type.
        ValueError: a setting that cannot be.
    """
    if isinstance(handle, Configured):
        schema, max_payload = handle.schema if schema is None else schema, max_payload or handle.max_payload
        handle = handle.handle
    if schema is not None and not isinstance(schema, str):
        raise TypeError(f"schema={schema!r}: expected str or None, got {type(schema).__name__}")
    if schema is not None and (not schema or "\0" in schema):
        raise ValueError(f"schema={schema!r}: a schema's name is not empty and has no NUL characters")
    if max_payload is not None:
        if isinstance(max_payload, bool) or not isinstance(max_payload, int):
            raise TypeError(f"max_payload={max_payload!r}: expected int or None, got {type(max_payload).__name__}")
        if max_payload < 2:
            raise ValueError(f"max_payload={max_payload!r}: expected at least 2 bytes, those of an empty object")
    return Configured(handle, schema, max_payload)


_AUTOCOMMIT = (
    "enqueue() on a connection in AUTOCOMMIT: the job is there at once, and stays there when your work is "
    "rolled back; use a transaction"
)


class Joined(ABC):
    """A handle of synchronous code."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether what is sent now stays undone until the caller commits."""

    @abstractmethod
    def rows(self, query: Query) -> Rows:
        """Run one query in the caller's transaction and return its rows, whatever rows the caller is used to."""

    def perform(self, plan: Plan[T], *, warn: bool = False, must: str | None = None) -> T:
        """Run the plan.

        Args:
            plan: what to do.
            warn: say so, where the caller's caller's caller stands, if there is no transaction to join.
            must: raise a RuntimeError that says this, in that case.
        """
        steps = plan(self.settings.max_payload)
        try:
            query = next(steps)
            if (warn or must) and not self.in_transaction():
                if must:
                    raise RuntimeError(must)
                warnings.warn(_AUTOCOMMIT, NeoqWarning, stacklevel=4)
            while True:
                query = steps.send(self.rows(query))
        except StopIteration as end:
            result: T = end.value
            return result


class AsyncJoined(ABC):
    """A handle of asynchronous code."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether what is sent now stays undone until the caller commits."""

    @abstractmethod
    async def rows(self, query: Query) -> Rows:
        """Run one query in the caller's transaction and return its rows, whatever rows the caller is used to."""

    async def perform(self, plan: Plan[T], *, warn: bool = False, must: str | None = None) -> T:
        """Run the plan; the arguments are those of :meth:`Joined.perform`."""
        steps = plan(self.settings.max_payload)
        try:
            query = next(steps)
            if (warn or must) and not self.in_transaction():
                if must:
                    raise RuntimeError(must)
                warnings.warn(_AUTOCOMMIT, NeoqWarning, stacklevel=4)
            while True:
                query = steps.send(await self.rows(query))
        except StopIteration as end:
            result: T = end.value
            return result
