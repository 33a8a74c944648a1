import asyncio
import logging
import signal
import threading
import time
import types
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool
from support.databases import migrate
from support.running import Database, Gate, ago, in_thread, threads
from support.waiting import eventually

from sqla_neoq import (
    ConfigurationError,
    Discard,
    DuplicateTask,
    Ended,
    JobCancelled,
    JobTimeout,
    Retry,
    Runner,
    RunnerConfig,
    Snooze,
    cancel,
    current_job,
    dispatcher,
    enqueue,
    enqueue_many,
    handler,
    retries,
    services,
    task,
)
from sqla_neoq.errors import DatabaseUnavailable, SchemaMissing
from sqla_neoq.link import Link
from sqla_neoq.models import DeadJob, Job, Worker

FAST = timedelta(milliseconds=100)
NEVER = timedelta(hours=1)


@pytest.fixture
def database(engine):
    return Database(engine)


@pytest.fixture
def make_runner(engine, database):
    """Factory of runners on the test's engine, stopped after the test; nothing of them may be left behind."""
    made = []

    def make(*tasks, engine=engine, queues=None, sessions=None, async_sessions=None, **config):
        given = {"concurrency": 4, "heartbeat_interval": FAST, "shutdown_timeout": timedelta(seconds=10)} | config
        runner = Runner(
            engine,
            tasks,
            queues=queues,
            config=RunnerConfig(**given),
            sessionmaker=sessions,
            async_sessionmaker=async_sessions,
        )
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.stop()
    eventually(lambda: not threads(), why=threads)
    eventually(lambda: not database.backends())


@pytest.fixture
def start(make_runner):
    """Like ``make_runner``, and started."""

    def start(*tasks, **how):
        runner = make_runner(*tasks, **how)
        runner.start()
        return runner

    return start


def put(database, target, payload=None, **options):
    with database.engine.begin() as connection:
        return enqueue(connection, target, payload, **options).id


def nothing():
    """A task of its own each time, that does nothing."""

    @task(name="m:nothing", queue="q")
    def nothing(): ...

    return nothing


def calling(function, **options):
    """A handler of queue ``q`` that calls ``function`` with the job."""

    def call(job):
        return function(job)

    return handler("q", **options)(call)


def idle(runner):
    """Wait until the runner has found nothing and is told of what comes."""
    eventually(lambda: runner._services.listener.connected and runner._services.listener._held)


# What it is made of --------------------------------------------------------------------------------------------------


def test_tasks_may_be_a_module_a_task_a_handler_or_any_of_them_together(engine):
    one, other = nothing(), task(name="m:other", queue="r")(lambda: None)
    greet = handler("greetings", concurrency=3)(lambda job: None)
    module = types.ModuleType("app_tasks")
    module.one, module.greet, module.unrelated = one, greet, 7
    assert set(Runner(engine, one).tasks) == {"m:nothing"}
    assert set(Runner(engine, greet).handlers) == {"greetings"}
    runner = Runner(engine, [module, other])
    assert (set(runner.tasks), set(runner.handlers)) == ({"m:nothing", "m:other"}, {"greetings"})


def test_the_queues_are_those_of_the_tasks_unless_named(engine):
    greet = handler("greetings", concurrency=3)(lambda job: None)
    config = RunnerConfig(concurrency=7)
    assert dict(Runner(engine, [nothing(), greet], config=config).queues) == {"q": 7, "greetings": 3}
    named = Runner(engine, [nothing(), greet], queues={"greetings": None, "x": 2, "y": None}, config=config)
    assert dict(named.queues) == {"greetings": 3, "x": 2, "y": 7}


def test_two_tasks_under_one_name_are_refused_with_both_places(engine):
    with pytest.raises(
        DuplicateTask, match=r"two tasks are called 'm:nothing': test_runner:nothing.* and test_runner:"
    ):
        Runner(engine, [nothing(), nothing()])


def test_the_same_task_twice_is_one(engine):
    one = nothing()
    assert len(Runner(engine, [one, one, one.using(priority=3)]).tasks) == 1


def test_two_handlers_of_one_queue_are_refused(engine):
    with pytest.raises(DuplicateTask, match="queue 'q' has two handlers"):
        Runner(engine, [calling(print), calling(print)])


@pytest.mark.parametrize("tasks", [[], types.ModuleType("empty")])
def test_nothing_to_run_is_refused(engine, tasks):
    with pytest.raises(ConfigurationError, match="nothing to run"):
        Runner(engine, tasks)


@pytest.mark.parametrize("tasks", ["m:nothing", 7, [7], [print]])
def test_what_is_no_task_is_refused(engine, tasks):
    with pytest.raises(TypeError, match="expected modules, tasks or handlers"):
        Runner(engine, tasks)


@pytest.mark.parametrize(
    ("queues", "error", "message"),
    [
        ({}, ConfigurationError, "needs at least one queue"),
        (["q"], TypeError, "expected a mapping"),
        ({"": 1}, ValueError, "cannot be empty"),
        ({"q": 0}, ValueError, r"queues\['q'\]=0"),
        ({"q": "3"}, TypeError, r"queues\['q'\]='3'"),
    ],
)
def test_queues_that_cannot_be_are_refused_by_name(engine, queues, error, message):
    with pytest.raises(error, match=message):
        Runner(engine, nothing(), queues=queues)


@pytest.mark.parametrize("database", [None, 5, object()])
def test_a_database_that_is_none_is_refused(database):
    with pytest.raises(TypeError, match="expected a URL or an Engine"):
        Runner(database, nothing())


def test_its_mappings_cannot_be_changed(engine):
    runner = Runner(engine, nothing())
    for mapping in (runner.queues, runner.tasks, runner.handlers):
        with pytest.raises(TypeError):
            mapping["x"] = 1


# Starting ------------------------------------------------------------------------------------------------------------


def test_a_database_that_is_down_is_said_without_its_password(tmp_path):
    runner = Runner(f"postgresql://me:secret@/x?host={tmp_path}", nothing())
    with pytest.raises(DatabaseUnavailable) as caught:
        runner.start()
    assert "cannot connect to postgresql+psycopg://me:***@/x" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert not threads()


@pytest.mark.parametrize("act", [Runner.check, Runner.start, Runner.run, Runner.drain])
def test_missing_tables_are_said_with_the_lines_to_paste(fresh_database, act):
    url = fresh_database()
    with pytest.raises(SchemaMissing) as caught:
        act(Runner(url, nothing()))
    assert "neoq.migrate(op, 0, " in caught.value.remedy
    eventually(lambda: not threads())


@pytest.mark.parametrize("act", [Runner.check, Runner.start, Runner.run, Runner.drain])
def test_a_start_that_failed_leaves_no_connection(fresh_database, database, act):
    url = fresh_database()
    with pytest.raises(SchemaMissing):
        act(Runner(url, nothing()))
    other = create_engine(url, poolclass=NullPool)
    query = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
    with other.connect() as connection:
        eventually(lambda: connection.scalar(query) == 0)


