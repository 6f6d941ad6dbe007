"""PostgreSQL: the journal of runs, and the state of hubs, for several machines."""

from importlib.util import find_spec

from operations.base.errors import MissingExtraError

if find_spec("psycopg") is None:
    raise MissingExtraError("operations.postgres", extra="postgres")

from operations.postgres.journal import PostgresConnection, PostgresDatabase

__all__ = ["PostgresConnection", "PostgresDatabase"]
