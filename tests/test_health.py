import http.client
import json
import socket
import threading
from dataclasses import dataclass, field

import pytest

from sqla_neoq.errors import ConfigurationError
from sqla_neoq.health import HealthServer


@dataclass
class State:
    live: bool = True
    ready: bool = True
    detail: dict = field(default_factory=dict)


def ask(server, path, *, method="GET", host="127.0.0.1"):
    connection = http.client.HTTPConnection(host, server.port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if body else None, answer.headers
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("live", "ready", "livez", "readyz"),
    [(True, True, 200, 200), (True, False, 200, 503), (False, False, 503, 503)],
)
def test_each_path_answers_for_its_own_question(live, ready, livez, readyz):
    with HealthServer(lambda: State(live, ready, {"listening": ready}), 0) as server:
        assert ask(server, "/livez")[:2] == (livez, {"live": live, "ready": ready, "listening": ready})
        assert ask(server, "/readyz")[:2] == (readyz, {"live": live, "ready": ready, "listening": ready})


def test_the_probe_is_asked_each_time():
    states = iter([State(ready=False), State(ready=True)])
    with HealthServer(lambda: next(states), 0) as server:
        assert [ask(server, "/readyz")[0] for _ in range(2)] == [503, 200]


def test_the_answer_is_json_that_no_one_may_keep():
    with HealthServer(lambda: State(detail={"since": object()}), 0) as server:
        headers = ask(server, "/livez")[2]
    assert (headers["Content-Type"], headers["Cache-Control"]) == ("application/json", "no-store")


def test_a_probe_that_fails_is_not_live_and_tells_no_secret(caplog):
    def fail():
        raise RuntimeError("password=secret")

    with HealthServer(fail, 0) as server:
        assert ask(server, "/livez")[:2] == (503, {"live": False, "ready": False, "error": "RuntimeError"})
    assert "the health probe failed" in caplog.text


def test_another_path_is_not_found_and_another_method_not_known():
    with HealthServer(State, 0) as server:
        assert ask(server, "/")[0] == 404
        assert ask(server, "/livez?x=1")[0] == 200
        assert ask(server, "/livez", method="HEAD")[:2] == (200, None)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", "/livez")
        assert connection.getresponse().status == 501
        connection.close()


def test_a_client_that_says_nothing_holds_up_nobody():
    with HealthServer(State, 0) as server, socket.create_connection(("127.0.0.1", server.port)):
        assert ask(server, "/livez")[0] == 200


def test_all_addresses_are_listened_on_unless_one_is_named():
    with HealthServer(State, 0) as everywhere:
        assert ask(everywhere, "/livez", host="127.0.0.1")[0] == 200
        if socket.has_dualstack_ipv6():
            assert ask(everywhere, "/livez", host="::1")[0] == 200
    with HealthServer(State, 0, "127.0.0.1") as here:
        assert ask(here, "/livez", host="127.0.0.1")[0] == 200
        with pytest.raises(ConnectionRefusedError):
            ask(here, "/livez", host="127.0.0.2")


def test_a_port_that_is_taken_is_named():
    with HealthServer(State, 0) as server, pytest.raises(ConfigurationError, match=f"health port {server.port} cannot"):
        HealthServer(State, server.port)


def test_closing_frees_the_port_ends_the_thread_and_may_be_done_twice():
    server = HealthServer(State, 0)
    server.close()
    server.close()
    assert "neoq-health" not in {thread.name for thread in threading.enumerate()}
    with HealthServer(State, server.port) as again:
        assert again.port == server.port
