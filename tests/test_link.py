import contextlib
import gc
import signal
from contextlib import contextmanager
from decimal import Decimal
from time import monotonic

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from sqlalchemy import BigInteger, bindparam, create_engine, event, literal_column, select, text
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.exc import OperationalError, ProgrammingError
from support.running import in_thread
from support.waiting import eventually

from sqla_neoq.dialects import PostgresDialect, fetch
from sqla_neoq.link import LONGEST_WAIT, Link, Reconnecting


@pytest.fixture
def link(engine):
    link = Link(engine, PostgresDialect(), "test")
    yield link
    link.close()


def pid(link):
    with link.use() as connection:
        return connection.scalar(text("SELECT pg_backend_pid()"))


def is_there(engine, pid):
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid"), {"pid": pid}) == 1


def terminate(engine, pid):
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})


def count_workers(engine):
    with engine.connect() as connection:
        return connection.scalar(
            text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sqla_neoq test'")
        )


def test_it_connects_at_the_first_use_and_keeps_the_connection(engine, link):
    eventually(lambda: count_workers(engine) == 0)  # those of earlier tests may still be ending
    assert pid(link) == pid(link)
    assert count_workers(engine) == 1


def test_it_takes_no_place_in_the_engines_pool(database_url):
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=1)
    first, second = Link(engine, PostgresDialect(), "test"), Link(engine, PostgresDialect(), "test")
    try:
        with first.use(), second.use(), engine.connect() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
            assert engine.pool.checkedout() == 1
    finally:
        first.close()
        second.close()
        engine.dispose()


def test_it_does_not_wait_for_a_place_in_a_pool_whose_places_jobs_hold(database_url):
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=600)
    connected = []
    event.listen(engine, "connect", lambda *_: connected.append(True))
    link = Link(engine, PostgresDialect(), "test")
    try:
        with engine.connect(), in_time(), link.use() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
            with contextlib.closing(PostgresDialect().listening_connection(engine, None, "test")) as listening:
                listening.execute("SELECT 1")
        assert len(connected) == 3  # the application's own hooks see them all
    finally:
        link.close()
        engine.dispose()


def test_without_a_server_the_error_is_sqlalchemys_as_from_the_engine_itself():
    engine = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    errors = []
    for connect in (engine.connect, lambda: PostgresDialect().connect(engine, "test")):
        with pytest.raises(OperationalError) as caught:
            connect()
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


@contextmanager
def in_time(seconds=20):
    """Interrupt what would wait for minutes."""

    def interrupt(*_):
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_use_is_in_autocommit(engine, link):
    with link.use() as connection:
        connection.execute(text("CREATE TABLE a_use (id int)"))
        with engine.begin() as other:
            other.execute(text("DROP TABLE a_use"))


def test_a_transaction_commits_at_its_end(engine, link):
    with link.transaction() as connection:
        connection.execute(text("CREATE TABLE a_transaction (id int)"))
        with engine.connect() as other:
            assert other.scalar(text("SELECT to_regclass('a_transaction')")) is None
    with engine.begin() as other:
        other.execute(text("DROP TABLE a_transaction"))


def test_an_error_rolls_the_transaction_back(engine, link):
    def fail():
        with link.transaction() as connection:
            connection.execute(text("CREATE TABLE a_transaction (id int)"))
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    with engine.connect() as other:
        assert other.scalar(text("SELECT to_regclass('a_transaction')")) is None


def test_after_an_error_it_connects_anew(engine, link):
    before = pid(link)
    with pytest.raises(ProgrammingError), link.use() as connection:
        connection.execute(text("SELECT * FROM no_such_table"))
    eventually(lambda: not is_there(engine, before))
    assert pid(link) != before


def test_after_the_server_ended_the_connection_it_connects_anew(engine, link):
    before = pid(link)
    terminate(engine, before)
    with pytest.raises(OperationalError):
        pid(link)
    assert pid(link) != before


def test_a_connection_that_breaks_within_a_transaction_raises_and_the_next_use_works(engine, link):
    def break_off():
        with link.transaction() as connection:
            terminate(engine, connection.scalar(text("SELECT pg_backend_pid()")))
            connection.execute(text("SELECT 1"))

    with pytest.raises((OperationalError, psycopg.OperationalError)):
        break_off()
    assert pid(link)


