import logging
import os
import resource
import threading
from pathlib import Path
from time import monotonic

import psycopg
import pytest
from sqlalchemy import make_url, text
from support.running import Database, threads
from support.servers import libpq
from support.waiting import eventually

from sqla_neoq import listener as module
from sqla_neoq.dialects import PostgresDialect
from sqla_neoq.listener import Listener
from sqla_neoq.statements import jobs_oid


@pytest.fixture
def database(engine):
    return Database(engine)


@pytest.fixture
def oid(database):
    with database.engine.connect() as connection:
        return connection.scalar(jobs_oid(), {"table": "neoq_jobs"})


class Wakes:
    """What the listener said: a set of queues each time, None for "look everywhere"."""

    def __init__(self):
        self.all = []

    def __call__(self, queues):
        self.all.append(queues)

    @property
    def everywhere(self):
        return self.all.count(None)

    @property
    def queues(self):
        return [queue for queues in self.all if queues is not None for queue in sorted(queues)]


@pytest.fixture
def wakes():
    return Wakes()


@pytest.fixture
def make_listener(engine, oid, wakes):
    """Factory of started listeners, stopped after the test."""
    made = []

    def make(connect=None, **hungry):
        listener = Listener(
            connect or (lambda: PostgresDialect().listening_connection(engine, None, "test")), oid, wakes
        )
        made.append(listener)
        return listener

    yield make
    for listener in made:
        assert listener.stop()
    assert not threads("neoq-listener")


@pytest.fixture
def listener(make_listener, wakes):
    """A listener that listens."""
    listener = make_listener()
    listener.start()
    eventually(lambda: listener.connected and wakes.everywhere == 1)
    return listener


def locks(database, kind, name, oid):
    """The modes in which the advisory lock of that name is held."""
    query = text(
        "SELECT mode FROM pg_locks, hashtextextended(:name, :oid) AS key WHERE locktype = 'advisory' AND granted "
        # Of this database: the tests beside have their tables under the same oids in theirs.
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint = key"
    )
    with database.engine.connect() as connection:
        return list(connection.scalars(query, {"name": f"{kind}:{name}", "oid": oid}))


def hungry(listener, database, oid, *queues):
    """Be hungry for these queues, and wait until that is so."""
    listener.set_hungry(queues)
    eventually(lambda: all(locks(database, "queue", queue, oid) for queue in queues))


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def notify(database, payload):
    with database.engine.begin() as connection:
        connection.execute(text("SELECT pg_notify('neoq', :payload)"), {"payload": payload})


def backend(listener):
    return listener._connection.info.backend_pid


def terminate(database, pid):
    with database.engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})


# Hearing -------------------------------------------------------------------------------------------------------------


def test_once_it_listens_everything_is_to_be_looked_at(listener, wakes):
    assert wakes.all == [None]


def test_a_notification_wakes_for_its_queue(listener, wakes, database, oid):
    notify(database, f"{oid} emails")
    eventually(lambda: wakes.queues == ["emails"])


def test_notifications_of_other_installations_and_of_strangers_are_not_heard(listener, wakes, database, oid):
    for payload in (f"{oid + 1} emails", f"{oid}", f"{oid} ", "", "emails", f" {oid} emails", f"{oid}1 x", "x y"):
        notify(database, payload)
    notify(database, f"{oid} last")
    eventually(lambda: "last" in wakes.queues)
    assert wakes.queues == ["last"]


@pytest.mark.parametrize("queue", ["it's", 'a "b"', "ü" * 128, "🐘" * 128, " a  b ", "x" * 128, "%s", "a\nb"])
def test_a_queue_of_any_name_is_heard_of(listener, wakes, database, oid, queue):
    hungry(listener, database, oid, queue)
    eventually(lambda: wakes.queues == [queue])
    database.add(queue=queue)
    eventually(lambda: wakes.queues == [queue, queue])


def test_an_insert_that_is_rolled_back_wakes_nobody(listener, wakes, database, oid):
    hungry(listener, database, oid, "q")
    eventually(lambda: wakes.queues == ["q"])
    with database.engine.connect() as connection:
        connection.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('q')"))
        connection.rollback()
    notify(database, f"{oid} last")
    eventually(lambda: wakes.queues[-1] == "last")
    assert wakes.queues == ["q", "last"]


