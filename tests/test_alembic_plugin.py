"""The Alembic plugin, in environments with each kind of Alembic that hosts may have, installed from the wheel.

By default only with this environment's own Alembic; ``make test-matrix`` runs all.
"""

from textwrap import indent

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool
from support.hosts import Host, excerpt, there
from support.packages import ask, build_wheel, make_venv

from sqla_neoq import migrations

HERE = "this environment's"
MATRIX = {
    "1.13.0": ["alembic==1.13.0", "sqlalchemy==2.0.36"],  # the oldest of both
    "1.16.5": ["alembic==1.16.5"],
    "1.18.0": ["alembic==1.18.0"],  # the first with plugins, which takes only what can be iterated over
    "1.20.0": ["alembic==1.20.0"],  # the last of these
    "newest": ["alembic"],
}
BEFORE_PLUGINS = {"1.13.0", "1.16.5"}
OPT_IN = 'autogenerate_plugins=["alembic.autogenerate.*", "sqla_neoq"]'
CLEAN = "No new upgrade operations detected."

everywhere = pytest.mark.parametrize(
    "release", [HERE, *(pytest.param(release, marks=pytest.mark.matrix) for release in MATRIX)]
)
with_plugins = pytest.mark.parametrize(
    "release",
    [HERE, *(pytest.param(release, marks=pytest.mark.matrix) for release in MATRIX if release not in BEFORE_PLUGINS)],
)
_interpreters = {}


@pytest.fixture
def python(release, tmp_path_factory):
    """Return the interpreter of an environment with that Alembic, made once a run."""
    if release not in _interpreters:
        wheel = build_wheel(tmp_path_factory)
        directory = tmp_path_factory.mktemp("venv")
        if release == HERE:
            _interpreters[release] = make_venv(directory, str(wheel), borrow=True)
        else:
            _interpreters[release] = make_venv(directory, str(wheel), "psycopg[binary]", *MATRIX[release])
    return _interpreters[release]


@pytest.fixture
def engine(fresh_database):
    engine = create_engine(fresh_database(), poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def host(tmp_path, engine, python):
    url = engine.url.render_as_string(hide_password=False)
    return lambda **options: Host(tmp_path / "host", url, python=python, installed=True, **options)


@everywhere
@pytest.mark.parametrize("first", ["alembic", "sqla_neoq", "sqla_neoq.migrations", "alembic.config", "alembic.command"])
def test_alembic_can_be_imported_without_a_warning(release, python, first, tmp_path):
    code = f"import {first}, alembic, alembic.context, sys; print(alembic.__version__, 'sqla_neoq' in sys.modules)"
    version = ask(python, code, cwd=tmp_path).split()[0]
    assert release in {HERE, "newest", version}


@everywhere
def test_without_opting_in_autogenerate_writes_nothing_about_our_tables(release, host, engine):
    # From 1.18 on the entry point protects. Before, an env.py or a revision must have imported sqla_neoq.migrations.
    app = host(before="from sqla_neoq import migrations\n" if release in BEFORE_PLUGINS else "")
    app.customers()
    app.alembic("upgrade", "head")
    assert CLEAN in app.alembic("check")
    with engine.begin() as connection:
        migrations.upgrade(connection)
    assert CLEAN in app.alembic("check")
    app.alembic("revision", "--autogenerate", "-m", "nothing")
    assert app.written().count("    pass") == 2
    assert "neoq" not in app.written()


@everywhere
def test_include_object_hides_our_tables_and_no_others(host, engine):
    app = host(before="from sqla_neoq import migrations as neoq\n", configure="include_object=neoq.include_object")
    with engine.begin() as connection:
        migrations.upgrade(connection)
    app.alembic("revision", "--autogenerate", "-m", "start")
    assert app.written().count("op.create_table('customer'") == app.written().count("op.drop_table(") == 1
    assert "neoq" not in app.written()


@with_plugins
def test_with_opting_in_autogenerate_writes_the_call_and_its_reverse_which_work(release, host, engine):
    app = host()
    arguments = "            connection=connection, target_metadata=target_metadata\n"
    app.edit_env(f"        context.configure(\n{arguments}        )\n", indent(excerpt("Autogenerate"), " " * 8))
    app.customers()
    app.alembic("upgrade", "head")
    before = there(engine)
    assert "neoq_migrate" in app.refused("check")
    app.alembic("revision", "--autogenerate", "-m", "queue")
    up, down = app.written().split("def downgrade")
    assert "from sqla_neoq import migrations as neoq" in up
    assert "    neoq.migrate(op, 0, 1)\n" in up
    assert "    neoq.migrate(op, 1, 0)\n" in down
    assert "drop" not in up + down
    app.alembic("upgrade", "head")
    with engine.connect() as connection:
        assert migrations.check(connection) == []
    assert CLEAN in app.alembic("check")
    app.alembic("downgrade", "-1")
    assert there(engine) == before


@with_plugins
def test_the_call_names_the_schema_that_the_application_s_engine_names(release, host, engine):
    app = host(configure=f'{OPT_IN}, neoq_schema="queue"')
    app.alembic("revision", "--autogenerate", "-m", "queue")
    assert "    neoq.migrate(op, 0, 1, schema='queue')\n" in app.written()
    assert "    neoq.migrate(op, 1, 0, schema='queue')\n" in app.written()
