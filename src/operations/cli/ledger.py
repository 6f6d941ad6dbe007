"""`operations ledger`: check the tamper-evident record of calls, and show its end."""

from dataclasses import asdict
from pathlib import Path

from cyclopts import App

from operations._text import counted
from operations.authority.ledger import verify as verified
from operations.cli.options import DEFAULTS, Common, ExitCode, command
from operations.hub.authority import ledger_options

app = App(name="ledger", help="Check the tamper-evident record of calls, and show its end.")


@app.command
@command
async def verify(*files: Path, common: Common = DEFAULTS) -> int:
    """Check that no line of the ledger was changed, removed, moved or repeated.

    Args:
        files: The files of the ledger, from the oldest to the newest; by default the one of the config.
        common: What every command takes.
    """
    screen = common.screen()
    options = ledger_options(common.load())
    found = verified(files or [options["path"]], options["key"], options["head"])
    if screen.json:
        screen.value(asdict(found))
    else:
        tail = "" if found.tail_checked else "; tail not checked: set [ledger] head"
        screen.write(f"{counted(found.lines, 'line')}, {found.first} to {found.last}{tail}")
        if found.problem is not None:
            screen.failed(found.problem)
    return ExitCode.DONE if found.problem is None else ExitCode.FAILED


@app.command
@command
async def tail(count: int = 20, /, *, common: Common = DEFAULTS) -> None:
    """Print the last lines of the ledger.

    Args:
        count: How many.
        common: What every command takes.
    """
    path: Path = ledger_options(common.load())["path"]
    screen = common.screen()
    for line in _last(path, count):
        screen.write(line)


def _last(path: Path, count: int) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()[-count:]