def test_nobody_is_notified_of_a_queue_that_nobody_is_hungry_for(listener, wakes, database, oid):
    hungry(listener, database, oid, "other")
    eventually(lambda: wakes.queues == ["other"])
    database.add(queue="q")
    notify(database, f"{oid} last")
    eventually(lambda: wakes.queues[-1] == "last")
    assert wakes.queues == ["other", "last"]


def test_many_notifications_at_once_make_few_wakes(listener, wakes, database, oid):
    with database.engine.begin() as connection:
        for number in range(100):
            connection.execute(text("SELECT pg_notify('neoq', :payload)"), {"payload": f"{oid} q{number}"})
    eventually(lambda: len(wakes.queues) == 100)
    assert len(wakes.all) < 20


def test_a_notification_that_comes_during_the_check_is_not_kept_waiting_for_the_next(
    make_listener, wakes, database, oid, monkeypatch
):
    monkeypatch.setattr(module, "_CHECK_EVERY", 0.01)
    listener = make_listener()
    execute = listener._execute

    def with_a_notification(connection, sql, parameters=None):
        if sql == "SELECT 1":
            monkeypatch.setattr(module, "_CHECK_EVERY", 1e6)
            notify(database, f"{oid} emails")
        execute(connection, sql, parameters)

    listener._execute = with_a_notification
    listener.start()
    eventually(lambda: wakes.queues == ["emails"])


def test_a_notification_that_comes_while_locks_are_taken_is_heard(make_listener, wakes, database, oid):
    listener = make_listener()
    execute = listener._execute

    def with_a_notification(connection, sql, parameters=None):
        if "lock_shared" in sql:
            notify(database, f"{oid} emails")
        execute(connection, sql, parameters)

    listener._execute = with_a_notification
    listener.start()
    eventually(lambda: wakes.everywhere == 1)
    listener.set_hungry(["q"])
    eventually(lambda: set(wakes.queues) == {"emails", "q"})


# Locks ---------------------------------------------------------------------------------------------------------------


def test_being_hungry_is_a_shared_lock_and_being_full_is_none(listener, database, oid):
    hungry(listener, database, oid, "a", "b")
    assert locks(database, "queue", "a", oid) == locks(database, "queue", "b", oid) == ["ShareLock"]
    listener.set_hungry(["b"])
    eventually(lambda: not locks(database, "queue", "a", oid))
    assert locks(database, "queue", "b", oid) == ["ShareLock"]
    listener.set_hungry([])
    eventually(lambda: not locks(database, "queue", "b", oid))


def test_whoever_turns_hungry_is_told_to_look_once_more(listener, wakes, database, oid):
    hungry(listener, database, oid, "a")
    eventually(lambda: wakes.queues == ["a"])
    hungry(listener, database, oid, "a", "b")
    eventually(lambda: wakes.queues == ["a", "b"])


def test_turning_hungry_again_and_again_holds_the_lock_once(listener, wakes, database, oid):
    for _ in range(20):
        listener.set_hungry(["q"])
        listener.set_hungry([])
    hungry(listener, database, oid, "q")
    listener.set_hungry([])
    eventually(lambda: not locks(database, "queue", "q", oid))


def test_two_runners_can_be_hungry_for_one_queue(make_listener, database, oid):
    for _ in range(2):
        listener = make_listener()
        listener.start()
        listener.set_hungry(["q"])
    eventually(lambda: locks(database, "queue", "q", oid) == ["ShareLock"] * 2)


def test_the_liveness_lock_is_held_and_moves_with_the_worker(listener, database, oid):
    listener.set_worker(7)
    eventually(lambda: locks(database, "worker", 7, oid) == ["ExclusiveLock"])
    listener.set_worker(8)
    eventually(lambda: locks(database, "worker", 8, oid) == ["ExclusiveLock"])
    assert locks(database, "worker", 7, oid) == []


def test_what_was_wanted_before_it_started_is_held_once_it_listens(make_listener, wakes, database, oid):
    listener = make_listener()
    listener.set_worker(7)
    listener.set_hungry(["q"])
    listener.start()
    eventually(lambda: wakes.everywhere)
    assert locks(database, "worker", 7, oid) == ["ExclusiveLock"]
    assert locks(database, "queue", "q", oid) == ["ShareLock"]


# Losing the connection -----------------------------------------------------------------------------------------------


