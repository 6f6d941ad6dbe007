"""Validation of a value: failures as a list, as an exception, and as text."""

import pytest

from operations.base.errors import CallError, ErrorCode
from operations.schema import (
    Schema,
    ValidationIssue,
    collect_errors,
    format_value_errors,
    validate_or_raise,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def test_errors_are_collected_from_documents_and_schemas() -> None:
    expected = [ValidationIssue("/name", "is required", "required")]

    assert collect_errors(PERSON, {}) == expected
    assert collect_errors(Schema(PERSON), {}) == expected
    assert collect_errors(PERSON, {"name": "Ada"}) == []


def test_a_valid_value_passes() -> None:
    validate_or_raise(PERSON, {"name": "Ada"})


def test_an_invalid_value_is_a_call_error_that_names_every_path() -> None:
    with pytest.raises(CallError) as caught:
        validate_or_raise(PERSON, {"age": "old"}, subject="input of people.add")

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert caught.value.message == "Invalid input of people.add: /name is required (and 1 more)"
    assert caught.value.details == {
        "errors": [
            {"path": "/name", "message": "is required", "keyword": "required"},
            {"path": "/age", "message": "must be an integer, not a string", "keyword": "type"},
        ]
    }


def test_a_value_wrong_as_a_whole_has_no_path_to_name() -> None:
    with pytest.raises(CallError, match="Invalid value: it must be an object, not null"):
        validate_or_raise(PERSON, None)


def test_errors_are_formatted_one_to_a_line() -> None:
    faults = collect_errors(PERSON, {"age": "old"})

    assert (
        format_value_errors(faults)
        == "  /name is required\n  /age must be an integer, not a string"
    )
    assert format_value_errors(collect_errors(PERSON, 1), indent="") == (
        "(the value) must be an object, not an integer"
    )
    assert format_value_errors([]) == ""


def test_names_cannot_forge_lines_of_a_log() -> None:
    faults = collect_errors({"additionalProperties": False}, {"a\nERROR: b\x1b[0m": 1})

    assert "\n" not in format_value_errors(faults)
    assert r"a\nERROR: b\x1b[0m" in format_value_errors(faults)


def test_a_misspelt_name_is_the_first_reported_issue() -> None:
    schema = {
        "type": "object",
        "required": ["due", "title"],
        "properties": {"title": {"type": "string"}, "due": {"type": "string"}},
        "additionalProperties": False,
    }
    with pytest.raises(CallError) as caught:
        validate_or_raise(schema, {"titel": "x"}, subject="input of task.create")

    message = 'Invalid input of task.create: /titel is not a known property. Did you mean "title"? (and 2 more)'
    assert caught.value.message == message
    assert [fault["path"] for fault in caught.value.details["errors"]] == [
        "/titel",
        "/due",
        "/title",
    ]
