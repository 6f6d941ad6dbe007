"""`operations approvals`: see and answer the calls that wait for a person."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from cyclopts import App
from msgspec import to_builtins

from operations.authority import Approval, Approvals
from operations.cli.options import DEFAULTS, Common, ExitCode, command
from operations.cli.render import Screen, plain
from operations.context import OperationContext
from operations.errors import OperationsError
from operations.hub.authority import opened_authority

app = App(name="approvals", help="See and answer the calls that wait for a person.")


@app.command(name="list")
@command
async def list_pending(*, common: Common = DEFAULTS) -> None:
    """List the calls that wait for approval.

    Args:
        common: What every command takes.
    """
    async with _opened(common) as (approvals, context):
        _show(await approvals.pending(context), common.screen())


@app.command
@command
async def watch(*, common: Common = DEFAULTS) -> int:
    """Show the calls that wait for approval whenever they change, until Ctrl-C.

    Args:
        common: What every command takes.
    """
    screen = common.screen()
    async with _opened(common) as (approvals, context):
        try:
            async for found in approvals.watch(context):
                _show(found, screen)
        except asyncio.CancelledError:
            return ExitCode.DONE
    return ExitCode.DONE


@app.command
@command
async def approve(
    approval: str, /, *, reason: str | None = None, common: Common = DEFAULTS
) -> None:
    """Approve one call: it may run once, for the same caller with the same input.

    Args:
        approval: The id of the request.
        reason: Why, for the record.
        common: What every command takes.
    """
    await _answer(approval, reason, common, approve=True)


@app.command
@command
async def deny(approval: str, /, *, reason: str | None = None, common: Common = DEFAULTS) -> None:
    """Deny one call.

    Args:
        approval: The id of the request.
        reason: Why, for the record.
        common: What every command takes.
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
