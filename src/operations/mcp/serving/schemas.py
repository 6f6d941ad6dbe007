"""An operation's schemas as a tool may carry them.

Rule 1: what is listed never says more than the operation's own schema; it may say less.
Rule 2: definitions nobody refers to are left out, and beyond a budget those farthest from the root become `{}`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, cast

import msgspec

from operations._json import object_of, unescape
from operations._references import objects_in
from operations.mcp.restoring import DEFINITIONS, RESULT, moved
from operations.types import JSONObject, JSONSchema

_Place: TypeAlias = tuple[str, str]
"""A definition: the keyword it stands under, and its name."""

WRAPPED: Final = "x-fastmcp-wrap-result"
"""Marks the output schema of a tool whose results are boxed: FastMCP's client unwraps `result`."""


def is_object(document: JSONSchema) -> bool:
    """Whether a schema surely admits objects alone."""
    return _surely(document, document, lambda schema: schema.get("type") == "object")


def is_never_null(document: JSONSchema) -> bool:
    """Whether a schema surely does not admit null."""

    def says_so(schema: JSONObject) -> bool:
        for keyword, null in (("type", "null"), ("enum", None)):
            values = schema.get(keyword)
            if values is not None:
                values = cast("Sequence[Any]", values if isinstance(values, list) else [values])
                if null not in values:
                    return True
        return schema.get("const") is not None

    return _surely(document, document, says_so)


def _surely(schema: Any, root: Any, says_so: Callable[[JSONObject], bool], depth: int = 8) -> bool:
    """Whether a schema, or what it is made of, says so. Looks at words alone: compiling takes long."""
    if not isinstance(schema, dict) or not depth:
        return False
    schema = cast("JSONObject", schema)

    def made_of(keyword: str, judge: Callable[[Iterator[bool]], bool]) -> bool:
        members = schema.get(keyword)
        return (
            isinstance(members, list)
            and members != []
            and judge(
                _surely(member, root, says_so, depth - 1)
                for member in cast("Sequence[Any]", members)
            )
        )

    place = _place(schema.get("$ref"))
    return (
        says_so(schema)
        or (place is not None and _surely(_definition(root, place), root, says_so, depth - 1))
        or made_of("allOf", any)
        or made_of("anyOf", all)
        or made_of("oneOf", all)
    )


def is_binary(document: JSONSchema) -> bool:
    """Whether a schema describes bytes."""
    return isinstance(document, dict) and document.get("contentEncoding") == "base64"


def as_object(document: JSONSchema) -> JSONObject:
    """A schema that admits objects alone, saying so at its root, where clients look for it."""
    if isinstance(document, dict) and document.get("type") == "object":
        return document
    return {"type": "object", **cast("JSONObject", document)}


def with_alternative(document: JSONSchema) -> JSONObject:
    """Return a schema that describes values of `document` and accepts any other value of its type too.

    Shared definitions stay at the root: some clients follow references through objects only.
    """
    place = "#/anyOf/0"
    exact = moved(document, place)
    if not isinstance(exact, dict):
        return {"anyOf": [exact, {}]}
    definitions: JSONObject = {}
    for keyword in DEFINITIONS:
        if keyword in exact:
            exact = cast("JSONObject", moved(exact, f"#/{keyword}", f"{place}/{keyword}"))
            definitions[keyword] = exact.pop(keyword)
    schema: JSONObject = {"anyOf": [exact, {}], **definitions}
    if exact.get(WRAPPED):
        # FastMCP's client looks for both at the root.
        schema = {"properties": {RESULT: {}}, WRAPPED: True, **schema}
    return {"type": "object", **schema} if exact.get("type") == "object" else schema


def boxed_result(document: JSONSchema) -> JSONObject:
    """Return the schema of an object that contains a value of `document` under `result`."""
    return {**boxed(document, RESULT), WRAPPED: True}


def boxed(document: JSONSchema, key: str) -> JSONObject:
    """Return the schema of an object that contains a value of `document` under `key`."""
    inside = moved(document, f"#/properties/{key}")
    return {"type": "object", "properties": {key: inside}, "required": [key]}


def pruned(document: JSONSchema, budget: int) -> JSONSchema:
    """`document` with the definitions it uses, as many as fit into `budget` bytes of JSON."""
    if not isinstance(document, dict) or not any(key in document for key in DEFINITIONS):
        return document
    root: JSONObject = {
        key: value for key, value in document.items() if key not in DEFINITIONS or not value
    }
    kept: dict[_Place, Any] = {}
    waiting = deque(_references(root))
    while waiting:
        place = waiting.popleft()
        if place in kept:
            continue
        definition = _definition(document, place)
        if definition is None:
            continue
        budget -= len(msgspec.json.encode(definition))
        kept[place] = definition if budget >= 0 else {}
        waiting.extend(_references(kept[place]))
    for (keyword, name), definition in kept.items():
        root.setdefault(keyword, {})[name] = definition
    return root


def _references(node: Any) -> Iterator[_Place]:
    """The definitions a schema refers to, in the order of their mention."""
    for current in objects_in(node):
        place = _place(current.get("$ref"))
        if place is not None:
            yield place


def _place(reference: Any) -> _Place | None:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    keyword, _, rest = reference[2:].partition("/")
    name = rest.partition("/")[0]
    if keyword not in DEFINITIONS or not name:
        return None
    return keyword, unescape(name)


def _definition(root: Any, place: _Place) -> Any:
    keyword, name = place
    return object_of(object_of(root).get(keyword)).get(name)
