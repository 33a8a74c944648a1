"""The small web applications under examples/ end to end: a request, and a worker in a process of its own."""

import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from support import eventually

EXAMPLES = Path(__file__).parents[1] / "examples"


# advanced-alchemy 1.12 on SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The declarative_mixin decorator:sqlalchemy.exc.SADeprecationWarning")


@contextmanager
def flask_client(module):
    app = module.create_app()
    with app.test_client() as client:
        yield client
    with app.app_context():  # WSGI has no lifespan: a server's process would just end
        module.db.engine.dispose()


def fastapi_client(module, *, factory="create_app"):
    from fastapi.testclient import TestClient

    return TestClient(getattr(module, factory)())


def litestar_client(module):
    from litestar.testing import TestClient

    return TestClient(module.create_app())


CLIENTS = {"flask": flask_client, "fastapi": fastapi_client, "litestar": litestar_client}


@pytest.fixture
def url(fresh_database):
    return fresh_database()


@pytest.fixture
def database(url):
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def signup(monkeypatch, url):
    """Import a module of the example, on the test's database."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("DATABASE_URL", url)
    yield lambda name: import_module(f"signup.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "signup"]:
        del sys.modules[name]


@pytest.fixture
def prepared(run_process, signup, url):
    done = run_process(env={"DATABASE_URL": url}, cwd=EXAMPLES, module="signup.setup")
    assert done.wait() == 0, done.output


@pytest.fixture
def worker(run_process, prepared, url):
    process = run_process("signup.tasks", env={"DATABASE_URL": url}, cwd=EXAMPLES)
    process.wait_for("runner started")
    return process


def sign_up(client, email="ada@example.org"):
    return client.post("/users", json={"email": email})


def body(answer):
    return answer.json() if callable(answer.json) else answer.json


def jobs(database):
    return [tuple(row) for row in database.execute(text("SELECT task, status FROM neoq_jobs"))]


@pytest.mark.parametrize("framework", CLIENTS)
def test_a_request_writes_and_enqueues_and_a_worker_in_another_process_does_the_work(
    signup, worker, database, framework
):
    with CLIENTS[framework](signup(f"{framework}_app")) as client:
        answer = sign_up(client)
        assert answer.status_code == 201
        user = body(answer)["id"]
        eventually(lambda: body(client.get(f"/users/{user}"))["welcomed"], why=lambda: worker.output)
        assert body(client.get(f"/users/{user}"))["email"] == "ada@example.org"
        assert client.get(f"/users/{user + 1}").status_code == 404
    assert jobs(database) == [("signup.tasks:welcome", "processed")]


@pytest.mark.parametrize("framework", CLIENTS)
def test_a_request_that_is_refused_enqueues_nothing(signup, prepared, database, framework):
    with CLIENTS[framework](signup(f"{framework}_app")) as client:
        assert [sign_up(client).status_code for _ in range(2)] == [201, 409]
    assert jobs(database) == [("signup.tasks:welcome", "new")]


@pytest.mark.parametrize("framework", CLIENTS)
def test_a_commit_that_fails_takes_user_and_job_with_it(signup, prepared, database, framework):
    # A deferred constraint objects at the COMMIT, when user and job have both been written.
    database.execute(
        text("CREATE FUNCTION objects() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE check_violation; END'")
    )
    database.execute(
        text(
            "CREATE CONSTRAINT TRIGGER objects AFTER INSERT ON neoq_jobs INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION objects()"
        )
    )
    with CLIENTS[framework](signup(f"{framework}_app")) as client:
        try:
            refused = sign_up(client).status_code >= 400
        except Exception:
            refused = True
        assert refused
    assert jobs(database) == []
    assert database.scalar(text("SELECT count(*) FROM users")) == 0


def test_fastapi_can_run_the_jobs_in_its_own_lifespan(signup, prepared, database):
    with fastapi_client(signup("fastapi_app"), factory="create_app_with_runner") as client:
        user = body(sign_up(client))["id"]
        eventually(lambda: body(client.get(f"/users/{user}"))["welcomed"])
    eventually(lambda: database.scalar(text("SELECT count(*) FROM neoq_workers")) == 0)
