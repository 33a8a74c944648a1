"""What happens to the database: restarts, outages, terminated backends, refusals, and timeouts that hit the runner."""

import signal
import time
from contextlib import ExitStack

import psycopg
from sqlalchemy import make_url
from support.servers import libpq

from chaos.scenarios import SCENARIOS
from chaos.world import World


def _under_load(world: World) -> None:
    world.runner()
    world.runner()
    world.produce(rate=100, seconds=0.05)
    world.await_starts(100)


def _restart(world: World, how: signal.Signals, away: float) -> None:
    world.injure()
    world.server.stop(how)
    world.sleep(away)
    world.server.start_again()
    world.repaired()


@SCENARIOS.add(
    "restart-fast",
    promise="a lost database is waited for",
    faults="PostgreSQL restarted, fast shutdown",
    limit=10.0,
    smoke=True,
)
def restart_fast(world: World) -> None:
    _under_load(world)
    for _ in range(1 if world.smoke else 4):
        _restart(world, signal.SIGINT, 0.5)
        world.go_on()


@SCENARIOS.add(
    "restart-immediate",
    promise="a lost database is waited for",
    faults="PostgreSQL restarted: immediate shutdown, kill -9 of the server, kill -9 of a backend",
    limit=10.0,
)
def restart_immediate(world: World) -> None:
    _under_load(world)
    for how in (signal.SIGQUIT, signal.SIGKILL, signal.SIGQUIT):
        _restart(world, how, 0.5)
        world.go_on()
    world.injure()
    world.server.kill_a_backend()
    world.server.value("SELECT 1")
    world.repaired()
    world.go_on()


@SCENARIOS.add(
    "stopped-60s",
    promise="a lost database is waited for; what had finished is written when it is back",
    faults="PostgreSQL stopped for 60 s",
    limit=15.0,
    quiet_within=120.0,
)
def stopped(world: World) -> None:
    _under_load(world)
    running = world.enqueue("chaos:plain", 5, seconds=4.0, how={"priority": 50})
    world.await_started(running)
    _restart(world, signal.SIGINT, min(world.seconds, 60.0))
    world.go_on()
    # They ended while the server was away: once was enough.
    crashes = world.server.rows(
        "SELECT payload, crashes, retries FROM neoq_jobs WHERE (payload ->> 'key')::bigint = ANY(%s) AND "
        "(crashes > 0 OR retries > 0)",
        running,
    )
    world.expect(not crashes, f"jobs that ended during the outage were run again: {crashes}")


@SCENARIOS.add(
    "backends-terminated",
    promise="connections that break cost no job",
    faults="pg_terminate_backend of one to five connections, at random, several times a second",
    limit=10.0,
    smoke=True,
)
def backends_terminated(world: World) -> None:
    _under_load(world)
    until = time.monotonic() + world.seconds
    while time.monotonic() < until:
        world.server.terminate(limit=world.random.randint(1, 5))
        world.injure()
        world.sleep(world.random.uniform(0.05, 0.6))
    world.repaired()
    world.go_on()


@SCENARIOS.add(
    "connections-exhausted",
    promise="a lost database is waited for",
    faults="all connections taken by others while those of the runners are terminated, for 20 s",
    limit=10.0,
    settings={"max_connections": "30"},
)
def connections_exhausted(world: World) -> None:
    # As a plain role: the last few connections are a superuser's, and the harness needs one.
    world.server.execute(
        "CREATE ROLE app LOGIN",
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO app",
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO app",
    )
    url = make_url(world.url).set(username="app").render_as_string()
    world.runner(url=url)
    world.runner(url=url)
    world.produce(rate=100, seconds=0.05, url=url)
    world.await_starts(100)
    for _ in range(2):
        with ExitStack() as taken:
            world.injure()
            until = time.monotonic() + min(world.seconds, 20.0)
            while time.monotonic() < until:
                try:
                    connection = psycopg.connect(libpq(make_url(url)), autocommit=True)
                    taken.callback(connection.close)
                except psycopg.OperationalError:
                    world.server.terminate("application_name <> ''", limit=2)
                    world.sleep(0.2)
        world.repaired()
        world.go_on()


@SCENARIOS.add(
    "read-only",
    promise="a lost database is waited for",
    faults="default_transaction_read_only for 15 s, as after a failover to a standby",
    limit=10.0,
)
def read_only(world: World) -> None:
    _under_load(world)
    for _ in range(2):
        world.injure()
        world.server.set(default_transaction_read_only="on")
        world.sleep(min(world.seconds, 15.0))
        with world.server.connect() as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")
        world.repaired()
        world.go_on()


@SCENARIOS.add(
    "role-timeouts",
    promise="a server's own timeouts cost attempts, never jobs",
    faults="statement_timeout 100 ms, idle_in_transaction 200 ms, transaction and idle_session 1 s, set on the role; "
    "some jobs take longer",
    limit=None,
)
def role_timeouts(world: World) -> None:
    world.injure()
    settings = ["statement_timeout = '100ms'", "idle_in_transaction_session_timeout = '200ms'"]
    settings += ["lock_timeout = '50ms'", "idle_session_timeout = '1s'"]
    if world.server.value("SELECT count(*) FROM pg_settings WHERE name = 'transaction_timeout'"):
        settings.append("transaction_timeout = '1s'")
    world.server.execute(*[f"ALTER ROLE postgres SET {setting}" for setting in settings])
    world.runner()
    world.runner()
    world.produce(rate=60)
    world.produce("chaos:plain", rate=10, seconds=1.5)
    hit = world.enqueue("chaos:effect", 10, seconds=0.4)  # idle in its transaction for twice as long as it may be
    world.sleep(min(world.seconds, 20.0))
    attempts = len([line for line in world.ledger.lines() if line.kind == "start" and line.key in set(hit)])
    world.notes["attempts of the jobs that were hit"] = attempts
    world.expect(attempts > len(hit), "no job was hit by idle_in_transaction_session_timeout")
    world.server.execute("ALTER ROLE postgres RESET ALL")
    world.server.terminate()
