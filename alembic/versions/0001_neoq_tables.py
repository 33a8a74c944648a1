"""Version 1 of sqla_neoq's tables.

Revision ID: 0001
Revises:
Create Date: 2026-12-01
"""

from alembic import op

from sqla_neoq import migrations as neoq

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    neoq.migrate(op, 0, 1, schema=op.get_context().version_table_schema)


def downgrade() -> None:
    neoq.migrate(op, 1, 0, schema=op.get_context().version_table_schema)
