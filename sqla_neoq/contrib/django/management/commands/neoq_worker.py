"""``manage.py neoq_worker``: ``sqla-neoq run`` with Django set up, on a database of the settings."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS

from sqla_neoq import targets
from sqla_neoq.cli import run
from sqla_neoq.contrib.django.databases import url_of
from sqla_neoq.errors import TaskNotFound

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator

WORKER = "sqla_neoq.contrib.django.worker"


class Command(BaseCommand):
    """Run background jobs."""

    help = (
        "Run the jobs of the tasks in each MODULE; without one, of every installed application's module 'tasks', and "
        "those of django.tasks. All flags of 'sqla-neoq run' may follow; see 'sqla-neoq run --help'."
    )
    # A worker checks its tables when it starts.
    requires_system_checks: list[str] = []  # noqa: RUF012 - Django's own declaration

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what is Django's; the rest goes to ``sqla-neoq run`` as it is."""
        parser.allow_abbrev = False
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, metavar="ALIAS", help="of settings.DATABASES")

    def run_from_argv(self, argv: list[str]) -> None:
        """Split the command line between Django's parser and the one of ``sqla-neoq run``."""
        parser = self.create_parser(argv[0], argv[1])
        known, rest = parser.parse_known_args(argv[2:])
        try:
            self._run(known.database, rest, parser.prog)
        except CommandError as error:
            if known.traceback:
                raise
            self.stderr.write(f"{type(error).__name__}: {error}")
            raise SystemExit(error.returncode) from None

    def handle(self, *_args: str, **_options: Any) -> None:
        """Refuse: it takes over signals and ends the process, which only a command line can want."""
        raise CommandError("neoq_worker is a process of its own; to run jobs inside this one use sqla_neoq.Runner")

    def _run(self, alias: str, arguments: list[str], prog: str) -> None:
        # In the environment, not the command line, which everybody on the machine can read.
        if not any(one.partition("=")[0] in {"--url", "--engine", "--embedded"} for one in arguments):
            os.environ["NEOQ_DATABASE_URL"] = url_of(alias).render_as_string(hide_password=False)
        with run.make_context(prog, list(arguments), resilient_parsing=True) as context:
            modules, queues = context.params["modules"], context.params["queues"]
        found = [] if modules else list(_modules())
        if not modules and not found:
            raise CommandError("no installed application has a module 'tasks' with a task; name a MODULE that has one")
        if not queues and WORKER in [*found, *modules]:
            # The one task of django.tasks has jobs in every queue of TASKS.
            named = {one.queue for module in [*found, *modules] for one in targets.load(module)} | _queues_of_tasks()
            found += [word for queue in sorted(named) for word in ("-q", re.sub(r"([\\,:])", r"\\\1", queue))]
        run.main(args=[*found, *arguments], prog_name=prog)


def _modules() -> Iterator[str]:
    """Yield the modules ``tasks`` of the installed applications that hold a task or a handler of this library."""
    for config in apps.get_app_configs():
        name = f"{config.name}.tasks"
        if importlib.util.find_spec(name) is None:
            continue
        try:
            targets.load(name)
        except TaskNotFound:
            continue  # it holds those of another queue
        yield name
    if any(backend.get("BACKEND", "").startswith("sqla_neoq.") for backend in getattr(settings, "TASKS", {}).values()):
        yield WORKER


def _queues_of_tasks() -> set[str]:
    from sqla_neoq.contrib.django.worker import BACKENDS

    return {queue for backend in BACKENDS for queue in backend.queues}
