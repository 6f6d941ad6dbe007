"""Outcomes of steps and runs: how errors are stored, and read again."""

from typing import Any

import msgspec

from operations.base.errors import CallError, ErrorCode, map_error
from operations.base.json.values import JSONValueError
from operations.contract.specs import Operation
from operations.registry.runs import RunStatus
from operations.runs.records import End, Step
from operations.runs.secrecy import error_places, error_with_places


def failed(error: CallError) -> End:
    """Return the end of a run that failed."""
    return End(RunStatus.FAILED, error=error_wire(error))


def outcome_unknown(step: Step) -> CallError:
    """Return the error of a run with a call that was begun, may run only once, and has no recorded outcome."""
    message = (
        f"{step.operation} was begun by a process that is gone, and may run only once: find out whether it ran, and "
        "decide with retry"
    )
    details = {"operation": step.operation, "step": step.name, "begun": step.begun}
    return CallError(ErrorCode.OUTCOME_UNKNOWN, message, details)


def described(name: str, error: Exception) -> CallError:
    """Return the error of a function that is a step."""
    if isinstance(error, JSONValueError):
        return CallError(
            ErrorCode.EXECUTION_ERROR, f"The step {name} returned a value that is not JSON: {error}"
        )
    return map_error(error)


def error_wire(error: CallError) -> dict[str, Any]:
    """Return an error as it is stored."""
    wire = error.to_wire()
    if error.unexpected:
        wire["unexpected"] = True
    return wire


def error_bytes(error: CallError, operation: Operation | None = None) -> bytes:
    """Return the error of a step as it is stored, with the places of its secrets."""
    wire = error_with_places(error_wire(error), error_places(operation, error))
    if error.operation_id is not None:
        wire["operation"] = error.operation_id
    return msgspec.json.encode(wire)


def recorded_value(step: Step) -> Any:
    """Return the recorded result of a function; raise its recorded error."""
    if step.error is not None:
        raise recorded_error(step.error)
    return msgspec.json.decode(step.result or b"null")


def recorded_error(data: bytes) -> CallError:
    """Return the error of a step from its stored form."""
    wire = msgspec.json.decode(data)
    error = CallError.from_wire(wire)
    error.unexpected = wire.get("unexpected") is True
    error.operation_id = wire.get("operation")
    return error
