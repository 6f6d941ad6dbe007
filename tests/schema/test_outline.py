"""The outline of a schema that is not valid, as some MCP servers list them: `null` for an empty list or object."""

from typing import Any

import pytest

from operations.schema.outline import Outline


@pytest.mark.requirement("R25")
@pytest.mark.parametrize("value", [None, 5, True, "x", [5], [None], {"a": 5}], ids=repr)
@pytest.mark.parametrize(
    "keyword", ["type", "properties", "required", "enum", "anyOf", "oneOf", "allOf", "items"]
)
def test_a_malformed_keyword_is_not_described(keyword: str, value: Any) -> None:
    outline = Outline({"type": "object", "properties": {"a": {"type": "string"}}, keyword: value})

    for place in (outline, outline.items, *outline.properties.values(), *outline.members):
        texts = [place.kind, place.limits, place.description, *place.types, *place.required]
        assert all(isinstance(text, str) for text in texts)
        assert isinstance(place.choices, list)
