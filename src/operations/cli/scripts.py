"""`operations run`: run a script that calls operations, as an agent would."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from operations.cli.call import make_call
from operations.cli.options import DEFAULTS, POSITIVE, Common, command, encoded


@command
async def run_script(
    script: Path,
    /,
    *,
    check: Annotated[bool, Parameter(negative="")] = False,
    timeout: Annotated[float | None, POSITIVE] = None,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    detach: Annotated[bool, Parameter(negative="")] = False,
    key: str | None = None,
    common: Common = DEFAULTS,
) -> int | None:
    """Run a Python script that calls operations, such as `await shop.items(limit=4)`, in a sandbox.

    Its types are checked before its first call. The table [code] has its limits.

    Args:
        script: The script.
        check: Only check the types, and run nothing.
        timeout: Seconds to wait.
        as_: A caller of [access.keys], or a grant; `anonymous` for no identity. Default: operator (full access).
        detach: Start a run, print its id and end; a server with the same [runs] works on it.
        key: With --detach: the same script with the same key is the same run.
        common: Options of every command.
    """
    value = {"script": _text_of(script), "check_only": check}
    return await make_call(
        "code.run", encoded(value), timeout=timeout, as_=as_, detach=detach, key=key, common=common
    )


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")
