"""README.md and docs/ say what is so: their code runs, their commands parse, and they leave no public name out.

Each document is followed as a reader would follow it, block by block, in an empty directory and on a database of its
own, whose URL is in DATABASE_URL:

====================================  ==================================================================================
```` ```python ````                   is executed, all blocks of a document in one namespace; where a line reads
                                      ``print(...)  # value``, the value is what it prints
```` ```python file=myapp/a.py ````   is written to that file, for later blocks to import
```` ```python signature ````         is compared with the real thing, parameter by parameter
```` ```python no-run ````            is compiled; the line before says why, ``<!-- not run: … -->``
```` ```sql ````                      is executed; its output is that of psql
```` ```shell ````                    its commands of sqla_neoq must parse
```` ```shell run ````                is executed; with ``until="text"`` it stays in the background from that output on
```` ```text output ````              is what the last command wrote; ``...`` stands for anything
====================================  ==================================================================================
"""

import __future__

import contextlib
import dataclasses
import doctest
import inspect
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import types
from datetime import timedelta
from enum import Enum
from pathlib import Path

import click
import psycopg
import pytest
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import CheckConstraint, Engine, create_engine, make_url, text
from sqlalchemy.pool import NullPool
from support import Process, eventually
from support.processes import environment
from support.servers import libpq

import sqla_neoq
from sqla_neoq import cli, embedded, errors, logs, migrate, migrations
from sqla_neoq.arguments import PayloadMismatch
from sqla_neoq.models import Base

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
EMPTY_DATABASE = {"README.md", "docs/tutorial.md", "docs/how-to/migrations.md"}
"""Documents that install the tables themselves."""
MODULE = "myapp"
"""What the blocks of a document call their module, and so the prefix of their tasks' names."""

# Reading Markdown -----------------------------------------------------------------------------------------------------

_FENCE = re.compile(
    r"^(?:<!--(?P<comment>[^\n]*)-->\n+)?```(?P<info>[^\n`]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: its language, what else its first line says, its text, and the line that starts at."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int
    comment: str

    @property
    def options(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.words if "=" in word)

    @property
    def source(self) -> str:
        """The text, moved down to where it stands, so that a traceback names the document's own lines."""
        return "\n" * (self.line - 1) + self.text


def blocks(path: Path) -> list[Block]:
    text = path.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, *words = shlex.split(match["info"])
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(language, tuple(words), match["text"], line, (match["comment"] or "").strip()))
    return found


