"""The `operations` command: the table of its sub-commands, and nothing else.

Rule 1: this module stands outside the package, and imports nothing of it. Importing anything below `operations` loads
        the whole core first, and `operations --help` has to answer at once.
Rule 2: what a command needs is imported when that command runs: the table names modules, it does not import them.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

try:
    from cyclopts import App, CycloptsError, Group
except ModuleNotFoundError:
    raise SystemExit(
        "operations: the command line needs the 'cli' extra: pip install 'alkdev-operations[cli]'"
    ) from None

_USE, _SERVE, _SET_UP = "Find and call", "Serve", "Set up and look into"

COMMANDS: dict[str, tuple[str, str, str]] = {
    "list": (_USE, "list_:list_operations", "List and search operations."),
    "show": (_USE, "show:show", "Show one operation: its schemas, access, errors and origin."),
    "call": (_USE, "call:call", "Call an operation, or follow a subscription until Ctrl-C."),
    "serve": (
        _SERVE,
        "serve:serve",
        "Serve everything over HTTP, MCP and WebSocket, with a console.",
    ),
    "work": (_SERVE, "work:work", "Serve everything to callers on a broker."),
    "demo": (_SERVE, "demo:demo", "See it all at work, with nothing to configure."),
    "init": (_SET_UP, "init:init", "Write a commented operations.toml to start from."),
    "import": (
        _SET_UP,
        "import_:import_source",
        "Show what a document, server or module would give.",
    ),
    "export": (
        _SET_UP,
        "export:export",
        "Write operations for others: OpenAPI, tools, a Python client.",
    ),
    "trace": (_SET_UP, "trace:trace", "Show the tree of recent calls."),
    "completion": (_SET_UP, "completion:completion", "Print or install completion for your shell."),
    "doctor": (_SET_UP, "doctor:doctor", "Check the config, its sources and this installation."),
}
"""By name: the group in the help, where the command is, and its line in the help."""

_EPILOGUE = """\
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 wrong config, 4 not found, 5 denied, 6 invalid input, 7 timed out, \
8 unavailable, 130 interrupted. The config is the nearest operations.toml; every command takes --config and --json."""


def build_app(chosen: str | None = None) -> App:
    """The command line, with every command named and none imported.

    Args:
        chosen: The command about to run, which tells more about itself than its line here.
    """
    app = App(
        name="operations",
        help="Every function, HTTP endpoint and MCP tool as one kind of typed operation.",
        help_epilogue=_EPILOGUE,
        help_format="plaintext",
        version=lambda: import_module("operations").__version__,
        version_flags=["--version"],
        result_action="return_value",
    )
    groups = {
        title: Group(title, sort_key=number) for number, title in enumerate((_USE, _SERVE, _SET_UP))
    }
    for name, (group, target, line) in COMMANDS.items():
        app.command(
            f"operations.cli.{target}",
            name=name,
            help=None if name == chosen else line,
            group=groups[group],
        )
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = build_app(tokens[0] if tokens else None)(tokens, exit_on_error=False)
        sys.stdout.flush()
    except CycloptsError:
        # It has been printed, with what was probably meant.
        return 2
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        # A command whose extra is not installed; the message names it.
        sys.stderr.write(f"error: {error}\n")
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return result if isinstance(result, int) else 0
