"""The other job queues on PostgreSQL, beside this one: the same work, definitions, server and hour for each.

``python -m benchmarks.peers`` measures; ``--help`` says what it can be asked for.

===================  ================================================================================================
:mod:`.catalogue`    who is compared: versions, the interpreter each needs, settings, and when one of its jobs is left
:mod:`.adapters`     a module for each: how its public API installs, enqueues and works
:mod:`.inside`       what runs in a peer's own interpreter, with nothing of ours but its adapter
:mod:`.places`       a throw-away venv and a database for each
:mod:`.scenarios`    the measurements, from outside
:mod:`.report`       the table and the JSON
===================  ================================================================================================

The peers are no dependencies: each is installed, in the version pinned here, into a venv under ``.bench/``.
"""