def test_a_start_that_failed_can_be_tried_again(fresh_database):
    url = fresh_database()
    runner = Runner(url, nothing())
    with pytest.raises(SchemaMissing):
        runner.start()
    migrate(url, None)
    runner.start()
    assert runner.stop()


def test_a_start_that_fails_after_it_registered_leaves_nothing_behind(make_runner, database, monkeypatch):
    runner = make_runner(handler("q")(lambda job: None))

    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(dispatcher.Dispatcher, "start", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        runner.start()
    assert database.rows(Worker) == []
    eventually(lambda: not threads(), why=threads)


def test_once_started_it_is_registered(start, database):
    start(nothing(), name="me")
    assert [row.name for row in database.rows(Worker)] == ["me"]


def test_a_runner_is_started_once(start):
    runner = start(nothing())
    with pytest.raises(RuntimeError, match="started once"):
        runner.start()
    runner.stop()
    with pytest.raises(RuntimeError, match="started once"):
        runner.start()


def test_a_pool_that_is_too_small_for_the_jobs_is_warned_of(database_url, make_runner, caplog):
    engine = create_engine(database_url, pool_size=2, max_overflow=1)
    make_runner(nothing(), engine=engine, concurrency=10).check()
    assert "pool gives at most 3 connections, and 10 jobs" in caplog.text
    caplog.clear()
    make_runner(nothing(), engine=engine, concurrency=2).check()
    for options in ({"max_overflow": -1}, {"poolclass": NullPool}):
        other = create_engine(database_url, **options)
        make_runner(nothing(), engine=other, concurrency=100).check()
        other.dispose()
    assert caplog.text == ""
    engine.dispose()


# Stopping ------------------------------------------------------------------------------------------------------------


def test_stopping_leaves_no_thread_connection_or_row_behind(start, database):
    runner = start(nothing(), task(name="m:a", queue="q")(async_nothing))
    put(database, "q", task="m:a")
    eventually(lambda: runner.counts.processed == 1)
    assert len(database.backends()) == 4
    assert runner.stop()
    eventually(lambda: not threads())
    assert database.rows(Worker) == []
    eventually(lambda: not database.backends())
    assert database.engine.pool.checkedout() == 0


async def async_nothing():
    pass


def test_stop_before_start_and_stop_twice(make_runner):
    runner = make_runner(nothing())
    assert runner.stop()
    with pytest.raises(RuntimeError, match="started once"):
        runner.start()
    other = make_runner(nothing())
    other.start()
    assert other.stop()
    assert other.stop()


def test_whoever_stops_it_while_another_does_waits_for_the_same_end(start, database):
    gate = Gate()
    runner = start(calling(lambda job: gate()))
    put(database, "q")
    gate.await_arrived(1)
    results = []
    stopping = [in_thread(lambda: results.append(runner.stop())) for _ in range(2)]
    time.sleep(0.3)
    assert results == []
    gate.open()
    for thread in stopping:
        thread.join(10)
    assert results == [True, True]
    assert runner.counts.processed == 1


def test_as_a_context_manager_it_runs_inside_and_not_after(make_runner, database):
    with make_runner(calling(lambda job: None)) as runner:
        put(database, "q")
        eventually(lambda: runner.counts.processed == 1)
    eventually(lambda: not threads())
    assert database.rows(Worker) == []


def test_many_short_lives_in_a_row_leave_nothing(make_runner, database):
    for _ in range(8):
        with make_runner(calling(lambda job: None)):
            pass
        eventually(lambda: not threads())
    eventually(lambda: not database.backends())


def test_a_stop_right_after_the_start_is_clean(make_runner, database):
    for _ in range(5):
        put(database, "q")
    runner = make_runner(calling(lambda job: None))
    runner.start()
    assert runner.stop()
    assert "running" not in database.statuses().values()


def test_stopping_lets_running_jobs_finish(start, database):
    gate = Gate()
    jobs = [put(database, "q") for _ in range(6)]
    runner = start(calling(lambda job: gate()), concurrency=2)
    gate.await_arrived(2)
    stopped = []
    stopping = in_thread(lambda: stopped.append(runner.stop()))
    eventually(lambda: not runner._services.dispatcher.claiming)
    gate.open()
    stopping.join(10)
    assert stopped == [True]
    assert database.statuses() == dict.fromkeys(jobs[:2], "processed") | dict.fromkeys(jobs[2:], "new")


def test_what_does_not_finish_in_time_is_given_back_untouched(start, database):
    gate = Gate()
    job = put(database, "q")
    runner = start(calling(lambda job: gate(), timeout=None))
    gate.await_arrived(1)
    assert runner.stop(timedelta(seconds=0.05)) is False
    row = database.row(job)
    assert (row.status, row.retries, row.crashes, row.claim_token, row.error) == ("new", 0, 0, None, None)
    assert (runner.counts.released, runner.counts.failed, database.failures()) == (1, 0, [])
    gate.open()


def test_a_retry_that_is_cut_short_is_the_same_retry_again(start, database):
    gate, attempts = Gate(), []
    job = database.add(queue="q", status="failed", retries=3)

    def work(job):
        attempts.append(job.attempt)
        if len(attempts) == 1:
            gate()

    runner = start(calling(work))
    gate.await_arrived(1)
    assert not runner.stop(timedelta(0))
    gate.open()
    eventually(lambda: not threads("neoq-job"))
    start(calling(work))
    eventually(lambda: database.row(job).status == "processed")
    assert attempts == [5, 5]
    assert database.row(job).retries == 4


def statement_runs(database, text_="pg_sleep"):
    """Whether a statement with that text is running."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE state = 'active' AND query LIKE :text AND pid <> pg_backend_pid() AND datname = current_database()"
    )
    with database.engine.connect() as connection:
        return connection.scalar(query, {"text": f"%{text_}%"}) > 0


def test_a_forced_stop_cancels_the_statement_a_job_waits_for_and_rolls_its_work_back(start, database):
    put(database, "q")

    def work(job):
        job.session.execute(text("INSERT INTO neoq_jobs (queue) VALUES ('left behind')"))
        job.session.execute(text("SELECT pg_sleep(60)"))

    runner = start(calling(work))
    eventually(lambda: statement_runs(database))
    assert not runner.stop(timedelta(0))
    eventually(lambda: not threads("neoq-job"))
    assert [(row.queue, row.status) for row in database.rows()] == [("q", "new")]


def test_a_job_that_obeys_a_forced_stop_is_given_back_too(start, database):
    gate = Gate()

    def obey(job):
        gate()
        job.raise_if_cancelled()

    job = put(database, "q")
    runner = start(calling(obey))
    gate.await_arrived(1)
    threading.Timer(0.05, gate.open).start()
    assert not runner.stop(timedelta(0))
    assert (database.row(job).status, database.failures()) == ("new", [])


@pytest.mark.parametrize("busy", [False, True])
def test_stopping_without_patience_is_clean_when_nothing_runs(start, database, busy):
    runner = start(calling(lambda job: None))
    if busy:
        put(database, "q")
        eventually(lambda: runner.counts.processed == 1)
    assert runner.stop(timedelta(0)) is True


def test_a_stop_can_be_forced_from_another_thread(start, database):
    gate = Gate()
    job = put(database, "q")
    runner = start(calling(lambda job: gate(), timeout=None))
    gate.await_arrived(1)
    stopped = []
    stopping = in_thread(lambda: stopped.append(runner.stop(timedelta(hours=1))))
    eventually(lambda: not runner._services.dispatcher.claiming)
    runner.force_stop()
    stopping.join(10)
    assert stopped == [False]
    assert database.row(job).status == "new"
    gate.open()


def test_the_heartbeat_goes_on_while_it_drains(start, database):
    gate = Gate()
    put(database, "q")
    runner = start(calling(lambda job: gate()))
    gate.await_arrived(1)
    stopping = in_thread(runner.stop)
    eventually(lambda: not runner._services.dispatcher.claiming)
    (worker,) = database.rows(Worker)
    database.change(worker.id, model=Worker, heartbeat_at=ago(20))
    eventually(lambda: database.rows(Worker)[0].heartbeat_at > worker.heartbeat_at)
    gate.open()
    stopping.join(10)
    assert not stopping.is_alive()


def test_stopping_while_the_database_is_away_ends_in_time_and_leaves_no_thread(start, database, monkeypatch, caplog):
    monkeypatch.setattr(services, "_FORCED_GRACE", 0.2)
    gate, away = Gate(), threading.Event()
    put(database, "q")
    runner = start(calling(lambda job: gate()))
    gate.await_arrived(1)
    use = Link.use

    def refuse(self, *args):
        if away.is_set():
            raise OSError("no route to host")
        return use(self, *args)

    monkeypatch.setattr(Link, "use", refuse)
    away.set()
    gate.open()
    eventually(lambda: runner._services.dispatcher.away)
    assert runner.stop(timedelta(seconds=0.1)) is False
    eventually(lambda: not threads("neoq-dispatcher"))
    assert "could not be written" in caplog.text
    away.clear()


# run -----------------------------------------------------------------------------------------------------------------


def run_in_thread(runner, **how):
    ended = []
    return in_thread(lambda: ended.append(runner.run(**how))), ended


def test_run_blocks_until_it_is_asked_to_stop_also_outside_the_main_thread(make_runner, database):
    runner = make_runner(calling(lambda job: None))
    thread, ended = run_in_thread(runner)
    put(database, "q")
    eventually(lambda: runner.counts.processed == 1)
    runner.request_stop()
    thread.join(10)
    assert ended == [Ended.CLEAN]


@pytest.mark.parametrize("ended", list(Ended))
def test_run_says_how_it_ended(make_runner, ended):
    runner = make_runner(nothing())
    runner.force_stop() if ended is Ended.FORCED else runner.request_stop(ended)
    assert runner.run() is ended


def test_a_job_that_was_cut_short_is_a_forced_end(make_runner, database):
    gate = Gate()
    put(database, "q")
    runner = make_runner(calling(lambda job: gate(), timeout=None), shutdown_timeout=timedelta(0))
    thread, ended = run_in_thread(runner)
    gate.await_arrived(1)
    runner.request_stop()
    thread.join(10)
    assert ended == [Ended.FORCED]
    gate.open()


def test_in_a_burst_it_ends_once_nothing_is_due(make_runner, database):
    jobs = [put(database, "q") for _ in range(20)]
    later = put(database, "q", run_after=timedelta(hours=1))
    runner = make_runner(calling(lambda job: None))
    assert runner.run(burst=True) is Ended.CLEAN
    assert database.statuses() == dict.fromkeys(jobs, "processed") | {later: "new"}


def test_after_so_many_jobs_it_ends_for_a_restart(make_runner, database):
    for _ in range(10):
        put(database, "q")
    runner = make_runner(calling(lambda job: None), max_jobs=3, concurrency=1)
    thread, ended = run_in_thread(runner)
    thread.join(10)
    assert ended == [Ended.RESTART]
    assert runner.counts.processed >= 3
    assert "running" not in database.statuses().values()


def test_too_many_stuck_threads_end_it_for_a_restart(make_runner, database, caplog):
    gate = Gate()
    for _ in range(2):
        put(database, "q", max_retries=0)
    runner = make_runner(calling(lambda job: gate(), timeout=timedelta(milliseconds=20)), concurrency=2)
    thread, ended = run_in_thread(runner)
    thread.join(10)
    assert ended == [Ended.RESTART]
    assert "2 timed-out jobs still hold their threads" in caplog.text
    gate.open()


TERM, INT, QUIT, TSTP, HUP = 15, 2, 3, 20, 1


@pytest.mark.parametrize(
    ("signals", "ended"),
    [
        ([TERM], Ended.CLEAN),
        ([INT], Ended.CLEAN),
        ([HUP], Ended.RESTART),
        ([QUIT], Ended.FORCED),
        ([TERM, TERM], Ended.FORCED),
        ([INT, TERM], Ended.FORCED),
        ([TSTP, TERM], Ended.CLEAN),
        # A restart that is under way is called off by a first TERM, not cut short.
        ([HUP, TERM], Ended.CLEAN),
        ([HUP, TERM, TERM], Ended.FORCED),
        ([TERM, HUP], Ended.CLEAN),
    ],
)
def test_signals_end_it_as_they_mean(make_runner, database, signals, ended):
    gate = Gate()
    put(database, "q")
    runner = make_runner(calling(lambda job: gate(), timeout=None))
    thread, result = run_in_thread(runner)
    gate.await_arrived(1)
    for number in signals:
        runner.on_signal(number)
    if ended is not Ended.FORCED:
        eventually(lambda: not runner._services.dispatcher.claiming)
        gate.open()
    thread.join(10)
    assert result == [ended]
    gate.open()


def test_a_term_after_enough_jobs_does_not_cut_the_last_ones_short(make_runner, database):
    gate = Gate()
    for _ in range(3):
        put(database, "q")
    runner = make_runner(calling(lambda job: gate() if job.id > 1 else None), max_jobs=1, concurrency=3)
    thread, result = run_in_thread(runner)
    gate.await_arrived(2)
    eventually(lambda: runner.health().detail["state"] == "stopping")
    runner.on_signal(TERM)
    gate.open()
    thread.join(10)
    assert result == [Ended.CLEAN]
    assert set(database.statuses().values()) == {"processed"}


# Quiet ---------------------------------------------------------------------------------------------------------------


def test_a_quiet_runner_finishes_what_runs_and_claims_nothing(start, database):
    gate = Gate()
    first = put(database, "q")
    runner = start(calling(lambda job: gate()))
    gate.await_arrived(1)
    runner.quiet()
    second = put(database, "q")
    gate.open()
    eventually(lambda: runner.counts.processed == 1)
    assert database.statuses() == {first: "processed", second: "new"}
    assert runner.stop()
    assert database.statuses() == {first: "processed", second: "new"}


def test_a_runner_that_is_quiet_before_it_starts_claims_nothing(make_runner, database):
    job = put(database, "q")
    runner = make_runner(calling(lambda job: None))
    runner.quiet()
    runner.start()
    eventually(lambda: runner._services.listener.connected)
    assert runner.health().detail["state"] == "quiet"
    assert runner.stop()
    assert database.statuses() == {job: "new"}


# drain, counts, health -----------------------------------------------------------------------------------------------


def test_drain_runs_all_that_is_due_and_says_how_it_ended(make_runner, database):
    def work(job):
        match job.payload:
            case "fail":
                raise ValueError
            case "die":
                raise Discard
            case "snooze":
                raise Snooze(timedelta(hours=1))
            case "cancel":
                raise JobCancelled

    for payload in ("", "", "fail", "die", "snooze", "cancel"):
        put(database, "q", payload)
    put(database, "q", run_after=timedelta(hours=1))
    counts = make_runner(calling(work)).drain()
    assert (counts.processed, counts.failed, counts.dead, counts.snoozed, counts.cancelled) == (2, 1, 1, 1, 1)
    assert (counts.total, counts.lost, counts.released) == (6, 0, 0)


def test_drain_runs_what_the_jobs_enqueue(make_runner, database):
    def work(job):
        if job.payload:
            enqueue(job.session, "q", job.payload - 1)

    for _ in range(3):
        put(database, "q", 5)
    counts = make_runner(calling(work)).drain()
    assert counts.processed == 18
    assert set(database.statuses().values()) == {"processed"}


def test_drain_can_be_called_on_a_started_runner_and_stops_it(start, database):
    runner = start(calling(lambda job: None))
    for _ in range(5):
        put(database, "q")
    assert runner.drain().processed == 5
    eventually(lambda: not threads())


def test_drain_of_nothing_ends_at_once(make_runner):
    assert make_runner(nothing()).drain().total == 0


def test_drain_runs_suspects_too(make_runner, database):
    jobs = [database.add(queue="q", status="failed", crashes=2) for _ in range(3)]
    assert make_runner(calling(lambda job: None)).drain().processed == 3
    assert database.statuses() == dict.fromkeys(jobs, "processed")


def test_drain_ends_with_what_the_database_refuses(make_runner, database):
    runner = make_runner(nothing())
    with database.begin() as connection:
        connection.execute(text("ALTER SEQUENCE neoq_claim_tokens RENAME TO neoq_elsewhere"))
    try:
        with pytest.raises(DatabaseUnavailable, match="refuses what the runner asks"):
            runner.drain()
    finally:
        with database.begin() as connection:
            connection.execute(text("ALTER SEQUENCE neoq_elsewhere RENAME TO neoq_claim_tokens"))


def test_drain_waits_for_no_job_that_nobody_here_can_run(make_runner, database):
    job = database.add(queue="q", task="m:unknown")
    assert make_runner(nothing()).drain().total == 0
    assert database.statuses() == {job: "new"}


def test_health_tells_the_whole_life(make_runner, database):
    runner = make_runner(calling(lambda job: None))
    assert (runner.health().live, runner.health().ready, runner.health().detail) == (True, False, {"state": "new"})
    runner.start()
    idle(runner)
    healthy = runner.health()
    assert (healthy.live, healthy.ready) == (True, True)
    assert healthy.detail["seconds_since_heartbeat"] < 30
    assert {
        name: healthy.detail[name] for name in ("state", "database", "listening", "running", "stuck", "queues")
    } == {
        "state": "running",
        "database": "ok",
        "listening": True,
        "running": 0,
        "stuck": 0,
        "queues": {"q": 4},
    }
    runner.quiet()
    assert (runner.health().live, runner.health().ready) == (True, False)
    runner.stop()
    stopped = runner.health()
    assert (stopped.live, stopped.ready, stopped.detail["listening"]) == (False, False, False)


def test_health_counts_what_runs(start, database):
    gate = Gate()
    for _ in range(3):
        put(database, "q")
    runner = start(calling(lambda job: gate()))
    gate.await_arrived(3)
    assert runner.running == runner.health().detail["running"] == 3
    gate.open()
    eventually(lambda: runner.running == 0)


def test_every_attempt_that_ends_is_logged_with_the_facts(make_runner, database, caplog):
    @task(name="m:fail", queue="q")
    def fail():
        raise ValueError("no luck")

    good, bad = put(database, "q"), put(database, "q", task="m:fail")
    with caplog.at_level(logging.INFO, "sqla_neoq.jobs"):
        make_runner(calling(lambda job: None), fail).drain()
    logged = {record.neoq["job_id"]: (record.levelname, record.getMessage(), record.neoq) for record in caplog.records
              if record.name == "sqla_neoq.jobs"}  # fmt: skip
    level, message, fields = logged[good]
    assert (level, message, fields["event"], fields["task"], fields["queue"], fields["attempt"]) == (
        "INFO",
        "job processed",
        "processed",
        None,
        "q",
        1,
    )
    assert fields["duration"] >= 0
    level, message, fields = logged[bad]
    assert (level, message, fields["task"], fields["kind"]) == ("WARNING", "job failed", "m:fail", "error")
    assert fields["error"] == "ValueError: no luck"
    assert fields["delay"] >= 15


# Attempts ------------------------------------------------------------------------------------------------------------


def no_wait():
    return retries.constant(timedelta(0))


def test_a_failing_job_is_retried_until_its_retries_are_used_up(make_runner, database):
    attempts = []

    def fail(job):
        attempts.append((job.attempt, job.retries))
        raise ValueError(f"attempt {job.attempt}")

    job = put(database, "q", {"a": 1}, max_retries=3)
    counts = make_runner(calling(fail, backoff=no_wait())).drain()
    assert attempts == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert (counts.failed, counts.dead) == (3, 1)
    (dead,) = database.rows(DeadJob)
    assert (dead.id, dead.reason, dead.retries, dead.payload, dead.error) == (
        job,
        "exhausted",
        3,
        {"a": 1},
        "ValueError: attempt 4",
    )
    assert database.rows() == []
    assert [(noted.attempt, noted.message) for noted in database.failures()] == [
        (number, f"ValueError: attempt {number}") for number in (1, 2, 3, 4)
    ]
    assert all("test_runner.py" in noted.traceback for noted in database.failures())


def test_success_at_the_last_retry_is_success(make_runner, database):
    def work(job):
        if job.attempt < 3:
            raise ValueError

    job = put(database, "q", max_retries=2)
    make_runner(calling(work, backoff=no_wait())).drain()
    row = database.row(job)
    assert (row.status, row.retries, row.error) == ("processed", 2, None)


def test_a_failed_job_waits_as_its_backoff_says(make_runner, database):
    def fail(job):
        raise ValueError

    asked = []

    def backoff(number):
        asked.append(number)
        return timedelta(minutes=7)

    job = put(database, "q")
    make_runner(calling(fail, backoff=backoff)).drain()
    row = database.row(job)
    assert (row.status, asked) == ("failed", [0])
    assert timedelta(minutes=6, seconds=50) < row.run_after - row.ran_at < timedelta(minutes=8)


def test_retry_after_uses_a_retry_and_its_own_delay(make_runner, database):
    def work(job):
        raise Retry("busy", after=timedelta(hours=2))

    job = put(database, "q", max_retries=1)
    make_runner(calling(work)).drain()
    row = database.row(job)
    assert (row.status, row.error) == ("failed", "Retry: busy")
    assert row.run_after - row.ran_at > timedelta(hours=1)
    database.change(job, run_after=ago(1))
    make_runner(calling(work)).drain()
    assert database.dead() == {job: "exhausted"}


def test_snoozing_uses_no_retry_however_often(make_runner, database):
    attempts = []

    def work(job):
        attempts.append(job.attempt)
        if len(attempts) < 5:
            raise Snooze(timedelta(0))

    job = put(database, "q", max_retries=0)
    counts = make_runner(calling(work)).drain()
    assert (attempts, counts.snoozed, counts.processed) == ([1] * 5, 4, 1)
    assert (database.row(job).retries, database.failures()) == (0, [])


def test_a_discarded_job_is_dead_at_once(make_runner, database):
    def work(job):
        raise Discard("not wanted")

    job = put(database, "q")
    make_runner(calling(work)).drain()
    assert database.dead() == {job: "discarded"}
    assert [noted.kind for noted in database.failures()] == ["discarded"]


def test_a_payload_that_does_not_fit_fails_with_a_clear_message_and_is_retried(make_runner, database):
    @task(name="m:add", queue="q")
    def add(a: int): ...

    jobs = [database.add(queue="q", task="m:add", payload=payload) for payload in ({"b": 1}, {"a": "x"}, [1], None)]
    make_runner(add).drain()
    rows = [database.row(job) for job in jobs]
    assert {row.status for row in rows} == {"failed"}
    assert all(row.error.startswith("PayloadMismatch: m:add") for row in rows)


@pytest.mark.parametrize("payload", ["1e400", '{"a": 123456789012345678901234567890.5}', "1" * 5000, '"\\ud7ff"'])
def test_json_that_plain_sql_put_there_is_read_or_fails_but_never_sticks(make_runner, database, payload):
    seen = []
    with database.begin() as connection:
        connection.execute(
            text("INSERT INTO neoq_jobs (queue, payload) VALUES ('q', CAST(:p AS jsonb))"), {"p": payload}
        )
    make_runner(calling(lambda job: seen.append(job.payload))).drain()
    with database.begin() as connection:
        status, error = connection.execute(text("SELECT status, error FROM neoq_jobs")).one()
    assert status == ("processed" if seen else "failed")
    assert seen or error.startswith("ValueError: ")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a\x00b\ud800c"),
        ValueError("x" * 100_000),
        Unspeakable(),
        SystemExit(3),
        KeyboardInterrupt(),
        ExceptionGroup("many", [ValueError("\x00")]),
    ],
    ids=["nul", "long", "unspeakable", "exit", "interrupt", "group"],
)
def test_whatever_is_raised_is_that_jobs_failure_and_the_runner_goes_on(make_runner, database, error):
    def work(job):
        if job.payload:
            raise error

    bad, good = put(database, "q", 1), put(database, "q", 0)
    make_runner(calling(work), concurrency=1).drain()
    assert database.statuses() == {bad: "failed", good: "processed"}
    assert type(error).__name__ in database.row(bad).error
    assert type(error).__name__ in database.failures()[0].traceback


def test_a_backoff_that_raises_leaves_the_default(make_runner, database, caplog):
    def backoff(retries):
        raise KeyError("oops")

    def fail(job):
        raise ValueError

    job = put(database, "q")
    make_runner(calling(fail, backoff=backoff)).drain()
    row = database.row(job)
    assert timedelta(seconds=14) < row.run_after - row.ran_at < timedelta(seconds=60)
    assert "the back-off of" in caplog.text


def test_a_task_is_called_with_its_arguments_and_knows_its_job(make_runner, database):
    seen = []

    @task(name="m:add", queue="q")
    def add(a: int, *, when: timedelta):
        job = current_job()
        seen.append((a, when, job.task, job.queue, job.attempt, job.priority))

    with Session(database.engine) as session, session.begin():
        add.using(priority=7).enqueue(session, 3, when=timedelta(hours=1))
    make_runner(add).drain()
    assert seen == [(3, timedelta(hours=1), "m:add", "q", 1, 7)]


# The job's own session -----------------------------------------------------------------------------------------------


@pytest.fixture
def effects(database):
    """A table that jobs write to; call it for what is there."""
    with database.engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (job bigint, attempt int)"))

    def read():
        with database.engine.begin() as connection:
            return [tuple(row) for row in connection.execute(text("SELECT job, attempt FROM effects ORDER BY 1, 2"))]

    yield read
    database.engine.dispose()
    with database.engine.begin() as connection:
        # What a failed test left open must fail it, and not hang the run.
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        connection.execute(text("DROP TABLE effects"))


def write(job):
    job.session.execute(text("INSERT INTO effects VALUES (:id, :attempt)"), {"id": job.id, "attempt": job.attempt})


def test_work_in_the_jobs_session_happens_once_with_its_success(make_runner, database, effects):
    def work(job):
        write(job)
        if job.attempt < 3:
            raise ValueError

    job = put(database, "q")
    make_runner(calling(work, backoff=no_wait())).drain()
    assert effects() == [(job, 3)]
    assert database.row(job).status == "processed"


@pytest.mark.parametrize("error", [Snooze(timedelta(hours=1)), Discard(), Retry(), SystemExit()])
def test_whatever_a_task_raises_its_work_is_rolled_back(make_runner, database, effects, error):
    def work(job):
        write(job)
        raise error

    put(database, "q")
    make_runner(calling(work)).drain()
    assert effects() == []


def test_a_run_whose_job_was_taken_meanwhile_leaves_nothing(start, database, effects):
    gate = Gate()

    def work(job):
        write(job)
        gate()

    job = put(database, "q")
    runner = start(calling(work))
    gate.await_arrived(1)
    database.change(job, claim_token=10**9)
    gate.open()
    eventually(lambda: runner.counts.lost == 1)
    assert effects() == []
    assert database.row(job).status == "running"


def test_an_async_task_is_refused_the_session_and_says_so(make_runner, database):
    @handler("q")
    async def work(job):
        job.session.execute(text("SELECT 1"))

    job = put(database, "q")
    make_runner(work).drain()
    assert "would block the event loop" in database.row(job).error


@task(name="async:work", max_retries=0)
async def commits_with_its_job(wait: bool = False) -> None:
    session = await current_job().async_session()
    await session.execute(text("INSERT INTO effects VALUES (1)"))
    if wait:
        await session.execute(text("SELECT pg_sleep(30)"))


def test_an_async_task_commits_its_session_with_the_job(make_runner, database, database_url, effects):
    assert put(database, "default", task=commits_with_its_job.name)
    assert make_runner(commits_with_its_job, engine=database_url).drain().processed == 1
    assert effects() == [(1, None)]
    eventually(lambda: not database.backends(name=""))  # its engine closed its connections


def test_an_async_task_past_its_timeout_leaves_nothing_written(make_runner, database, database_url, effects):
    late = task(name="async:late", timeout=FAST, max_retries=0)(commits_with_its_job.function)
    job = put(database, "default", task=late.name, payload={"wait": True})
    assert make_runner(late, engine=database_url).drain().dead == 1
    assert (effects(), database.dead()) == ([], {job: "exhausted"})
    eventually(lambda: not database.backends(name=""))


def test_async_sessions_can_be_the_applications_own(make_runner, database, database_url, effects):
    async def make():
        return create_async_engine(database_url, poolclass=NullPool)

    sessions = async_sessionmaker(asyncio.run(make()))
    put(database, "default", task=commits_with_its_job.name)
    assert make_runner(commits_with_its_job, async_sessions=sessions).drain().processed == 1
    assert effects() == [(1, None)]


def test_on_an_engine_alone_an_async_task_is_told_what_the_runner_lacks(make_runner, database, effects):
    put(database, "default", task=commits_with_its_job.name)
    assert make_runner(commits_with_its_job).drain().dead == 1
    assert "async_sessionmaker" in database.rows(DeadJob)[0].error


def test_jobs_get_sessions_of_the_applications_own_making(make_runner, database):
    seen = []

    class AppSession(Session):
        pass

    def work(job):
        seen.append((isinstance(job.session, AppSession), job.session.info))
        job.session.execute(text("SELECT 1"))

    put(database, "q")
    sessions = sessionmaker(database.engine, class_=AppSession, info={"app": 1})
    assert make_runner(calling(work), sessions=sessions).drain().processed == 1
    assert seen == [(True, {"app": 1})]


# Timeouts ------------------------------------------------------------------------------------------------------------

BRIEF = timedelta(milliseconds=50)


def timed_out(database, job):
    (noted,) = [noted for noted in database.failures() if noted.job_id == job]
    return (noted.kind, noted.message) == ("timeout", f"JobTimeout: job {job} ran past its timeout of 0.05 s")


def test_a_job_that_looks_ends_by_itself_past_its_timeout(start, database):
    ended = []

    def look(job):
        try:
            while True:
                time.sleep(0.001)
                job.raise_if_cancelled()
        except JobTimeout as error:
            ended.append(str(error))
            raise

    job = put(database, "q")
    runner = start(calling(look, timeout=BRIEF))
    eventually(lambda: database.row(job).status == "failed")
    assert timed_out(database, job)
    eventually(lambda: ended)
    eventually(lambda: runner.health().detail["stuck"] == 0)


def test_a_job_that_sleeps_in_python_is_given_up_and_the_capacity_stays(start, database):
    gate, ran = Gate(), []

    def work(job):
        gate() if job.payload == "hang" else ran.append(job.id)

    hanging = [put(database, "q", "hang") for _ in range(2)]
    runner = start(calling(work, timeout=BRIEF), concurrency=2, stuck_limit=100)
    gate.await_arrived(2)
    others = [put(database, "q", "go") for _ in range(6)]
    eventually(lambda: sorted(ran) == others)
    assert all(timed_out(database, job) for job in hanging)
    assert runner.health().detail["stuck"] == 2
    gate.open()
    eventually(lambda: runner.health().detail["stuck"] == 0)
    assert runner.counts.failed == 2
    assert {database.row(job).status for job in hanging} == {"failed"}


def test_a_job_that_waits_in_a_statement_is_cancelled_there(start, database, effects):
    errors = []

    def work(job):
        write(job)
        try:
            job.session.execute(text("SELECT pg_sleep(60)"))
        except Exception as error:
            errors.append(type(error.orig).__name__)
            raise

    job = put(database, "q")
    runner = start(calling(work, timeout=BRIEF))
    eventually(lambda: database.row(job).status == "failed")
    eventually(lambda: errors == ["QueryCanceled"])
    assert timed_out(database, job)
    eventually(lambda: runner.health().detail["stuck"] == 0)
    assert effects() == []


def test_a_statement_that_begins_past_the_timeout_is_cancelled_too(start, database, effects):
    gate, errors = Gate(), []

    def work(job):
        write(job)
        gate()
        try:
            job.session.execute(text("SELECT pg_sleep(60)"))
        except Exception as error:
            errors.append(type(error.orig).__name__)
            raise

    job = put(database, "q")
    runner = start(calling(work, timeout=BRIEF))
    eventually(lambda: database.row(job).status == "failed")
    gate.open()
    eventually(lambda: errors == ["QueryCanceled"])
    eventually(lambda: runner.health().detail["stuck"] == 0)
    assert effects() == []


def test_an_async_job_past_its_timeout_is_cancelled(start, database):
    ended = []

    @handler("q", timeout=BRIEF)
    async def work(job):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(job.stop_reason.value)
            raise

    job = put(database, "q")
    start(work)
    eventually(lambda: database.row(job).status == "failed")
    assert timed_out(database, job)
    eventually(lambda: ended == ["timeout"])


def test_without_a_timeout_a_job_may_take_its_time(start, database):
    gate = Gate()
    job = put(database, "q")
    short = task(name="m:short", queue="q", timeout=timedelta(milliseconds=5))(lambda: None)
    start(calling(lambda job: gate(), timeout=None), short)
    gate.await_arrived(1)
    time.sleep(0.05)  # several looks of the timekeeper
    gate.open()
    eventually(lambda: database.row(job).status == "processed")


def test_a_late_success_of_a_job_that_was_given_up_changes_nothing(start, database, effects):
    gate = Gate()

    def work(job):
        gate()
        try:
            write(job)
        finally:
            gate()

    job = put(database, "q", max_retries=0)
    runner = start(calling(work, timeout=BRIEF))
    eventually(lambda: database.dead() == {job: "exhausted"})
    gate.open()
    eventually(lambda: runner.health().detail["stuck"] == 0)
    assert (effects(), database.dead(), database.rows()) == ([], {job: "exhausted"}, [])


# Deadlines, time, priority -------------------------------------------------------------------------------------------


def test_a_job_past_its_deadline_is_not_started_and_dies(start, database):
    ran = []
    job = database.add(queue="q", deadline=ago(1))
    start(calling(lambda job: ran.append(job.id)))
    eventually(lambda: database.dead() == {job: "deadline"})
    assert (ran, database.failures()) == ([], [])


def test_a_deadline_that_passes_between_retries_ends_them(start, database):
    def fail(job):
        raise Retry(after=timedelta(hours=1))

    job = put(database, "q", deadline=timedelta(hours=2))
    start(calling(fail))
    eventually(lambda: database.row(job).status == "failed")
    database.change(job, deadline=ago(1))
    eventually(lambda: database.dead() == {job: "deadline"})


def test_a_future_job_runs_at_its_time_and_never_before(start, database):
    job = put(database, "q", run_after=timedelta(seconds=0.4))
    other = put(database, "q")
    start(calling(lambda job: None))
    eventually(lambda: set(database.statuses().values()) == {"processed"})
    assert database.row(job).ran_at >= database.row(job).run_after
    assert database.row(other).ran_at < database.row(job).run_after


def test_a_higher_priority_runs_first(make_runner, database):
    ran = []
    jobs = {priority: put(database, "q", priority=priority) for priority in (0, -100, 7, 100, 6)}
    make_runner(calling(lambda job: ran.append(job.id)), concurrency=1).drain()
    assert ran == [jobs[priority] for priority in (100, 7, 6, 0, -100)]


# Waking --------------------------------------------------------------------------------------------------------------


def test_a_plain_insert_wakes_an_idle_runner(start, database):
    """With an hour between its polls, nothing else could."""
    runner = start(calling(lambda job: None), poll_interval=NEVER)
    idle(runner)
    eventually(lambda: runner._services.dispatcher._poll_after > 0.3)
    for number in range(1, 4):
        with database.engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO neoq_jobs (queue, payload) VALUES ('q', '{}')")
        eventually(lambda number=number: runner.counts.processed == number)


def test_a_job_whose_transaction_was_open_while_the_runner_turned_hungry_is_found(start, database):
    with database.engine.connect() as connection:
        enqueue(connection, "q")
        runner = start(calling(lambda job: None), poll_interval=NEVER)
        idle(runner)
        connection.commit()
    eventually(lambda: runner.counts.processed == 1)


def test_without_listening_it_polls(start, database):
    runner = start(calling(lambda job: None), listen=False, poll_interval=timedelta(milliseconds=50))
    assert len(database.backends()) <= 3
    put(database, "q")
    eventually(lambda: runner.counts.processed == 1)
    assert runner.health().detail["listening"] is False


def test_a_stream_of_single_jobs_is_all_done(start, database):
    runner = start(calling(lambda job: None), poll_interval=NEVER)
    idle(runner)

    def produce():
        for _ in range(60):
            put(database, "q")

    producers = [in_thread(produce) for _ in range(3)]
    for producer in producers:
        producer.join(20)
    eventually(lambda: runner.counts.processed == 180)


# Cancelling ----------------------------------------------------------------------------------------------------------


def call_off(database, job):
    with database.engine.begin() as connection:
        return cancel(connection, job)


def test_a_running_job_that_is_cancelled_is_told_and_ends_cancelled(start, database):
    job = put(database, "q")
    running = threading.Event()

    def work(job):
        running.set()
        while True:
            time.sleep(0.001)
            job.raise_if_cancelled()

    runner = start(calling(work, timeout=None))
    assert running.wait(10)
    assert call_off(database, job)
    eventually(lambda: database.row(job).status == "cancelled")
    assert (runner.counts.cancelled, database.failures()) == (1, [])


def test_the_statement_of_a_job_that_is_cancelled_is_cancelled_too(start, database):
    job = put(database, "q")
    running = threading.Event()

    def work(job):
        job.session.execute(text("SELECT 1"))
        running.set()
        job.session.execute(text("SELECT pg_sleep(60)"))

    start(calling(work, timeout=None))
    assert running.wait(10)
    assert call_off(database, job)
    eventually(lambda: database.row(job).status == "cancelled")


def test_a_cancelled_async_job_ends_cancelled(start, database):
    running = threading.Event()

    @handler("q", timeout=None)
    async def work(job):
        running.set()
        await asyncio.Event().wait()

    job = put(database, "q")
    start(work)
    assert running.wait(10)
    assert call_off(database, job)
    eventually(lambda: database.row(job).status == "cancelled")


def test_a_waiting_job_that_is_cancelled_never_runs(make_runner, database):
    ran = []
    job = put(database, "q")
    assert call_off(database, job)
    make_runner(calling(lambda job: ran.append(job.id))).drain()
    assert (ran, database.statuses()) == ([], {job: "cancelled"})
    assert not call_off(database, job)


# Losing its lease ----------------------------------------------------------------------------------------------------


def test_a_runner_that_was_declared_dead_gives_up_what_it_ran_and_lives_on(start, database):
    gate, seen = Gate(), []

    def work(job):
        first = not seen
        seen.append(job.token)
        if first:
            gate()
            job.raise_if_cancelled()

    job = put(database, "q")
    runner = start(calling(work, timeout=None))
    gate.await_arrived(1)
    (worker,) = database.rows(Worker)
    database.remove(worker.id, model=Worker)
    eventually(lambda: [row.id for row in database.rows(Worker)] not in ([], [worker.id]))
    gate.open()
    eventually(lambda: database.row(job).status == "processed")
    row = database.row(job)
    assert (row.crashes, row.retries) == (1, 1)
    assert len(seen) == 2
    eventually(lambda: runner.counts.lost == 1)


def test_jobs_held_ready_by_a_runner_that_was_declared_dead_do_not_start_under_the_lost_claim(start, database):
    gate, ran = Gate(), {}

    def work(job):
        if job.payload == "first":
            gate()
        else:
            ran.setdefault(job.id, []).append(job.token)

    runner = start(calling(work, timeout=None), concurrency=1)
    runner._services.pool._lanes["q"].mean = 0.001
    with database.engine.begin() as connection:
        enqueue(connection, "q", "first", priority=9)
        held = [enqueue(connection, "q").id for _ in range(4)]
    gate.await_arrived(1)
    eventually(lambda: list(database.statuses().values()) == ["running"] * 5)
    lost = database.rows()[0].claim_token
    (worker,) = database.rows(Worker)
    database.remove(worker.id, model=Worker)
    eventually(lambda: [row.id for row in database.rows(Worker)] not in ([], [worker.id]))
    eventually(lambda: lost not in {row.claim_token for row in database.rows()})
    gate.open()
    eventually(lambda: set(database.statuses().values()) == {"processed"}, within=20)
    assert ran.keys() == set(held)
    assert all(len(tokens) == 1 and tokens[0] > lost for tokens in ran.values())


# Two runners, schemas, retention -------------------------------------------------------------------------------------


def test_two_runners_share_the_work_and_no_job_runs_twice(start, database):
    ran = []
    lock = threading.Lock()

    def work(which):
        def note(job):
            with lock:
                ran.append((job.id, which))
            time.sleep(0.001)

        return note

    with database.engine.begin() as connection:
        job = nothing().job
        enqueue_many(connection, [job() for _ in range(300)])
    runners = [
        start(task(name="m:nothing", queue="q", timeout=None)(lambda which=which: work(which)(current_job())))
        for which in (0, 1)
    ]
    eventually(lambda: sum(runner.counts.processed for runner in runners) == 300)
    assert sorted(job for job, _ in ran) == sorted(database.statuses())
    assert {which for _, which in ran} == {0, 1}


def test_a_retention_of_zero_leaves_nothing_of_what_succeeded(make_runner, database):
    def work(job):
        if job.payload == "fail":
            raise ValueError
        if job.payload == "session":
            job.session.execute(text("SELECT 1"))

    for payload in ("", "session", "fail"):
        put(database, "q", payload)
    counts = make_runner(calling(work), retention=timedelta(0)).drain()
    assert (counts.processed, counts.failed) == (2, 1)
    assert list(database.statuses().values()) == ["failed"]


def test_a_runner_finds_its_tables_in_the_schema_of_its_config(fresh_database, effects):
    url = fresh_database()
    migrate(url, 'A "Schema"')
    ran = []

    def work(job):
        job.session.execute(text("SELECT 1"))
        ran.append(job.payload)

    engine = create_engine(url, execution_options={"neoq_schema": 'A "Schema"'})
    here = Database(engine)
    config = RunnerConfig(schema='A "Schema"', poll_interval=NEVER)
    with Runner(url, calling(work), config=config) as runner:
        idle(runner)
        put(here, "q", "hello")
        eventually(lambda: runner.counts.processed == 1)
    assert ran == ["hello"]
    assert list(here.statuses().values()) == ["processed"]
    engine.dispose()


def test_a_runner_looks_where_the_applications_own_map_of_schemas_sends_its_jobs(migrated_database):
    url = migrated_database()  # there are tables on the search path too
    migrate(url, 'A "Schema"')
    engine = create_engine(url, execution_options={"schema_translate_map": {None: 'A "Schema"', "x": "y"}})
    with engine.begin() as connection:
        enqueue(connection, "q")
    work = calling(lambda job: job.session.execute(text("SELECT 1")))
    assert Runner(engine, work).drain().processed == 1
    engine.dispose()


@pytest.mark.parametrize("queue", ['it\'s "quoted"-Ä', "ü" * 128, "a\\b %s :x"])
def test_a_queue_of_any_name_works_from_end_to_end(start, database, queue):
    ran = []
    runner = start(handler(queue)(lambda job: ran.append(job.queue)), poll_interval=NEVER)
    idle(runner)
    put(database, queue)
    eventually(lambda: ran == [queue])


# Inside other programs -----------------------------------------------------------------------------------------------


def test_it_lives_in_the_lifespan_of_an_asyncio_application(make_runner, database):
    """As an ASGI application does: started and stopped within the running loop, in the main thread, without signals."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ran = []

    async def application():
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        @handler("q")
        async def work(job):
            ran.append(threading.current_thread().name)
            loop.call_soon_threadsafe(done.set)

        before = [signal.getsignal(number) for number in numbers]
        with make_runner(work):
            assert [signal.getsignal(number) for number in numbers] == before
            await asyncio.to_thread(put, database, "q")
            await done.wait()

    asyncio.run(asyncio.wait_for(application(), 20))
    assert ran == ["neoq-event-loop"]


def test_it_uses_the_applications_engine_and_leaves_it_in_use(make_runner, database):
    runner = make_runner(calling(lambda job: job.session.execute(text("SELECT 1"))))
    put(database, "q")
    assert runner.drain().processed == 1
    assert database.engine.pool.checkedout() == 0
    with database.engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1


def test_an_idle_runner_asks_the_database_next_to_nothing(migrated_database):
    """On a database of its own: counted where the statements are made, and by the server."""
    url = migrated_database()
    outside = create_engine(url, poolclass=NullPool)
    count = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")

    def commits():
        with outside.connect() as connection:
            return connection.scalar(count)

    statements = []
    with Runner(url, calling(lambda job: None)) as runner:
        idle(runner)
        event.listen(runner._engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        eventually(lambda: runner._services.dispatcher._poll_after >= 2)
        before, began = commits(), time.monotonic()
        statements.clear()
        time.sleep(3)
        made, committed, seconds = len(statements), commits() - before, time.monotonic() - began
    assert made <= 1.2 * seconds + 1
    # The server counts late: what came before, some ten statements of the start, may come in now.
    assert committed <= 1.2 * seconds + 10


def test_jobs_and_rows_can_be_made_with_the_orm(make_runner, database, engine):
    ran = []
    with Session(engine.execution_options(**make_runner(nothing())._options)) as session, session.begin():
        session.add(Job(queue="q", payload={"a": 1}))
    make_runner(calling(lambda job: ran.append(job.payload))).drain()
    assert ran == [{"a": 1}]


# What one row, or one transaction elsewhere, must not stop ------------------------------------------------------------


def test_a_job_whose_row_somebody_holds_stops_no_other(start, database):
    gate = Gate()
    held = put(database, "q", {"wait": True})
    runner = start(calling(lambda job: gate() if job.payload else None))
    gate.await_arrived(1)
    with Session(database.engine) as session:
        assert cancel(session, held)  # uncommitted: the row is locked
        gate.open()
        others = [put(database, "q") for _ in range(5)]
        eventually(lambda: {database.statuses()[job] for job in others} == {"processed"})
        assert database.statuses()[held] == "running"
        assert runner.counts.lost == 0
        session.rollback()
    eventually(lambda: database.statuses()[held] == "processed")
    assert runner.counts.processed == 6


def test_a_stop_waits_for_a_row_that_somebody_holds(start, database):
    gate = Gate()
    held = put(database, "q")
    runner = start(calling(lambda job: gate()))
    gate.await_arrived(1)
    with Session(database.engine) as session:
        cancel(session, held)
        gate.open()
        eventually(lambda: runner._services.dispatcher._blocked)
        stopping = in_thread(runner.stop)
        session.rollback()
    stopping.join(10)
    assert database.statuses() == {held: "processed"}


def test_numbers_at_the_end_of_their_type_stop_no_claim(make_runner, database):
    last = 2**31 - 1
    jobs = [database.add(queue="q", status="failed", retries=last), database.add(queue="q")]
    assert make_runner(calling(lambda job: None)).drain().processed == 2
    assert database.statuses() == dict.fromkeys(jobs, "processed")
    assert database.row(jobs[0]).retries == last


def test_a_task_that_deletes_its_own_row_has_failed(make_runner, database):
    def delete_itself(job):
        job.session.execute(text("DELETE FROM neoq_jobs WHERE id = :id"), {"id": job.id})

    job = put(database, "q", max_retries=0)
    assert make_runner(calling(delete_itself)).drain().dead == 1
    assert database.dead() == {job: "exhausted"}


def test_jobs_in_their_own_session_do_not_fail_each_other_on_a_serializable_engine(make_runner, database, database_url):
    engine = create_engine(database_url, isolation_level="SERIALIZABLE")
    for _ in range(30):
        put(database, "q", max_retries=0)
    runner = make_runner(
        calling(lambda job: job.session.execute(text("SELECT count(*) FROM neoq_jobs"))), engine=engine
    )
    assert (runner.drain().processed, database.dead()) == (30, {})
    engine.dispose()
