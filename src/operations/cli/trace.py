"""`operations trace`: the tree of recent calls, and how long each took."""

import asyncio
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from cyclopts import Parameter
from rich.text import Text
from rich.tree import Tree

from operations._text import counted
from operations.calls import CallRecord
from operations.calls.graph import known_parents
from operations.cli.options import DEFAULTS, Common, Screen, command, plain
from operations.hub.journal import journal_path, read_journal
from operations.types import JSONObject

_LOOK_AGAIN = 0.2
"""Seconds between two looks at a journal that is followed."""


class Span(NamedTuple):
    """One call, and the calls it made."""

    record: CallRecord
    calls: list["Span"]

    @property
    def has_failed(self) -> bool:
        """Whether it or a nested call failed."""
        return self.record.outcome != "success" or any(call.has_failed for call in self.calls)

    def to_json(self) -> JSONObject:
        """For scripts."""
        record: JSONObject = msgspec.to_builtins(self.record)
        return {**record, "calls": [call.to_json() for call in self.calls]}


@command
async def trace(
    operation_id: str | None = None,
    /,
    *,
    limit: Annotated[int, Parameter(alias="-n")] = 20,
    failed: Annotated[bool, Parameter(negative="")] = False,
    follow: Annotated[bool, Parameter(alias="-f", negative="")] = False,
    common: Common = DEFAULTS,
) -> None:
    """Show recent calls as a tree: caller, operation, nested calls, duration and outcome.

    It shows the calls that `call`, `serve` and `work` made with this config. Arguments and results are not kept.

    Args:
        operation_id: Only calls that begin with this operation.
        limit: How many calls, the newest last.
        failed: Only calls that failed, or in which one failed.
        follow: Go on showing calls as they end, until Ctrl-C.
        common: Options of every command.
    """
    screen = common.screen()
    path = journal_path(common.load(required=False))
    # Ctrl-C is how one ends following, and no failure.
    with suppress(asyncio.CancelledError) if follow else nullcontext():
        await _trace(path, screen, operation_id, limit=limit, failed=failed, follow=follow)


async def _trace(
    path: Path,
    screen: Screen,
    operation_id: str | None,
    *,
    limit: int,
    failed: bool,
    follow: bool,
) -> None:
    shown: set[str] = set()
    while True:
        seen = _mark(path)
        roots = [
            root
            for root in spans(read_journal(path))
            if root.record.request_id not in shown
            and (operation_id is None or root.record.operation_id == operation_id)
            and (not failed or root.has_failed)
        ][-limit:]
        _show(roots, screen, many=not follow)
        if not follow:
            if not roots and screen.is_terminal:
                screen.note(f"no calls are recorded in {path}")
            return
        shown.update(root.record.request_id for root in roots)
        while _mark(path) == seen:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(_LOOK_AGAIN)


def spans(records: Iterable[CallRecord]) -> list[Span]:
    """The calls that no other call made, by the time they started, each with those it made."""
    ordered = sorted(records, key=lambda record: record.started_at)
    by_id = {record.request_id: Span(record, []) for record in ordered}
    parents = known_parents(ordered)
    roots: list[Span] = []
    for request_id, span in by_id.items():
        parent = by_id.get(parents[request_id] or "")
        (roots if parent is None else parent.calls).append(span)
    return roots


def _mark(path: Path) -> int:
    """Something that changes when the journal does."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _show(roots: list[Span], screen: Screen, *, many: bool) -> None:
    if screen.json and many:
        screen.value([root.to_json() for root in roots])
        return
    for root in roots:
        if screen.json:
            screen.item(root.to_json())
            continue
        when = datetime.fromtimestamp(root.record.started_at / 1000, UTC).astimezone()
        line = Text(f"{when:%H:%M:%S}  ", style="dim").append_text(_line(root.record))
        if root.record.identity_id is not None:
            line.append(f"  by {plain(root.record.identity_id)}", style="dim")
        tree = Tree(line, guide_style="dim")
        _grow(tree, root)
        screen.show(tree)


def _grow(tree: Tree, span: Span) -> None:
    for call in span.calls:
        _grow(tree.add(_line(call.record)), call)


def _line(record: CallRecord) -> Text:
    line = Text(plain(record.operation_id), style="bold")
    if record.duration is not None:
        line.append(f"  {record.duration * 1000:.1f} ms", style="cyan")
    if record.items:
        line.append(f"  {counted(record.items, 'item')}", style="cyan")
    if record.outcome != "success":
        line.append(f"  {plain(record.outcome)}", style="red")
    if record.abandoned:
        line.append("  left behind", style="yellow")
    return line
