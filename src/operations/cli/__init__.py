"""The `operations` command line: the table of commands, the help text, and the parser.

    command -> Session: config -> hub of sources -> registry -> screen

A command parses its arguments, calls one library function, and renders the result.

Rule 1: the module of a command is imported only when the command runs: the table has the names of modules, and cyclopts
        imports them.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from operations import __version__

ABOUT = "Call and serve functions, HTTP endpoints and MCP tools as typed operations."

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Find and call": {
        "list": ("lookup:list_operations", "List and search operations."),
        "show": ("lookup:show", "Show one operation: its schemas, access, errors and origin."),
        "call": ("call:call", "Call an operation, or follow a subscription until Ctrl-C."),
        "run": ("scripts:run_script", "Run a script that calls operations, in a sandbox."),
        "code": ("scripts:code_app", "Make a reviewed script an operation."),
        "runs": ("runs:runs_app", "See, cancel, answer and retry calls that run on their own."),
    },
    "Serve": {
        "dev": ("serve:dev", "Serve a file while you write it, and import saved changes at once."),
        "serve": (
            "serve:serve",
            "Serve all operations over HTTP, MCP and WebSocket, with a console.",
        ),
        "work": ("work:work", "Serve all operations to callers on a broker."),
        "workers": ("work:workers_app", "See the workers of a broker, and handle dead letters."),
        "demo": ("demo:demo", "Run a complete example without any configuration."),
    },
    "Set up and inspect": {
        "init": ("setup:init", "Write a commented operations.toml to start from."),
        "import": (
            "setup:import_source",
            "Show the operations that a document, server or module would add.",
        ),
        "install": (
            "clients:install",
            "Add the operations to Claude Code, Codex and other clients.",
        ),
        "discover": ("clients:discover", "List the MCP servers that clients on this machine have."),
        "export": ("export:export", "Export operations: OpenAPI, tools, a Python client."),
        "login": ("setup:login", "Sign in to an MCP server through a browser."),
        "grant": ("authority:grant_app", "Create, narrow, show and revoke grants for agents."),
        "approvals": ("authority:approvals_app", "List and answer calls that wait for approval."),
        "ledger": ("authority:ledger_app", "Check the tamper-evident record of calls."),
        "trace": ("call:trace", "Show the tree of recent calls."),
        "completion": ("setup:completion", "Print the completion script of your shell."),
        "doctor": ("doctor:doctor", "Check the config, its sources and this installation."),
    },
}
"""The commands by group and name: module and function, and line in the help."""

EPILOGUE = """\
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 wrong config, 4 not found,
5 denied, 6 invalid input, 7 timed out, 8 unavailable, 9 needs approval,
130 interrupted, 143 ended by SIGTERM. The config is the nearest
operations.toml; every command accepts --config, --json and --help.
"""


def run(tokens: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    if not tokens or tokens[0] in ("--help", "-h"):
        sys.stdout.writelines(_help(bold=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        return 0
    if tokens[0].startswith("-") and tokens[0] != "--version":
        message = f"options follow the command: operations COMMAND {tokens[0]}"
        return _misused(f"{message}. operations --help lists the commands.", tokens)
    try:
        result = build_app(tokens[0])(tokens, exit_on_error=False, print_error=False)
    except UnusedCliTokensError as error:
        unused = " ".join(error.unused_tokens or ())
        advice = f"Repeat an option for each of its values; see operations {tokens[0]} --help."
        return _misused(f"Unexpected argument: {unused}. {advice}", tokens)
    except CycloptsError as error:
        return _misused(str(error), tokens)
    return result if isinstance(result, int) else 0


def _misused(message: str, tokens: Sequence[str]) -> int:
    """Print an error of the command line; return its exit code."""
    if {"--json", "-j"}.isdisjoint(tokens):
        sys.stderr.write(f"error: {message}\n")
    else:
        sys.stderr.write(json.dumps({"error": {"code": "USAGE", "message": message}}) + "\n")
    return 2


def build_app(chosen: str | None = None) -> App:
    """Build the parser without importing any command.

    Args:
        chosen: The command about to run, whose full help is shown.
    """
    app = App(
        name="operations",
        help=ABOUT,
        help_epilogue=" ".join(EPILOGUE.split()),
        help_format="plaintext",
        default_parameter=Parameter(show_default=_default),
        version=__version__,
        version_flags=["--version"],
        result_action="return_value",
    )
    for number, (title, commands) in enumerate(GROUPS.items()):
        group = Group(title, sort_key=number)
        for name, (target, line) in commands.items():
            shown = None if name == chosen else line
            app.command(f"operations.cli.{target}", name=name, help=shown, group=group)
    return app


def _default(value: object) -> str | None:
    """Return a default for the help of an option; None for absent values, switches and empty lists."""
    return None if value is None or value is False or value == () else str(value)


def _help(*, bold: bool) -> Iterator[str]:
    """Yield the lines of the help overview."""
    start, end = ("\x1b[1m", "\x1b[0m") if bold else ("", "")
    yield f"Usage: operations COMMAND\n\n{ABOUT}\n"
    for title, commands in GROUPS.items():
        yield f"\n{start}{title}{end}\n"
        for name, (_, line) in commands.items():
            yield f"  {name:<12}{line}\n"
    yield f"\n  {'--version':<12}Print the version.\n"
    yield f"\n{EPILOGUE}"
