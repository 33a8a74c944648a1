"""Each file remembers the job that counts it.

Revision ID: 0003
Revises: 0002
Create Date: 2026-12-01
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("source_file", sa.Column("job_id", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("source_file", "job_id")
