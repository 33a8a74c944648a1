"""The fault harness itself: its verdict sees what is wrong, its proxy breaks what it says (make chaos plays)."""

import threading

import psycopg
import pytest
from chaos import report, verdict
from chaos.ledger import Ledger
from chaos.proxy import Proxy
from chaos.proxy import Verdict as Cut
from chaos.scenario import Result
from chaos.scenarios import SCENARIOS
from sqlalchemy import make_url

DONE = [(7, "new", "running", 1, "10"), (7, "running", "processed", 1, "11")]


class Database:
    """Answers the verdict's questions from lists: one job, key 1, id 7."""

    def __init__(self, *, ended="processed", effects=((1, 1, "11"),), moves=DONE):
        self.ended, self.effects, self.moves = ended, effects, moves

    def rows(self, query):
        if "neoq_jobs" in query:
            return [(1, "chaos:effect", self.ended)] if self.ended else []
        if "chaos_effects" in query:
            return list(self.effects)
        return [(job, 1, was, became, token, tx) for job, was, became, token, tx in self.moves]


def judged(tmp_path, *lines, may_end=frozenset({"processed"}), **database):
    ledger = Ledger(tmp_path / "ledger")
    for kind, *fields in lines or (("committed", 1), ("start", 1, 1, 99), ("end", 1, 1, 99)):
        ledger.note(kind, *fields)
    ledger.close()
    return verdict.compare(Database(**database), verdict.Record(ledger), lambda _: may_end)


def test_a_job_that_ran_once_and_wrote_once_is_balanced(tmp_path):
    found = judged(tmp_path)
    assert (found.jobs, found.starts, found.reruns, found.complaints) == (1, 1, 0, [])


@pytest.mark.parametrize(
    "database",
    [{"ended": "running"}, {"ended": "failed"}, {"ended": None}, {"ended": "dead:crashed"}, {"effects": []}],
    ids=str,
)
def test_a_committed_job_that_did_not_end_as_it_should_is_lost(tmp_path, database):
    assert len(judged(tmp_path, **database).lost) == 1


def test_a_job_may_end_dead_only_where_and_as_the_scenario_says_so(tmp_path):
    assert not judged(tmp_path, ended="dead:crashed", may_end={"dead:crashed"}).lost
    assert judged(tmp_path, ended="dead:exhausted", may_end={"dead:crashed"}).lost


def test_two_effects_are_doubled(tmp_path):
    assert len(judged(tmp_path, effects=[(1, 1, "11"), (1, 2, "12")]).doubled) == 1


TWICE = [
    (7, "new", "running", 1, "10"),
    (7, "running", "failed", 1, "11"),
    (7, "failed", "running", 2, "12"),
    (7, "running", "processed", 2, "13"),
]


@pytest.mark.parametrize(
    ("why", "lines", "database"),
    [
        ("came without its completion", (), {"effects": [(1, 1, "99")]}),
        # The run under token 1 completed what token 2 owned.
        (
            "never came to its end",
            (("committed", 1), ("start", 1, 1, 9), ("start", 1, 2, 9), ("end", 1, 1, 9)),
            {"moves": TWICE, "effects": [(1, 2, "13")]},
        ),
        ("began 2 times", (("committed", 1), ("start", 1, 1, 9), ("start", 1, 1, 9), ("end", 1, 1, 9)), {}),
        ("never committed", (("start", 1, 1, 9), ("end", 1, 1, 9)), {}),
        ("from processed to running", (), {"moves": [*DONE, (7, "processed", "running", 2, "14")]}),
        ("and then left", (), {"moves": [DONE[1]]}),
        ("under token 1 after 2", (), {"moves": [(7, "new", "running", 2, "8"), (7, "running", "new", 2, "9"), *DONE]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_a_run_that_lost_its_job_can_have_done_breaks_the_fence(tmp_path, why, lines, database):
    assert why in " ".join(judged(tmp_path, *lines, **database).fence)


def test_a_commit_without_an_answer_counts_as_a_job_only_if_it_is_there(tmp_path):
    lines = (("unknown", 1), ("start", 1, 1, 9), ("end", 1, 1, 9))
    assert judged(tmp_path, *lines).jobs == 1
    (tmp_path / "ledger").unlink()
    assert judged(tmp_path, ("unknown", 1), ended=None, effects=[], moves=[]).jobs == 0


def test_the_slowest_recovery_and_the_quantiles_are_those_of_the_list():
    result = Result("name", "promise", "faults", 10.0, recoveries=[float(n) for n in range(1, 101)])
    assert [result.quantile(share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert result.passed
    assert "lost 0" in report.line(result)


def test_every_scenario_says_what_it_does_and_the_short_form_is_short():
    assert all(scenario.faults and scenario.promise for scenario in SCENARIOS.values())
    assert 5 <= sum(scenario.smoke for scenario in SCENARIOS.values()) <= 8


@pytest.fixture
def proxied(database_url):
    url = make_url(database_url)
    if not str(url.query.get("host", "")).startswith("/"):
        pytest.skip("the proxy leads to a unix socket, and this server is reached otherwise")
    proxy = Proxy(f"{url.query['host']}/.s.PGSQL.{url.query['port']}")
    proxy.start()

    def connect():
        return psycopg.connect(
            host="127.0.0.1", port=proxy.port, user=url.username, dbname=url.database, autocommit=True
        )

    yield proxy, connect
    proxy.stop()


def test_the_proxy_counts_round_trips_whatever_the_protocol(proxied):
    proxy, connect = proxied
    with connect() as connection:
        assert proxy.round_trips == 1  # the startup
        connection.execute("SELECT 1")
        connection.execute("SELECT %s, repeat('x', 300000)", [1])
        with connection.transaction():
            connection.execute("SELECT 2")
    assert proxy.round_trips == 6


@pytest.mark.parametrize(("kind", "written"), [(Cut.CUT_BEFORE, 0), (Cut.CUT_AFTER, 1)])
def test_the_proxy_cuts_a_commit_before_or_after_the_server_did_it(proxied, kind, written):
    proxy, connect = proxied
    proxy.judge = lambda _link, request: kind if b"COMMIT" in request else Cut.PASS
    connection = connect()
    with pytest.raises(psycopg.OperationalError), connection.transaction():
        connection.execute("INSERT INTO neoq_jobs (queue) VALUES ('q')")
    proxy.judge = lambda _link, _request: Cut.PASS
    with connect() as after:
        assert after.execute("SELECT count(*) FROM neoq_jobs").fetchone() == (written,)


def test_a_half_open_connection_answers_nothing_and_reports_nothing(proxied):
    proxy, connect = proxied
    connection = connect()
    assert proxy.half_open() == 1
    error = []

    def ask():
        try:
            connection.execute("SELECT 1")
        except psycopg.OperationalError as caught:
            error.append(caught)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    with connect() as other:
        assert other.execute("SELECT 1").fetchone() == (1,)
    assert proxy.cut() >= 1
    asking.join(10)
    assert error
