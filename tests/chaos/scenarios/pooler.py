"""A pooler in between: PgBouncer in transaction mode, where LISTEN and session locks mean nothing."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from chaos.pooled import VARIABLE
from chaos.scenario import NotRunError
from chaos.scenarios import SCENARIOS
from chaos.world import World, patiently


@contextmanager
def _pgbouncer(world: World) -> Iterator[str]:
    """Yield the URL through a PgBouncer in transaction mode."""
    program = shutil.which("pgbouncer") or next((p for p in ("/usr/sbin/pgbouncer",) if Path(p).exists()), None)
    if program is None:
        raise NotRunError("no pgbouncer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = make_url(world.url)
    directory = Path(str(url.query["host"]))  # of the server's own account, which PgBouncer may then run as
    configuration = directory / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n{url.database} = host={directory} port=5432 dbname={url.database} user=postgres\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\npool_mode = transaction\n"
        "max_client_conn = 200\ndefault_pool_size = 15\nunix_socket_dir =\n"
    )
    owner = directory.stat()
    account = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if owner.st_uid else {}
    configuration.chmod(0o644)
    with (world.directory / "pgbouncer.log").open("wb") as log:
        bouncer = subprocess.Popen([program, str(configuration)], stdout=log, stderr=log, **account)
        try:
            patiently(lambda: _answers(port), within=20, why=(world.directory / "pgbouncer.log").read_text)
            yield url.set(query={}, host="127.0.0.1", port=port).render_as_string()
        finally:
            bouncer.kill()
            bouncer.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _play(world: World, url: str, *flags: str) -> None:
    env = {VARIABLE: url}
    victim = world.runner("--engine", "chaos.pooled:engine", *flags, env=env)
    other = world.runner("--engine", "chaos.pooled:engine", *flags, env=env)
    world.produce("chaos:effect", "chaos:plain", "chaos:fails", rate=80, seconds=0.1, pooled=True, env=env)
    world.await_starts(200)
    world.kill(victim)
    world.sleep(world.scenario.limit or 0.0)  # an outage now would put the verdict on the dead off
    for _ in range(3):
        world.injure()
        world.server.terminate(limit=5)
        world.sleep(1)
    world.repaired()
    world.go_on()
    world.expect(other.alive, "the runner ended")


@SCENARIOS.add(
    "pgbouncer-poll-only",
    promise="works behind a transaction pooler, by polling",
    faults="PgBouncer in transaction mode, --no-listen; kill -9 (noticed after 30 s), backends terminated",
    limit=40.0,
    quiet_within=120.0,
)
def pgbouncer_poll_only(world: World) -> None:
    with _pgbouncer(world) as url:
        _play(world, url, "--no-listen")
        world.settle(120.0)


@SCENARIOS.add(
    "pgbouncer-listen-url",
    promise="works behind a transaction pooler, and is woken through a direct connection",
    faults="PgBouncer in transaction mode with a direct --listen-url; kill -9, backends terminated",
    limit=10.0,
)
def pgbouncer_listen_url(world: World) -> None:
    with _pgbouncer(world) as url:
        began = time.monotonic()
        _play(world, url, "--listen-url", world.url)
        world.notes["seconds"] = round(time.monotonic() - began)
        world.settle(60.0)
