"""Plans: what several schemas say about one value, merged, and as many as a document may need."""

import pytest

from operations.schema import Schema
from operations.schema.planning.plans import Planner
from operations.schema.reading.checking import Checker


def test_schemas_that_only_refer_to_the_same_place_have_the_same_plan() -> None:
    planner = Planner(
        Checker(
            {
                "properties": {
                    "a": {"$ref": "#/$defs/text"},
                    "b": {"$ref": "#/$defs/again", "description": "the same by another way"},
                    "c": {"$ref": "#/$defs/text", "default": "x"},
                },
                "$defs": {"text": {"type": "string"}, "again": {"$ref": "#/$defs/text"}},
            }
        )
    )
    root = planner.plan((planner.document.root,))
    first, second, third = (root.part(root.fields[name].sites) for name in ("a", "b", "c"))

    assert first is second
    assert first is not third
    assert third.default == "x"


def test_a_document_that_needs_too_many_plans_is_cast_as_far_as_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Checker, "max_plans", 2)
    nested = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "object"}}}},
    }
    schema = Schema({"type": "object", "properties": {"x": nested, "y": nested}})
    value = {"x": {"a": {"b": {}, "c": 1}, "d": 1}, "y": {"a": {"e": 1}}, "z": 1}

    assert schema.cast(value).value == {"x": {"a": {"b": {}, "c": 1}}, "y": {"a": {"e": 1}}}
