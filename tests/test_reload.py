import sys
import threading
import types

import pytest

from sqla_neoq import reload
from sqla_neoq.errors import ConfigurationError


@pytest.fixture
def watcher(monkeypatch):
    """Stands for watchfiles: each set of paths put into it is one batch of changes."""
    module = types.ModuleType("watchfiles")
    module.changes, module.asked = threading.Semaphore(0), threading.Event()
    module.PythonFilter = lambda: "python files"

    def watch(directory, *, watch_filter, stop_event):
        module.given = (directory, watch_filter)
        module.asked.set()
        while not stop_event.is_set():
            if module.changes.acquire(timeout=0.01):
                yield {(1, f"{directory}/tasks.py")}

    module.watch = watch
    monkeypatch.setitem(sys.modules, "watchfiles", module)
    return module


def test_each_change_of_a_python_file_below_the_directory_is_told(watcher, tmp_path, caplog):
    caplog.set_level("INFO")
    told = threading.Semaphore(0)
    with reload.watching(tmp_path, told.release):
        for _ in range(2):
            watcher.changes.release()
            assert told.acquire(timeout=10)
    assert watcher.given == (tmp_path, "python files")
    assert f"restarting: {tmp_path}/tasks.py changed" in caplog.text


def test_watching_ends_with_its_thread(watcher, tmp_path):
    with reload.watching(tmp_path, lambda: None):
        assert watcher.asked.wait(10)
    assert "neoq-reload" not in {thread.name for thread in threading.enumerate()}


def test_without_the_library_that_watches_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    with (
        pytest.raises(ConfigurationError, match=r"--reload needs watchfiles; run: pip install 'sqla_neoq\[reload\]'"),
        reload.watching(tmp_path, lambda: None),
    ):
        pass
