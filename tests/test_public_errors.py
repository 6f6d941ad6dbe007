import logging

import pytest

from operations import CallError, ErrorCode, map_error
from operations.front.public_errors import MAX_DETAILS, public_error


@pytest.mark.requirement("R16", "R17")
def test_an_unexpected_error_is_logged_and_callers_see_only_code_and_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = ValueError("password hunter2")

    shown = public_error(map_error(secret), "r1")

    assert shown.to_wire() == {
        "code": ErrorCode.EXECUTION_ERROR,
        "message": "The operation failed (request r1)",
        "details": {"requestId": "r1"},
    }
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "r1" in record.getMessage()


def test_an_operator_may_expose_exceptions() -> None:
    shown = public_error(map_error(KeyError("boom")), "r1", expose=True)

    assert shown.message == "KeyError: 'boom'"


@pytest.mark.requirement("R17")
def test_errors_for_the_caller_pass(caplog: pytest.LogCaptureFixture) -> None:
    error = CallError("TASK_CLOSED", "closed", {"id": 7}, retryable=True)

    assert public_error(error, "r1").to_wire() == error.to_wire()
    plain = CallError("TASK_CLOSED", "closed")
    assert public_error(plain, "r1") is plain
    assert not caplog.records


@pytest.mark.requirement("R17")
def test_a_response_of_an_upstream_is_shown_without_credentials() -> None:
    details = {"statusCode": 500, "headers": {"Set-Cookie": "s=1", "x-a": "1"}, "body": {"why": 1}}

    shown = public_error(CallError(ErrorCode.EXECUTION_ERROR, "HTTP 500", details), "r1")

    assert shown.details == {"statusCode": 500, "headers": {"x-a": "1"}, "body": {"why": 1}}
    assert details["headers"] == {"Set-Cookie": "s=1", "x-a": "1"}


@pytest.mark.parametrize("details", ["x" * MAX_DETAILS, object()], ids=["long", "not JSON"])
def test_details_that_cannot_be_shown_are_marked(details: object) -> None:
    assert "omitted" in public_error(CallError("X", "y", details), "r1").details
