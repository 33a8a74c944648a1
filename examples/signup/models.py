"""The application's one table. No framework's base class: the worker that imports this needs no framework."""

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The application's tables."""


class User(Base):
    """Somebody who signed up."""

    __tablename__ = "users"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)
    welcomed: Mapped[bool] = mapped_column(default=False)
