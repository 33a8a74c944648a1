"""The application's background work: ``python -m sqla_neoq.run catalog.tasks``."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from threading import Lock

from sqlalchemy import select, update

from catalog.models import SourceFile
from sqla_neoq import current_job, exponential, task

# What the compiler thinks of the style of the files read is not this application's business.
warnings.filterwarnings("ignore", category=SyntaxWarning)

# CPython 3.11 counts how deep it is in a tree for all threads together, and two that build one at once can get a
# SystemError (python/cpython#106905). Parsing holds the interpreter's lock anyway, so taking turns costs nothing.
_turn = Lock()


# A file that does not parse today will not parse in two seconds either; a job that calls another service would keep
# the default back-off and its 23 retries.
@task(queue="catalog", max_retries=2, backoff=exponential(timedelta(milliseconds=500)))
def count_file(file_id: int) -> None:
    """Count the lines, functions and classes of one file.

    Raises:
        SyntaxError: the file does not parse. The job is retried, and ends as a dead job with this traceback.
    """
    session = current_job().session  # commits together with the job's completion, or not at all
    this_file = SourceFile.id == file_id
    path = session.scalars(select(SourceFile.path).where(this_file)).one()
    source = Path(path).read_bytes()
    with _turn:
        tree = ast.parse(source, path)
    nodes = Counter(type(node) for node in ast.walk(tree))
    session.execute(
        update(SourceFile)
        .where(this_file)
        .values(
            lines=len(source.splitlines()),
            functions=nodes[ast.FunctionDef] + nodes[ast.AsyncFunctionDef],
            classes=nodes[ast.ClassDef],
            times_counted=SourceFile.times_counted + 1,
        )
    )
