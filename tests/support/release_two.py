"""A made-up next release, whose tables have version 2: :func:`become` turns the installed one into it.

``python -m support.release_two run mytasks`` is its command line.
"""

from sqla_neoq import migrations
from sqla_neoq.migrations.indexes import Index
from sqla_neoq.models import TABLES


class StepTwo:
    """Each table gets a column; the jobs get an index."""

    @staticmethod
    def up(prefix):
        for table in sorted(TABLES - {"neoq_meta"}):
            yield f"ALTER TABLE {prefix}{table} ADD COLUMN note text"
        yield Index("neoq_jobs_note_idx", "neoq_jobs", "(note) WHERE note IS NOT NULL")

    @staticmethod
    def down(prefix):
        yield f"DROP INDEX IF EXISTS {prefix}neoq_jobs_note_idx"
        for table in sorted(TABLES - {"neoq_meta"}):
            yield f"ALTER TABLE {prefix}{table} DROP COLUMN note"


def become() -> None:
    """Make the installed release this one."""
    migrations._STEPS = (*migrations._STEPS[:1], StepTwo)
    migrations.LATEST = 2
    migrations.OLDEST_USABLE = 1


if __name__ == "__main__":
    from sqla_neoq.cli import main

    become()
    main()
