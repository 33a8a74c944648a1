import itertools
import re
import sys
import types

import pytest
from sqlalchemy import Engine

from sqla_neoq import targets
from sqla_neoq.errors import ConfigurationError, TaskNotFound

number = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write modules of a package of a new name, importable during the test; returns the name."""
    name = f"neoqtargets{next(number)}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules):
        (tmp_path / name).mkdir(exist_ok=True)
        for module, code in modules.items():
            (tmp_path / name / f"{module}.py").write_text(code.replace("PACKAGE", name))
        return name

    yield write
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == name]:
        del sys.modules[loaded]


TASKS = """
from sqla_neoq import handler, task

@task
def send(to): ...

@task(queue="reports")
def report(): ...

@handler("greetings")
def greet(job): ...

again = send
both = [send, report]
once = (each for each in both)
number = 5
mixed = [send, 5]
"""


def names(found):
    return [one.name.rpartition(":")[2] for one in found]


def test_a_modules_tasks_are_its_attributes_each_once_and_in_order(package):
    assert names(targets.load(f"{package(__init__='', tasks=TASKS)}.tasks")) == ["send", "report", "greet"]


def test_tasks_that_a_module_imports_are_its_too(package):
    name = package(__init__="", tasks=TASKS, more="from PACKAGE.tasks import send")
    assert names(targets.load(f"{name}.more")) == ["send"]


def test_a_package_has_its_own_tasks_and_those_of_its_submodule_tasks(package):
    name = package(__init__="from PACKAGE.tasks import report", tasks=TASKS)
    assert names(targets.load(name)) == ["report", "send", "greet"]


def test_a_package_without_a_submodule_tasks_has_its_own(package):
    assert names(targets.load(package(__init__=TASKS))) == ["send", "report", "greet"]


@pytest.mark.parametrize(
    ("attribute", "found"),
    [("send", ["send"]), ("greet", ["greet"]), ("both", ["send", "report"]), ("once", ["send", "report"])],
)
def test_an_object_is_one_task_or_several(package, attribute, found):
    assert names(targets.load(f"{package(__init__='', tasks=TASKS)}.tasks:{attribute}")) == found


def test_looking_for_tasks_does_not_wake_what_stands_for_something_else():
    class Lazy:
        @property
        def __class__(self):
            raise RuntimeError("not outside of a request")

    module = types.ModuleType("lazy")
    module.request = Lazy()
    assert targets.discover(module) == []


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("neoq_no_such", "there is no module neoq_no_such; is --app-dir right?"),
        ("neoq_no_such.tasks", "there is no module neoq_no_such; is --app-dir right?"),
        ("PACKAGE.taskz", "there is no module PACKAGE.taskz; is --app-dir right?"),
        ("PACKAGE.tasks.send", "there is no module PACKAGE.tasks.send; did you mean PACKAGE.tasks:send?"),
        ("PACKAGE.tasks:sent", "module PACKAGE.tasks has no 'sent'"),
        ("PACKAGE.tasks:", "module PACKAGE.tasks has no ''"),
        ("PACKAGE.tasks:number", "PACKAGE.tasks:number is not a task but a int; decorate it with @task or @handler"),
        ("PACKAGE.tasks:mixed", "PACKAGE.tasks:mixed is not a task but a int; decorate it with @task or @handler"),
        ("PACKAGE.empty", "module PACKAGE.empty has no tasks; decorate a function in it"),
        ("PACKAGE", "module PACKAGE has no tasks; decorate a function in it"),
        (
            "PACKAGE/tasks.py",
            "is not a module's name; write it with dots, like myapp.tasks; did you mean PACKAGE.tasks?",
        ),
        ("", "'' is not a module's name"),
        (".tasks", "'.tasks' is not a module's name"),
        ("my-app", "'my-app' is not a module's name"),
    ],
)
def test_what_is_not_there_is_named(package, target, sentence):
    modules = {"__init__": "", "empty": "x = 1"} | ({} if target == "PACKAGE" else {"tasks": TASKS})
    name = package(**modules)
    with pytest.raises(TaskNotFound, match=re.escape(sentence.replace("PACKAGE", name))):
        targets.load(target.replace("PACKAGE", name))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import neoq_no_such_library", ModuleNotFoundError),
        ("import PACKAGE.missing", ModuleNotFoundError),
        ("from os import nothing", ImportError),
        ("1 / 0", ZeroDivisionError),
        ("def (", SyntaxError),
    ],
)
@pytest.mark.parametrize("where", ["__init__", "tasks"])
def test_what_goes_wrong_inside_a_module_comes_out_as_it_is(package, code, error, where):
    name = package(**({"__init__": "", "tasks": ""} | {where: code}))
    with pytest.raises(error) as caught:
        targets.load(f"{name}.tasks")
    assert not isinstance(caught.value, TaskNotFound)


ENGINES = """
from sqlalchemy import create_engine
engine = create_engine("postgresql+psycopg://")
def make():
    return engine
class Settings:
    engine = engine
def broken():
    return "postgresql://"
"""


@pytest.mark.parametrize("attribute", ["engine", "make", "Settings.engine"])
def test_an_engine_is_an_object_or_what_a_function_returns(package, attribute):
    assert isinstance(targets.load_engine(f"{package(__init__='', db=ENGINES)}.db:{attribute}"), Engine)


@pytest.mark.parametrize(("attribute", "kind"), [("broken", "str"), ("Settings", "Settings"), ("__name__", "str")])
def test_what_is_no_engine_is_named(package, attribute, kind):
    target = f"{package(__init__='', db=ENGINES)}.db:{attribute}"
    with pytest.raises(ConfigurationError, match=f"{target} is no SQLAlchemy Engine, .* but a {kind}"):
        targets.load_engine(target)
