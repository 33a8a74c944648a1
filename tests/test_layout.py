"""What lies where, and the traps that a folder called ``alembic`` at the top could set."""

import os
from pathlib import Path

import alembic

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "alembic",
    "alembic.ini",
    "benchmarks",
    "docs",
    "examples",
    "pyproject.toml",
    "sqla_neoq",
    "tests",
}
BUILT = {"build", "dist", "__pycache__"}


def test_the_top_level_holds_what_a_reader_expects_and_nothing_else():
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert {name for name in there - BUILT if not name.endswith(".egg-info")} == TOP_LEVEL


def test_ci_has_one_script_that_can_be_run():
    assert [path.name for path in (ROOT / ".ci").iterdir()] == ["run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_alembic_folder_is_no_package_so_it_shadows_nothing():
    # With an __init__.py, "python -m anything" from the repository would import this folder instead of Alembic.
    assert not (ROOT / "alembic" / "__init__.py").exists()
    assert alembic.__file__ is not None
    assert not Path(alembic.__file__).is_relative_to(ROOT / "alembic")
    assert "site-packages" in Path(alembic.__file__).parts
