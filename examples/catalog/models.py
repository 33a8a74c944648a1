"""The application's own tables; the queue's are not among them."""

from __future__ import annotations

from sqlalchemy import BigInteger, Identity, MetaData, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The application's declarative base."""

    metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s", "uq": "uq_%(table_name)s_%(column_0_name)s"})


class SourceFile(Base):
    """One Python file, and what its job counted in it."""

    __tablename__ = "source_file"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    path: Mapped[str] = mapped_column(Text, unique=True)
    lines: Mapped[int | None]
    functions: Mapped[int | None]
    classes: Mapped[int | None]
    # How often a job's work on this row was committed. Anything but 1 in the end is a bug of the queue.
    times_counted: Mapped[int] = mapped_column(server_default=text("0"))
    # No foreign key: the queue moves a dead job into another table, and removes old ones.
    job_id: Mapped[int | None] = mapped_column(BigInteger)
