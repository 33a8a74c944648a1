"""Where the project's own Alembic environment is: a complete example of a chain, and one to run as it is."""

from __future__ import annotations

from pathlib import Path


def reference_directory() -> Path:
    """Return the directory with ``env.py`` and ``versions/``, to be an Alembic ``script_location``.

    It is ``sqla_neoq/_alembic`` where the package is installed, and ``alembic`` at the top of a checkout.
    """
    package = Path(__file__).parents[1]
    installed = package / "_alembic"
    return installed if installed.is_dir() else package.parent / "alembic"
