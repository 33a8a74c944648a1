"""How the application connects."""

from __future__ import annotations

from sqlalchemy import Engine, create_engine, make_url


def engine_for(url: str) -> Engine:
    """Return an engine on psycopg, whether the URL says so or only ``postgres://`` or ``postgresql://``."""
    return create_engine(make_url(url).set(drivername="postgresql+psycopg"))
