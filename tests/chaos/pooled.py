"""The engine of an application behind PgBouncer: prepared statements are off, for older ones mix them up."""

import os

from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

VARIABLE = "CHAOS_POOLED_URL"


def engine() -> Engine:
    """Make the engine for the URL in the environment; a pool in front of a pool serves nobody."""
    return create_engine(os.environ[VARIABLE], poolclass=NullPool, connect_args={"prepare_threshold": None})
