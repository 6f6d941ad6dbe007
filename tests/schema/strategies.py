"""Random JSON, random schemas, and values that are similar to valid values of them."""

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "c", "kind")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.sampled_from(["", "a", "bb", "ccc", "42", "1.5", "true", "null", "ü"])
)

json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*NAMES, "x"]), inner, max_size=5)
    ),
    max_leaves=12,
)


def _with_default(schema: dict[str, Any], default: Any) -> dict[str, Any]:
    return {**schema, "default": default}


_strings = st.builds(lambda least: {"type": "string", "minLength": least}, st.integers(0, 3))
_numbers = st.builds(
    lambda kind, low: {"type": kind, "minimum": low},
    st.sampled_from(["integer", "number"]),
    st.integers(-2, 5),
)
_constants = st.sampled_from(
    [
        {"const": "a"},
        {"const": 1},
        {"const": None},
        {"enum": ["a", "bb"]},
        {"enum": [3, "x", False]},
    ]
)
_leaves: st.SearchStrategy[Any] = (
    st.sampled_from([{"type": name} for name in ("string", "number", "integer", "boolean", "null")])
    | st.sampled_from([{}, {"type": ["string", "null"]}, {"type": ["integer", "boolean"]}])
    | _strings
    | _numbers
    | _constants
    | st.just({"type": "string", "default": "d"})
    | st.just({"type": "integer", "default": 7})
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    extra = draw(st.sampled_from([None, True, False]) | inner)
    if extra is not None:
        schema["additionalProperties"] = extra
    return schema


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    schema: dict[str, Any] = {"type": "array", "minItems": least}
    if draw(st.booleans()):
        schema["maxItems"] = least + draw(st.integers(0, 2))
    if draw(st.booleans()):
        first = draw(st.lists(inner, min_size=1, max_size=2))
        schema["prefixItems"] = first
        if draw(st.booleans()) and least <= len(first):
            schema["items"] = False
            return schema
    schema["items"] = draw(inner)
    return schema


@st.composite
def _intersections(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Schemas of objects with different properties, which can be satisfied together."""
    names = draw(st.permutations(NAMES))
    members = [
        {
            "type": "object",
            "properties": {name: draw(inner)},
            "required": draw(st.sampled_from([[name], []])),
        }
        for name in names[: draw(st.integers(1, 3))]
    ]
    return {"allOf": members}


def _grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        _objects(inner)
        | _arrays(inner)
        | _intersections(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda members: {"anyOf": members})
        | st.builds(_with_default, _objects(inner), st.just({}))
        | st.just({"$ref": "#/$defs/node"})
    )


_NODE = {
    "type": "object",
    "properties": {"kind": {"type": "string"}, "a": {"$ref": "#/$defs/node"}},
    "required": ["kind"],
}


def _document(schema: Any) -> dict[str, Any]:
    return {**schema, "$defs": {"node": _NODE}}


plain_schemas: st.SearchStrategy[Any] = st.recursive(_leaves, _grow, max_leaves=8).map(_document)
"""Schemas of the keywords that casting has rules for. All of them can be satisfied."""

_odd_keywords: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "not": _leaves,
        "maximum": st.integers(-1, 3),
        "maxLength": st.integers(0, 2),
        "pattern": st.sampled_from(["^a", "b$", "^[0-9]+$"]),
        "multipleOf": st.sampled_from([2, 0.5]),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
        "uniqueItems": st.booleans(),
        "contains": _leaves,
        "propertyNames": st.sampled_from([{"maxLength": 1}, {"pattern": "^[ab]"}]),
        "patternProperties": st.fixed_dictionaries({"^a": _leaves}),
        "dependentRequired": st.just({"a": ["b"]}),
        "dependentSchemas": st.fixed_dictionaries({"b": _objects(_leaves)}),
        "unevaluatedProperties": st.booleans(),
        "if": _objects(_leaves),
        "then": _objects(_leaves),
        "else": _objects(_leaves),
        "oneOf": st.lists(_objects(_leaves) | _leaves, min_size=1, max_size=3),
        "default": json_values,
    },
)


def _grow_oddly(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda schema, odd: {**schema, **odd}, _grow(inner), _odd_keywords)


any_schemas: st.SearchStrategy[Any] = st.recursive(_leaves, _grow_oddly, max_leaves=6).map(
    _document
)
"""Schemas of all kinds of keywords. Some cannot be satisfied, and some defaults are wrong."""
