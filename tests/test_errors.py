"""One tree of errors; each is also what Python calls such a thing."""

import inspect
import re

import pytest

import sqla_neoq
from sqla_neoq import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__
}


def test_every_error_is_a_neoq_error_and_the_warning_is_not():
    for name, kind in CLASSES.items():
        assert issubclass(kind, errors.NeoqError) != (name == "NeoqWarning")
    assert issubclass(errors.NeoqWarning, UserWarning)


@pytest.mark.parametrize(
    ("kind", "as_well"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.NoCurrentJob, LookupError),
        (errors.TaskNotFound, LookupError),
        (errors.JobTimeout, TimeoutError),
        (errors.SchemaMissing, errors.SchemaError),
        (errors.SchemaOutdated, errors.SchemaError),
        (errors.SchemaTooNew, errors.SchemaError),
    ],
)
def test_an_error_is_also_what_python_calls_it(kind, as_well):
    assert issubclass(kind, as_well)


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = re.findall(r"^\W*(\w+?)(?= {2,}|$)", errors.__doc__.split("::", 1)[1], re.MULTILINE)
    assert CLASSES.keys() <= set(drawn)
    assert all(inspect.getdoc(kind) for kind in CLASSES.values())


@pytest.mark.parametrize("kind", [errors.SchemaError, errors.SchemaMissing, errors.SchemaOutdated, errors.SchemaTooNew])
def test_a_schema_error_carries_the_lines_to_paste_apart_from_its_sentence(kind):
    error = kind("the tables are not there", "run this")
    assert str(error) == "the tables are not there"
    assert error.remedy == "run this"


def test_what_users_catch_can_be_imported_from_the_package():
    exported = {name for name in CLASSES if hasattr(sqla_neoq, name)}
    never_caught = {"EmbeddedError", "JobCrashed", "SchemaMissing", "SchemaOutdated", "SchemaTooNew"}
    assert CLASSES.keys() - exported <= never_caught
    for name in exported:
        assert getattr(sqla_neoq, name) is CLASSES[name]
