"""`operations trace`: the tree of recent calls, and how long each took."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text
from rich.tree import Tree

from operations.cli.journal import Recorded, journal_path, read_journal
from operations.cli.options import DEFAULTS, Common, command
from operations.cli.render import Screen, plain
from operations.observe import CallAbandoned, CallFinished, CallStarted
from operations.types import JSONObject

_LOOK_AGAIN = 0.2
"""Seconds between two looks at a journal that is followed."""


@dataclass(slots=True, kw_only=True)
class Span:
    """One call, and the calls it made."""

    operation_id: str
    request_id: str
    identity_id: str | None
    started: int
    parent: str | None
    code: str | None = None
    seconds: float | None = None
    """None while it runs."""

    abandoned: bool = False
    children: list["Span"] = field(default_factory=list["Span"])

    def to_json(self) -> JSONObject:
        """For scripts."""
        return {
            "operationId": self.operation_id,
            "requestId": self.request_id,
            "identityId": self.identity_id,
            "started": self.started,
            "seconds": self.seconds,
            "code": self.code,
            "abandoned": self.abandoned,
            "calls": [child.to_json() for child in self.children],
        }


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
    """Show recent calls as a tree: who called what, what that called in turn, how long it took, how it ended.

    It shows the calls that `call`, `serve` and `work` made with this config. Arguments and results are not kept.

    Args:
        operation_id: Only calls that begin with this operation.
        limit: How many calls, the newest last.
        failed: Only calls that failed, or in which one failed.
        follow: Go on showing calls as they end, until Ctrl-C.
        common: What every command takes.
    """
    screen = common.screen()
    path = journal_path(common.load(required=False))
    shown: set[str] = set()
    while True:
        seen = _mark(path)
        roots = [
            root
            for root in spans(read_journal(path))
            if root.request_id not in shown
            and (operation_id is None or root.operation_id == operation_id)
            and (not failed or _has_failed(root))
            and not (follow and root.seconds is None)
        ][-limit:]
        _show(roots, screen)
        if not follow:
            if not roots and screen.is_terminal:
                screen.note(f"no calls are recorded in {path}")
            return
        shown.update(root.request_id for root in roots)
        while _mark(path) == seen:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(_LOOK_AGAIN)


def spans(events: Iterable[Recorded]) -> list[Span]:
    """The calls that nobody else's call made, oldest first, each with those it made."""
    by_id: dict[str, Span] = {}
    for event in events:
        match event:
            case CallStarted():
                by_id[event.request_id] = Span(
                    operation_id=event.operation_id,
                    request_id=event.request_id,
                    identity_id=event.identity_id,
                    started=event.timestamp,
                    parent=event.parent_request_id,
                )
            case CallFinished() if event.request_id in by_id:
                by_id[event.request_id].code = event.code
                by_id[event.request_id].seconds = event.duration
            case CallAbandoned() if event.request_id in by_id:
                by_id[event.request_id].abandoned = True
            case _:
                pass
    roots: list[Span] = []
    for span in by_id.values():
        parent = by_id.get(span.parent or "")
        (roots if parent is None else parent.children).append(span)
    return roots


def _has_failed(span: Span) -> bool:
    return span.code is not None or any(map(_has_failed, span.children))


def _mark(path: Path) -> int:
    """Something that changes when the journal does."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _show(roots: list[Span], screen: Screen) -> None:
    if screen.json:
        if roots:
            screen.value([root.to_json() for root in roots])
        return
    for root in roots:
        when = datetime.fromtimestamp(root.started / 1000, UTC).astimezone()
        line = Text(f"{when:%H:%M:%S}  ", style="dim").append_text(_line(root))
        if root.identity_id is not None:
            line.append(f"  by {plain(root.identity_id)}", style="dim")
        tree = Tree(line, guide_style="dim")
        _grow(tree, root)
        screen.show(tree)


def _grow(tree: Tree, span: Span) -> None:
    for child in span.children:
        _grow(tree.add(_line(child)), child)


def _line(span: Span) -> Text:
    line = Text(plain(span.operation_id), style="bold")
    if span.seconds is None:
        return line.append("  running, or cut off", style="yellow")
    line.append(f"  {span.seconds * 1000:.1f} ms", style="cyan")
    if span.code is not None:
        line.append(f"  {plain(span.code)}", style="red")
    if span.abandoned:
        line.append("  left behind", style="yellow")
    return line
