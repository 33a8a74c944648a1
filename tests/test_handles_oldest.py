"""The conformance of the handles in an environment with the oldest release of each framework that is supported.

The newest are in this environment: the dependency group ``dev`` has no upper bounds. ``make test-matrix`` runs this.
"""

import re
import subprocess
from pathlib import Path

import pytest
from support.handles import KINDS
from support.packages import ask, make_venv
from support.processes import ROOT, environment

OLDEST = {
    "advanced-alchemy": "0.8.0",
    "asyncpg": "0.27.0",
    "django": "4.2",
    "flask-sqlalchemy": "3.1.0",
    "peewee": "3.14.10",
    "piccolo": "1.0.0",
    "pony": "0.7.17",
    "psycopg": "3.2.0",
    "psycopg2-binary": "2.9.5",
    "sqlalchemy": "2.0.36",
    "sqlmodel": "0.0.22",
    "tortoise-orm": "0.19.3",
}
BESIDE = ["psycopg-binary==3.2.0", "pypika-tortoise==0.1.6", "pytz"]
YOUNGER = "async_peewee_database"
"""What the oldest releases do not have."""
CASES = "commit or rollback or savepoint or duplicate or unusual or schema or cancelled or many_enqueues"
"""Those that a release can change: transactions, parameters, rows. The others are about the statement, or take long."""


def test_the_readme_says_which_are_the_oldest():
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme[readme.index("<!-- handles:start -->") : readme.index("<!-- handles:end -->")]
    said = {name.lower(): version for name, version in re.findall(r"\| ([\w-]+) ([\d.]+) \|", table)}
    assert said == {name.removesuffix("-binary"): version for name, version in OLDEST.items()}


@pytest.mark.matrix
def test_the_handles_of_the_oldest_releases_conform(server_url, tmp_path_factory):
    directory = tmp_path_factory.mktemp("oldest")
    pinned = [f"{name}=={version}" for name, version in OLDEST.items()]
    python = make_venv(directory, *pinned, *BESIDE, borrow=True)
    code = f"from importlib.metadata import version; print(*map(version, {list(OLDEST)!r}))"
    assert ask(python, code, cwd=directory).split() == list(OLDEST.values())
    # Their own deprecation warnings are not this project's.
    options = ["-o", "filterwarnings=ignore", "-p", "no:cacheprovider", "-n", "2", "-q", f"--pg={server_url}"]
    command = [
        python,
        "-m",
        "pytest",
        *options,
        "-k",
        f"({CASES}) and not ({YOUNGER})",
        str(Path(__file__).with_name("test_handles.py")),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-2_000:]
    # A case that was renamed is not left out unseen.
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= len(CASES.split(" or ")) * (len(KINDS) - 1)
