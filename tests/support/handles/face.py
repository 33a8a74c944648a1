"""One face for every handle: a caller's transaction, its savepoints, its own statements and the library's verbs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL

import sqla_neoq


class Undo(Exception):
    """Leaves a transaction's block so that it is rolled back."""


@dataclass
class Caller:
    """An application in the middle of its work.

    Attributes:
        is_async: whether its verbs are those of asynchronous code.
        transaction: opens a transaction and yields the handle; an exception rolls it back.
        savepoint: the same for a savepoint within it.
        execute: runs a statement of the application's own on the handle.
    """

    is_async: bool
    transaction: Callable[[], AbstractAsyncContextManager[Any]]
    savepoint: Callable[[Any], AbstractAsyncContextManager[Any]]
    execute: Callable[[Any, str], Any]

    async def call(self, verb: str, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``sqla_neoq.enqueue`` or another verb, or its asynchronous form."""
        if self.is_async:
            return await getattr(sqla_neoq, f"{verb}_async")(handle, *args, **kwargs)
        return getattr(sqla_neoq, verb)(handle, *args, **kwargs)

    async def run(self, handle: Any, statement: str) -> None:
        """Run a statement of the application's own."""
        result = self.execute(handle, statement)
        if self.is_async:
            await result


@dataclass
class Kind:
    """A kind of handle."""

    name: str
    open: Callable[[URL], AbstractAsyncContextManager[Caller]]
    is_async: bool

    def drive(self, url: URL, work: Callable[[Caller], Any]) -> Any:
        """Open a caller and run ``work(caller)`` to its end."""

        async def all_of_it() -> Any:
            async with self.open(url) as caller:
                return await work(caller)

        if self.is_async:
            return asyncio.run(all_of_it())
        try:
            all_of_it().send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("something synchronous awaited")


KINDS: list[Kind] = []


def kind(function: Callable[[URL], AsyncIterator[Caller]]) -> Callable[[URL], AsyncIterator[Caller]]:
    """Register a kind; those of asynchronous code are called ``async_...``."""
    name = function.__name__
    KINDS.append(Kind(name, asynccontextmanager(function), name.startswith("async_")))
    return function


def asynchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make of a context manager the asynchronous one that the suite enters."""

    @asynccontextmanager
    async def entered(*args: Any) -> AsyncIterator[Any]:
        with function(*args) as value:
            yield value

    return entered
