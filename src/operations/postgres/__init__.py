"""PostgreSQL: the journal of runs for several machines."""

from importlib.util import find_spec

from operations.base.errors import MissingExtraError

if find_spec("psycopg") is None:
    raise MissingExtraError("operations.postgres", extra="postgres")

from operations.postgres.journal import PostgresConnection, PostgresDatabase

__all__ = ["PostgresConnection", "PostgresDatabase"]
