"""The queue as a Django application: ``INSTALLED_APPS += ["sqla_neoq.contrib.django"]``.

It brings the tables as a Django migration, ``manage.py neoq_worker``, the jobs in the admin, and for Django 6 a backend
of ``django.tasks``. To enqueue from a view it is not even needed: Django's ``connection`` is a handle as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqla_neoq.contrib.django.backend import NeoqBackend

__all__ = ["NeoqBackend"]


def __getattr__(name: str) -> Any:
    # Only settings.TASKS asks for it: before Django 6 there is no django.tasks to import.
    if name == "NeoqBackend":
        from sqla_neoq.contrib.django.backend import NeoqBackend

        return NeoqBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
