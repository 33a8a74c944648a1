"""What is in the rows: ids beyond 2³¹, unique jobs and their twins, rows that cannot be written or that others hold."""

import signal
import time
from contextlib import suppress

import psycopg
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool
from support.servers import libpq

from chaos.scenarios import SCENARIOS
from chaos.tasks import fails, plain
from chaos.world import World, patiently
from sqla_neoq import cancel


@SCENARIOS.add(
    "large-ids",
    promise="every path works beyond 2³¹",
    faults="all ids and tokens begin at 3·10⁹ to 6·10⁹; then kill -9, failures, deaths, put-backs, cancels",
    limit=10.0,
    ends={"chaos:doomed": {"dead:exhausted"}, "chaos:plain": {"processed", "cancelled"}},
)
def large_ids(world: World) -> None:
    world.server.execute(
        "ALTER TABLE neoq_jobs ALTER id RESTART WITH 3000000000",
        "ALTER TABLE neoq_workers ALTER id RESTART WITH 4000000000",
        "ALTER TABLE neoq_failures ALTER id RESTART WITH 5000000000",
        "SELECT setval('neoq_claim_tokens', 6000000000)",
    )
    victim, stopped, _ = world.runner(), world.runner("--shutdown-timeout", "0"), world.runner()
    world.produce("chaos:effect", "chaos:plain", "chaos:fails", "chaos:doomed", "chaos:async", rate=80, seconds=0.1)
    world.await_starts(100)
    long = world.enqueue("chaos:plain", 4, seconds=3.0, how={"priority": 90})
    world.await_started(long)
    engine = create_engine(world.url, poolclass=NullPool)
    with engine.begin() as connection:
        ids = connection.exec_driver_sql(
            "SELECT id FROM neoq_jobs WHERE (payload ->> 'key')::bigint = ANY(%s)", (long[:2],)
        ).scalars()
        for job in list(ids):
            cancel(connection, job)
    world.kill(victim)
    world.injure()
    stopped.signal(signal.SIGTERM)
    stopped.wait(20)
    world.sleep(10)
    for table, least in (("neoq_jobs", 3), ("neoq_dead_jobs", 3), ("neoq_workers", 4), ("neoq_failures", 5)):
        lowest = world.server.value(f"SELECT min(id) FROM {table}")
        world.expect(lowest is not None and lowest >= least * 10**9, f"{table} begins at {lowest}")


@SCENARIOS.add(
    "unique-twins",
    promise="of jobs with one fingerprint at most one is unfinished, and each that was enqueued ends",
    faults="twins enqueued all the time, while theirs waits, runs, fails, is retried and rescued; kill -9 every 4 s",
    limit=10.0,
)
def unique_twins(world: World) -> None:
    runners = [world.runner(), world.runner()]
    engine = create_engine(world.url, poolclass=NullPool)
    until = time.monotonic() + min(world.seconds, 30.0)
    next_kill = time.monotonic() + 3
    key = 1_000_000
    created = duplicates = 0
    while time.monotonic() < until:
        for lane in range(6):
            key += 1
            task = plain if lane % 2 else fails
            arguments = {"seconds": 0.2} if lane % 2 else {"times": 2}
            with engine.begin() as connection:
                made = task.using(fingerprint=f"twin {lane}").enqueue(connection, key=key, **arguments)
            if made.created:
                created += 1
                world.ledger.note("committed", key)
            else:
                duplicates += 1
        if time.monotonic() > next_kill:
            next_kill += 4
            world.kill(runners.pop(0))
            runners.append(world.runner(ready=False))
        world.sleep(0.02)
    world.notes |= {"created": created, "duplicates": duplicates}
    world.expect(created > 20, f"only {created} jobs were created")
    world.expect(duplicates > 50, f"only {duplicates} twins met theirs")


@SCENARIOS.add(
    "unwritable-row",
    promise="a row that cannot be written stops no other",
    faults="a trigger that refuses the completion of some jobs; rows, then the whole table, locked by others",
    limit=5.0,
)
def unwritable_row(world: World) -> None:
    world.server.execute(
        "CREATE FUNCTION chaos_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$",
        "CREATE TRIGGER chaos_refuse BEFORE UPDATE ON neoq_jobs FOR EACH ROW "
        "WHEN (NEW.status = 'processed' AND NEW.priority = 7) EXECUTE FUNCTION chaos_refuse()",
    )
    world.runner()
    refused: list[int] = []
    for task in ("chaos:plain", "chaos:effect"):
        world.injure()
        began = time.monotonic()
        refused += world.enqueue(task, 3, how={"priority": 7})
        world.await_status(world.enqueue(task, 30), "processed", within=30)
        world.recovered(time.monotonic() - began)
    world.await_started(refused)
    world.server.execute("DROP TRIGGER chaos_refuse ON neoq_jobs")
    # Somebody's open transaction holds the rows of running jobs; the others are written.
    held = world.enqueue("chaos:plain", 3, seconds=0.5)
    world.await_started(held)
    with psycopg.connect(libpq(make_url(world.url)), application_name="chaos") as holder:
        holder.execute("SELECT 1 FROM neoq_jobs WHERE (payload ->> 'key')::bigint = ANY(%s) FOR UPDATE", [held])
        world.injure()
        began = time.monotonic()
        world.await_status(world.enqueue("chaos:plain", 30), "processed", within=30)
        world.recovered(time.monotonic() - began)
        world.sleep(2)
        holder.rollback()
    world.await_status(held, "processed", within=20)
    # And the whole table, as a migration would.
    with psycopg.connect(libpq(make_url(world.url)), application_name="chaos") as holder:
        more = world.enqueue("chaos:plain", 10, seconds=0.3)
        world.await_started(more)
        with suppress(psycopg.errors.LockNotAvailable):
            holder.execute("LOCK TABLE neoq_jobs")
        world.injure()
        world.sleep(3)
        holder.rollback()
    began = time.monotonic()
    world.await_status(more, "processed", within=30)
    world.recovered(time.monotonic() - began)
    world.server.execute("UPDATE neoq_jobs SET run_after = now() WHERE status = 'failed'")
    patiently(lambda: {world.status(key) for key in refused} == {"processed"}, within=30)
