"""How the command line writes its log: one line a record, for people or as JSON.

The library itself only emits records, on loggers under ``sqla_neoq``; what happened to a job rides along as a dict in
``record.neoq``, its durations in seconds. Nothing here runs at import, and an application that configures logging by
itself can use the two formatters from its own configuration.
"""

from __future__ import annotations

import json
import logging
import logging.config
import sys
import time
import tomllib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sqla_neoq.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
FORMATS: Final = ("text", "json")


class TextFormatter(logging.Formatter):
    """Lines for people: ``12:00:01 INFO job processed id=5 task=m:f queue=emails attempt=1 duration=12.3ms``.

    The time is local. Records from outside the library name their logger before the message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """Return the line without its traceback, which the base class adds."""
        origin = "" if record.name.partition(".")[0] == "sqla_neoq" else f"{record.name}: "
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(_pair(key, value) for key, value in _fields(record).items() if key != "event")
        return f"{clock} {record.levelname} {origin}{record.message}{fields}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, the job's fields, the exception's text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of pure ASCII, so that no text in it can break the line or its encoding."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # The four above keep their meaning whatever a record carries.
        line |= {key: value for key, value in _fields(record).items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str = "info", format: str = "text", config_file: Path | None = None) -> None:  # noqa: A002
    """Send the process's log to stderr; called by the command line, never at import.

    Args:
        level: the least severe level shown, one of ``LEVELS``, for the library and the application alike.
        format: ``text`` or ``json``.
        config_file: a logging configuration that replaces both: ``.json`` or ``.toml`` in the form of
            :func:`logging.config.dictConfig`, anything else in that of :func:`logging.config.fileConfig`. Loggers that
            exist stay enabled unless it says otherwise.

    Raises:
        ConfigurationError: the file cannot be read, or is no logging configuration.
    """
    logging.captureWarnings(True)
    if config_file is None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
        root = logging.getLogger()
        root.addHandler(handler)
        root.setLevel(level.upper())
        return
    try:
        _configure_from(config_file)
    except Exception as error:  # the file names classes and, as INI, holds expressions: anything may be raised
        reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigurationError(f"the logging configuration {config_file} does not work: {reason}") from error


def _configure_from(file: Path) -> None:
    match file.suffix:
        case ".json":
            config = json.loads(file.read_text("utf-8"))
        case ".toml":
            config = tomllib.loads(file.read_text("utf-8"))
        case _:
            logging.config.fileConfig(file, disable_existing_loggers=False, encoding="utf-8")
            return
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False} | config)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "neoq", {})
    return fields


def _pair(key: str, value: Any) -> str:
    if key == "duration":
        value = f"{value * 1000:.1f}ms" if value < 1 else f"{value:.2f}s"
    text = ",".join(f"{name}:{each}" for name, each in value.items()) if isinstance(value, dict) else str(value)
    if not text.isprintable() or not text or " " in text or '"' in text:
        # Quoted, with control characters escaped: what a payload or an error says cannot forge a second line.
        text = json.dumps(text, ensure_ascii=False)
    return f" {'id' if key == 'job_id' else key}={text}"
