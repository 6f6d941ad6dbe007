"""What the exit code of a command means."""

from enum import IntEnum

from operations.errors import ErrorCode


class ExitCode(IntEnum):
    """How a command ended; scripts may rely on these numbers."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 3
    NOT_FOUND = 4
    DENIED = 5
    INVALID = 6
    TIMED_OUT = 7
    UNAVAILABLE = 8
    INTERRUPTED = 130


_BY_ERROR: dict[str, ExitCode] = {
    ErrorCode.OPERATION_NOT_FOUND: ExitCode.NOT_FOUND,
    ErrorCode.ACCESS_DENIED: ExitCode.DENIED,
    ErrorCode.VALIDATION_ERROR: ExitCode.INVALID,
    ErrorCode.TIMEOUT: ExitCode.TIMED_OUT,
    ErrorCode.UNAVAILABLE: ExitCode.UNAVAILABLE,
    ErrorCode.ABORTED: ExitCode.INTERRUPTED,
}


def exit_code_of(code: str) -> ExitCode:
    """The exit code for an error's code; a domain code is a failure like any other."""
    return _BY_ERROR.get(code, ExitCode.FAILED)
