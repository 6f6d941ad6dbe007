"""The quick pass: in C for plain shapes, in Python for others, with equal results."""

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operations.base.json.values import MAX_DEPTH, TOO_LONG, JSONValueError, to_json
from operations.base.work import Work
from operations.schema.casting.stripping import StrippingPass
from operations.schema.casting.structs import PlanType, Shaper
from operations.schema.casting.thorough import Pass
from operations.schema.casting.typed import NeedsRepair, TypedStrip
from operations.schema.checking import Checker
from operations.schema.plans import Planner

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x"],
}


def _strip(document: Any, value: Any, room: int = MAX_DEPTH) -> Any:
    planner = Planner(Checker(document))
    root = planner.plan((planner.document.root,))
    return StrippingPass(Pass(planner, Work()), Work()).cast(root, value, levels=room)


def _shape(document: Any) -> PlanType | None:
    planner = Planner(Checker(document))
    return Shaper(Pass(planner, Work()).default).shape(planner.plan((planner.document.root,)))


def test_a_name_that_no_struct_can_have_does_not_affect_other_types() -> None:
    planner = Planner(Checker({"$defs": {"point": POINT}}))
    shaper = Shaper(Pass(planner, Work()).default, closed=True)
    for number in range(40):
        named = {"type": "object", "properties": {f'"{number}"': {"type": "integer"}}}
        quoted = Planner(Checker(named))
        assert shaper.shape(quoted.plan((quoted.document.root,))) is None

    root = planner.document.root
    assert shaper.shape(planner.plan((planner.document.at(root, "$defs", "point"),))) is not None


def _is_shaped(document: Any) -> bool:
    return _shape(document) is not None


def _is_exact(document: Any) -> bool:
    shape = _shape(document)
    return shape is not None and shape.exact


@pytest.mark.parametrize(
    "document",
    [
        POINT,
        {"type": "array", "items": POINT},
        {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        {"type": ["object", "null"], "properties": {"a": POINT}},
        {"anyOf": [POINT, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        {
            "type": "object",
            "properties": {"not an identifier!": {"type": "string", "default": "x"}},
        },
        {"type": "object", "properties": {"a": {"enum": ["a", 1]}, "b": {"const": None}}},
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"a": {"type": "array"}}},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
    ],
)
def test_plain_shapes_are_converted_in_c(document: Any) -> None:
    assert _is_shaped(document)


@pytest.mark.parametrize(
    "document",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": False, "b": {"type": "string"}}},
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "additionalProperties": {"type": "string"},
        },
        {"type": "array", "prefixItems": [POINT]},
        {"anyOf": [POINT, {"type": "object", "properties": {"z": {"type": "null"}}}]},
        {"anyOf": [POINT, {}]},
        {"allOf": [{"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [POINT, {"type": "string"}]}]},
        {
            "type": "object",
            "if": {"required": ["a"]},
            "then": {"properties": {"a": {"type": "string"}}},
        },
        {
            "type": "object",
            "properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(300)},
            "$defs": {f"d{i}": POINT for i in range(300)},
        },
    ],
)
def test_other_shapes_have_no_type(document: Any) -> None:
    assert not _is_shaped(document)


@pytest.mark.parametrize(
    "document",
    [
        POINT,
        {**POINT, "additionalProperties": False, "x-origin": "here", "title": "Point"},
        {"type": "array", "items": POINT},
        {"type": ["array", "null"], "items": {"enum": ["a", 1, None]}},
        {"anyOf": [POINT, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#/$defs/point"}, "$defs": {"point": POINT}},
    ],
)
def test_a_type_that_expresses_its_whole_schema_is_exact(document: Any) -> None:
    assert _is_exact(document)


@pytest.mark.parametrize(
    "document",
    [
        {**POINT, "minProperties": 1},
        {"type": "array", "items": POINT, "minItems": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}},
        {"type": "array", "items": {"type": "string", "pattern": "^a"}},
        {"type": "array", "items": {"enum": [True, "a"]}},
        {"type": "array", "items": {"enum": [1.5]}},
        {"type": "array", "items": {"const": 2**70}},
        {"oneOf": [POINT, {"type": "null"}]},
        {"anyOf": [POINT, {"enum": ["none"]}]},
        {"anyOf": [{"type": "string"}, {"enum": ["a", "b"]}], "type": ["string", "null"]},
        {"type": "array", "items": {"allOf": [False], "type": "string"}},
        {
            "type": "array",
            "items": {"$ref": "#/$defs/no", "type": "string"},
            "$defs": {"no": False},
        },
        {"type": "array", "items": {"type": "string", "not": {"const": "a"}}},
        {"type": "array", "items": {"enum": []}},
    ],
)
def test_a_type_that_omits_part_of_its_schema_is_not_exact(document: Any) -> None:
    assert not _is_exact(document)


class _Text(str):
    __slots__ = ()


_odd = st.sampled_from(
    [math.nan, math.inf, -math.inf, "\ud800", "ü", _Text("a"), TOO_LONG, 2**64, True, 1.0, 3, "a", None, Decimal("1.5")]
)  # fmt: skip
_EXACT = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "size": {"type": "number"},
            "count": {"type": ["integer", "null"]},
            "kind": {"enum": ["a", 3, None], "default": "a"},
            "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "number"}]}},
        },
        "required": ["name"],
    },
}


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional=dict.fromkeys(("name", "size", "count", "kind", "more"), _odd)
            | {"tags": st.lists(_odd, max_size=2)},
        ),
        max_size=2,
    )
)
def test_values_of_an_exact_type_are_valid_and_equal_those_of_the_pass(value: Any) -> None:
    shape = _shape(_EXACT)
    assert shape is not None
    assert shape.exact
    try:
        stripped, differs = TypedStrip(shape).strip(value)
    except NeedsRepair:
        return
    assert differs is (stripped != value)
    assert Checker(_EXACT).is_valid(stripped)
    assert to_json(stripped) == stripped == _strip(_EXACT, value)


