"""`operations run` and `operations code save`: run a script that calls operations, and make it an operation."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, CycloptsError, Parameter

from operations.base.text import counted
from operations.cli.call import make_call
from operations.cli.lookup import caller
from operations.cli.options import (
    DEFAULTS,
    POSITIVE,
    Common,
    ExitCode,
    command,
    encoded,
    open_session,
)
from operations.code.config import digest_of
from operations.contract.context import OperationContext
from operations.contract.specs import NAME, NAMESPACE
from operations.hub import SourceFilter

code_app = App(name="code", help="Make a reviewed script an operation.")


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
    text = _text_of(script)
    if check:
        return await _check(text, as_, common)
    value = {"script": text}
    return await make_call(
        "code.run", encoded(value), timeout=timeout, as_=as_, detach=detach, key=key, common=common
    )


async def _check(text: str, as_: str | None, common: Common) -> int:
    """Check a script here: a run would wait for a server."""
    screen = common.screen()
    async with open_session(common, screen, SourceFilter(operation="code.run")) as hub:
        context = await caller(hub, as_)
        await hub.registry.authorize("code.run", {"script": text, "check_only": True}, context)
        checked = await hub.code_mode.check(text, context)
    screen.result(msgspec.to_builtins(checked))
    return ExitCode.DONE


@code_app.command
@command
async def save(
    operation_id: str,
    script: Path,
    /,
    *,
    description: str = "",
    scope: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    common: Common = DEFAULTS,
) -> int | None:
    """Make a reviewed script an operation: check it, and add its table [code.saved] to the config.

    The operation is bound to this version of the file. Its input is the variable `arguments` of the script. Callers
    need the scopes of all operations whose names are in the script, unless you give others.

    Args:
        operation_id: The id of the new operation, `namespace.name`.
        script: The script, in the folder of the config.
        description: What it does.
        scope: A scope that callers need, instead of those of the operations; may be repeated.
        common: Options of every command.
    """
    screen = common.screen()
    text = _text_of(script)
    async with open_session(common, screen, SourceFilter(operation="code.run")) as hub:
        origin = hub.file.origin
        if origin is None:
            raise CycloptsError(
                msg="there is no operations.toml to which the script could be added"
            )
        namespace, _, name = operation_id.partition(".")
        is_id = NAMESPACE.fullmatch(namespace) and NAME.fullmatch(name)
        if not is_id or operation_id in hub.registry:
            raise CycloptsError(msg=f"{operation_id} is no id, or the id of another operation")
        operator = OperationContext(trusted=True)
        # Not as a run, which would wait for a server.
        await hub.code_mode.check(text, operator)
        used = hub.code_mode.used_by(text, operator)
    unclear = [spec.id for spec in used if _is_unclear(spec.access_control)]
    if unclear and not scope:
        raise CycloptsError(
            msg=f"name the scopes with --scope: {', '.join(unclear)} requires more than a list of scopes"
        )
    scopes = sorted(scope or {each for s in used for each in s.access_control.required_scopes})
    entry = {
        "file": _place_of(script, origin),
        "digest": digest_of(text),
        "scopes": scopes,
        "description": description,
    }
    lines = [f"{key} = {msgspec.json.encode(each).decode()}" for key, each in entry.items()]
    table = "\n".join([f'[code.saved."{operation_id}"]', *lines])
    _append(origin, f"\n{table}\n")
    if screen.json:
        screen.value({"id": operation_id, **entry, "uses": [spec.id for spec in used]})
    else:
        screen.write(table)
        uses = ", ".join(spec.id for spec in used)
        screen.note(f"uses {counted(len(used), 'operation')}: {uses}")
    return ExitCode.DONE


def _is_unclear(access: Any) -> bool:
    return bool(access.required_scopes_any or access.resource_type)


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _place_of(script: Path, origin: Path) -> str:
    """Return the path of a script, relative to the config if it is in its folder."""
    file, folder = script.resolve(), origin.resolve().parent
    return (file.relative_to(folder) if file.is_relative_to(folder) else file).as_posix()


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
