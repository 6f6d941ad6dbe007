"""The entry point of the `operations` command and of `python -m operations`. Maps exceptions to exit codes."""

import os
import signal
import sys
from collections.abc import Sequence

from operations.base.errors import MissingExtraError
from operations.base.tasks import receives_signals

try:
    from operations.cli import run
except ImportError as error:
    if error.name not in ("cyclopts", "rich"):
        raise
    sys.exit(
        "operations: the command line needs the 'cli' extra: pip install 'alkdev-operations[cli]'"
    )
except KeyboardInterrupt:
    sys.exit(130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    is_server = bool(tokens) and tokens[0] in ("dev", "serve", "work")
    if is_server and receives_signals() and hasattr(signal, "SIGHUP"):
        # SIGHUP reloads the config once it is served. Until then it must not end the process. A handler does so, unlike
        # `SIG_IGN`, without effect on the programs that the process starts.
        signal.signal(signal.SIGHUP, _do_nothing)
    try:
        result = run(tokens)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        # An extra is missing. cyclopts wraps the error of a command's module, which names the extra.
        missing = error if isinstance(error, MissingExtraError) else error.__cause__ or error
        sys.stderr.write(f"error: {missing}\n")
        return 1
    except (OSError, SystemExit) as error:
        # rich raises `SystemExit` if the reader of a help text has left.
        reason = error.__context__ if isinstance(error, SystemExit) else error
        if not isinstance(reason, OSError):
            raise
        # The output cannot be written. Redirect it, or Python reports a second error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(reason, BrokenPipeError):
            return 141
        sys.stderr.write(f"error: {reason}\n")
        return 1
    return result


def _prepare_streams() -> None:
    """Replace closed streams, and let the output contain any character in any locale."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Open until the end, so that no other file gets the number of the stream.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and sys.stdout.isatty():
        reconfigure(errors="backslashreplace")
    elif reconfigure is not None:
        # JSON, exported documents and generated code are UTF-8.
        reconfigure(encoding="utf-8")


def _do_nothing(*_: object) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
