import pickle
from typing import Any

import msgspec
import pytest

from operations import CallError, ErrorCode, ErrorDefinition, MissingExtraError, map_error
from operations.errors import HTTP_STATUS, timed_out


def test_an_error_goes_over_the_wire_and_back() -> None:
    error = CallError("TASK_CLOSED", "it is closed", {"id": 7, "tags": {"a"}}, retryable=True)

    wire = error.to_wire()
    back = CallError.from_wire(wire)

    assert wire == {
        "code": "TASK_CLOSED",
        "message": "it is closed",
        "details": {"id": 7, "tags": ["a"]},
        "retryable": True,
    }
    assert (back.code, back.message, back.retryable) == ("TASK_CLOSED", "it is closed", True)


def test_details_that_are_not_json_do_not_stop_the_error() -> None:
    wire = CallError("X", "y", {"socket": object()}).to_wire()

    assert "omitted" in wire["details"]


def test_unavailable_and_unapproved_calls_are_retryable_by_default() -> None:
    assert CallError(ErrorCode.UNAVAILABLE, "").retryable
    assert CallError(ErrorCode.APPROVAL_REQUIRED, "").to_wire()["retryable"]
    assert not CallError(ErrorCode.UNAVAILABLE, "", retryable=False).retryable
    assert not CallError(ErrorCode.TIMEOUT, "").retryable


@pytest.mark.parametrize("wire", [{}, {"code": 3, "message": []}, {"code": ""}])
def test_a_mangled_error_is_unknown(wire: dict[str, Any]) -> None:
    assert CallError.from_wire(wire).code == ErrorCode.UNKNOWN_ERROR


def test_an_error_survives_pickling_and_shows_itself() -> None:
    error = CallError("X", "y", [1])
    error.unexpected = True

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert (copy.code, copy.message, copy.details, copy.unexpected) == ("X", "y", [1], True)
    assert repr(error) == "CallError('X', 'y')"
    assert str(error) == "X: y"


DECLARED = [ErrorDefinition("GONE"), ErrorDefinition("GONE_FOR_EVER")]


@pytest.mark.parametrize(
    ("exception", "code", "message"),
    [
        (ValueError("GONE"), "GONE", "GONE"),
        (ValueError("GONE: since monday"), "GONE", "since monday"),
        (ValueError("GONE:"), "GONE", "GONE"),
        (ValueError("GONE://x refused"), "GONE", "GONE://x refused"),
        (ValueError("GONE_FOR_EVER: x"), "GONE_FOR_EVER", "x"),
        (ValueError("GONE fishing"), ErrorCode.EXECUTION_ERROR, "ValueError: GONE fishing"),
        (ValueError("OTHER: x"), ErrorCode.EXECUTION_ERROR, "ValueError: OTHER: x"),
        (ValueError(), ErrorCode.EXECUTION_ERROR, "ValueError"),
        (KeyError("secret"), ErrorCode.EXECUTION_ERROR, "KeyError: 'secret'"),
    ],
)
def test_a_declared_code_is_recognised(exception: Exception, code: str, message: str) -> None:
    error = map_error(exception, DECLARED)

    assert (error.code, error.message) == (code, message)
    assert error.unexpected is (code == ErrorCode.EXECUTION_ERROR)


def test_an_exception_that_cannot_be_printed_is_mapped_all_the_same() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert map_error(MuteError()).message == "MuteError"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2499, "within 0.25 s"),
        (2.4998, "within 2.5 s"),
        (29.9991, "within 30 s"),
        (600, "within 600 s"),
        (-1, "within 0 s"),
        (None, "in time"),
    ],
)
def test_a_timeout_names_the_operation_and_the_limit(seconds: float | None, words: str) -> None:
    error = timed_out("task.run", seconds)

    assert (error.code, error.message) == (ErrorCode.TIMEOUT, f"task.run did not finish {words}")


def test_a_call_error_is_mapped_to_itself() -> None:
    error = CallError("X", "y")

    assert map_error(error) is error


def test_a_missing_extra_is_reported_with_its_install_command() -> None:
    error = MissingExtraError("operations.pubsub.redis", extra="redis")

    assert isinstance(error, ImportError)
    assert str(error) == (
        "operations.pubsub.redis needs the 'redis' extra: pip install 'alkdev-operations[redis]'"
    )


def test_the_status_table_is_the_contracts() -> None:
    assert HTTP_STATUS == {
        "OPERATION_NOT_FOUND": 404,
        "ACCESS_DENIED": 403,
        "VALIDATION_ERROR": 422,
        "TIMEOUT": 504,
        "UNAVAILABLE": 503,
        "RESOURCE_EXHAUSTED": 429,
        "APPROVAL_REQUIRED": 428,
    }


@pytest.mark.parametrize("message", ["no file \udcff", ValueError("an object")])
def test_every_message_can_be_written(message: Any) -> None:
    assert msgspec.json.encode(CallError("X", message).to_wire())
