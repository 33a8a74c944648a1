"""The application's own table, from before it had a queue.

Revision ID: 0001
Revises:
Create Date: 2026-12-01
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "source_file",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("lines", sa.Integer()),
        sa.Column("functions", sa.Integer()),
        sa.Column("classes", sa.Integer()),
        sa.Column("times_counted", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_source_file")),
        sa.UniqueConstraint("path", name=op.f("uq_source_file_path")),
    )


def downgrade() -> None:
    op.drop_table("source_file")
