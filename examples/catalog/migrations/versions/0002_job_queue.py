"""The job queue's tables come in.

Revision ID: 0002
Revises: 0001
Create Date: 2026-12-01
"""

from alembic import op

from sqla_neoq import migrations as neoq

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    neoq.migrate(op, 0, 1)


def downgrade() -> None:
    neoq.migrate(op, 1, 0)
