"""The scenarios, by family; a module that is imported here declares its own."""

from chaos.scenario import Registry

SCENARIOS = Registry()

from chaos.scenarios import (  # noqa: E402 - each needs the registry
    clocks,
    database,
    jobs,
    listening,
    network,
    pooler,
    roundtrips,
    rows,
    workers,
)

__all__ = ["SCENARIOS", "clocks", "database", "jobs", "listening", "network", "pooler", "roundtrips", "rows", "workers"]
