"""Every handle that can be passed as ``session``, behind one face, so that one suite holds for all of them.

Each kind opens a :class:`Caller` at a database's URL. The suite is written as coroutines: those of asynchronous kinds
run on an event loop, those of synchronous ones are driven without one, for Django refuses to work inside of one.
"""

from support.handles import alchemy, drivers, frameworks
from support.handles.face import KINDS, Undo

__all__ = ["KINDS", "Undo", "alchemy", "drivers", "frameworks"]
