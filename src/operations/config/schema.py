"""The JSON Schema of `operations.toml`, made from its dataclasses: for editors, and for checking."""

from collections.abc import Iterable
from functools import cache
from typing import Any, cast

from operations._derive import file_class
from operations.config.model import Config
from operations.schema import Schema, schema_for
from operations.types import JSONObject

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema(tables: Iterable[str] | None = None) -> Schema:
    """Return the schema of a file; with `tables`, of one that has only these.

    The tables that are read into classes of the library import those: a file without them need not wait.
    """
    return _schema(None if tables is None else frozenset(tables))


@cache
def _schema(tables: frozenset[str] | None) -> Schema:
    document = _without_null(schema_for(file_class(Config, tables)).document)
    return Schema({"$schema": _DIALECT, **document, "title": "operations.toml"})


def _without_null(schema: Any) -> Any:
    """`schema` without the alternative that TOML cannot write; what may be null may be left out."""
    if isinstance(schema, list):
        items: list[Any] = schema  # pyright: ignore[reportUnknownVariableType]
        return [_without_null(item) for item in items]
    if not isinstance(schema, dict):
        return schema
    node: JSONObject = {
        key: _without_null(value)
        for key, value in cast("JSONObject", schema).items()
        if not (key == "default" and value is None)
    }
    options: list[Any] = [item for item in node.get("anyOf", ()) if item != {"type": "null"}]
    if len(options) == 1:
        del node["anyOf"]
        return options[0] | node
    if options:
        node["anyOf"] = options
    return node
