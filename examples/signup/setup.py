"""Create the tables, the application's and the queue's: ``python -m signup.setup``.

An application that lives longer does this in its migrations.
"""

import os

from sqlalchemy import create_engine

from signup.models import Base
from sqla_neoq import migrations


def create_tables(url: str) -> None:
    """Create whatever is missing."""
    engine = create_engine(url)
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        migrations.upgrade(connection)
    engine.dispose()


if __name__ == "__main__":
    create_tables(os.environ["DATABASE_URL"])
