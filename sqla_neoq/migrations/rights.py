"""The least that a role needs: to run jobs, or only to enqueue them. No DDL, and nothing of the host's own tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqla_neoq.migrations.functions import SIGNATURES
from sqla_neoq.migrations.quoting import qualifier, quote

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORKER = {
    "neoq_jobs": "SELECT, INSERT, UPDATE, DELETE",
    "neoq_dead_jobs": "SELECT, INSERT, UPDATE",
    "neoq_workers": "SELECT, INSERT, UPDATE, DELETE",
    # UPDATE for the row locks of pruning: PostgreSQL asks for it where a row is locked to be deleted.
    "neoq_failures": "SELECT, INSERT, UPDATE, DELETE",
    "neoq_meta": "SELECT",
    "neoq_claim_tokens": "SELECT, USAGE",
}
_PRODUCER = {"neoq_jobs": "SELECT, INSERT"}


def grants(role: str, *, schema: str | None = None, producer_only: bool = False) -> Iterator[str]:
    """Yield the GRANT statements that let a role run jobs and enqueue them, or only enqueue."""
    prefix = qualifier(schema)
    if schema is not None:
        yield f"GRANT USAGE ON SCHEMA {quote(schema)} TO {quote(role)}"
    for name, rights in (_PRODUCER if producer_only else _WORKER).items():
        kind = "SEQUENCE" if name == "neoq_claim_tokens" else "TABLE"
        yield f"GRANT {rights} ON {kind} {prefix}{name} TO {quote(role)}"
    for signature in SIGNATURES:
        yield f"GRANT EXECUTE ON FUNCTION {prefix}{signature} TO {quote(role)}"
