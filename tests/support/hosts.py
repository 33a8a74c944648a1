"""Host applications: a models module and an Alembic chain in a directory, on the env.py of Alembic's own templates."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import alembic
from sqlalchemy import make_url, text

from sqla_neoq.embedded import system_binaries, wheel_binaries
from support.processes import ROOT, environment

MODELS = """
from sqlalchemy import MetaData
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

class Base(DeclarativeBase):
    pass

class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)
"""
CUSTOMER = """\
    op.create_table("customer", sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("email", sa.String(), nullable=False), sa.UniqueConstraint("email"))
"""
_REVISION = '''\
"""{name}"""

import sqlalchemy as sa
from alembic import op

from sqla_neoq import migrations as neoq

revision = {name!r}
down_revision = {after!r}
branch_labels = None
depends_on = None


def upgrade() -> None:
{up}


def downgrade() -> None:
{down}
'''

# Everything in a database that is not PostgreSQL's own.
_THERE = """
WITH system AS (SELECT oid FROM pg_namespace WHERE nspname ~ '^(pg_|information_schema)')
SELECT 'schema', nspname, '' FROM pg_namespace WHERE oid NOT IN (SELECT oid FROM system)
UNION ALL SELECT 'relation', CAST(oid AS regclass)::text, relkind::text FROM pg_class
    WHERE relnamespace NOT IN (SELECT oid FROM system)
UNION ALL SELECT 'function', CAST(oid AS regprocedure)::text, '' FROM pg_proc
    WHERE pronamespace NOT IN (SELECT oid FROM system)
UNION ALL SELECT 'type', CAST(oid AS regtype)::text, '' FROM pg_type WHERE typnamespace NOT IN (SELECT oid FROM system)
UNION ALL SELECT 'trigger', tgname, CAST(tgrelid AS regclass)::text FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT 'constraint', conname, CAST(conrelid AS regclass)::text FROM pg_constraint
    WHERE connamespace NOT IN (SELECT oid FROM system)
"""


def there(engine):
    """Return what is in the database, as a set of (kind, name, detail)."""
    with engine.connect() as connection:
        return {tuple(row) for row in connection.exec_driver_sql(_THERE)}


def psql(url, script):
    """Pipe a script into psql, which stops at the first error."""
    libpq = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    return subprocess.run(
        [_psql(), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--dbname={libpq}"],
        input=script,
        capture_output=True,
        text=True,
    )


def _psql():
    for binaries in (wheel_binaries(), system_binaries()):
        if binaries is not None and (Path(binaries) / "psql").exists():
            return str(Path(binaries) / "psql")
    found = shutil.which("psql")
    assert found, "this machine has no psql"
    return found


def excerpt(title):
    """Return the first block of Python under a heading of docs/how-to/migrations.md."""
    document = (ROOT / "docs" / "how-to" / "migrations.md").read_text("utf-8")
    found = re.search(rf"^## {re.escape(title)}$.*?^```python no-run\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


class Host:
    """An application in ``directory`` whose database is ``url``.

    Args:
        directory: made, with models.py, alembic.ini and migrations/ in it.
        url: of the database.
        template: which of Alembic's env.py it has: generic, async or multidb.
        models: its models.py.
        configure: more keyword arguments of its context.configure().
        before: lines at the top of its env.py.
        python: the interpreter that runs its commands.
        installed: whether that has sqla_neoq itself, and must not take this checkout.
    """

    def __init__(
        self,
        directory,
        url,
        *,
        template="generic",
        models=MODELS,
        configure="",
        before="",
        python=sys.executable,
        installed=False,
    ):
        self.directory, self.url, self._python, self._installed = directory, url, python, installed
        self._last = None
        versions = directory / "migrations" / "versions"
        versions.mkdir(parents=True)
        (directory / "models.py").write_text(models)
        templates = Path(alembic.__file__).parent / "templates" / template
        shutil.copy(templates / "script.py.mako", directory / "migrations")
        env = (templates / "env.py").read_text()
        ask = "from models import Base\ntarget_metadata = Base.metadata"
        env, replaced = re.subn(r"^target_metadata = None$", ask, env, flags=re.MULTILINE)
        assert replaced == (template != "multidb")
        env = env.replace(
            "target_metadata=target_metadata", f"target_metadata=target_metadata{configure and ', '}{configure}"
        )
        (directory / "migrations" / "env.py").write_text(before + env)
        self.ini(f"sqlalchemy.url = {url.replace('%', '%%')}")

    def ini(self, database, sections=""):
        (self.directory / "alembic.ini").write_text(
            "[alembic]\nscript_location = %(here)s/migrations\nprepend_sys_path = .\npath_separator = os\n"
            f"{database}\n{sections}{_LOGGING}"
        )

    def edit_env(self, old, new):
        path = self.directory / "migrations" / "env.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def revision(self, name, up="    pass", down="    pass"):
        """Write a revision after the last one."""
        content = _REVISION.format(name=name, after=self._last, up=up, down=down)
        (self.directory / "migrations" / "versions" / f"{name}.py").write_text(content)
        self._last = name

    def customers(self):
        self.revision("customers", CUSTOMER, '    op.drop_table("customer")')

    def queue(self, from_=0, to=1, more=""):
        """Write the revision that calls neoq.migrate()."""
        self.revision(
            f"queue_{to}", f"    neoq.migrate(op, {from_}, {to}{more})", f"    neoq.migrate(op, {to}, {from_}{more})"
        )

    def command(self, *arguments, module="alembic"):
        return [self._python, "-W", "error", "-m", module, *arguments]

    def environment(self):
        path = None if self._installed else f"{ROOT}:{ROOT / 'tests'}"
        return environment({"PYTHONPATH": path, "NEOQ_DATABASE_URL": self.url})

    def run(self, *arguments, module="alembic"):
        return subprocess.run(
            self.command(*arguments, module=module),
            cwd=self.directory,
            env=self.environment(),
            capture_output=True,
            text=True,
        )

    def alembic(self, *arguments):
        """Run ``alembic`` and return what it wrote; it must succeed."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def refused(self, *arguments):
        """Run ``alembic``, which must fail, and return the last lines it wrote: the error's sentence and its notes."""
        done = self.run(*arguments)
        assert done.returncode != 0, done.stdout + done.stderr
        _, _, said = done.stderr.rpartition("\nsqla_neoq.errors.")
        return said or done.stdout + done.stderr

    def written(self):
        """Return the text of the newest revision file."""
        return max(
            (self.directory / "migrations" / "versions").glob("*.py"), key=lambda path: path.stat().st_mtime_ns
        ).read_text()


def scalar(engine, sql, **parameters):
    with engine.connect() as connection:
        return connection.scalar(text(sql), parameters)


_LOGGING = """
[loggers]
keys = root

[handlers]
keys = console

[formatters]
keys = generic

[logger_root]
level = WARNING
handlers = console

[handler_console]
class = StreamHandler
args = (sys.stderr,)
formatter = generic

[formatter_generic]
format = %(levelname)s %(message)s
"""
