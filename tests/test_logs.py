import json
import logging
import logging.config
import re
import subprocess

import pytest
from support.processes import environment, python

from sqla_neoq import logs
from sqla_neoq.errors import ConfigurationError


def record(message="job processed", *, name="sqla_neoq.jobs", level=logging.INFO, error=None, **fields):
    exc_info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord(name, level, __file__, 1, message, (), exc_info)
    made.neoq = fields
    return made


def processed(**fields):
    given = {"event": "processed", "job_id": 5, "task": "m:f", "queue": "emails", "attempt": 1, "duration": 0.0123}
    return record(**{**given, **fields})


def raised():
    try:
        raise LookupError("no such user")
    except LookupError as error:
        return error


def test_text_says_what_happened_to_which_job():
    line = logs.TextFormatter().format(processed())
    clock, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock)
    assert rest == "INFO job processed id=5 task=m:f queue=emails attempt=1 duration=12.3ms"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0ms"), (0.00004, "0.0ms"), (0.9994, "999.4ms"), (1.0, "1.00s"), (75.128, "75.13s")]
)
def test_text_durations_are_milliseconds_below_a_second(seconds, text):
    assert logs.TextFormatter().format(processed(duration=seconds)).endswith(f" duration={text}")


def test_text_of_a_field_cannot_forge_a_line_or_another_field():
    line = logs.TextFormatter().format(processed(queue="a\nERROR b", task='x" y', reason=""))
    assert "\n" not in line
    assert r'queue="a\nERROR b" ' in line
    assert r'task="x\" y" ' in line
    assert line.endswith(' reason=""')


def test_text_of_a_mapping_is_short():
    assert logs.TextFormatter().format(record("started", queues={"a": 1, "b": 2})).endswith(" started queues=a:1,b:2")


def test_text_names_the_logger_of_the_application_but_not_of_the_library():
    assert logs.TextFormatter().format(record("hello", name="myapp.mail")).endswith(" INFO myapp.mail: hello")
    assert logs.TextFormatter().format(record("hello", name="sqla_neoq")).endswith(" INFO hello")


def test_text_shows_the_traceback():
    assert logs.TextFormatter().format(record(error=raised())).endswith("LookupError: no such user")


def test_json_carries_the_facts_of_the_record_and_of_the_job():
    line = json.loads(logs.JsonFormatter().format(processed()))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "sqla_neoq.jobs",
        "message": "job processed",
        "event": "processed",
        "job_id": 5,
        "task": "m:f",
        "queue": "emails",
        "attempt": 1,
        "duration": 0.0123,
    }


def test_json_is_one_line_whatever_is_in_it():
    line = logs.JsonFormatter().format(record("a\nb\u2028\ud800", queue="x\r\n", thing=object(), error=raised()))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    read = json.loads(line)
    assert read["message"] == "a\nb\u2028\ud800"
    assert read["exception"].endswith("LookupError: no such user")


def test_a_field_of_a_job_does_not_replace_one_of_the_record():
    made = record("job failed")
    made.neoq = {"message": "x", "logger": "y", "level": "z", "time": 0, "job_id": 5}
    line = json.loads(logs.JsonFormatter().format(made))
    assert (line["message"], line["logger"], line["level"]) == ("job failed", "sqla_neoq.jobs", "info")
    assert line["time"] != 0


# The configuration changes the whole process, so each of these has a process of its own.


def configured(*arguments, script, tmp_path):
    code = f"import logging, pathlib\nfrom sqla_neoq import logs\n{script}"
    return subprocess.run(
        python("-c", code, *arguments), capture_output=True, text=True, cwd=tmp_path, env=environment({}), check=True
    )


def test_importing_the_library_configures_nothing(tmp_path):
    script = "import sqla_neoq.cli; print(logging.getLogger().handlers, logging.getLogger('sqla_neoq').level)"
    assert configured(script=script, tmp_path=tmp_path).stdout == "[] 0\n"


def test_the_level_counts_for_the_library_and_the_application_and_warnings_are_logged(tmp_path):
    script = """
import warnings
logs.configure("warning", "json")
logging.getLogger("sqla_neoq.runner").info("no")
logging.getLogger("sqla_neoq.runner").warning("library")
logging.getLogger("myapp").warning("application")
warnings.warn("careful")
"""
    done = configured(script=script, tmp_path=tmp_path)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["logger"], line["message"].split("\n")[0]) for line in lines[:2]] == [
        ("sqla_neoq.runner", "library"),
        ("myapp", "application"),
    ]
    assert "careful" in lines[2]["message"]
    assert done.stdout == ""


INI = """
[loggers]
keys=root
[handlers]
keys=out
[formatters]
keys=
[logger_root]
level=INFO
handlers=out
[handler_out]
class=StreamHandler
args=(sys.stdout,)
"""
TOML = """
[formatters.json]
"()" = "sqla_neoq.logs.JsonFormatter"
[handlers.out]
class = "logging.StreamHandler"
stream = "ext://sys.stdout"
[root]
level = "INFO"
handlers = ["out"]
"""
JSON = """{"handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
           "root": {"level": "INFO", "handlers": ["out"]}}"""


@pytest.mark.parametrize(("name", "content"), [("log.ini", INI), ("log.toml", TOML), ("log.json", JSON)])
def test_a_configuration_file_decides_and_leaves_existing_loggers_enabled(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    script = f"""
before = logging.getLogger("sqla_neoq.early")
logs.configure("error", "text", pathlib.Path({name!r}))
before.info("still here")
"""
    assert "still here" in configured(script=script, tmp_path=tmp_path).stdout


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log.toml", "not = = toml"),
        ("log.json", "{"),
        ("log.json", "[]"),
        ("log.json", '{"root": {"handlers": ["missing"]}}'),
        ("log.toml", '[handlers.out]\nclass = "no.such.Handler"'),
        ("log.ini", "not an ini file"),
        ("log.ini", "[loggers]\nkeys=root"),
    ],
)
def test_a_broken_configuration_file_is_named(name, content, tmp_path):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(f"the logging configuration {file} does not work: ")):
        logs.configure("info", "text", file)


def test_a_missing_configuration_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        logs.configure("info", "text", tmp_path / "none.toml")
