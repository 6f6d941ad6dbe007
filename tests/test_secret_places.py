"""Which values a schema marks as secret, and how they are masked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operations.base.json.secrets import marks_secrets, masked, secret_places
from operations.base.json.values import MASK

SECRET: dict[str, Any] = {"type": "string", "format": "password"}
TOKEN = {"type": "object", "properties": {"token": SECRET, "name": {"type": "string"}}}
NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "properties": {
                "token": {"writeOnly": True},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            }
        }
    },
}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (TOKEN, {"token": "s", "name": "n"}, {"token": MASK, "name": "n"}),
        ({"writeOnly": True}, {"a": ["s"]}, MASK),
        ({"type": "object", "properties": {"a": TOKEN}}, {"a": {"token": "s"}}, {"a": {"token": MASK}}),
        ({"items": TOKEN}, [{"token": "s"}, {"name": "n"}], [{"token": MASK}, {"name": "n"}]),
        ({"prefixItems": [{}, SECRET]}, ["n", "s", "n"], ["n", MASK, "n"]),
        ({"items": [{}, SECRET]}, ["n", "s"], [MASK, MASK]),
        (
            {"properties": {"name": {}}, "additionalProperties": SECRET},
            {"name": "n", "a": "s", "b/~*": "s", "": "s"},
            {"name": "n", "a": MASK, "b/~*": MASK, "": MASK},
        ),
        ({"patternProperties": {"^t": SECRET}}, {"t": "s"}, {"t": MASK}),
        ({"unevaluatedProperties": SECRET}, {"t": "s"}, {"t": MASK}),
        ({"anyOf": [TOKEN, {"type": "string"}]}, {"token": "s"}, {"token": MASK}),
        ({"anyOf": [TOKEN, {"type": "string"}]}, "n", "n"),
        ({"oneOf": [{"type": "null"}, SECRET]}, "s", MASK),
        ({"allOf": [{"properties": {"x": SECRET}}, TOKEN]}, {"x": "s", "token": "s"}, {"x": MASK, "token": MASK}),
        ({"if": {}, "then": TOKEN}, {"token": "s"}, {"token": MASK}),
        (NODE, {"token": "s", "below": [{"token": "s", "below": [{"token": "s"}]}]},
         {"token": MASK, "below": [{"token": MASK, "below": [{"token": MASK}]}]}),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": SECRET}}, "s", MASK),
        ({"properties": {"a": {"$ref": "#missing"}}}, {"a": "s"}, {"a": MASK}),
        ({"$ref": "#"}, {"token": "n"}, {"token": "n"}),
        (TOKEN, {"token": None}, {"token": None}),
        (TOKEN, ["n"], ["n"]),
        (True, {"a": 1}, {"a": 1}),
    ],
)  # fmt: skip
def test_secrets_are_masked(schema: Any, value: Any, expected: Any) -> None:
    assert masked(value, secret_places(schema, value)) == expected


def test_the_document_itself_is_not_changed() -> None:
    value = {"token": "s", "name": ["n"]}

    masked(value, secret_places(TOKEN, value))

    assert value == {"token": "s", "name": ["n"]}


def test_a_list_of_secrets_is_one_place() -> None:
    assert secret_places({"items": TOKEN}, [{"token": "s"}] * 5) == ("/~*/token",)


@pytest.mark.parametrize(
    "value",
    [{f"k{number}": "s" for number in range(2_000)}, [{"token": "s"}] * 200_000],
    ids=["places", "work"],
)
def test_a_document_with_too_many_secrets_is_masked_as_a_whole(value: Any) -> None:
    schema = {"anyOf": [{"additionalProperties": SECRET}, {"items": TOKEN}]}

    assert masked(value, secret_places(schema, value)) == MASK


def test_a_large_document_beside_a_secret_is_not_searched() -> None:
    schema = {
        "properties": {"rows": {"type": "array", "items": {"type": "integer"}}, "token": SECRET}
    }
    value = {"rows": list(range(200_000)), "token": "s"}

    assert secret_places(schema, value) == ("/token",)


def test_schemas_without_secrets_are_known() -> None:
    assert marks_secrets(NODE)
    assert not marks_secrets({"$ref": "#", "properties": {"format": {"type": "string"}}})


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(json_values)
def test_every_value_of_a_document_can_be_masked(value: Any) -> None:
    schema: dict[str, Any] = {"additionalProperties": {"anyOf": [{"$ref": "#"}, SECRET]}}
    found = masked(value, secret_places(schema, value))

    if isinstance(value, dict):
        assert found == {key: None if item is None else MASK for key, item in value.items()}
    else:
        assert found == value


def test_a_property_with_the_name_of_all_others_is_a_property_of_its_own() -> None:
    schema = {
        "properties": {"~*": {"format": "password"}},
        "additionalProperties": {"type": "string"},
    }
    value = {"other": "shown", "~*": "hidden"}

    assert masked(value, secret_places(schema, value)) == {"other": "shown", "~*": MASK}
