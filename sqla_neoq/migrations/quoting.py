"""Identifiers and literals in DDL: the one place where a name is pasted into SQL."""


def quote(name: str) -> str:
    """Quote an identifier for PostgreSQL."""
    if not name or "\x00" in name:
        raise ValueError(f"schema={name!r}: a schema's name is not empty and has no NUL characters")
    return '"' + name.replace('"', '""') + '"'


def qualifier(schema: str | None) -> str:
    """Return ``"schema".`` to put before a table's name, or nothing when the search_path decides."""
    return "" if schema is None else f"{quote(schema)}."


def literal(text: str) -> str:
    """Write a text as a literal that means the same whatever the session's ``standard_conforming_strings``."""
    tag = "$neoq"
    while tag in text:
        tag += "_"
    return f"{tag}${text}{tag}$"