def test_after_its_connection_was_ended_it_listens_again_and_has_everything_looked_at(
    listener, wakes, database, oid, caplog
):
    listener.set_worker(7)
    hungry(listener, database, oid, "q")
    before = backend(listener)
    terminate(database, before)
    eventually(lambda: wakes.everywhere == 2)
    assert backend(listener) != before
    assert locks(database, "worker", 7, oid) == ["ExclusiveLock"]
    assert locks(database, "queue", "q", oid) == ["ShareLock"]
    assert "the listening connection is down" in caplog.text
    database.add(queue="q")
    eventually(lambda: wakes.queues.count("q") >= 2)


def test_what_it_wants_while_it_is_away_is_held_when_it_is_back(make_listener, engine, wakes, database, oid):
    away = threading.Event()
    tried = threading.Event()

    def connect():
        if away.is_set():
            tried.set()
            raise psycopg.OperationalError("away")
        return PostgresDialect().listening_connection(engine, None, "test")

    listener = make_listener(connect)
    listener.start()
    eventually(lambda: wakes.everywhere == 1)
    hungry(listener, database, oid, "old")
    away.set()
    terminate(database, backend(listener))
    assert tried.wait(10)
    assert not listener.connected
    listener.set_worker(9)
    listener.set_hungry(["new"])
    away.clear()
    eventually(lambda: wakes.everywhere == 2)
    assert locks(database, "worker", 9, oid) == ["ExclusiveLock"]
    assert locks(database, "queue", "new", oid) == ["ShareLock"]
    assert locks(database, "queue", "old", oid) == []


def test_a_database_that_is_away_is_tried_with_growing_pauses_and_said(make_listener, caplog):
    tries = []

    def connect():
        tries.append(monotonic())
        raise OSError("no route to host")

    with caplog.at_level(logging.WARNING):
        listener = make_listener(connect)
        listener.start()
        eventually(lambda: len(tries) == 4)
    assert not listener.connected
    assert "no route to host" in caplog.text
    assert tries[3] - tries[2] > tries[1] - tries[0] - 0.1


def test_it_can_be_stopped_while_the_database_is_away(make_listener):
    tried = threading.Event()

    def connect():
        tried.set()
        raise psycopg.OperationalError("away")

    listener = make_listener(connect)
    listener.start()
    assert tried.wait(10)
    assert listener.stop()


def test_a_statement_that_hangs_is_cut_and_the_connection_made_anew(listener, wakes, database, database_url, oid):
    with psycopg.connect(libpq(make_url(database_url)), autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(hashtextextended('worker:7', %s))", [oid])
        listener.set_worker(7)
        eventually(lambda: listener._busy_until is not None)
        assert not listener.cut_if_late(monotonic())
        assert listener.cut_if_late(monotonic() + 3600)
        other.execute("SELECT pg_advisory_unlock_all()")
    eventually(lambda: locks(database, "worker", 7, oid) == ["ExclusiveLock"])
    eventually(lambda: wakes.everywhere == 2)


def test_a_connection_on_which_nothing_runs_is_not_cut(listener, make_listener):
    assert not listener.cut_if_late(monotonic() + 3600)
    assert not make_listener().cut_if_late(monotonic() + 3600)


# Stopping ------------------------------------------------------------------------------------------------------------


def test_stopping_ends_thread_connection_locks_and_files(make_listener, wakes, database, oid):
    files = open_files()
    listener = make_listener()
    listener.start()
    listener.set_worker(7)
    hungry(listener, database, oid, "q")
    pid = backend(listener)
    assert listener.stop()
    eventually(lambda: pid not in database.backends())
    assert locks(database, "worker", 7, oid) == locks(database, "queue", "q", oid) == []
    assert open_files() <= files + 1  # the engine's pooled connection of ``database``
    listener.set_hungry(["z"])
    listener.interrupt()


def test_a_listener_that_is_never_started_holds_nothing(make_listener):
    listener = make_listener()
    listener.set_worker(1)
    listener.set_hungry(["q"])
    assert listener.stop()


def test_it_works_in_a_process_with_many_open_files(make_listener, wakes, database, oid):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1100:
            opened.append(os.dup(opened[0]))
        listener = make_listener()
        listener.start()
        eventually(lambda: wakes.everywhere)
        notify(database, f"{oid} q")
        eventually(lambda: wakes.queues == ["q"])
    finally:
        for file in opened:
            os.close(file)
