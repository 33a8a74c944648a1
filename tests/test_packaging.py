"""What users install: the wheel, and an editable checkout."""

import zipfile

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool
from support.packages import ask, build_wheel, make_venv
from support.processes import ROOT

from sqla_neoq import migrations

UPGRADE = """
import sys
from alembic import command
from alembic.config import Config
from sqla_neoq import migrations
config = Config()
config.set_main_option("script_location", str(migrations.reference_directory()))
config.set_main_option("sqlalchemy.url", {url!r}.replace("%", "%%"))
command.upgrade(config, "head")
print(migrations.reference_directory())
"""


@pytest.fixture
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory)


def assert_installed(url):
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        assert migrations.check(connection) == []


def test_the_wheel_holds_the_package_with_the_reference_chain_inside_and_nothing_beside_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"sqla_neoq", wheel.name.rsplit("-py3", 1)[0] + ".dist-info"}
    chain = {f"sqla_neoq/_alembic/{p.relative_to(ROOT / 'alembic')}" for p in (ROOT / "alembic").rglob("*.*")}
    assert {name for name in chain if "__pycache__" not in name} <= names
    assert "sqla_neoq/_alembic/env.py" in names
    assert "sqla_neoq/py.typed" in names


def test_an_installed_wheel_runs_its_reference_chain(wheel, tmp_path, fresh_database):
    python = make_venv(tmp_path / "venv", str(wheel), borrow=True)
    url = fresh_database()
    directory = ask(python, UPGRADE.format(url=url), cwd=tmp_path).strip()
    assert directory.endswith("site-packages/sqla_neoq/_alembic")
    assert_installed(url)
    there = ask(python, "import alembic, os; print(os.listdir(os.path.dirname(alembic.__file__)))", cwd=tmp_path)
    assert "env.py" not in there
    assert "versions" not in there


def test_an_editable_checkout_runs_the_chain_at_its_top_and_leaves_no_copies(tmp_path, fresh_database):
    python = make_venv(tmp_path / "venv", "--editable", str(ROOT), borrow=True)
    url = fresh_database()
    assert ask(python, UPGRADE.format(url=url), cwd=tmp_path).strip() == str(ROOT / "alembic")
    assert_installed(url)
    assert ask(python, "import sqla_neoq; print(sqla_neoq.__file__)", cwd=tmp_path).strip() == str(
        ROOT / "sqla_neoq" / "__init__.py"
    )
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert not (site / "sqla_neoq").exists()
    assert not (site / "alembic").exists()
