import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from support.running import Database, in_thread
from support.waiting import eventually

from sqla_neoq import dialects
from sqla_neoq.dialects import PostgresDialect, cut, dialect_of, engine_of
from sqla_neoq.errors import ConfigurationError


@pytest.fixture
def dialect(engine):
    return dialect_of(engine)


def test_a_psycopg_engine_will_do(engine):
    assert isinstance(dialect_of(engine), PostgresDialect)


def test_another_database_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="works on PostgreSQL, not on sqlite"):
        dialect_of(create_engine("sqlite://"))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async"])
def test_an_engine_of_another_driver_is_refused_with_the_way_out(driver):
    engine = create_engine(f"postgresql+{driver}://localhost/x")
    with pytest.raises(ConfigurationError, match=r"not \w+; give it a postgresql\+psycopg:// URL of its own"):
        dialect_of(engine)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_usual_scheme_means_psycopg(scheme):
    url = engine_of(f"{scheme}://user:p%40ss@host:5433/name").url
    assert url.render_as_string(hide_password=False) == "postgresql+psycopg://user:p%40ss@host:5433/name"


def test_a_url_object_will_do():
    assert engine_of(make_url("postgresql://host/name")).url.host == "host"


@pytest.mark.parametrize("scheme", ["mysql", "sqlite", "postgresql+asyncpg"])
def test_another_scheme_is_refused_by_name(scheme):
    with pytest.raises(ConfigurationError, match=f"not {scheme}".replace("+", r"\+")):
        engine_of(f"{scheme}://host/name")


@pytest.mark.parametrize("text", ["", "nonsense", "host:5432/name", "postgresql://host:port/name"])
def test_what_is_no_url_is_refused_with_an_example(text):
    with pytest.raises(ConfigurationError, match="write one like postgresql://user"):
        engine_of(text)


def test_a_refused_url_keeps_its_password_to_itself():
    with pytest.raises(ConfigurationError) as caught:
        engine_of("mysql://user:secret@host/name")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        engine_of("postgresql://user:secret@host:port/name")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def connect_arguments(engine):
    seen = {}

    @event.listens_for(engine, "do_connect")
    def capture(dialect, record, cargs, cparams):
        seen.update(cparams)
        raise psycopg.OperationalError("not now")

    with pytest.raises(DBAPIError):
        engine.connect()
    return seen


def test_a_link_that_is_cut_without_a_word_will_be_noticed():
    seen = connect_arguments(engine_of("postgresql://host/name"))
    assert seen["connect_timeout"] == 10
    assert seen["tcp_user_timeout"] == 20_000


def test_what_the_url_says_itself_goes_first():
    seen = connect_arguments(engine_of("postgresql://host/name?connect_timeout=3&tcp_user_timeout=5"))
    assert (int(seen["connect_timeout"]), int(seen["tcp_user_timeout"])) == (3, 5)


@pytest.mark.parametrize(
    ("schema", "name"),
    [(None, "neoq_jobs"), ("app", '"app".neoq_jobs'), ('The "Queue"', '"The ""Queue""".neoq_jobs')],
)
def test_the_tables_name_is_written_as_sql_wants_it(schema, name):
    assert PostgresDialect().table_name(schema) == name


def test_the_listening_connection_is_in_autocommit_and_outside_the_pool(engine, dialect):
    connection = dialect.listening_connection(engine, None, "me")
    try:
        assert connection.autocommit
        assert engine.pool.checkedout() == 0
        assert connection.execute("SHOW application_name").fetchone() == ("sqla_neoq me listen",)
    finally:
        connection.close()
    with engine.connect() as other:
        assert not other.connection.driver_connection.autocommit


def test_the_listening_connection_can_go_round_a_pooler(engine, dialect, migrated_database):
    url = migrated_database()
    connection = dialect.listening_connection(engine, url, "me")
    try:
        assert connection.info.dbname == make_url(url).database
    finally:
        connection.close()


def test_the_engines_own_way_to_connect_is_used(database_url, dialect):
    engine = create_engine(database_url, poolclass=NullPool)
    names = []

    @event.listens_for(engine, "do_connect")
    def name(dialect, record, cargs, cparams):
        names.append("asked")
        cparams["options"] = "-c search_path=elsewhere"

    connection = dialect.connect(engine, "me")
    listening = dialect.listening_connection(engine, None, "me")
    try:
        assert connection.scalar(text("SHOW search_path")) == "elsewhere"
        assert listening.execute("SHOW search_path").fetchone() == ("elsewhere",)
        assert names == ["asked", "asked"]
    finally:
        connection.close()
        listening.close()


@pytest.mark.parametrize("which", ["connect", "listening_connection"])
def test_a_connection_that_cannot_be_set_up_is_not_left_open(engine, dialect, monkeypatch, which):
    database = Database(engine)
    before = set(database.backends(name="%"))
    if which == "connect":
        monkeypatch.setattr(dialects, "_SETTINGS", {"statement_timeout": "for ever"})
        with pytest.raises(DBAPIError):
            dialect.connect(engine, "me")
    else:
        with pytest.raises(psycopg.Error):
            dialect.listening_connection(engine, None, "me\x00")
    eventually(lambda: set(database.backends(name="%")) <= before)


def test_a_long_runner_name_is_cut_to_what_the_server_shows(engine, dialect):
    connection = dialect.connect(engine, "n" * 200)
    try:
        assert len(connection.scalar(text("SHOW application_name"))) == 63
    finally:
        connection.close()


def test_a_runner_name_of_many_bytes_connects_too(engine, dialect):
    for name in ("ü" * 100, "ä\u20ac" * 30):
        connection = dialect.connect(engine, name)
        listening = dialect.listening_connection(engine, None, name)
        connection.close()
        listening.close()


def test_cutting_a_connection_wakes_who_waits_on_it(engine):
    connection = engine.raw_connection()
    driver_connection = connection.driver_connection
    raised = []

    def wait():
        try:
            driver_connection.execute("SELECT pg_sleep(60)")
        except psycopg.OperationalError as error:
            raised.append(error)

    thread = in_thread(wait)
    eventually(lambda: driver_connection.pgconn.transaction_status == TransactionStatus.ACTIVE)
    pid = driver_connection.info.backend_pid
    cut(driver_connection)
    thread.join(10)
    assert raised
    connection.invalidate()
    with engine.connect() as other:  # it would not notice before the minute is over
        other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})


def test_cutting_what_is_closed_already_does_nothing(engine):
    with engine.connect() as connection:
        driver_connection = connection.connection.driver_connection
        connection.detach()
        driver_connection.close()
    cut(driver_connection)
