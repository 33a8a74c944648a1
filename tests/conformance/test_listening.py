"""The listening connection: S62-S64 and the rows about it. That it is closed at the end is in test_shutdown."""

import pytest
from sqlalchemy import text
from support import eventually

from sqla_neoq import handler
from sqla_neoq.listener import CHANNEL

LISTENING = "sqla_neoq % listen"


@handler("work")
def work(job):
    pass


def listening(runner):
    return lambda: runner.health().detail["listening"]


@pytest.mark.neoq("S62")
@pytest.mark.parametrize("how", [{"listen": False}, {"listen_url": "postgresql://nobody@127.0.0.1:1/nothing"}])
def test_a_runner_that_cannot_listen_says_so_and_polls(place, start, done, how):
    runner = start(work, **how)
    place.enqueue("work")
    done(1)
    health = runner.health()
    assert (health.detail["listening"], health.ready) == (False, True)


@pytest.mark.neoq("S63")
def test_a_lost_listening_connection_is_replaced_and_jobs_run_meanwhile(place, start, done):
    runner = start(work)
    eventually(listening(runner))
    before = place.backends(name=LISTENING)
    place.terminate(LISTENING)
    place.enqueue("work")
    done(1)
    eventually(lambda: place.backends(name=LISTENING) not in (before, []))
    eventually(listening(runner))


@pytest.mark.neoq("S64", "T46")
def test_what_others_say_on_the_channel_is_ignored(place, start, done):
    runner = start(work)
    eventually(listening(runner))
    oid = place.sql("SELECT cast(:table AS regclass)::oid::text", table=f"{place.prefix}neoq_jobs")
    with place.begin() as connection:
        for payload in (
            "",
            "-1",
            "work",
            "0x10",
            "1 work",
            "9" * 30 + " work",
            "ü \t\n",
            oid,
            f"{oid} ",
            f"{oid} other",
        ):
            connection.execute(text("SELECT pg_notify(:channel, :said)"), {"channel": CHANNEL, "said": payload})
    place.enqueue("work")
    done(1)
    assert runner.health().ready
    assert listening(runner)()
