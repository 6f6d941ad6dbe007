"""`operations grant`: create, narrow, show and revoke grants."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from msgspec import to_builtins

from operations.authority import GrantError, Grants, new_block, read_token
from operations.authority import narrow as narrowed
from operations.authority.grants import BlockOptions
from operations.cli.options import DEFAULTS, Common, command
from operations.config import ConfigFile
from operations.errors import OperationsError
from operations.hub.authority import opened_authority
from operations.hub.callers import Access

app = App(
    name="grant", help="Create, narrow, show and revoke grants: identities narrowed for agents."
)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Patterns = Annotated[tuple[str, ...], Parameter(negative="")]


@app.command
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
        holder: Who will act with it.
        operations: A pattern of operations that it covers, such as `task.*`; may be repeated.
        until: How long it is valid: `30m`, `8h`, `7d`.
        calls: `PATTERN=N`: at most N calls in total; may be repeated.
        input: `PATTERN=SCHEMA`: a JSON Schema that the input must satisfy; may be repeated.
        approve: A pattern of operations whose calls a person must approve; may be repeated.
        scopes: A scope of a subject that is not in [access.keys], such as one of a token; may be repeated.
        common: What every command takes.
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


@app.command
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
        holder: Who will act with it.
        operations: A pattern of operations that it covers at most; may be repeated.
        until: How long it is valid at most: `30m`, `8h`, `7d`.
        calls: `PATTERN=N`: at most N calls in total; may be repeated.
        input: `PATTERN=SCHEMA`: a JSON Schema that the input must satisfy; may be repeated.
        approve: A pattern of operations whose calls a person must approve; may be repeated.
        common: What every command takes.
    """
    block = new_block(holder, **_options(operations, until, calls, input, approve))
    common.screen().write(narrowed(token, block))


@app.command
@command
async def show(token: str, /, *, common: Common = DEFAULTS) -> None:
    """Show what a grant allows, without checking whether it is valid.

    Args:
        token: The grant.
        common: What every command takes.
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


@app.command
@command
async def key(name: str, /, *, common: Common = DEFAULTS) -> None:
    """Print the key for a group of workers or a spoke: its `[access.grants] key`. It cannot mint grants for others.

    Args:
        name: The group, or the id of the spoke.
        common: What every command takes.
    """
    file = common.load()
    async with opened_authority(file, records=False) as authority:
        common.screen().write(_grants(Access(file, authority.store), file).for_name(name))


@app.command
@command
async def revoke(block: str, /, *, common: Common = DEFAULTS) -> None:
    """Revoke a grant, and all that were narrowed from it.

    A hub with a store in memory cannot see this: set `[authority] file` or `broker`.

    Args:
        block: The id of a block, as `show` prints it, or a token: its last block is revoked.
        common: What every command takes.
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
