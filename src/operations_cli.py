"""The `operations` command: the table of its sub-commands, its help, and how it ends.

Rule 1: this module stands outside the package, and imports nothing of it or of others. Importing anything below
        `operations` loads the whole core first, and `operations --help` has to answer at once.
Rule 2: what a command needs is imported when that command runs: the table names modules, it does not import them.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

ABOUT = "Every function, HTTP endpoint and MCP tool as one kind of typed operation."

GROUPS = _USE, _SERVE, _SET_UP = "Find and call", "Serve", "Set up and look into"

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
    "login": (_SET_UP, "login:login", "Sign in to an MCP server through a browser."),
    "trace": (_SET_UP, "trace:trace", "Show the tree of recent calls."),
    "completion": (_SET_UP, "completion:completion", "Print or install completion for your shell."),
    "doctor": (_SET_UP, "doctor:doctor", "Check the config, its sources and this installation."),
}
"""By name: the group in the help, where the command is, and its line in the help."""

EPILOGUE = """\
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 wrong config, 4 not found, 5 denied, 6 invalid input,
7 timed out, 8 unavailable, 130 interrupted. The config is the nearest operations.toml; every command
takes --config and --json, and answers --help.
"""

_EXTRA = (
    "operations: the command line needs the 'cli' extra: pip install 'alkdev-operations[cli]'\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not tokens or tokens[0] in ("--help", "-h"):
            sys.stdout.writelines(_help(bold=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
            result = 0
        else:
            result = import_module("operations.cli.app").run(tokens)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        # What is not installed; the message of ours names the extra.
        is_ours = error.name not in ("cyclopts", "rich")
        sys.stderr.write(f"error: {error}\n" if is_ours else _EXTRA)
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return int(result)


def _help(*, bold: bool) -> Iterator[str]:
    """The overview, in lines."""
    start, end = ("\x1b[1m", "\x1b[0m") if bold else ("", "")
    yield f"Usage: operations COMMAND\n\n{ABOUT}\n"
    for title in GROUPS:
        yield f"\n{start}{title}{end}\n"
        for name, (group, _, line) in COMMANDS.items():
            if group == title:
                yield f"  {name:<12}{line}\n"
    yield f"\n  {'--version':<12}Display application version.\n"
    yield f"\n{EPILOGUE}"
