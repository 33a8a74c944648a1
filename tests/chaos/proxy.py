"""A TCP proxy in front of PostgreSQL that breaks connections in the ways that networks do.

It reads enough of the protocol to know a *round trip*: everything that a client sends up to the message that makes the
server answer with ReadyForQuery (a simple Query, or the Sync after an extended one; the startup counts as one). A round
trip can be cut before the server hears of it, or after it answered and before the client hears of that: the one fault
after which a client cannot know whether its COMMIT happened.
"""

import asyncio
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

_CANCEL, _SSL, _GSS = 80877102, 80877103, 80877104


class Verdict(Enum):
    """What to do with a round trip."""

    PASS = "pass"
    CUT_BEFORE = "before"
    """The server never hears of it."""
    CUT_AFTER = "after"
    """The server did it and answered, and the client never hears of that."""


class Link:
    """One client's connection through the proxy."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.listens = False
        self.swallowed = False
        self.cut_when_answered = False
        self.started = False

    def abort(self) -> None:
        """Cut both sides off, with a reset."""
        for writer in (self.client, self.server):
            with suppress(Exception):
                writer.transport.abort()


class Proxy:
    """Listens on a port of its own; every verb may be called from any thread, and holds for connections to come too.

    Args:
        socket: the path of the server's unix socket.
    """

    def __init__(self, socket: str) -> None:
        self._target = socket
        self._links: set[Link] = set()
        self._loop = asyncio.new_event_loop()
        self._delay = 0.0
        self._refusing = False
        self._black_hole = False
        # Asked for each round trip, in the proxy's thread.
        self.judge: Callable[[Link, bytes], Verdict] = lambda _link, _request: Verdict.PASS
        self.round_trips = 0
        self.cuts = 0
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="proxy", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Cut everything and end."""
        self._call(lambda: [link.abort() for link in self._links])
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def links(self) -> list[Link]:
        """The connections there are."""
        return list(self._call(lambda: list(self._links)))

    # --- the verbs ---

    def delay(self, seconds: float) -> None:
        """Hold every chunk back for so long, in each direction."""
        self._delay = seconds

    def cut(self, *, listening: bool | None = None) -> int:
        """Reset the connections there are: all, those that LISTEN, or those that do not. Returns how many."""
        return self._each(Link.abort, listening)

    def refuse(self, refusing: bool = True) -> None:
        """Reset every connection that comes, or let them in again."""
        self._refusing = refusing

    def half_open(self, *, listening: bool | None = None) -> int:
        """Swallow all bytes of the connections there are, for good; neither side is told. Returns how many."""

        def swallow(link: Link) -> None:
            link.swallowed = True

        return self._each(swallow, listening)

    def black_hole(self, on: bool = True) -> None:
        """Accept whoever comes and swallow all, as a network that drops packets does; so is what is there.

        When it ends, those connections are reset: a real one's ends have given up by then, or find bytes missing.
        """
        self._black_hole = on
        if on:
            self.half_open()
        else:
            self._call(lambda: [link.abort() for link in list(self._links) if link.swallowed])

    def _each(self, act: Callable[[Link], None], listening: bool | None) -> int:
        def act_on_all() -> int:
            chosen = [link for link in self._links if listening is None or link.listens is listening]
            for link in chosen:
                act(link)
            return len(chosen)

        return self._call(act_on_all)

    def _call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    # --- the thread ---

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, server_writer)
        link.swallowed = self._black_hole
        self._links.add(link)
        try:
            await asyncio.gather(self._forward(link, reader), self._answer(link, server_reader))
        except (OSError, asyncio.IncompleteReadError, EOFError):
            pass
        finally:
            link.abort()
            self._links.discard(link)

    async def _forward(self, link: Link, reader: asyncio.StreamReader) -> None:
        """Client to server, one round trip at a time."""
        pending = bytearray()
        while True:
            frame, ends = await self._client_frame(link, reader)
            pending += frame
            if not ends:
                continue
            request = bytes(pending)
            pending.clear()
            if link.swallowed:
                continue
            if frame[:1] in b"QS" or not link.started:
                self.round_trips += 1
                verdict = self.judge(link, request)
                if verdict is not Verdict.PASS:
                    self.cuts += 1
                if verdict is Verdict.CUT_BEFORE:
                    raise EOFError
                link.cut_when_answered = verdict is Verdict.CUT_AFTER
                link.listens = link.listens or b"LISTEN neoq" in request
            link.started = True
            if self._delay:
                await asyncio.sleep(self._delay)
            link.server.write(request)
            await link.server.drain()

    async def _client_frame(self, link: Link, reader: asyncio.StreamReader) -> tuple[bytes, bool]:
        """Return one message of the client, and whether it is to be sent on now, with what came before."""
        if not link.started:
            head = await reader.readexactly(8)
            length, code = struct.unpack("!II", head)
            body = await reader.readexactly(length - 8)
            if code in {_SSL, _GSS}:
                # Answered here, or the server's answer without a frame would have to be told from the others.
                link.client.write(b"N")
                return b"", False
            if code == _CANCEL:
                link.server.write(head + body)
                await link.server.drain()
                raise EOFError
            return head + body, True
        head = await reader.readexactly(5)
        (length,) = struct.unpack("!I", head[1:])
        body = await reader.readexactly(length - 4)
        # Parse, Bind, Describe, Execute and Close wait for their Sync; everything else goes at once.
        return head + body, head[:1] not in b"PBDEC"

    async def _answer(self, link: Link, reader: asyncio.StreamReader) -> None:
        """Server to client; frames matter only to see ReadyForQuery."""
        buffer = bytearray()
        while chunk := await reader.read(65536):
            if link.swallowed:
                continue
            if self._delay:
                await asyncio.sleep(self._delay)
            if link.cut_when_answered:
                buffer += chunk
                # ReadyForQuery is always the last, and no other message ends in its six bytes.
                if len(buffer) >= 6 and buffer[-6:-1] == b"Z\x00\x00\x00\x05":
                    raise EOFError
                continue
            link.client.write(chunk)
            await link.client.drain()
        raise EOFError
