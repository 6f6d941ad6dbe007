"""Addresses of views and skills in the values of imported tools: those of the server, and those that clients use.

    structured content    ui://clock/app.html          ->  ui://oslo/clock/app.html
    arguments             ui://oslo/clock/app.html     ->  ui://clock/app.html

Rule 1: only a text that is an address as a whole changes. Names of properties and blocks of text stay as they are.
Rule 2: only servers with views or skills have such addresses.
Rule 3: an address that a server lists is that of the server, also if it begins with the namespace of the server.
Rule 4: a result that would no longer match the listed output schema stays as it is, because clients would drop it.
Rule 5: every change is listed in the `_meta` of the result.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from operations.base.json.values import Path, object_of, pointer_to
from operations.base.text import shortened
from operations.base.types import JSONObject
from operations.contract.envelopes import MAX_CHANGES
from operations.mcp.serving.catalog import Addresses, publish_addresses
from operations.mcp.serving.tools import Tool
from operations.mcp.shared import codec
from operations.mcp.shared.addresses import is_scoped, rescoped, scoped, unscoped
from operations.schema import MAX_MESSAGE, MAX_PATH, Change, ChangeKind

_ANY: Final = re.compile(rb'"(?:ui|skill)://', re.IGNORECASE)
"""Finds whether JSON has an address; most has none."""


_PARTS: Final = frozenset({str, dict, list})
"""The types of values that may be addresses, or have them."""


def at_server(value: Any, namespace: str | None, addresses: Addresses) -> tuple[Any, list[Change]]:
    """Return the arguments of a tool with the addresses of its server, and the changes."""
    if namespace is None or namespace not in addresses.scopes or not _has_address(value):
        return value, []

    def change(text: str) -> str:
        place = unscoped(text)
        is_ours = place is not None and place[0] == namespace
        if place is None or not is_ours or addresses.is_known(namespace, text):
            return text
        return place[1]

    found = _Replacement(change)
    return found.of(value), found.changes("input", "is now {after}")


def publish(result: JSONObject, tool: Tool, addresses: Addresses, *, modern: bool) -> None:
    """Write the addresses in the result of an imported tool as clients use them; `result` is modified."""
    namespace = tool.source
    if namespace is None:
        return
    publish_addresses(result["content"], namespace, addresses)
    if "_meta" in result:
        result["_meta"] = rescoped(result["_meta"], namespace)
    structured = result.get("structuredContent")
    value, changes = _published(structured, namespace, addresses)
    if changes and (tool.accepts(value, modern) or not tool.accepts(structured, modern)):
        result["structuredContent"] = value
        note(result, changes)


def publish_envelope(wire: JSONObject, namespace: str, addresses: Addresses) -> None:
    """Do the same for the envelope of an imported tool on the wire."""
    wire["data"], changes = _published(wire.get("data"), namespace, addresses)
    meta = object_of(wire.get("meta"))
    publish_addresses(meta.get("content", []), namespace, addresses)
    for key in ("structuredContent", "_meta"):
        if key in meta:
            meta[key] = rescoped(meta[key], namespace)
    if changes:
        _append(meta, changes)


def publish_prompt(result: JSONObject, namespace: str, addresses: Addresses) -> None:
    """Do the same for the result of an imported prompt."""
    for message in result["messages"]:
        message["content"] = content = dict(message["content"])
        publish_addresses([content], namespace, addresses)
    if "_meta" in result:
        result["_meta"] = rescoped(result["_meta"], namespace)


def note(result: JSONObject, changes: list[Change]) -> None:
    """Add changes to the `_meta` of a result."""
    if changes:
        meta = result.setdefault("_meta", {})
        _append(meta.setdefault(codec.CHANGES_KEY, {}), changes)


def _append(noted: JSONObject, changes: list[Change]) -> None:
    listed = [*noted.get("changes", ()), *msgspec.to_builtins(changes)]
    noted["changes"] = listed[:MAX_CHANGES]
    count = sum(change.count for change in changes)
    noted["changesCount"] = noted.get("changesCount", 0) + count


def _published(value: Any, namespace: str, addresses: Addresses) -> tuple[Any, list[Change]]:
    if namespace not in addresses.scopes or not _has_address(value):
        return value, []
    found = _Replacement(lambda text: scoped(namespace, text) or text)
    return found.of(value), found.changes("address", "was {before}")


def _has_address(value: Any) -> bool:
    return isinstance(value, (str, dict, list)) and bool(_ANY.search(msgspec.json.encode(value)))


class _Replacement:
    """Replaces addresses in one value.

    Args:
        change: Returns the address to write for one.
    """

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change
        self._first: tuple[Path, str, str] | None = None
        self._count = 0

    def of(self, value: str | JSONObject | list[Any], path: Path = ()) -> Any:
        """Return a value with the other addresses; parts without addresses are shared with it."""
        if isinstance(value, str):
            return self._text(value, path)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        changed: dict[Any, Any] = {}
        for key, each in pairs:
            # Most values are scalars, for which a call would take longer than this test.
            if type(each) in _PARTS:
                after = self.of(each, (key, path))
                if after is not each:
                    changed[key] = after
        if not changed:
            return value
        if isinstance(value, dict):
            return {**value, **changed}
        return [changed.get(index, each) for index, each in enumerate(value)]

    def _text(self, text: str, path: Path) -> str:
        after = self._change(text) if is_scoped(text) else text
        if after != text:
            self._count += 1
            self._first = self._first or (path, text, after)
        return after

    def changes(self, kind: ChangeKind, message: str) -> list[Change]:
        """Return the changes so far: one entry with the first address and the number of all."""
        if self._first is None:
            return []
        path, *texts = self._first
        before, after = (msgspec.json.encode(text).decode() for text in texts)
        shown = shortened(message.format(before=before, after=after), MAX_MESSAGE)
        return [Change(shortened(pointer_to(path), MAX_PATH), kind, self._count, shown)]
