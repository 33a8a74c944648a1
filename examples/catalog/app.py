"""What the application does in the foreground: bring its tables up to date, and put files into its catalog."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from catalog.models import SourceFile
from catalog.tasks import count_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine


def migrate(engine: Engine) -> None:
    """Run the application's own Alembic chain; one of its revisions brings the queue's tables."""
    config = Config(Path(__file__).with_name("alembic.ini"))
    config.attributes["engine"] = engine
    command.upgrade(config, "head")


def enqueue_files(engine: Engine, root: Path) -> int:
    """Add every Python file under ``root`` that is not there yet, each with its job; return how many were new."""
    with Session(engine) as session:
        known = set(session.scalars(select(SourceFile.path)))
    return sum(_add(engine, path) for path in source_files(root) if str(path) not in known)


def _add(engine: Engine, path: Path) -> bool:
    try:
        # One transaction: either the row and its job are both there, or neither is.
        with Session(engine) as session, session.begin():
            file = SourceFile(path=str(path))
            session.add(file)
            session.flush()  # the database gives the file its id
            file.job_id = count_file.enqueue(session, file_id=file.id).id
    except IntegrityError:
        return False  # another process added the file first, and with it its job
    return True


def source_files(root: Path) -> Iterator[Path]:
    """Yield the Python files under ``root`` in the order of their names, without installed packages."""
    for path in sorted(root.rglob("*.py")):
        if path.is_file() and not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            yield path
