"""A pooled connection that died is replaced before it is lent, and one that lives is not asked each time."""

import psycopg
import pytest
from sqlalchemy import text
from support.waiting import eventually

from sqla_neoq.checkout import LONGEST_IDLE, is_doubtful
from sqla_neoq.dialects import engine_of


@pytest.fixture
def pooled(database_url):
    engine = engine_of(database_url, size=3)
    yield engine
    engine.dispose()


@pytest.fixture
def asked(pooled, monkeypatch):
    """The connections that were asked whether they live."""
    asked = []
    ping = pooled.dialect.do_ping
    monkeypatch.setattr(pooled.dialect, "do_ping", lambda connection: asked.append(connection) or ping(connection))
    return asked


def pids_of_three(pooled):
    """Leave three idle connections in the pool."""
    connections = [pooled.connect() for _ in range(3)]
    pids = [connection.scalar(text("SELECT pg_backend_pid()")) for connection in connections]
    for connection in connections:
        connection.close()
    return pids


def terminate(engine, pid):
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})


def test_a_connection_that_was_just_used_is_not_asked(pooled, asked):
    for _ in range(3):
        with pooled.connect() as connection:
            connection.scalar(text("SELECT 1"))
    assert asked == []


def test_connections_that_the_server_closed_are_replaced_and_the_others_with_them(engine, pooled, asked):
    before = pids_of_three(pooled)
    for pid in before[:2]:
        terminate(engine, pid)
    after = pids_of_three(pooled)
    assert not set(before) & set(after)
    assert len(asked) == 1


def test_a_connection_that_lay_idle_is_asked(pooled, asked, monkeypatch):
    (pid, *_) = pids_of_three(pooled)
    monkeypatch.setattr("sqla_neoq.checkout.LONGEST_IDLE", -1.0)
    with pooled.connect() as connection:
        assert connection.scalar(text("SELECT pg_backend_pid()")) == pid
    assert len(asked) == 1


def test_a_connection_with_news_is_asked_and_kept(engine, pooled, asked):
    with pooled.connect() as connection:
        driver_connection = connection.connection.driver_connection
        driver_connection.execute("LISTEN news")
        driver_connection.commit()
    with engine.begin() as connection:
        connection.execute(text("NOTIFY news"))
    eventually(lambda: is_doubtful(driver_connection, 0.0))
    with pooled.connect() as connection:
        assert connection.connection.driver_connection is driver_connection
    assert asked == [driver_connection]


def test_doubt_is_of_idleness_of_what_is_to_be_read_and_of_a_lost_socket(engine, database_url):
    connection = psycopg.connect(database_url.replace("+psycopg", ""))
    pid = connection.info.backend_pid
    assert not is_doubtful(connection, LONGEST_IDLE)
    assert is_doubtful(connection, LONGEST_IDLE + 0.1)
    terminate(engine, pid)
    assert is_doubtful(connection, 0.0)
    connection.close()
    assert is_doubtful(connection, 0.0)
