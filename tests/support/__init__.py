"""What the tests share: their PostgreSQL, its databases, child processes, and how to wait for any of these."""

from support.processes import Process
from support.waiting import eventually

__all__ = ["Process", "eventually"]
