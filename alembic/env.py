"""Runs the reference chain, online or with ``--sql``.

The database is ``config.attributes["connection"]`` (an Engine or a Connection), else the first of ``-x url=URL``,
``NEOQ_DATABASE_URL``, ``DATABASE_URL`` and the ini file's ``sqlalchemy.url``. ``-x schema=NAME`` (or
``config.attributes["schema"]``) puts the tables and the version table into that schema, and creates it if need be.

The version table has a name of its own, so that this chain can be run on an application's database beside the
application's chain.
"""

import os
from logging.config import fileConfig

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, MetaData, create_engine, make_url
from sqlalchemy.schema import CreateSchema

from sqla_neoq.models import Base

VERSION_TABLE = "neoq_alembic_version"

config = context.config
arguments = context.get_x_argument(as_dictionary=True)
schema = config.attributes.get("schema") or arguments.get("schema") or None


def database_url():
    """Return the URL to use, with psycopg as the driver where none is named."""
    candidates = (
        arguments.get("url"),
        os.environ.get("NEOQ_DATABASE_URL"),
        os.environ.get("DATABASE_URL"),
        config.get_main_option("sqlalchemy.url"),
    )
    raw = next((candidate for candidate in candidates if candidate), None)
    if raw is None:
        raise CommandError("no database: say -x url=postgresql://… before the command, or set NEOQ_DATABASE_URL")
    url = make_url(raw)
    return url.set(drivername="postgresql+psycopg") if url.drivername in {"postgres", "postgresql"} else url


def ours(place):
    """Return the models' tables in schema ``place``, and the filter that hides everything else from Alembic."""
    metadata = MetaData()
    for table in Base.metadata.sorted_tables:
        table.to_metadata(metadata, schema=place)

    def include_name(name, type_, parent_names):
        if type_ == "schema":
            return name == place
        if type_ == "table":
            return name.startswith("neoq_") and name != VERSION_TABLE and parent_names["schema_name"] == place
        return True

    return {"target_metadata": metadata, "include_schemas": place is not None, "include_name": include_name}


def run(place=schema, **where) -> None:
    context.configure(**where, **ours(place), version_table=VERSION_TABLE, version_table_schema=schema)
    with context.begin_transaction():
        # Commands that only look (current, check) say dont_mutate.
        if schema and not context.get_context().opts.get("dont_mutate"):
            context.execute(CreateSchema(schema, if_not_exists=True))
        context.run_migrations()


def run_online(connection) -> None:
    # Reflection calls the connection's default schema None.
    run(None if schema == connection.dialect.default_schema_name else schema, connection=connection)


# Only for the command line: a program that runs Alembic has its own logging.
if config.cmd_opts is not None and config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)

connectable = config.attributes.get("connection")
if context.is_offline_mode():
    run(url=database_url(), literal_binds=True)
elif isinstance(connectable, Connection):
    run_online(connectable)
else:
    engine = connectable if isinstance(connectable, Engine) else create_engine(database_url())
    with engine.connect() as connection:
        run_online(connection)
    if engine is not connectable:
        engine.dispose()