def section(text: str, title: str) -> str:
    """Return what stands under a heading, up to the next one of any level."""
    match = re.search(rf"^#+ +{re.escape(title)} *\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"there is no heading {title!r}"
    return match[1]


def with_any(*kinds: str) -> list[str]:
    """Return the documents that have a block whose language is one of these."""
    return [name for name, path in DOCUMENTS.items() if any(block.language in kinds for block in blocks(path))]


def prose(text: str) -> str:
    return _FENCE.sub("", text)


# Following a document -------------------------------------------------------------------------------------------------


class Reader:
    """Does what a document says, in its order."""

    def __init__(self, name: str, directory: Path, url: str) -> None:
        self._path = DOCUMENTS[name]
        self._directory = directory
        self._module = types.ModuleType(MODULE)
        self._module.__path__ = [str(directory / MODULE)]  # so that "import myapp.tasks" finds what was written there
        self._url = url
        self._background: list[Process] = []
        self._last_output = lambda: ""
        self._bin = directory / ".bin"
        self._bin.mkdir()
        script = self._bin / "sqla-neoq"
        script.write_text(f"#!{sys.executable}\nfrom sqla_neoq.cli import main\nmain()\n")
        script.chmod(0o755)
        sys.modules[MODULE] = self._module

    def follow(self) -> None:
        for block in blocks(self._path):
            match block.language:
                case "python" if "file" in block.options:
                    self._write(block)
                case "python" if "no-run" in block.words or "signature" in block.words:
                    pass
                case "python":
                    self._execute(block)
                case "sql":
                    self._query(block)
                case "shell" if "run" in block.words:
                    self._command(block)
                case "text" if "output" in block.words:
                    self._compare(block)
                case _:
                    if "file" in block.options:
                        self._write(block)
        for process in self._background:
            process.signal(signal.SIGINT)
            assert process.wait() == 0, process.output

    def close(self) -> None:
        for process in self._background:
            process.kill()
        ours = [m for m in sys.modules.values() if self._is_ours(m)]
        for module in ours:
            for value in vars(module).values():
                if isinstance(value, Engine):
                    value.dispose()
        for module in ours:
            sys.modules.pop(module.__name__, None)

    def _is_ours(self, module: types.ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return module is self._module or (file is not None and Path(file).is_relative_to(self._directory))

    def _write(self, block: Block) -> None:
        file = self._directory / block.options["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        if file.suffix == ".py":
            compile(block.source, str(self._path), "exec", dont_inherit=True)

    def _execute(self, block: Block) -> None:
        code = compile(block.source, str(self._path), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, self._module.__dict__)
        said = [line.partition(")  # ")[2] for line in block.text.splitlines() if re.match(r"\s*print\(.*\)  # ", line)]
        if said:
            agree("\n".join(said), printed.getvalue())
        self._last_output = printed.getvalue

    def _query(self, block: Block) -> None:
        with psycopg.connect(libpq(make_url(self._url)), autocommit=True) as connection:
            output = as_psql(connection.execute(block.text))
        self._last_output = lambda: output

    def _command(self, block: Block) -> None:
        env = environment({"DATABASE_URL": self._url})
        env["PATH"] = f"{self._bin}:{Path(sys.executable).parent}:{env['PATH']}"
        if "until" in block.options:
            directory = self._directory / f".process-{len(self._background)}"
            directory.mkdir()
            command = ["bash", "-c", f"exec {block.text.strip()} 2>&1"]  # in the order of a terminal
            process = Process(command, directory=directory, cwd=self._directory, env=env)
            self._background.append(process)
            process.wait_for(block.options["until"])
            self._last_output = lambda: process.output
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self._directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == int(block.options.get("exit", 0)), f"{self._path}:{block.line}\n{done.stdout}"
        if done.stdout:  # else what a worker in the background says is still what a reader looks at
            self._last_output = lambda: done.stdout

    def _compare(self, block: Block) -> None:
        output = self._last_output
        eventually(lambda: matches(block.text, output()), why=lambda: f"{self._path}:{block.line}\n{output()}")


def as_psql(cursor: psycopg.Cursor) -> str:
    """Return the last result as psql prints it."""
    while cursor.nextset():
        pass
    if cursor.description is None:
        return cursor.statusmessage or ""
    rows = [[_PSQL.get(type(value), str)(value) for value in row] for row in cursor]
    head = [column.name for column in cursor.description]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    lines.insert(1, "+".join("-" * (width + 2) for width in widths))
    lines.append(f"({len(rows)} row{'s' * (len(rows) != 1)})")
    return "\n".join(lines)


_PSQL = {dict: json.dumps, list: json.dumps, bool: lambda value: "ft"[value], type(None): lambda _: ""}


def matches(wanted: str, got: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(wanted.strip(), got.strip(), flags)


def agree(wanted: str, got: str) -> None:
    assert matches(wanted, got), f"the document says\n{wanted}\n\nand the code printed\n{got}"


@pytest.fixture
def reader(request, tmp_path, monkeypatch):
    made: list[Reader] = []

    def make(name: str) -> Reader:
        kind = "fresh_database" if name in EMPTY_DATABASE else "migrated_database"
        url = request.getfixturevalue(kind)()
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("DATABASE_URL", url)
        monkeypatch.delenv("NEOQ_DATABASE_URL", raising=False)
        made.append(Reader(name, tmp_path, url))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("name", with_any("python", "sql"))
def test_a_reader_who_does_what_the_document_says_gets_what_it_says(name, reader):
    reader(name).follow()


@pytest.mark.parametrize("name", with_any("python"))
def test_code_that_is_not_run_compiles_and_says_why(name):
    for block in blocks(DOCUMENTS[name]):
        if block.language == "python" and "no-run" in block.words:
            compile(block.source, name, "exec")
            assert re.match(r"not run: \S", block.comment), f"{name}:{block.line} does not say why it is not run"


def test_a_block_has_no_words_that_mean_nothing_here():
    known = {
        "python": {"file", "signature", "no-run"},
        "shell": {"run", "until", "exit"},
        "text": {"output"},
        "sql": set(),
    }
    for name, path in DOCUMENTS.items():
        for block in blocks(path):
            words = {word.partition("=")[0] for word in block.words}
            assert words <= known.get(block.language, {"file"}), f"{name}:{block.line} {block.words}"


def test_the_server_of_the_tutorial_starts_and_says_its_url(tmp_path):
    block = next(b for b in blocks(DOCS / "tutorial.md") if b.options.get("file") == "server.py")
    (tmp_path / "server.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "server.py"],
        cwd=tmp_path,
        env=environment({}),
        input="\n",
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    assert "postgresql+psycopg://" in done.stdout


_OUR_TABLES = "SELECT count(*) FROM pg_tables WHERE starts_with(tablename, 'neoq_')"


def revisions() -> list[tuple[str, Block]]:
    return [(n, b) for n, p in DOCUMENTS.items() for b in blocks(p) if "/versions/" in b.options.get("file", "")]


@pytest.mark.parametrize(("name", "block"), revisions(), ids=lambda value: getattr(value, "line", value))
def test_every_revision_in_the_documents_leads_up_and_down(name, block, fresh_database):
    revision: dict[str, object] = {}
    exec(compile(block.source, name, "exec"), revision)
    engine = create_engine(fresh_database(), poolclass=NullPool)
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        revision["upgrade"]()
        assert connection.scalar(text(_OUR_TABLES)) == len(Base.metadata.tables)
        revision["downgrade"]()
        assert connection.scalar(text(_OUR_TABLES)) == 0


# Commands -------------------------------------------------------------------------------------------------------------


def command_lines(text: str) -> list[list[str]]:
    """Return the arguments of every command of sqla_neoq in a block of shell, systemd or Kubernetes."""
    lines = text.replace("\\\n", " ").splitlines()
    lists = [json.loads(line[line.index("[") :]) for line in lines if re.search(r"(command|args): *\[.*sqla", line)]
    commands = [shlex.split(line.removeprefix("ExecStart="), comments=True) for line in lines if "sqla" in line]
    return [parts for parts in [*lists, *commands] if program(parts) is not None]


def program(parts: list[str]) -> int | None:
    """Return where the program's own arguments start."""
    for place, part in enumerate(parts):
        if Path(part).name == "sqla-neoq" or (part.startswith("sqla_neoq.") and parts[place - 1] == "-m"):
            return place + 1
    return None


COMMANDS = {"sqla-neoq": cli.main, "sqla_neoq.run": cli.run, "sqla_neoq.migrate": migrate.main}


def parse(parts: list[str]) -> None:
    place = program(parts)
    arguments, command = parts[place:], COMMANDS[Path(parts[place - 1]).name]
    # As click itself makes it: a command keeps the help option, with the names it had in the first context, for good.
    context = click.Context(command, **command.context_settings)
    if isinstance(command, click.Group):
        name = arguments.pop(0)
        if name in {"--help", "-h", "--version"}:
            return
        command = command.commands[name]
        context = click.Context(command, parent=context, **command.context_settings)
    command.make_parser(context).parse_args(arguments)


@pytest.mark.parametrize("name", with_any("shell", "ini", "yaml"))
def test_every_command_in_the_documents_parses(name):
    for block in blocks(DOCUMENTS[name]):
        if block.language in {"shell", "ini", "yaml"}:
            for parts in command_lines(block.text):
                parse(parts)


def test_parsing_leaves_the_short_help_option_to_those_who_come_after():
    for line in ("python -m sqla_neoq.run -h", "sqla-neoq status -h", "python -m sqla_neoq.migrate up -h"):
        parse(shlex.split(line))


def test_a_flag_that_does_not_exist_would_be_noticed():
    (parts,) = command_lines("env A=1 python -m sqla_neoq.run app.tasks \\\n  --no-such-flag 5\n")
    with pytest.raises(click.NoSuchOption, match="no-such-flag"):
        parse(parts)


def parameters() -> list[tuple[str, click.Option]]:
    commands = {**cli.main.commands, **{f"migrate {name}": one for name, one in migrate.main.commands.items()}}
    return [
        (name, option) for name, one in commands.items() for option in one.params if isinstance(option, click.Option)
    ]


def test_every_command_is_in_the_reference_of_the_command_line():
    text = (DOCS / "reference" / "cli.md").read_text("utf-8")
    for group in (cli.main, migrate.main):
        for name in group.commands:
            assert re.search(rf"^#+ {name}$|^\| `{name}` \|", text, re.MULTILINE), f"cli.md leaves out {name}"


@pytest.mark.parametrize(("command", "option"), parameters(), ids=lambda value: getattr(value, "name", value))
def test_every_flag_and_its_variable_is_in_the_reference_of_the_command_line(command, option):
    text = (DOCS / "reference" / "cli.md").read_text("utf-8")
    variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    for word in [*option.opts, *variables]:
        assert f"`{word}" in text, f"cli.md does not say {word} ({command})"


def test_the_help_of_run_has_a_line_for_each_signal():
    said, _, _ = cli.run.get_help(click.Context(cli.run)).partition("Options:")
    lines = [line.split()[0] for line in said.splitlines() if line.startswith("  ") and line.split()[0].isupper()]
    assert {"TERM,", "QUIT", "TSTP", "HUP"} <= set(lines)


def test_every_extra_that_somebody_is_told_to_install_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for path in [*(ROOT / "sqla_neoq").rglob("*.py"), *DOCUMENTS.values()]:
        for extra in re.findall(r"sqla[-_]neoq\[(\w+)\]", path.read_text("utf-8")):
            assert extra in project["optional-dependencies"], f"{path} names the extra {extra}"


def test_every_make_target_in_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)`", DOCUMENTS["README.md"].read_text("utf-8"))) <= targets


def test_every_exit_code_is_in_the_reference_of_the_command_line():
    codes = section((DOCS / "reference" / "cli.md").read_text("utf-8"), "Exit codes")
    for code in (0, cli.FORCED, cli.USAGE, cli.NO_CONNECTION, cli.SCHEMA):
        assert f"| {code} |" in codes


# The reference --------------------------------------------------------------------------------------------------------

API = DOCS / "reference" / "api.md"
BESIDE_THE_TOP_LEVEL = {
    **{
        name: function
        for name, function in vars(migrations).items()
        if inspect.isfunction(function) and function.__module__ == migrations.__name__ and name[0] != "_"
    },
    "EmbeddedServer": embedded.EmbeddedServer,
    "TextFormatter": logs.TextFormatter,
    "JsonFormatter": logs.JsonFormatter,
    "PayloadMismatch": PayloadMismatch,
}
PUBLIC = {name: getattr(sqla_neoq, name) for name in sqla_neoq.__all__}
TABLES = {name for name, value in PUBLIC.items() if isinstance(value, type) and issubclass(value, Base)}


def stubs() -> dict[str, object]:
    """Return what the signature blocks of api.md define."""
    namespace: dict[str, object] = {
        **vars(sqla_neoq),
        "timedelta": timedelta,
        "Enum": Enum,
        "LATEST": migrations.LATEST,
    }
    before = dict(namespace)
    for block in blocks(API):
        if "signature" in block.words:
            code = compile(block.source, str(API), "exec", flags=__future__.annotations.compiler_flag)
            exec(code, namespace)
    return {name: value for name, value in namespace.items() if before.get(name) is not value and name[0] != "_"}


def parameters_of(function: object) -> list[tuple[str, object, object]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def same_parameters(stub: object, real: object) -> bool:
    said, is_so = parameters_of(stub), parameters_of(real)
    if len(said) != len(is_so):
        return False
    # "..." in the document stands for a default that is not worth a name.
    return all(
        a[:2] == b[:2] and (a[2] == b[2] or (a[2] is ... and b[2] is not inspect.Parameter.empty))
        for a, b in zip(said, is_so, strict=True)
    )


def public_members(real: type) -> set[str]:
    """Return the names that the class itself, or a base of ours, defines for its users."""
    own = [base for base in real.__mro__ if base.__module__.startswith("sqla_neoq")]
    return {name for base in own for name in vars(base) if not name.startswith("_")}


def test_every_public_name_is_in_the_reference():
    text = API.read_text("utf-8")
    for name in PUBLIC:
        assert re.search(rf"\b{name}\b", text), f"api.md does not mention {name}"


def test_every_function_and_class_has_its_signature_in_the_reference():
    exceptions = {name for name, value in PUBLIC.items() if isinstance(value, type) and issubclass(value, Exception)}
    steering = {"Retry", "Snooze", "Discard"}
    needed = PUBLIC.keys() - TABLES - {"__version__"} - (exceptions - steering) | BESIDE_THE_TOP_LEVEL.keys()
    assert needed - stubs().keys() == set()


@pytest.mark.parametrize(("name", "stub"), stubs().items())
def test_the_reference_has_the_signatures_as_they_are(name, stub):
    real = {**PUBLIC, **BESIDE_THE_TOP_LEVEL}.get(name)
    assert real is not None, f"api.md documents {name}, which is not there"
    if not isinstance(real, type):
        assert same_parameters(stub, real), f"{name}{inspect.signature(real)}"
        return
    for member, value in vars(stub).items():
        if inspect.isfunction(value):
            actual = inspect.unwrap(getattr(real, member))
            assert same_parameters(value, actual), f"{name}.{member}{inspect.signature(actual)}"
    annotated = inspect.get_annotations(stub)
    said = annotated.keys() | {member for member in vars(stub) if member[0] != "_"}
    assert public_members(real) - said == set(), f"api.md leaves out what {name} has"
    if dataclasses.is_dataclass(real):
        defaults = {field.name: field.default for field in dataclasses.fields(real)}
        assert said >= defaults.keys()
        for field, default in defaults.items():
            assert vars(stub).get(field, dataclasses.MISSING) == default, f"{name}.{field}"


def test_every_error_is_in_the_reference_of_errors():
    text = (DOCS / "reference" / "errors.md").read_text("utf-8")
    tree = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception | Warning)]
    for name in [*(error.__name__ for error in tree), "PayloadMismatch"]:
        assert f"`{name}`" in text, f"errors.md does not mention {name}"


def catalogue() -> list[tuple[str, str]]:
    """Return (table, name) of every column, index and constraint."""
    found = []
    for table in Base.metadata.sorted_tables:
        names = {*table.columns.keys(), *(index.name for index in table.indexes), *(c.name for c in table.constraints)}
        found += [(table.name, name) for name in sorted(map(str, names))]  # in one order for all xdist workers
    return found


@pytest.mark.parametrize(("table", "name"), catalogue())
def test_every_column_index_and_constraint_is_in_the_reference_of_tables(table, name):
    assert f"`{name}`" in section((DOCS / "reference" / "tables.md").read_text("utf-8"), f"`{table}`")


@pytest.mark.parametrize("document", ["tables.md", "states.md"])
def test_every_state_and_reason_is_in_the_reference(document):
    text = (DOCS / "reference" / document).read_text("utf-8")
    checks = [c for table in Base.metadata.sorted_tables for c in table.constraints if isinstance(c, CheckConstraint)]
    known = [c for c in checks if str(c.name).endswith("_known")]
    assert len(known) == 3
    for check in known:
        for value in re.findall(r"'(\w+)'", str(check.sqltext)):
            assert f"`{value}`" in text, f"{document} does not mention {value}, which {check.name} allows"


# The documents together -----------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    titles = _HEADING.findall(prose(path.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "name", [*DOCUMENTS, "CHANGELOG.md", "examples/catalog/README.md", "examples/signup/README.md"]
)
def test_links_between_the_documents_resolve(name):
    path = ROOT / name
    for target in _LINK.findall(prose(path.read_text("utf-8"))):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), f"{name} links to {target}"
        assert other.is_relative_to(ROOT), f"{name} links to {target}, outside the repository"
        if anchor:
            assert anchor in anchors(other), f"{name} links to {target}; there are {sorted(anchors(other))}"


def test_every_document_can_be_reached_from_the_index():
    reached, front = set(), [DOCS / "index.md"]
    while front:
        path = front.pop()
        if path in reached or path.suffix != ".md" or not path.is_relative_to(DOCS):
            continue
        reached.add(path)
        targets = _LINK.findall(prose(path.read_text("utf-8")))
        front += [(path.parent / t.partition("#")[0]).resolve() for t in targets if not t.startswith(("http", "#"))]
    assert set(DOCS.rglob("*.md")) - reached == set()


def test_the_readme_has_one_place_for_measured_numbers():
    text = DOCUMENTS["README.md"].read_text("utf-8")
    assert len(re.findall(r"^<!-- bench:start -->$.*?^<!-- bench:end -->$", text, re.MULTILINE | re.DOTALL)) == 1


def test_the_version_is_in_the_changelog():
    assert f"## [{sqla_neoq.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
