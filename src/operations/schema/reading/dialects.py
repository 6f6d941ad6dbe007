"""The dialects of JSON Schema that are understood, and where each keyword holds further schemas.

Rule 1: a document is read in the dialect its `$schema` names, otherwise as 2020-12.
Rule 2: a nameless document that writes tuples the old way (`items` is a list) is read as 2019-09.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import jsonschema_rs

from operations._json import is_list, is_object
from operations.types import JSONObject, JSONSchema

IN_PLACE = ("not", "if", "then", "else")
"""Keywords whose one schema applies to the same value."""

IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
IN_PLACE_MAPS = ("dependentSchemas", "dependencies")

PARTS = (
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
)
"""Keywords whose one schema applies to parts of the value."""

PART_LISTS = ("prefixItems", "items")
PART_MAPS = ("properties", "patternProperties")

DEFINITIONS = ("$defs", "definitions")
"""Keywords that only keep schemas for others to refer to."""

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


_ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "$vocabulary", "components",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
    "discriminator", "example", "examples", "externalDocs", "format", "id", "nullable", "readOnly", "title",
    "writeOnly", "xml",
})  # fmt: skip


def is_annotation(keyword: str) -> bool:
    """Whether `keyword` says nothing about which values are valid."""
    return keyword in _ANNOTATIONS or keyword.startswith("x-")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one revision of JSON Schema is read."""

    validator: type[jsonschema_rs.Validator]
    draft: int
    id_keyword: str = "$id"

    ref_stands_alone: bool = False
    """Whether everything beside a `$ref` is ignored (up to draft 7)."""

    ignored: frozenset[str] = frozenset()
    """Keywords of other dialects, which mean nothing in this one."""


_SINCE_2020 = frozenset({"$dynamicRef", "prefixItems"})
_SINCE_2019 = _SINCE_2020 | {
    "$recursiveRef", "dependentRequired", "dependentSchemas", "maxContains", "minContains", "unevaluatedItems",
    "unevaluatedProperties",
}  # fmt: skip
_SINCE_7 = _SINCE_2019 | {"else", "if", "then"}
_SINCE_6 = _SINCE_7 | {"const", "contains", "propertyNames"}

DRAFT_2020_12 = Dialect(
    jsonschema_rs.Draft202012Validator,
    jsonschema_rs.Draft202012,
    ignored=frozenset({"$recursiveRef", "additionalItems"}),
)
DRAFT_2019_09 = Dialect(
    jsonschema_rs.Draft201909Validator, jsonschema_rs.Draft201909, ignored=_SINCE_2020
)

_NAMED = {
    "json-schema.org/draft/2020-12/schema": DRAFT_2020_12,
    "json-schema.org/draft/2019-09/schema": DRAFT_2019_09,
    "json-schema.org/draft-07/schema": Dialect(
        jsonschema_rs.Draft7Validator,
        jsonschema_rs.Draft7,
        ref_stands_alone=True,
        ignored=_SINCE_2019,
    ),
    "json-schema.org/draft-06/schema": Dialect(
        jsonschema_rs.Draft6Validator,
        jsonschema_rs.Draft6,
        ref_stands_alone=True,
        ignored=_SINCE_7,
    ),
    "json-schema.org/draft-04/schema": Dialect(
        jsonschema_rs.Draft4Validator,
        jsonschema_rs.Draft4,
        id_keyword="id",
        ref_stands_alone=True,
        ignored=_SINCE_6,
    ),
}


def named_dialect(document: JSONSchema) -> Dialect | None:
    """The dialect `document` names; None where it names none, or one nobody here knows."""
    if isinstance(document, bool):
        return None
    name = document.get("$schema")
    if not isinstance(name, str):
        return None
    return _NAMED.get(name.split("://", 1)[-1].rstrip("#"))


def item_keywords(schema: JSONObject) -> tuple[str, str]:
    """The keywords for the first items and for the rest; up to 2019-09 they had other names."""
    if isinstance(schema.get("items"), list):
        return "items", "additionalItems"
    return "prefixItems", "items"


def subschemas(schema: JSONObject) -> Iterator[tuple[str, str | int | None, JSONSchema]]:
    """Every schema directly inside `schema`: the keyword that holds it, its name or place there if it has one, itself.

    What has the wrong shape is passed over: the meta-schema reports it.
    """
    for keyword, held in schema.items():
        shapes = _HOLDERS.get(keyword)
        if shapes is None:
            continue
        if is_list(held):
            if "list" in shapes:
                for index, member in enumerate(held):
                    if _is_schema(member):
                        yield keyword, index, member
        elif "one" in shapes:
            if _is_schema(held):
                yield keyword, None, held
        elif is_object(held):
            for name, member in held.items():
                if _is_schema(member):
                    yield keyword, name, member


def _is_schema(value: Any) -> TypeGuard[JSONSchema]:
    return isinstance(value, (dict, bool))


_HOLDERS = {
    **dict.fromkeys((*IN_PLACE, *PARTS), frozenset({"one"})),
    **dict.fromkeys((*IN_PLACE_LISTS, *PART_LISTS), frozenset({"list"})),
    **dict.fromkeys((*IN_PLACE_MAPS, *PART_MAPS, *DEFINITIONS), frozenset({"map"})),
    "items": frozenset({"one", "list"}),
}
