"""Django migrations made from the numbered steps of :mod:`sqla_neoq.migrations`, one each."""
