"""`operations completion`: what makes a shell complete commands and options."""

from typing import Annotated, Literal

from cyclopts import Parameter

from operations.cli.app import build_app
from operations.cli.options import DEFAULTS, Common, command


@command
async def completion(
    shell: Literal["bash", "zsh", "fish", "powershell"],
    /,
    *,
    install: Annotated[bool, Parameter(negative="")] = False,
    common: Common = DEFAULTS,
) -> None:
    """Print the completion script of a shell, or install it.

    Args:
        shell: Which shell.
        install: Write the script where the shell looks for it, and name it in the shell's start file.
        common: What every command takes.
    """
    screen = common.screen()
    app = build_app()
    if install:
        screen.note(f"written to {app.install_completion(shell=shell)}; it holds in new shells")
    else:
        screen.write(app.generate_completion(shell=shell))
