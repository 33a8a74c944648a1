"""``python -m sqla_neoq.run MODULE…``: the ``run`` command of :mod:`sqla_neoq.cli`, and nothing else.

Nothing imports this module: a package that had imported it before ``python -m`` runs it would run it twice.
"""

from sqla_neoq.cli import run

if __name__ == "__main__":
    run(prog_name="python -m sqla_neoq.run")
