"""The tables and the expressions that all statements are made of.

Three habits start here: lists travel as one text parameter, predicates that must match a partial index are constant
SQL, and the clock is the database's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    ARRAY,
    JSON,
    DateTime,
    Double,
    Integer,
    Text,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    null,
    select,
)
from sqlalchemy.dialects.postgresql import insert

from sqla_neoq.models import Base

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import CTE, ColumnElement, FromClause, Select, TableValuedAlias

jobs: Final = Base.metadata.tables["neoq_jobs"]
dead_jobs: Final = Base.metadata.tables["neoq_dead_jobs"]
workers: Final = Base.metadata.tables["neoq_workers"]
failures: Final = Base.metadata.tables["neoq_failures"]

aware_time: Final = DateTime(timezone=True)
clock: Final = func.statement_timestamp(type_=aware_time)
ZERO: Final = literal_column("0", type_=Integer)
ONE: Final = literal_column("1", type_=Integer)


def array_literal(numbers: Iterable[int]) -> str:
    """Write integers as the text of a PostgreSQL array.

    A thousand numbers this way cost a twentieth of what the driver takes to adapt a list of them.
    """
    return "{" + ",".join(map(str, numbers)) + "}"


def array(rows: Select[Any]) -> ColumnElement[Any]:
    """Write ``ARRAY(SELECT ...)``, which PostgreSQL evaluates once for the whole statement."""
    return func.array(rows.scalar_subquery(), type_=ARRAY(rows.selected_columns[0].type))


def recordset(name: str, parameter: str, *columns: Any, default: str | None = None) -> TableValuedAlias:
    """Unfold a JSON text parameter, a list of objects, into rows."""
    given = bindparam(parameter, default, type_=Text) if default is not None else bindparam(parameter, type_=Text)
    records = func.json_to_recordset(cast(given, JSON))
    return records.table_valued(*columns).render_derived(name=name, with_types=True)


def in_seconds(seconds: Any) -> ColumnElement[Any]:
    """Return the time that many seconds from now; NULL for NULL."""
    # make_interval() takes its seconds by name only, which func cannot say.
    later: ColumnElement[Any] = clock + seconds * literal_column("interval '1 second'")
    return later


def in_status(*names: str) -> ColumnElement[bool]:
    """Whether the status is one of these."""
    # Constant SQL, so that the planner can prove the partial indexes' predicates in a generic plan too.
    return jobs.c.status.in_([literal_column(f"'{name}'") for name in names])


def waiting() -> ColumnElement[bool]:
    """Whether the job waits to be claimed, now or later."""
    return in_status("new", "failed")


def running() -> ColumnElement[bool]:
    """Whether the job is claimed."""
    return jobs.c.status == literal_column("'running'")


def unless_cancelled(status: str) -> dict[str, Any]:
    """The values that give a running job another status; ``cancelled`` if somebody has asked it to stop meanwhile.

    For whoever cancelled it was told that it would end so, unless it was done before.
    """
    asked = jobs.c.cancel_requested_at.is_not(None)
    return {
        "status": case((asked, literal_column("'cancelled'")), else_=literal_column(f"'{status}'")),
        "finished_at": case((asked, clock)),
        "cancel_requested_at": null(),
    }


def suspect() -> ColumnElement[bool]:
    """Whether workers died under the job more than once: then it runs apart from the others, see quarantine."""
    return jobs.c.crashes > ONE


def next_of(number: Any, most: int, step: Any = ONE) -> ColumnElement[Any]:
    """Add a step to a number without ever leaving its type.

    Plain SQL can store the largest number there is, and one row on which a claim overflows would stop every claim.
    """
    next_: ColumnElement[Any] = func.least(number, literal_column(str(most - 1), type_=Integer)) + step
    return next_


def seconds(name: str) -> ColumnElement[Any]:
    """A parameter in seconds, as an interval."""
    return bindparam(name, type_=Double) * literal_column("interval '1 second'")


_KEPT_OF_THE_DEAD: Final = tuple(name for name in dead_jobs.c.keys() if name in jobs.c and name != "error")  # noqa: SIM118


def bury_rows(gone: CTE, reason: Any, error: Any, source: FromClause, *where: ColumnElement[bool]) -> CTE:
    """Write deleted jobs into the dead table, with all that was known of them."""
    rows = select(*(gone.c[name] for name in _KEPT_OF_THE_DEAD), reason, error).select_from(source).where(*where)
    names = [*_KEPT_OF_THE_DEAD, "reason", "error"]
    buried = insert(dead_jobs).from_select(names, rows, include_defaults=False)
    # Somebody put the job back by hand and left its dead row behind: the later death is the one to know of.
    later = {name: buried.excluded[name] for name in [*names, "died_at"] if name != "id"}
    return buried.on_conflict_do_update(index_elements=[dead_jobs.c.id], set_=later).cte("buried")
