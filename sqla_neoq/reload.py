"""Watching the application's code for ``--reload``; for development only."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from typing import TYPE_CHECKING

from sqla_neoq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)


@contextlib.contextmanager
def watching(directory: Path, changed: Callable[[], None]) -> Iterator[None]:
    """While entered, call ``changed`` from a thread whenever a Python file below ``directory`` was written.

    Raises:
        ConfigurationError: the optional library that watches is not installed.
    """
    try:
        watchfiles = importlib.import_module("watchfiles")
    except ImportError:
        raise ConfigurationError("--reload needs watchfiles; run: pip install 'sqla_neoq[reload]'") from None
    ended = threading.Event()

    def watch() -> None:
        for changes in watchfiles.watch(directory, watch_filter=watchfiles.PythonFilter(), stop_event=ended):
            log.info("restarting: %s changed", ", ".join(sorted(path for _, path in changes)))
            changed()

    thread = threading.Thread(target=watch, name="neoq-reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
