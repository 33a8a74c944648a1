"""What Django calls when it has loaded the application."""

from __future__ import annotations

from django.apps import AppConfig

from sqla_neoq import executor
from sqla_neoq.contrib.django.databases import fresh_connections


class NeoqConfig(AppConfig):
    """The application ``neoq``."""

    name = "sqla_neoq.contrib.django"
    label = "neoq"
    verbose_name = "Background jobs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Have every job of this process find its thread's connections as a request would."""
        if fresh_connections not in executor.around_runs:
            executor.around_runs.append(fresh_connections)