@pytest.mark.parametrize(
    ("document", "value", "expected"),
    [
        (POINT, {"x": 1, "y": 2, "z": 3}, {"x": 1, "y": 2}),
        ({"type": ["object", "integer"], "properties": {"a": {}}}, 5, 5),
        ({"type": ["object", "integer"], "properties": {"a": {}}}, {"a": 1, "b": 2}, {"a": 1}),
        ({"properties": {"a": {}}}, "text", "text"),
        ({"properties": {"a": {}}}, [1], [1]),
        ({"properties": {"a": {}}, "items": POINT}, [{"x": 1, "z": 1}], [{"x": 1}]),
        (
            {"type": "array", "prefixItems": [POINT]},
            [{"x": 1, "z": 1}, {"z": 1}],
            [{"x": 1}, {"z": 1}],
        ),
        ({"type": "array", "uniqueItems": True, "items": POINT}, [{"x": 1, "z": 1}], [{"x": 1}]),
        (
            {
                "anyOf": [
                    {"type": "object", "properties": {"a": {}}},
                    {"type": "array", "items": {"properties": {"b": {}}}},
                ]
            },
            [{"b": 1, "c": 1}],
            [{"b": 1}],
        ),
        ({"anyOf": [{}, {"type": "string"}]}, "text", "text"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "string"}}, "b": {}},
            },
            {"a": ["x"], "b": 1},
            {"a": ["x"], "b": 1},
        ),
        (
            {"type": "object", "patternProperties": {"^a": POINT}, "properties": {"b": {}}},
            {"a1": {"x": 1, "z": 1}, "b": 1, "c": 1},
            {"b": 1, "a1": {"x": 1}},
        ),
    ],
)
def test_a_value_that_needs_only_stripping_is_stripped(
    document: Any, value: Any, expected: Any
) -> None:
    assert _strip(document, value) == expected


@pytest.mark.parametrize(
    ("document", "value"),
    [
        (POINT, {"x": "1"}),
        (POINT, {"x": 1.0}),
        (POINT, 5),
        (POINT, [1]),
        ({"type": "integer"}, "1"),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2.0]),
        ({"type": ["object", "integer"], "properties": {"a": {}}}, "text"),
        ({"type": "object", "properties": {"a": {}}}, {1: 2}),
        ({"type": "object", "additionalProperties": {"items": {}}}, {1: 2}),
        ({"anyOf": [POINT, {"type": "object", "required": ["q"]}]}, {"y": 1}),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, 5),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, [5]),
    ],
)
def test_a_value_that_needs_conversion_is_left_to_the_thorough_pass(
    document: Any, value: Any
) -> None:
    with pytest.raises(NeedsRepair):
        _strip(document, value)


@pytest.mark.parametrize(
    ("document", "value"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}},
            {"a": {"b": 1}},
        ),
        ({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}, [["a"]]),
        ({"type": "array", "items": {"type": "array", "items": POINT}}, [[]]),
        (
            {
                "type": "array",
                "items": {"type": "array", "items": {"type": "object", "properties": {"b": {}}}},
            },
            [[{}]],
        ),
        ({"type": "array", "prefixItems": [{"type": "array", "prefixItems": [{}]}]}, [[1]]),
    ],
)
def test_a_deep_value_is_rejected(document: Any, value: Any) -> None:
    with pytest.raises(JSONValueError, match="deeply"):
        _strip(document, value, room=1)


def test_undeclared_names_are_cached_up_to_a_limit() -> None:
    document = {
        "type": "object",
        "patternProperties": {"^a": {"type": "object", "properties": {"x": {}}}},
    }
    value = {f"a{i}": {"x": 1, "y": 1} for i in range(1_500)} | {"b": 1}

    assert _strip(document, value) == {f"a{i}": {"x": 1} for i in range(1_500)} | {"b": 1}


NESTED: Any = []
for _ in range(31):
    NESTED = [NESTED]
FREE = {"type": "array", "items": {"type": "object", "properties": {"free": {}}}}


@pytest.mark.parametrize(
    "free", [1, 0.5, "\u00e4", None, True, [], {"a": [{"b": None}]}, [1, [2.5, {}]], NESTED]
)
def test_a_part_without_a_schema_is_copied_in_c(free: Any) -> None:
    shape = _shape(FREE)
    assert shape is not None
    value = [{"free": free, "other": 1}]
    stripped, differs = TypedStrip(shape).strip(value)

    assert (stripped, differs) == ([{"free": free}], True)
    assert not isinstance(free, (dict, list)) or stripped[0]["free"] is not free


@pytest.mark.parametrize(
    "free",
    [
        b"bytes", (1, 2), {1: 2}, {"a": b""}, [math.nan], math.inf, [NESTED], Decimal(1), {"a": {1, 2}},
        datetime(2026, 1, 1, tzinfo=UTC), "\ud800", [2**70],
    ],
)  # fmt: skip
def test_a_part_without_a_schema_that_may_not_be_json_is_not_copied_in_c(free: Any) -> None:
    shape = _shape(FREE)
    assert shape is not None
    with pytest.raises(NeedsRepair):
        TypedStrip(shape).strip([{"free": free}])


def test_a_value_with_a_part_without_a_schema_is_not_known_to_be_clean() -> None:
    planner = Planner(Checker(FREE))
    root = planner.plan((planner.document.root,))
    strip = StrippingPass(Pass(planner, Work()), Work())
    assert strip.typed(root) is not None
    assert strip.check_text(root) is None
