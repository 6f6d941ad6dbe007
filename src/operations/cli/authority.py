"""`operations grant`, `operations approvals` and `operations ledger`: what agents may do, and what was done."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from msgspec import to_builtins

from operations._text import counted
from operations.authority import Approval, Approvals, GrantError, Grants, new_block, read_token
from operations.authority import narrow as narrowed
from operations.authority.grants import BlockOptions
from operations.cli.options import DEFAULTS, Common, ExitCode, command
from operations.cli.render import Screen, plain
from operations.config import ConfigFile
from operations.context import OperationContext
from operations.errors import OperationsError
from operations.hub.access import Access, ledger_options, opened_authority

grant_app = App(
    name="grant", help="Create, narrow, show and revoke grants: identities narrowed for agents."
)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Patterns = Annotated[tuple[str, ...], Parameter(negative="")]


@grant_app.command
@command
async def create(
    subject: str,
    /,
    *,
    holder: str,
    operations: Annotated[tuple[str, ...], Parameter(negative="", alias="-o")],
    until: str | None = None,
    calls: Patterns = (),
    input: Patterns = (),
    approve: Patterns = (),
    scopes: Patterns = (),
    common: Common = DEFAULTS,
) -> None:
    """Print the token of a new grant. The config needs `[access.grants] key`.

    Args:
        subject: Whose authority it narrows: a caller of [access.keys], or with --scopes any id.
        holder: The agent that will use it.
        operations: A pattern of operations that it covers, such as `task.*`; may be repeated.
        until: How long it is valid: `30m`, `8h`, `7d`.
        calls: `PATTERN=N`: at most N calls in total; may be repeated.
        input: `PATTERN=SCHEMA`: a JSON Schema that the input must satisfy; may be repeated.
        approve: A pattern of operations whose calls a person must approve; may be repeated.
        scopes: A scope of a subject that is not in [access.keys], such as one of a token; may be repeated.
        common: Options of every command.
    """
    file = common.load()
    async with opened_authority(file, records=False) as authority:
        access = Access(file, authority.store)
        whose: Any = subject
        if scopes:
            whose = access.anyone(subject, scopes)
        elif subject not in access.by_id:
            raise OperationsError(
                f"{subject} is not in [access.keys]; name its scopes with --scopes"
            )
        options = _options(operations, until, calls, input, approve)
        common.screen().write(_grants(access, file).create(whose, holder, **options))


@grant_app.command
@command
async def narrow(
    token: str,
    /,
    *,
    holder: str,
    operations: Annotated[tuple[str, ...], Parameter(negative="", alias="-o")] = ("*",),
    until: str | None = None,
    calls: Patterns = (),
    input: Patterns = (),
    approve: Patterns = (),
    common: Common = DEFAULTS,
) -> None:
    """Print the token of a narrower grant. This needs no key and no connection.

    Args:
        token: The grant to narrow.
        holder: The agent that will use it.
        operations: A pattern of operations that it covers at most; may be repeated.
        until: How long it is valid at most: `30m`, `8h`, `7d`.
        calls: `PATTERN=N`: at most N calls in total; may be repeated.
        input: `PATTERN=SCHEMA`: a JSON Schema that the input must satisfy; may be repeated.
        approve: A pattern of operations whose calls a person must approve; may be repeated.
        common: Options of every command.
    """
    block = new_block(holder, **_options(operations, until, calls, input, approve))
    common.screen().write(narrowed(token, block))


@grant_app.command
@command
async def show(token: str, /, *, common: Common = DEFAULTS) -> None:
    """Show what a grant allows, without checking whether it is valid.

    Args:
        token: The grant.
        common: Options of every command.
    """
    screen = common.screen()
    subject, blocks = read_token(token)
    if screen.json:
        screen.value({"subject": to_builtins(subject), "blocks": to_builtins(blocks)})
        return
    screen.write(f"for {subject.id}")
    for block in blocks:
        shown = to_builtins(block)
        if block.until is not None:
            shown["until"] = datetime.fromtimestamp(block.until / 1000, UTC).isoformat()
        name, holder = shown.pop("id"), shown.pop("holder")
        screen.write(f"{name} held by {holder}: {json.dumps(shown)}")


@grant_app.command
@command
async def key(name: str, /, *, common: Common = DEFAULTS) -> None:
    """Print the key for a group of workers or a spoke: its `[access.grants] key`. It cannot mint grants for others.

    Args:
        name: The group, or the id of the spoke.
        common: Options of every command.
    """
    file = common.load()
    async with opened_authority(file, records=False) as authority:
        common.screen().write(_grants(Access(file, authority.store), file).for_name(name))


@grant_app.command
@command
async def revoke(block: str, /, *, common: Common = DEFAULTS) -> None:
    """Revoke a grant, and all that were narrowed from it.

    A hub with a store in memory cannot see this: set `[authority] file` or `broker`.

    Args:
        block: The id of a block, as `show` prints it, or a token: its last block is revoked.
        common: Options of every command.
    """
    file, until = common.load(), None
    if block.startswith("opg1."):
        last = read_token(block)[1][-1]
        block, until = last.id, last.until
    async with opened_authority(file, records=False) as authority:
        if not authority.store.is_shared:
            raise OperationsError("revoking needs [authority] file or broker in the config")
        await _grants(Access(file, authority.store), file).revoke(block, until)
    common.screen().note(f"revoked {block}")


def _grants(access: Access, file: ConfigFile) -> Grants:
    if access.grants is None:
        raise file.fault("needs a key.", "access.grants")
    return access.grants


def _options(
    operations: tuple[str, ...],
    until: str | None,
    calls: tuple[str, ...],
    input: tuple[str, ...],
    approve: tuple[str, ...],
) -> BlockOptions:
    options = BlockOptions(operations=operations, approve=approve)
    if until is not None:
        number, unit = until[:-1], until[-1:]
        if unit not in _UNITS or not number.isdecimal():
            raise OperationsError("--until is a time such as 30m, 8h or 7d")
        options["seconds"] = int(number) * _UNITS[unit]
    try:
        options["calls"] = {key: int(value) for key, value in map(_pair, calls)}
        options["input"] = {key: msgspec.json.decode(value) for key, value in map(_pair, input)}
    except (ValueError, msgspec.DecodeError) as error:
        raise GrantError(
            f"--calls takes PATTERN=N, --input takes PATTERN=SCHEMA: {error}"
        ) from error
    return options


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} has no =")
    return key, value


approvals_app = App(name="approvals", help="See and answer the calls that wait for a person.")


@approvals_app.command(name="list")
@command
async def list_pending(*, common: Common = DEFAULTS) -> None:
    """List the calls that wait for approval.

    Args:
        common: Options of every command.
    """
    async with _opened(common) as (approvals, context):
        _show(await approvals.pending(context), common.screen())


@approvals_app.command
@command
async def watch(*, common: Common = DEFAULTS) -> int:
    """Show the calls that wait for approval whenever they change, until Ctrl-C.

    Args:
        common: Options of every command.
    """
    screen = common.screen()
    async with _opened(common) as (approvals, context):
        try:
            async for found in approvals.watch(context):
                _show(found, screen)
        except asyncio.CancelledError:
            return ExitCode.DONE
    return ExitCode.DONE


@approvals_app.command
@command
async def approve(
    approval: str, /, *, reason: str | None = None, common: Common = DEFAULTS
) -> None:
    """Approve one call: it may run once, for the same caller with the same input.

    Args:
        approval: The id of the request.
        reason: Why, for the record.
        common: Options of every command.
    """
    await _answer(approval, reason, common, approve=True)


@approvals_app.command
@command
async def deny(approval: str, /, *, reason: str | None = None, common: Common = DEFAULTS) -> None:
    """Deny one call.

    Args:
        approval: The id of the request.
        reason: Why, for the record.
        common: Options of every command.
    """
    await _answer(approval, reason, common, approve=False)


async def _answer(approval: str, reason: str | None, common: Common, *, approve: bool) -> None:
    async with _opened(common) as (approvals, context):
        done = await approvals.answer(approval, context, approve=approve, reason=reason)
    screen = common.screen()
    if screen.json:
        screen.value(to_builtins(done))
    else:
        screen.note(f"{done.state}: {done.operation}")


@asynccontextmanager
async def _opened(common: Common) -> AsyncGenerator[tuple[Approvals, OperationContext]]:
    async with opened_authority(common.load(), records=False) as authority:
        if not authority.store.is_shared:
            raise OperationsError("this needs [authority] file or broker in the config")
        yield authority.approvals, OperationContext(trusted=True)


def _show(found: list[Approval], screen: Screen) -> None:
    if screen.json:
        screen.value(to_builtins(found))
        return
    for each in found:
        who = "the operator" if each.is_operator else each.caller or "an unknown caller"
        through = f", through {' and '.join(each.acting)}" if each.acting else ""
        until = datetime.fromtimestamp(each.until / 1000, UTC).astimezone()
        screen.write(plain(f"{each.id}  {each.operation}  {json.dumps(each.input)}"))
        screen.note(plain(f"  asked by {who}{through}; until {until:%H:%M}"))
    if not found:
        screen.note("no calls wait for approval")


ledger_app = App(name="ledger", help="Check the tamper-evident record of calls, and show its end.")


@ledger_app.command
@command
async def verify(*files: Path, common: Common = DEFAULTS) -> int:
    """Check that no line of the ledger was changed, removed, moved or repeated.

    Args:
        files: The files of the ledger, from the oldest to the newest; by default the one of the config.
        common: Options of every command.
    """
    # It needs file locks, which not every system has.
    from operations.authority.ledger import verify as verified  # noqa: PLC0415

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


@ledger_app.command
@command
async def tail(count: int = 20, /, *, common: Common = DEFAULTS) -> None:
    """Print the last lines of the ledger.

    Args:
        count: How many.
        common: Options of every command.
    """
    path: Path = ledger_options(common.load())["path"]
    screen = common.screen()
    for line in _last(path, count):
        screen.write(line)


def _last(path: Path, count: int) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()[-count:]
