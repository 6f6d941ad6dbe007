"""The command line as cyclopts has it: every command of the table, none imported before it runs."""

from collections.abc import Sequence
from importlib import import_module

from cyclopts import App, CycloptsError, Group

from operations_cli import ABOUT, COMMANDS, EPILOGUE, GROUPS


def run(tokens: Sequence[str]) -> int:
    """Run one command; the result is the exit code."""
    try:
        result = build_app(tokens[0] if tokens else None)(tokens, exit_on_error=False)
    except CycloptsError:
        # It has been printed, with what was probably meant.
        return 2
    return result if isinstance(result, int) else 0


def build_app(chosen: str | None = None) -> App:
    """The command line, with every command named and none imported.

    Args:
        chosen: The command about to run, which tells more about itself than its line in the table.
    """
    app = App(
        name="operations",
        help=ABOUT,
        help_epilogue=" ".join(EPILOGUE.split()),
        help_format="plaintext",
        version=lambda: import_module("operations").__version__,
        version_flags=["--version"],
        result_action="return_value",
    )
    groups = {title: Group(title, sort_key=number) for number, title in enumerate(GROUPS)}
    for name, (group, target, line) in COMMANDS.items():
        app.command(
            f"operations.cli.{target}",
            name=name,
            help=None if name == chosen else line,
            group=groups[group],
        )
    return app
