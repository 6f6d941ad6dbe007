"""`operations grant`, `operations approvals` and `operations ledger`: grants for agents, approvals, and the ledger."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from math import isinf
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from operations.authority import Approval, Authority, Grants, new_block, read_token
from operations.authority import narrow as narrowed
from operations.authority.approvals import Approvals
from operations.authority.grants import PREFIX, BlockOptions
from operations.authority.ledger import LedgerError
from operations.authority.ledger import verify as verified
from operations.authority.queue import MAX_PAGE
from operations.base.errors import OperationsError
from operations.base.patterns import Patterns as PatternSet
from operations.base.text import counted, printable, visible, visible_json
from operations.base.types import JSONObject
from operations.cli.call import confirm
from operations.cli.options import (
    DEFAULTS,
    POSITIVE,
    Common,
    ExitCode,
    Screen,
    command,
    encoded,
    local_time,
    styled,
)
from operations.config import ConfigFile
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.hub.journal import recall_ids
from operations.hub.opening import grants_of, ledgers_of, opened_authority

grant_app = App(
    name="grant", help="Create, narrow, show and revoke grants: identities narrowed for agents."
)
approvals_app = App(name="approvals", help="List and answer the calls that wait for approval.")
ledger_app = App(name="ledger", help="Check the tamper-evident record of calls, and show its end.")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BLOCK_ID = re.compile("[0-9a-f]{16}|[0-9a-f]{32}")
"""The id of a block, or its key, which `operations trace --verbose` prints."""

_MARKED = ("approvals.", "hub.")
"""The operations of a hub itself, all of which are marked. They are registered when it serves."""

_OPERATOR = OperationContext(trusted=True)
Patterns = Annotated[tuple[str, ...], Parameter(negative="")]


@asynccontextmanager
async def _opened(common: Common) -> AsyncGenerator[Authority]:
    async with opened_authority(common.load()) as authority:
        if isinf(authority.store.poll_seconds):
            raise OperationsError("processes cannot share approvals yet: add [state] url")
        yield authority


def _grants(common: Common, **options: Any) -> Grants:
    file = common.load()
    grants = grants_of(file, **options)
    if grants is None:
        raise file.error("needs a key.", "access.grants")
    return grants


def _time(milliseconds: int) -> str:
    return local_time(milliseconds).isoformat(timespec="seconds")


# ------------------------------------------------------------ grants


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GrantOptions:
    """The content of a grant.

    Attributes:
        holder: The agent that uses the grant.
        operations: A pattern of operations that the grant covers, such as `task.*`; may be repeated.
        until: The lifetime of the grant: `30m`, `8h`, `7d`.
        calls: `PATTERN=N`: at most N calls in total; may be repeated.
        input: `PATTERN=SCHEMA`: a JSON Schema that the input must satisfy; may be repeated.
        approve: A pattern of operations whose calls a person must approve; may be repeated.
    """

    holder: str
    operations: Annotated[tuple[str, ...], Parameter(negative="", alias="-o")] = ()
    until: str | None = None
    calls: Patterns = ()
    input: Patterns = ()
    approve: Patterns = ()

    def options(self) -> BlockOptions:
        """Return these options as fields of a block.

        Raises:
            OperationsError: If an option is malformed.
        """
        options = BlockOptions(approve=self.approve)
        if self.operations:
            options["operations"] = self.operations
        if self.until is not None:
            number, unit = self.until[:-1], self.until[-1:]
            if unit not in _UNITS or not number.isdecimal():
                raise OperationsError("--until is a time such as 30m, 8h or 7d")
            options["seconds"] = int(number) * _UNITS[unit]
        options["calls"] = _pairs("--calls PATTERN=N", self.calls)
        options["input"] = _pairs("--input PATTERN=SCHEMA", self.input)
        return options


def _pairs(usage: str, given: Iterable[str]) -> dict[str, Any]:
    try:
        pairs = (each.partition("=") for each in given)
        return {pattern: msgspec.json.decode(value) for pattern, _, value in pairs}
    except msgspec.DecodeError:
        raise OperationsError(f"this option is used as {usage}, with JSON after the =") from None


@grant_app.command
@command
async def create(
    subject: str, /, limits: GrantOptions, *, scopes: Patterns = (), common: Common = DEFAULTS
) -> None:
    """Print the token of a new grant. The config needs `[access.grants] key`.

    Args:
        subject: The subject whose access the grant narrows: a caller of [access.keys] or, with --scopes, any id.
        limits: The restrictions.
        scopes: A scope of a subject that is not in [access.keys]; may be repeated.
        common: Options of every command.
    """
    if not scopes and subject not in common.load().config.access.keys:
        raise OperationsError(f"{subject} is not in [access.keys]; name its scopes with --scopes")
    whose = Identity(subject, scopes) if scopes else subject
    screen, options = common.screen(), limits.options()
    screen.write(_grants(common).create(whose, limits.holder, **options))
    if limits.until is None:
        screen.warn("this grant never expires: set --until, such as --until 8h, or revoke it later")
    for pattern in options.get("operations", ()):
        if pattern.startswith(_MARKED) and PatternSet([pattern]).ids == set():
            screen.warn(
                f"{pattern} allows no operation that administers authority: name each, such as approvals.answer"
            )
    for pattern in _unmatched(common.load(), options):
        screen.warn(f"{pattern} matches no operation that `operations list` has shown")


def _unmatched(file: ConfigFile, options: BlockOptions) -> list[str]:
    """Return the patterns of a grant that match no known operation; none if the sources have not been opened yet.

    No source is opened for this: a grant can be created while they are away.
    """
    known = recall_ids(file)
    if not known:
        return []
    patterns = dict.fromkeys(
        (
            *options.get("operations", ()),
            *options.get("calls", ()),
            *options.get("input", ()),
            *options.get("approve", ()),
        )
    )
    matching = PatternSet(patterns).matching(*known)
    return [each for each in patterns if each not in matching and not each.startswith(_MARKED)]


@grant_app.command
@command
async def narrow(token: str, /, limits: GrantOptions, *, common: Common = DEFAULTS) -> None:
    """Print the token of a narrower grant. This needs no key and no connection.

    Args:
        token: The grant to narrow.
        limits: The restrictions; without --operations, the same operations as before.
        common: Options of every command.
    """
    common.screen().write(narrowed(token, new_block(limits.holder, **limits.options())))


@grant_app.command
@command
async def show(token: str, /, *, common: Common = DEFAULTS) -> None:
    """Show the content of a grant, without checking whether it is valid.

    Args:
        token: The grant.
        common: Options of every command.
    """
    subject, blocks = read_token(token)
    shown: Any = to_builtins(list(blocks))
    for block in shown:
        if "until" in block:
            block["until"] = _time(block["until"])
    common.screen().value({"subject": to_builtins(subject), "blocks": shown})


@grant_app.command
@command
async def key(name: str, /, *, common: Common = DEFAULTS) -> None:
    """Print the key for a worker group or spoke: its `[access.grants] key`. It cannot create grants for others.

    Args:
        name: The group, or the id of the spoke.
        common: Options of every command.
    """
    common.screen().write(_grants(common).for_name(name))


@grant_app.command
@command
async def revoke(block: str, /, *, common: Common = DEFAULTS) -> None:
    """Revoke a grant, and all grants derived from it.

    This needs a persistent store, which a running hub can read: add `[state] url`.

    Args:
        block: The id of a block, as `show` or `operations trace --verbose` prints it, or a token: its last block is
            revoked.
        common: Options of every command.
    """
    until = None
    async with _opened(common) as authority:
        grants = _grants(common, store=authority.store)
        if block.startswith(PREFIX):
            # An edited token could contain an earlier end, after which its revocation would be removed.
            last = grants.blocks(block)[-1]
            block, until = last.id, last.until
        elif _BLOCK_ID.fullmatch(block) is None:
            raise OperationsError(
                f"{block!r} is not the id of a block: pass the token, or an id that `operations grant show` prints"
            )
        await grants.revoke(block, until)
    common.screen().note(f"revoked {visible(block)}")


# ------------------------------------------------------------ approvals


@approvals_app.command(name="list")
@command
async def list_pending(*, common: Common = DEFAULTS) -> None:
    """List the calls that wait for approval.

    Args:
        common: Options of every command.
    """
    async with _opened(common) as authority:
        _list(await _all(authority.approvals), common.screen())


@approvals_app.command
@command
async def watch(*, common: Common = DEFAULTS) -> None:
    """Show the calls that wait for approval, and update them until Ctrl-C.

    Args:
        common: Options of every command.
    """
    async with _opened(common) as authority:
        with suppress(asyncio.CancelledError):
            async for _ in authority.approvals.watch(_OPERATOR):
                _list(await _all(authority.approvals), common.screen())


@approvals_app.command(name="show")
@command
async def show_approval(approval: str, /, *, common: Common = DEFAULTS) -> None:
    """Show one call that waits for approval, with its whole input.

    Args:
        approval: The id of the request.
        common: Options of every command.
    """
    async with _opened(common) as authority:
        _show(await authority.approvals.get(approval, _OPERATOR), common.screen())


@approvals_app.command
@command
async def approve(
    approval: str, /, *, reason: str | None = None, common: Common = DEFAULTS
) -> None:
    """Approve one call: it may run once, for the same caller with the same input.

    On a terminal this shows the whole request first, and asks.

    Args:
        approval: The id of the request.
        reason: The reason, which is recorded.
        common: Options of every command.
    """
    await _answer(approval, reason, common, approve=True)


@approvals_app.command
@command
async def deny(approval: str, /, *, reason: str | None = None, common: Common = DEFAULTS) -> None:
    """Deny one call.

    Args:
        approval: The id of the request.
        reason: The reason, which is recorded and sent to the caller.
        common: Options of every command.
    """
    await _answer(approval, reason, common, approve=False)


async def _answer(approval: str, reason: str | None, common: Common, *, approve: bool) -> None:
    screen = common.screen()
    async with _opened(common) as authority:
        record = await authority.approvals.get(approval, _OPERATOR)
        if asks := approve and screen.can_ask:
            _show(record, screen)
            screen.note(f"approve {record.operation} with this input, {_bytes(record)}?", "bold")
            if not confirm(screen):
                raise OperationsError("not approved: the request still waits")
        done = await authority.approvals.answer(approval, approve, _OPERATOR, reason)
    if screen.json:
        screen.value(to_builtins(replace(done, input=record.input)))
    elif asks:
        screen.write(printable(f"{done.state} {done.operation}"))
    else:
        screen.write(printable(f"{done.state} {done.operation} ") + _line(record))


async def _all(approvals: Approvals) -> list[Approval]:
    """Return all pages of the requests that wait."""
    page = await approvals.pending(_OPERATOR, limit=MAX_PAGE)
    found = page.approvals
    while page.next is not None:
        page = await approvals.pending(_OPERATOR, page.next, MAX_PAGE)
        found += page.approvals
    return found


def _list(found: list[Approval], screen: Screen) -> None:
    if screen.json:
        screen.value(to_builtins(found))
        return
    for each in found:
        screen.write(f"{each.id}  {printable(each.operation)}  {_line(each)}")
        screen.note(f"  asked by {_caller(each)}; until {_time(each.until)}")
    if not found:
        screen.note("no calls wait for approval")


def _show(record: Approval, screen: Screen) -> None:
    """Print a request with its whole input."""
    if screen.json:
        screen.value(to_builtins(record))
        return
    screen.line(("request    ", "dim"), (record.id, ""))
    screen.line(("operation  ", "dim"), (record.operation, "bold"))
    screen.line(("asked by   ", "dim"), (_caller(record), ""))
    screen.line(("until      ", "dim"), (_time(record.until), ""))
    if record.claim is not None:
        _show_claim(record.claim, screen)
    screen.line(("input      ", "dim"), (_bytes(record), ""))
    screen.value(record.input)
    for place in record.generated:
        screen.line(("set when the call runs: ", "dim"), (place, ""))


def _show_claim(claim: JSONObject, screen: Screen) -> None:
    """Print what the author of a call claims about it, before the input, so that the answer follows the exact call."""
    author = printable(str(claim.get("by", "caller")))
    screen.line((f"claimed by the {author}, not part of what is approved:", "yellow"))
    for line, *words in (
        (claim.get("line"), claim.get("code")),
        *(
            (each.get("line"), each.get("operation"), each.get("outcome"), each.get("result"))
            for each in reversed(claim.get("before") or ())
        ),
    ):
        # Runs of spaces could push a part to a line of its own.
        text = " ".join(" ".join(str(word) for word in words if word).split())
        shown = styled((f"line {'?' if line is None else line}: {text}", ""))
        # Each row of the screen is marked, so that no part poses as another line of the request.
        for row in shown.wrap(screen.out, max(20, screen.out.width - 4)):
            screen.line(("  | ", "yellow"), (row.plain.rstrip(), ""))


def _line(record: Approval) -> str:
    """Return the whole input on one line, or how to read it: never a part of it."""
    if record.input is UNSET:
        return f"({_bytes(record)}: operations approvals show {record.id})"
    return visible_json(encoded(record.input))


def _bytes(record: Approval) -> str:
    return counted(record.size, "byte")


def _caller(record: Approval) -> str:
    caller = "the operator" if record.is_operator else record.caller or "an unknown caller"
    if record.issuer is not None:
        caller = f"{caller} of {record.issuer}"
    through = f", through {' and '.join(record.acting)}" if record.acting else ""
    return printable(caller + through)


# ------------------------------------------------------------ the ledger


@ledger_app.command
@command
async def verify(*files: Path, common: Common = DEFAULTS) -> int:
    """Check that no line of the ledger was changed, removed, moved or repeated.

    Args:
        files: The files of one chain, from the oldest to the newest; by default each file of the config is checked
            separately.
        common: Options of every command.
    """
    screen, code = common.screen(), ExitCode.DONE
    secret, kept = ledgers_of(common.load())
    heads = {path.resolve(): head for path, head in kept}
    chains = [files] if files else [(path,) for path, _ in kept]
    for paths in chains:
        try:
            place = paths[-1].resolve()
            # Any other file may have been renamed.
            name = paths[-1].name if place in heads else None
            found = verified(paths, secret, heads.get(place), name)
        except LedgerError as error:
            # Check the other files as well.
            screen.failed(str(error))
            code = ExitCode.FAILED
            continue
        start = "" if found.first <= 1 else "; earlier files not checked"
        tail = "" if found.tail_checked else "; tail not checked: set [record.ledger] head"
        if screen.json:
            screen.value(asdict(found))
        else:
            lines = f"{counted(found.lines, 'line')}, {found.first} to {found.last}"
            lost = f"; {counted(found.lost, 'line')} could not be written" if found.lost else ""
            screen.write(f"{paths[-1].name}: {lines}{start}{lost}{tail}")
            if found.problem is not None:
                screen.failed(found.problem)
        if found.problem is not None:
            code = ExitCode.FAILED
    if not chains and not screen.json:
        screen.note("the ledger has no files yet")
    return code


@ledger_app.command
@command
async def tail(count: Annotated[int, POSITIVE] = 20, /, *, common: Common = DEFAULTS) -> None:
    """Print the last lines of each file of the ledger.

    Args:
        count: The number of lines of a file.
        common: Options of every command.
    """
    screen = common.screen()
    for path, _ in ledgers_of(common.load())[1]:
        screen.note(f"{path.name}:")
        with path.open("rb") if path.exists() else nullcontext(()) as lines:
            for line in deque(lines, count):
                screen.write(visible(line.decode(errors="backslashreplace").rstrip("\n")))
