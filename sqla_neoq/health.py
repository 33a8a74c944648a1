"""Health over HTTP, for Kubernetes and load balancers: ``/livez`` and ``/readyz``.

A thread of the standard library's HTTP server that asks the runner each time and answers 200 or 503 with a JSON body.
An exec probe would start an interpreter, a third of a second of CPU, every few seconds.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Protocol, Self

from sqla_neoq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class State(Protocol):
    """What a probe answers: a runner's ``Health`` is one."""

    @property
    def live(self) -> bool:
        """Whether the process does its work; one that does not should be restarted."""

    @property
    def ready(self) -> bool:
        """Whether it can take jobs now; one that cannot should be waited for."""

    @property
    def detail(self) -> Mapping[str, object]:
        """What is behind the two, for whoever reads the body."""


class HealthServer:
    """Answers ``GET /livez`` and ``GET /readyz`` from ``probe`` until closed; a context manager.

    Args:
        probe: asked on each request, from a thread of its own; raising counts as not live.
        port: the TCP port; 0 takes a free one, see :attr:`port`.
        host: the address to listen on; empty means all of them, as probes come from outside the container.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """

    def __init__(self, probe: Callable[[], State], port: int, host: str = "") -> None:
        try:
            self._server = _Server((host, port), _handler(probe))
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"health port {port} cannot be listened on: {error}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="neoq-health", daemon=True)
        self._thread.start()
        log.info("health at port %d: /livez and /readyz", self.port)

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        # All addresses, when none is named: both families through one socket where the system can.
        self._dual = not address[0] and socket.has_dualstack_ipv6()
        if self._dual or ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        if self._dual:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's own, which asks DNS for a name that nobody here reads, and may wait long for it.
        socketserver.TCPServer.server_bind(self)


def _handler(probe: Callable[[], State]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # seconds a client may take to say what it wants
        server_version = "sqla_neoq"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path not in ("/livez", "/readyz"):
                self._answer(HTTPStatus.NOT_FOUND, {"paths": ["/livez", "/readyz"]})
                return
            try:
                state = probe()
                good = state.live if path == "/livez" else state.ready
                body: Mapping[str, object] = {"live": state.live, "ready": state.ready} | dict(state.detail)
            except Exception as error:
                log.exception("the health probe failed")
                good, body = False, {"live": False, "ready": False, "error": type(error).__name__}
            self._answer(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, body)

        do_HEAD = do_GET  # noqa: N815

        def _answer(self, status: HTTPStatus, body: Mapping[str, object]) -> None:
            content = json.dumps(body, default=str).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            log.debug(format, *args)

    return Handler
