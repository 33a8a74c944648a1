import logging

import pytest
from support.running import claimed

from sqla_neoq.outcomes import Outcome, Verb
from sqla_neoq.tally import Counts, Tally


def outcome(verb, number=1, **values):
    return Outcome(claimed(id=number, retries=2, task="m:f", queue="q"), verb, duration=0.5, **values)


@pytest.mark.parametrize(
    ("ended", "name"),
    [
        (outcome(Verb.COMPLETE), "processed"),
        (outcome(Verb.FAIL, delay=1.0), "failed"),
        (outcome(Verb.BURY, reason="exhausted"), "dead"),
        (outcome(Verb.PUT_BACK, delay=1.0), "snoozed"),
        (outcome(Verb.PUT_BACK, delay=0.0), "snoozed"),
        (outcome(Verb.PUT_BACK), "released"),
        (outcome(Verb.CANCEL), "cancelled"),
        (outcome(Verb.LOST), "lost"),
    ],
)
def test_each_end_is_counted_under_its_name(ended, name):
    tally = Tally()
    tally.settled([ended], set())
    assert tally.counts == Counts(**{name: 1})


@pytest.mark.parametrize("verb", list(Verb))
def test_what_the_fence_refused_is_lost_whatever_it_was(verb):
    tally = Tally()
    tally.settled([outcome(verb, 1), outcome(Verb.COMPLETE, 2)], {1})
    assert tally.counts == Counts(lost=1, processed=1)


def test_counts_add_up_over_batches_and_what_was_given_back_is_no_attempt():
    tally = Tally()
    tally.settled([outcome(Verb.COMPLETE, number) for number in range(5)], set())
    tally.settled([outcome(Verb.FAIL), outcome(Verb.PUT_BACK)], set())
    tally.settled([], set())
    assert tally.counts == Counts(processed=5, failed=1, released=1)
    assert tally.counts.total == 6


def test_counts_that_somebody_holds_do_not_change():
    tally = Tally()
    before = tally.counts
    tally.settled([outcome(Verb.COMPLETE)], set())
    assert before == Counts()


def logged(caplog, ended, lost=(), level=logging.INFO):
    with caplog.at_level(level, "sqla_neoq.jobs"):
        Tally().settled([ended], set(lost))
    return [(record.levelno, record.getMessage(), record.neoq) for record in caplog.records]


def test_an_end_is_logged_with_the_facts_that_there_are(caplog):
    failed = outcome(Verb.FAIL, delay=40.0, kind="error", message="ValueError: x", traceback="Traceback")
    assert logged(caplog, failed) == [
        (
            logging.WARNING,
            "job failed",
            {
                "event": "failed",
                "job_id": 1,
                "task": "m:f",
                "queue": "q",
                "attempt": 3,
                "duration": 0.5,
                "kind": "error",
                "delay": 40.0,
                "error": "ValueError: x",
            },
        )
    ]


def test_success_is_no_news_and_trouble_is(caplog):
    assert logged(caplog, outcome(Verb.COMPLETE))[0][0] == logging.INFO
    caplog.clear()
    assert logged(caplog, outcome(Verb.COMPLETE), level=logging.WARNING) == []
    assert logged(caplog, outcome(Verb.COMPLETE), lost=[1], level=logging.WARNING)[0][1] == "job lost"
    caplog.clear()
    assert logged(caplog, outcome(Verb.BURY, reason="exhausted"), level=logging.WARNING)[0][2]["reason"] == "exhausted"
