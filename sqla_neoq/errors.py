"""Every error and warning of the library, in one tree.

::

    NeoqError
    ├── ConfigurationError   an option that cannot be (also a ValueError)
    ├── NoCurrentJob         current_job() outside a job (also a LookupError)
    ├── TaskNotFound         a module or name that holds no task (also a LookupError)
    ├── DuplicateTask        two different functions under one task name
    ├── JobTimeout           what a task sees, and is recorded as, past its timeout (also a TimeoutError)
    ├── JobCancelled         what a task sees when somebody asked its job to stop
    ├── JobCrashed           the child process died under the job
    ├── ClaimLost            the run no longer owns its job; its writes were rolled back
    ├── DatabaseUnavailable  no connection at start
    ├── SchemaError          the tables; ``remedy`` holds the lines to paste
    │   ├── SchemaMissing
    │   ├── SchemaOutdated
    │   └── SchemaTooNew
    └── EmbeddedError        the embedded PostgreSQL server cannot be had
    NeoqWarning              (a UserWarning) something that works, but gives up a guarantee

Wrong arguments to the public functions raise plain ``TypeError`` or ``ValueError``, as any Python function does.
"""


class NeoqError(Exception):
    """The base of every error that sqla_neoq raises on its own account."""


class ConfigurationError(NeoqError, ValueError):
    """An option has a value that cannot work."""


class NoCurrentJob(NeoqError, LookupError):  # noqa: N818 - reads as the sentence it is, like StopIteration
    """``current_job()`` was called where no job is running."""


class TaskNotFound(NeoqError, LookupError):  # noqa: N818
    """A module or attribute that should hold tasks holds none."""


class DuplicateTask(NeoqError):  # noqa: N818
    """Two functions want the same task name, or two handlers the same queue."""


class JobTimeout(NeoqError, TimeoutError):  # noqa: N818
    """The run went past its task's timeout."""


class JobCancelled(NeoqError):  # noqa: N818
    """Somebody asked the running job to stop."""


class JobCrashed(NeoqError):  # noqa: N818
    """The child process that ran the job died under it."""


class ClaimLost(NeoqError):  # noqa: N818
    """The run no longer owns its job: another claim, a rescue or a time-out took it."""


class DatabaseUnavailable(NeoqError):  # noqa: N818
    """No connection to the database could be made at start."""


class SchemaError(NeoqError):
    """The tables are not what this release needs.

    Attributes:
        remedy: the lines to paste, into a shell or into a revision, that put it right.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy
        # A traceback, such as Alembic's command ends with, shows it too.
        self.add_note(remedy)


class SchemaMissing(SchemaError):  # noqa: N818
    """The tables are not there."""


class SchemaOutdated(SchemaError):  # noqa: N818
    """The tables are older than this release can use."""


class SchemaTooNew(SchemaError):  # noqa: N818
    """The tables are newer than this release knows."""


class EmbeddedError(NeoqError):
    """The embedded PostgreSQL server cannot be found, started or shared."""


class NeoqWarning(UserWarning):
    """Something works, but a guarantee is weaker than it looks."""
