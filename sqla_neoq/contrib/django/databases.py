"""Django's databases: where the runner finds one, and how a job's thread uses its connections."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections
from sqlalchemy import URL

if TYPE_CHECKING:
    from collections.abc import Iterator

# Options of Django's own backend; the others are libpq's.
_OF_DJANGO: Final = {"assume_role", "isolation_level", "pool", "server_side_binding"}


@contextmanager
def fresh_connections() -> Iterator[None]:
    """Do what Django does around a request: close connections that are broken, or older than CONN_MAX_AGE."""
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


def url_of(alias: str) -> URL:
    """Return the URL of a database of ``settings.DATABASES``, for an engine of the runner's own.

    Raises:
        ImproperlyConfigured: it is not PostgreSQL, or has an option that a URL cannot say.
    """
    wrapper = connections[alias]
    if wrapper.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"DATABASES[{alias!r}]: the jobs are in PostgreSQL, and this is {wrapper.vendor}; "
            "name another one with --database"
        )
    settings: dict[str, Any] = wrapper.settings_dict
    options: dict[str, Any] = settings.get("OPTIONS") or {}
    query = {}
    for name, value in options.items():
        if name in _OF_DJANGO:
            continue
        if not isinstance(value, str | int):
            raise ImproperlyConfigured(
                f"DATABASES[{alias!r}]['OPTIONS'][{name!r}]={value!r}: a URL cannot say this; give the worker a URL "
                "of its own with --url"
            )
        query[name] = str(value)
    if role := options.get("assume_role"):
        escaped = str(role).replace("\\", "\\\\").replace(" ", "\\ ")
        query["options"] = f"{query.get('options', '')} -c role={escaped}".strip()
    host, port = settings.get("HOST") or "", settings.get("PORT") or ""
    if host:
        query["host"] = host  # here, because a socket's directory is no host of a URL
    if port:
        query["port"] = str(port)
    return URL.create(
        "postgresql+psycopg",
        username=settings.get("USER") or None,
        password=settings.get("PASSWORD") or None,
        database=settings.get("NAME") or None,
        query=query,
    )
