"""What can hold the caller's transaction, and how one statement is sent through it.

A *handle* is whatever the caller passes as ``session``: a SQLAlchemy session or connection, a driver's connection or
cursor, a framework's. :func:`join` and :func:`join_async` find by its class's name what it is, importing no framework,
and return what can run a plan in its open transaction.

A *plan* is a generator. It yields queries and is sent their rows, so the logic of an enqueue exists once, for
synchronous and asynchronous code and for every driver: see :mod:`.contract`. :mod:`.rendering` writes a statement in
the handle's parameter style; :mod:`.alchemy`, :mod:`.drivers` and :mod:`.frameworks` send it.

Nothing here commits, opens a connection that the handle would not open by itself, or flushes pending objects.
"""

from sqla_neoq.handles.contract import Configured, Plan, Query, Steps, configure
from sqla_neoq.handles.resolving import AsyncHandle, Handle, join, join_async

__all__ = [
    "AsyncHandle",
    "Configured",
    "Handle",
    "Plan",
    "Query",
    "Steps",
    "configure",
    "join",
    "join_async",
]