def test_closing_ends_the_servers_process_and_may_be_done_twice(engine, link):
    before = pid(link)
    driver_connection = link._driver_connection
    link.close()
    link.close()
    assert driver_connection.closed
    eventually(lambda: not is_there(engine, before))


def test_closing_leaves_no_connection_to_the_garbage_collector(engine, link, recwarn):
    pid(link)
    link.close()
    terminate(engine, pid(link))
    with pytest.raises(OperationalError):
        pid(link)
    gc.collect()
    assert [str(warning.message) for warning in recwarn if warning.category is ResourceWarning] == []


def test_a_use_that_takes_too_long_is_cut_from_another_thread(engine, link):
    raised = []
    before = pid(link)

    def hang():
        try:
            with link.use() as connection:
                connection.execute(text("SELECT pg_sleep(60)"))
        except OperationalError as error:
            raised.append(error)

    thread = in_thread(hang)
    eventually(lambda: link._busy_until is not None)
    now = monotonic()
    assert not link.cut_if_late(now)
    assert link.cut_if_late(now + LONGEST_WAIT + 1)
    thread.join(10)
    assert raised
    assert pid(link) != before
    terminate(engine, before)  # it would not notice before the minute is over


def test_a_connection_that_nobody_uses_is_not_cut(link):
    pid(link)
    assert not link.cut_if_late(monotonic() + 1e6)
    link.close()
    assert not link.cut_if_late(monotonic() + 1e6)


def test_its_settings_do_not_depend_on_the_engines(database_url):
    engine = create_engine(database_url, isolation_level="SERIALIZABLE")
    link = Link(engine, PostgresDialect(), "test")
    try:
        with link.transaction() as connection:
            shown = {
                name: connection.scalar(text(f"SHOW {name}"))
                for name in ("transaction_isolation", "TimeZone", "jit", "plan_cache_mode", "statement_timeout")
            }
        assert shown == {
            "transaction_isolation": "read committed",
            "TimeZone": "UTC",
            "jit": "off",
            "plan_cache_mode": "force_generic_plan",
            "statement_timeout": "1min",
        }
        with engine.connect() as connection:
            assert connection.scalar(text("SHOW transaction_isolation")) == "serializable"
            assert connection.scalar(text("SHOW plan_cache_mode")) == "auto"
    finally:
        link.close()
        engine.dispose()


@pytest.mark.parametrize(
    "arguments", [{"cursor_factory": psycopg.ClientCursor}, {"row_factory": namedtuple_row}], ids=lambda given: [*given]
)
def test_rows_are_read_whatever_cursors_the_application_uses(database_url, arguments):
    engine = create_engine(database_url, connect_args=arguments)
    link = Link(engine, PostgresDialect(), "test")
    statement = select(bindparam("number", type_=BigInteger), array([1, 2]), literal_column("1"), literal_column("2.5"))
    try:
        with link.use() as connection:
            assert fetch(connection, statement, {"number": 7}, {}) == [(7, [1, 2], 1, Decimal("2.5"))]
        PostgresDialect().listening_connection(engine, None, "test").close()
    finally:
        link.close()
        engine.dispose()


@pytest.mark.parametrize("options", [{"stream_results": True}, {"yield_per": 10}])
def test_statements_run_though_the_application_reads_with_server_side_cursors(database_url, options):
    engine = create_engine(database_url, execution_options=options)
    link = Link(engine, PostgresDialect(), "test")
    try:
        with link.use() as connection:
            connection.execute(text("DELETE FROM neoq_jobs RETURNING id")).all()
    finally:
        link.close()
        engine.dispose()


def test_the_wait_before_the_next_attempt_grows_to_some_seconds():
    reconnecting = Reconnecting()
    delays = [reconnecting.next_delay() for _ in range(40)]
    assert 0.05 <= delays[0] <= 0.1
    assert all(2.5 <= delay <= 5.0 for delay in delays[6:])
    assert reconnecting.failures == 40


def test_many_workers_do_not_come_back_all_at_the_same_moment():
    assert len({Reconnecting().next_delay() for _ in range(20)}) > 10


def test_a_success_starts_the_waits_over():
    reconnecting = Reconnecting()
    for _ in range(10):
        reconnecting.next_delay()
    reconnecting.succeeded()
    assert reconnecting.failures == 0
    assert reconnecting.next_delay() <= 0.1
