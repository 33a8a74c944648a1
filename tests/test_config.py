"""A runner's settings are one value, checked when it is made."""

import dataclasses
import re
from datetime import timedelta

import pytest

from sqla_neoq import NeoqError, RunnerConfig, memory
from sqla_neoq.errors import ConfigurationError

SECOND = timedelta(seconds=1)


def test_the_defaults_are_what_the_documentation_says():
    config = RunnerConfig()
    assert (config.concurrency, config.listen, config.crash_limit) == (10, True, 3)
    assert (config.poll_interval, config.shutdown_timeout) == (2 * SECOND, 25 * SECOND)
    assert config.retention == timedelta(days=7)
    nothing = (config.listen_url, config.schema, config.name, config.max_jobs, config.stuck_limit)
    assert nothing == (None,) * 5
    # A killed worker's jobs must run elsewhere in ten seconds.
    assert config.heartbeat_interval <= timedelta(seconds=2.5)


def test_settings_are_a_value_that_cannot_change():
    assert RunnerConfig(concurrency=5) == RunnerConfig(concurrency=5) != RunnerConfig()
    assert len({RunnerConfig(), RunnerConfig()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunnerConfig().concurrency = 5


def test_settings_are_named():
    with pytest.raises(TypeError, match="positional"):
        RunnerConfig(5)
    with pytest.raises(TypeError, match="worker_count"):
        RunnerConfig(worker_count=5)


def test_a_copy_is_checked_too():
    assert dataclasses.replace(RunnerConfig(), concurrency=3).concurrency == 3
    with pytest.raises(ConfigurationError, match="concurrency=0"):
        dataclasses.replace(RunnerConfig(), concurrency=0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("concurrency", [0, -1, 10_001, True, 1.0, "5", None]),
        ("crash_limit", [0, 1001, True, 2.5, None]),
        ("max_jobs", [0, -1, 2**63, True, 1.5, "all"]),
        ("stuck_limit", [0, -1, True, 1.5]),
    ],
)
def test_a_count_is_a_whole_number_in_its_range(name, values):
    for value in values:
        with pytest.raises(
            ConfigurationError, match=f"^{re.escape(f'{name}={value!r}')}: expected a whole number from 1"
        ):
            RunnerConfig(**{name: value})


@pytest.mark.parametrize("value", [0, 512, 16 * 2**20 - 1, 2**63, True, 1e9, "512M"])
def test_a_memory_limit_is_a_number_of_bytes_that_a_process_can_keep(value):
    with pytest.raises(ConfigurationError, match=f"^max_memory={re.escape(repr(value))}: expected a whole number"):
        RunnerConfig(max_memory=value)


def test_a_memory_limit_needs_a_system_that_measures(monkeypatch):
    assert RunnerConfig(max_memory=2**30).max_memory == 2**30
    monkeypatch.setattr(memory, "resident", lambda: None)
    with pytest.raises(ConfigurationError, match="no /proc to measure memory by"):
        RunnerConfig(max_memory=2**30)


@pytest.mark.parametrize("value", ["info", ("info",), ("info", "text", None, 1), ["info", "text", None], ("x", 5, "")])
def test_the_logs_of_children_are_level_format_and_file(value):
    with pytest.raises(ConfigurationError, match=r"^child_logs=.*expected a tuple of level, format and file"):
        RunnerConfig(child_logs=value)


def test_the_database_of_children_may_hold_a_password_and_is_not_shown():
    assert "secret" not in repr(RunnerConfig(child_database="postgresql://me:secret@host/x"))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("poll_interval", timedelta(milliseconds=10), timedelta(hours=1)),
        ("heartbeat_interval", timedelta(milliseconds=100), 3 * SECOND),
        ("shutdown_timeout", timedelta(0), timedelta(days=7)),
        ("retention", timedelta(0), timedelta(days=36_525)),
    ],
)
def test_a_duration_is_a_timedelta_in_its_range(name, low, high):
    for value in (low, high):
        assert getattr(RunnerConfig(**{name: value}), name) == value
    tick = timedelta(microseconds=1)
    for value in (low - tick, high + tick, timedelta.max, timedelta.min, 5, 1e18, float("nan"), "5s", True):
        with pytest.raises(ConfigurationError, match=f"^{re.escape(f'{name}={value!r}')}: expected a timedelta from "):
            RunnerConfig(**{name: value})


def test_only_where_none_has_a_meaning_it_is_taken():
    assert RunnerConfig(retention=None).retention is None
    for name in ("poll_interval", "heartbeat_interval", "shutdown_timeout"):
        with pytest.raises(ConfigurationError, match=f"{name}=None"):
            RunnerConfig(**{name: None})


@pytest.mark.parametrize("name", ["listen_url", "schema", "name"])
def test_a_text_is_a_text_or_none(name):
    assert getattr(RunnerConfig(**{name: "The Queue's"}), name) == "The Queue's"
    for value in ("", "a\0b", 5, b"x"):
        with pytest.raises(ConfigurationError, match=f"^{name}="):
            RunnerConfig(**{name: value})


@pytest.mark.parametrize("value", [None, 1, 0, "yes"])
def test_listen_is_true_or_false(value):
    with pytest.raises(ConfigurationError, match=f"^{re.escape(f'listen={value!r}')}: expected True or False"):
        RunnerConfig(listen=value)


def test_a_refusal_can_be_caught_as_either():
    for kind in (NeoqError, ValueError):
        with pytest.raises(kind):
            RunnerConfig(concurrency=0)
