"""The jobs in the admin, to be looked at. To change one there are ``cancel`` and ``requeue``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin

from sqla_neoq.contrib.django.models import DeadJob, Failure, Job

if TYPE_CHECKING:
    from django.http import HttpRequest


class ReadOnly(admin.ModelAdmin):
    """Shows rows, to those who have the permission to view them."""

    # Counting a long history for each page costs more than the page.
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002 - Django's signature
        """Nobody adds."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002 - as above
        """Nobody changes."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002 - as above
        """Nobody deletes."""
        return False


@admin.register(Job)
class JobAdmin(ReadOnly):
    """Jobs."""

    list_display: ClassVar = ["id", "queue", "task", "status", "priority", "run_after", "retries"]
    list_filter: ClassVar = ["status"]
    search_fields: ClassVar = ["=id", "=queue", "=task"]


@admin.register(DeadJob)
class DeadJobAdmin(ReadOnly):
    """Dead jobs."""

    list_display: ClassVar = ["id", "queue", "task", "reason", "died_at", "retries"]
    list_filter: ClassVar = ["reason"]
    search_fields: ClassVar = ["=id", "=queue", "=task"]


@admin.register(Failure)
class FailureAdmin(ReadOnly):
    """Failed attempts."""

    list_display: ClassVar = ["id", "job_id", "attempt", "kind", "message", "failed_at"]
    list_filter: ClassVar = ["kind"]
    search_fields: ClassVar = ["=job_id"]
