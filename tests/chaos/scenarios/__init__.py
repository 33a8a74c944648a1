"""The scenarios, by family; a module that is imported here declares its own."""

from chaos.scenario import Registry

SCENARIOS = Registry()

from chaos.scenarios import database, jobs, listening, network, roundtrips, workers  # noqa: E402, F401 - each needs the registry
