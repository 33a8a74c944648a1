"""Runs the application's chain on ``config.attributes["engine"]``, else on the database the environment names."""

import os
from typing import Any

from alembic import context
from catalog.database import engine_for
from catalog.models import Base


def mine(name: str | None, type_: str, _parents: object) -> bool:
    """Hide the queue's tables from autogenerate: they change through revisions like 0002 alone."""
    return type_ != "table" or not (name or "").startswith("neoq_")


def run() -> None:
    url = os.environ.get("NEOQ_DATABASE_URL") or os.environ.get("DATABASE_URL", "")
    options: dict[str, Any] = {"target_metadata": Base.metadata, "include_name": mine}
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", literal_binds=True, **options)
        with context.begin_transaction():
            context.run_migrations()
        return
    engine = context.config.attributes.get("engine") or engine_for(url)
    with engine.connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()


run()
