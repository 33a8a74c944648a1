"""The rows of ``docs/reference/neoq.md`` as tests, by subject; ``tests/test_conformance.py`` is where to begin."""
