"""Options of every command, and exit codes.

Rule 1: a command raises an error; here it becomes a message for a person, or JSON for a script, and an exit code.
Rule 2: a traceback is printed only with --verbose.
"""

import logging
import shlex
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

from cyclopts import Parameter

from operations.cli.render import Screen
from operations.config import ConfigError, ConfigFile, enforce_trusted, find_config, load_config
from operations.errors import CallError, ErrorCode, OperationsError, TransportError


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
    NEEDS_APPROVAL = 9
    INTERRUPTED = 130


_BY_ERROR: dict[str, ExitCode] = {
    ErrorCode.OPERATION_NOT_FOUND: ExitCode.NOT_FOUND,
    ErrorCode.ACCESS_DENIED: ExitCode.DENIED,
    ErrorCode.VALIDATION_ERROR: ExitCode.INVALID,
    ErrorCode.TIMEOUT: ExitCode.TIMED_OUT,
    ErrorCode.UNAVAILABLE: ExitCode.UNAVAILABLE,
    ErrorCode.APPROVAL_REQUIRED: ExitCode.NEEDS_APPROVAL,
    ErrorCode.ABORTED: ExitCode.INTERRUPTED,
}


def exit_code_of(code: str) -> ExitCode:
    """The exit code for an error's code; a domain code is a failure like any other."""
    return _BY_ERROR.get(code, ExitCode.FAILED)


P = ParamSpec("P")


@Parameter(name="*", group="For every command")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command.

    Attributes:
        config: The config file; by default the nearest operations.toml.
        json: Print JSON, for scripts.
        verbose: Say more, and show tracebacks.
        trust: Use the config even if another user owns it; it can run programs as you.
    """

    config: Annotated[Path | None, Parameter(alias="-c")] = None
    json: Annotated[bool, Parameter(alias="-j", negative="")] = False
    verbose: Annotated[bool, Parameter(alias="-v", negative="")] = False
    trust: Annotated[bool, Parameter(negative="")] = False

    @property
    def hints(self) -> str:
        """The options with which a suggested command finds the same config, with a space before them."""
        return "" if self.config is None else f" --config {shlex.quote(str(self.config))}"

    def screen(self) -> Screen:
        """Return the screen for results and errors."""
        return Screen(json=self.json)

    def load(self, *, required: bool = True) -> ConfigFile:
        """Return the config of this command.

        Raises:
            ConfigError: If it is wrong; missing, and `required`; or found, not named, and another user's.
        """
        path = self.config or find_config(Path.cwd())
        if path is None and not required:
            return ConfigFile()
        if path is not None and self.config is None and not self.trust:
            enforce_trusted(path)
        return load_config(path or Path("operations.toml"))


DEFAULTS = Common()


def command(
    function: Callable[P, Coroutine[Any, Any, int | None]],
) -> Callable[P, Coroutine[Any, Any, int]]:
    """Make a coroutine function a command: what it raises becomes a message and an exit code."""

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> int:
        common = kwargs.get("common", DEFAULTS)
        if not isinstance(common, Common):
            raise TypeError("a command takes its common options as `common`")
        level = logging.DEBUG if common.verbose else logging.ERROR
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        logging.getLogger("operations").setLevel(level)
        screen = common.screen()
        try:
            return await function(*args, **kwargs) or ExitCode.DONE
        except CallError as error:
            if common.verbose and error.unexpected:
                screen.traceback()
            screen.call_failed(error)
            return exit_code_of(error.code)
        except ConfigError as error:
            screen.config_failed(error)
            return ExitCode.CONFIG
        except BrokenPipeError:
            raise
        except (OperationsError, OSError) as error:
            if common.verbose:
                screen.traceback()
            screen.failed(str(error) or type(error).__name__)
            is_away = isinstance(error, TransportError)
            return ExitCode.UNAVAILABLE if is_away else ExitCode.FAILED
        except Exception as error:  # noqa: BLE001 - a person cannot do anything with a traceback
            if common.verbose:
                screen.traceback()
            hint = "" if common.verbose else "; --verbose shows where"
            screen.failed(f"this is a defect: {type(error).__name__}: {error}{hint}")
            return ExitCode.FAILED

    return run
