"""The example application end to end, on a folder of real files small enough for a test."""

import os
import shutil
import signal
import sysconfig
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text
from support import eventually
from support.servers import libpq

EXAMPLES = Path(__file__).parents[1] / "examples"
UNPARSABLE = {
    "bad/syntax.py": b"def f(:\n",
    "bad/encoding.py": b'name = "\xf6"\n',
    "bad/unknown_codec.py": b"# coding: uft-8\n",
}
DONE = 120.0  # seconds; only bounds a failing test


@pytest.fixture
def root(tmp_path):
    """Two packages of the standard library, its installed packages' look-alike, and files that do not parse."""
    root = tmp_path / "library"
    for package in ("json", "email"):
        source = Path(sysconfig.get_path("stdlib"), package)
        shutil.copytree(source, root / package, ignore=lambda folder, names: {n for n in names if n == "test"})
    (root / "site-packages").mkdir()
    (root / "site-packages" / "installed.py").write_bytes(UNPARSABLE["bad/syntax.py"])
    (root / "bad").mkdir()
    for name, content in UNPARSABLE.items():
        (root / name).write_bytes(content)
    return root


@pytest.fixture
def files(root):
    return sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)


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
def catalog(run_process, url):
    """Start ``python -m catalog`` with the test's database in the environment."""

    def start(*arguments):
        env = {"NEOQ_DATABASE_URL": url}
        return run_process(*map(str, arguments), module="catalog", cwd=EXAMPLES, env=env)

    return start


@pytest.fixture
def demo(catalog, url, root, tmp_path):
    return lambda: catalog("demo", "--url", url, "--root", root, "--directory", tmp_path / "demo")


@pytest.fixture
def enqueued(catalog, root):
    """Migrate, and add every file with its job."""
    for command in (["migrate"], ["enqueue", "--root", root]):
        process = catalog(*command)
        assert process.wait(DONE) == 0, process.output


def count(database, sql):
    return database.scalar(text(f"SELECT count(*) FROM {sql}"))


def test_the_demo_ends_equal_and_says_so_again(demo, database, files):
    first = demo()
    assert first.wait(DONE) == 0, first.output
    assert first.stdout.endswith("equal\n")
    assert f"{len(files)} new files" in first.stdout
    for name in UNPARSABLE:
        assert f"{name}: SyntaxError" in first.stdout
    assert count(database, "neoq_dead_jobs WHERE reason = 'exhausted' AND retries = 2") == len(UNPARSABLE)
    assert count(database, "neoq_failures WHERE traceback LIKE '%ast.parse%'") == 3 * len(UNPARSABLE)
    assert count(database, "source_file WHERE times_counted = 1") == len(files) - len(UNPARSABLE)

    again = demo()
    assert again.wait(DONE) == 0, again.output
    assert "every job was finished before" in again.stdout
    assert again.stdout.endswith("equal\n")
    assert count(database, "source_file") == len(files)


def test_two_runners_share_the_work_and_one_that_is_killed_loses_nothing(enqueued, demo, database, url):
    with psycopg.connect(libpq(make_url(url))) as blocker:
        # Every job blocks where it writes its counts, so both runners are in the middle of several.
        blocker.execute("SELECT FROM source_file FOR UPDATE")
        process = demo()
        busy = "SELECT pid FROM neoq_workers WHERE id IN (SELECT worker_id FROM neoq_jobs WHERE status = 'running')"
        eventually(lambda: len(database.scalars(text(busy)).all()) == 2, within=DONE, why=lambda: process.output)
        os.kill(database.scalars(text(busy + " ORDER BY id")).first(), signal.SIGKILL)
    assert process.wait(DONE) == 0, process.output
    assert "a runner was killed" in process.stdout
    assert process.stdout.endswith("equal\n")
    assert count(database, "neoq_failures WHERE kind = 'crashed'") > 0


def test_killing_the_demo_ends_its_runners_and_running_it_again_ends_equal(enqueued, demo, database, url):
    workers = "neoq_workers WHERE id IN (SELECT worker_id FROM neoq_jobs WHERE status = 'running')"
    with psycopg.connect(libpq(make_url(url))) as blocker:
        blocker.execute("SELECT FROM source_file FOR UPDATE")
        process = demo()
        eventually(lambda: count(database, workers) == 2, within=DONE, why=lambda: process.output)
        pids = database.scalars(text("SELECT pid FROM neoq_workers")).all()
        process.signal(signal.SIGKILL)
        process.wait()
    eventually(lambda: not any(map(is_alive, pids)), within=DONE)

    again = demo()
    assert again.wait(DONE) == 0, again.output
    assert again.stdout.endswith("equal\n")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_that_enqueue_at_once_add_each_file_once(catalog, root, database, files):
    assert catalog("migrate").wait(DONE) == 0
    both = [catalog("enqueue", "--root", root) for _ in range(2)]
    assert [process.wait(DONE) for process in both] == [0, 0]
    assert count(database, "source_file") == len(files)
    assert count(database, "neoq_jobs JOIN source_file ON job_id = neoq_jobs.id") == len(files)
    assert count(database, "neoq_jobs") == len(files)


def test_the_report_names_each_difference(enqueued, catalog, database, root):
    left_undone = catalog("report", "--root", root)
    assert left_undone.wait(DONE) == 1
    assert "left undone, with the status new" in left_undone.stdout
    assert "NOT equal" in left_undone.stdout

    database.execute(
        text(
            "UPDATE neoq_jobs SET status = 'processed', finished_at = now(); "
            "UPDATE source_file SET lines = 1, functions = 2, classes = 3, times_counted = 1; "
            "UPDATE source_file SET times_counted = 2 WHERE path LIKE '%decoder.py'; "
            "DELETE FROM source_file WHERE path LIKE '%encoder.py'"
        )
    )
    (root / "json" / "scanner.py").unlink()
    wrong = [catalog("report", "--root", root / folder) for folder in ("json", "bad")]
    assert [process.wait(DONE) for process in wrong] == [1, 1]
    said = "".join(process.output for process in wrong)
    for difference in (
        "json/decoder.py: counted 2 times",
        "json/encoder.py: not in the database",
        "json/scanner.py: in the database, but no longer there",
        "json/tool.py: the database says Count(lines=1, functions=2, classes=3)",
        "bad/syntax.py: does not parse, and was counted",
        "bad/syntax.py: does not parse, and its job is not dead",
        "jobs for",
    ):
        assert difference in said


def test_the_application_s_chain_brings_the_queue_and_takes_it_away(run_process, url, database):
    env = {"NEOQ_DATABASE_URL": url}
    for command in (["upgrade", "head"], ["check"], ["downgrade", "0001"], ["upgrade", "head"], ["downgrade", "base"]):
        process = run_process(*command, module="alembic", cwd=EXAMPLES / "catalog", env=env)
        assert process.wait(DONE) == 0, process.output
        neoq_tables = count(database, r"pg_tables WHERE tablename LIKE 'neoq\_%'")
        assert bool(neoq_tables) == (command in (["upgrade", "head"], ["check"]))
    assert count(database, "pg_tables WHERE tablename = 'source_file'") == 0
