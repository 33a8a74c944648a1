import threading
from random import Random

from support.running import in_thread
from support.waiting import eventually

from sqla_neoq import lifecycle
from sqla_neoq.lifecycle import Service


class Recorder(Service):
    """Serves until stopped, and remembers what happened to it."""

    name = "recorder"

    def __init__(self, *errors):
        super().__init__()
        self.served = 0
        self.interrupted = 0
        self.serving = threading.Event()
        self._wake = threading.Event()
        self._errors = list(errors)

    def interrupt(self):
        self.interrupted += 1
        self._wake.set()

    def serve(self):
        self.served += 1
        if self._errors:
            raise self._errors.pop(0)
        self.serving.set()
        self._wake.wait(20)


def test_it_serves_in_a_thread_of_its_own_until_stopped():
    service = Recorder()
    assert not service.alive
    service.start()
    assert service.serving.wait(10)
    assert service.alive
    assert "neoq-recorder" in {thread.name for thread in threading.enumerate()}
    assert service.stop()
    assert not service.alive
    assert "neoq-recorder" not in {thread.name for thread in threading.enumerate()}


def test_starting_twice_starts_one_thread():
    service = Recorder()
    service.start()
    service.start()
    assert service.serving.wait(10)
    service.stop()
    assert service.served == 1


def test_stop_before_start_means_that_it_never_serves():
    service = Recorder()
    assert service.stop()
    service.start()
    assert not service.alive
    assert service.served == 0


def test_stopping_twice_is_harmless():
    service = Recorder()
    service.start()
    assert service.stop()
    assert service.stop()


def test_stop_returns_false_when_the_thread_does_not_end_in_time():
    service = Recorder()
    service.interrupt = lambda: None
    service.start()
    assert service.serving.wait(10)
    assert service.stop(timeout=0) is False
    service._wake.set()
    assert service.stop()


def test_a_service_may_stop_itself():
    class Selfish(Service):
        def serve(self):
            self.answer = self.stop()

    service = Selfish()
    service.start()
    service.join(10)
    assert service.answer is True
    assert not service.alive


def test_an_error_is_logged_and_the_service_goes_on(caplog, monkeypatch):
    monkeypatch.setattr(lifecycle, "_PAUSE", 0.0)
    service = Recorder(ValueError("a bug"), KeyError("another"))
    service.start()
    assert service.serving.wait(10)
    assert service.stop()
    assert service.served == 3
    assert "the recorder stopped on an error and starts again" in caplog.text
    assert "a bug" in caplog.text


def test_a_service_that_keeps_failing_can_still_be_stopped(caplog):
    # The pause between two tries must not outlast a stop.
    service = Recorder(*[ValueError(str(number)) for number in range(1000)])
    service.start()
    eventually(lambda: service.served)
    assert service.stop()
    assert service.served < 1000


def test_joining_what_was_never_started_returns():
    Recorder().join(timeout=20)


def test_starts_and_stops_from_many_threads_leave_nothing_behind():
    random = Random(7)
    for _ in range(30):
        service = Recorder()
        calls = [service.start] * 2 + [service.stop] * 2
        random.shuffle(calls)
        callers = [in_thread(call) for call in calls]
        for caller in callers:
            caller.join(10)
        assert service.stop()
        assert not service.alive
