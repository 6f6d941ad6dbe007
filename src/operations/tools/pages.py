"""Split large results into pages that a caller reads one by one, with a cursor.

    {"path": "", "value": {"total": 9000, "items": [...]}, "cursor": "..."}
    {"path": "/items", "value": [...], "cursor": "..."}

Rule 1: every page is complete JSON. `value` continues the earlier pages at `path`: items are appended to a list,
        properties added to an object, characters to a text. `cursor` gives the next page; the last page has none.
Rule 2: an item or property stays whole if it fits into a page.
Rule 3: pages are stored for some minutes, only for the caller of the operation, with limits in bytes per caller and in
        total. A cursor may be used again, so a caller can repeat a request whose response was lost.
Rule 4: the pages of the result of a run are stored with the run, for those who may see it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from secrets import token_urlsafe
from time import monotonic
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import is_list, is_object, list_of, pointer
from operations.base.types import JSONObject
from operations.contract.access import UNGRANTED
from operations.contract.context import OperationContext, may_call
from operations.contract.envelopes import MCPResponseMeta, ResponseEnvelope, TextContent
from operations.contract.functions import operation, operation_of
from operations.contract.specs import Operation
from operations.registry.registry import OperationRegistry

NEXT: Final = "results.next"
"""The id of the operation that returns the next page of a result."""

LIFETIME: Final = 600.0
"""Seconds for which the pages of a result are stored."""

MAX_BYTES: Final = 64 << 20
"""The largest total size of the stored pages, in bytes; the oldest results are removed first."""

MAX_CALLER_BYTES: Final = 32 << 20
"""The largest total size of the stored pages of one caller, in bytes."""

MIN_PAGE: Final = 1_000
"""The smallest page, in bytes: its cursor and path need some of them."""

_RUN: Final = "run:"
"""The beginning of the cursors of runs. Other cursors have no colon."""

_OVERHEAD = 120
"""Bytes of a page that are neither its path nor its value."""

_MAX_DIGITS = 9
"""The longest page number in a cursor."""

_LITTLE = 100
"""If fewer bytes than this are left in a page, the next value begins a new page."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class ResultPages:
    """Stores the pages of large results, and returns them to their callers.

    Args:
        registry: The registry of the operations. A caller that loses access to an operation receives no further pages.
    """

    def __init__(self, registry: OperationRegistry) -> None:
        self._registry = registry
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    async def bound(
        self,
        envelope: ResponseEnvelope[Any],
        context: OperationContext,
        operation_id: str,
        max_bytes: int,
    ) -> ResponseEnvelope[Any]:
        """Return a small result unchanged, and the first page of a larger one.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the pages are too large to be stored.
        """
        keeper = None if context.scope is None else context.scope.result_keeper
        if keeper is not None:
            if context.whole and len(envelope.encode()) <= keeper.max_bytes:
                return envelope
            # The envelope of an MCP result contains its page three times.
            max_bytes = min(max_bytes, max(MIN_PAGE, keeper.max_bytes // 5))
        data, meta = envelope.data, envelope.meta
        raw = _encode(data)
        is_large = len(raw) > max_bytes
        if isinstance(meta, MCPResponseMeta):
            content: list[JSONObject] = msgspec.to_builtins(meta.content)
            is_large = is_large or len(_encode(content)) > max_bytes
            if is_large and any(block["type"] != "text" for block in content) and data != content:
                raw = _encode({"content": content, "data": data})
        if not is_large:
            return envelope
        # Copy the result, because the operation may change the object that it returned.
        value = _decode(raw)
        pages = list[bytes]()
        left = MAX_CALLER_BYTES
        secret = token_urlsafe(16) if keeper is None else _RUN + keeper.run_id
        page: JSONObject = {}
        for path, fragment in split(value, max_bytes - _OVERHEAD):
            if page:
                pages.append(_encode({**page, "cursor": f"{secret}.{len(pages) + 1}"}))
                # Each page repeats its path, and names have any length.
                left -= len(pages[-1])
                if left < 0:
                    message = f"The pages of this result would take more than {MAX_CALLER_BYTES >> 20} MiB"
                    raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
                # A large result takes many pages: let other tasks run in between.
                await asyncio.sleep(0)
            page = {"path": path, "value": fragment}
            if isinstance(data, bytes):
                page["encoding"] = "base64"
        pages.append(_encode(page))
        if keeper is None:
            self._keep(secret, _Kept(_caller(context), operation_id, pages))
        else:
            keeper.keep(pages)
        return _enveloped(pages[0], envelope)

    async def next(self, cursor: str, context: OperationContext) -> JSONObject:
        """Return the page of a cursor.

        Raises:
            CallError: `VALIDATION_ERROR` if it is unknown to this caller or has expired; `UNAVAILABLE` if the store of
                its run does not work.
        """
        secret, _, digits = cursor.partition(".")
        found: tuple[str, bytes] | None = None
        if digits.isdecimal() and len(digits) <= _MAX_DIGITS:
            number = int(digits)
            if secret.startswith(_RUN):
                found = await self._page_of_run(secret.removeprefix(_RUN), number, context)
            else:
                found = self._page(secret, number, context)
        spec = None if found is None else self._registry.get_spec(found[0])
        if found is None or spec is None or not may_call(spec, context):
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                "The cursor is unknown or has expired: call the operation again",
            )
        return cast("JSONObject", _decode(found[1]))

    def _page(
        self, secret: str, number: int, context: OperationContext
    ) -> tuple[str, bytes] | None:
        """Return a page of this process, with its operation."""
        self._expire()
        kept = self._kept.get(secret)
        if kept is None or kept.caller != _caller(context) or not 0 < number < len(kept.pages):
            return None
        return kept.operation_id, kept.pages[number]

    async def _page_of_run(
        self, run_id: str, number: int, context: OperationContext
    ) -> tuple[str, bytes] | None:
        """Return a page of the result of a run, with its operation."""
        store = self._registry.run_store
        return None if store is None else await store.result_page(run_id, number, context)

    def _keep(self, secret: str, kept: "_Kept") -> None:
        self._expire()
        self._kept[secret] = kept
        self._bytes += kept.size
        own = [(key, each) for key, each in self._kept.items() if each.caller == kept.caller]
        held = sum(each.size for _, each in own)
        for key, each in own:
            if held <= MAX_CALLER_BYTES:
                break
            held -= each.size
            self._drop(key)
        while self._bytes > MAX_BYTES:
            self._drop(next(iter(self._kept)))

    def _expire(self) -> None:
        now = monotonic()
        while self._kept and next(iter(self._kept.values())).expires <= now:
            self._drop(next(iter(self._kept)))

    def _drop(self, secret: str) -> None:
        self._bytes -= self._kept.pop(secret).size


@dataclass(frozen=True, slots=True)
class _Kept:
    """The pages of one result."""

    caller: bytes
    operation_id: str
    pages: list[bytes]
    expires: float = field(default_factory=lambda: monotonic() + LIFETIME)

    @property
    def size(self) -> int:
        return sum(map(len, self.pages))


def next_operation(pages: ResultPages) -> Operation:
    """Return the operation `results.next` of a registry."""

    @operation(NEXT, type="query")
    async def next_page(cursor: str, context: OperationContext) -> JSONObject:  # noqa: D417
        """Return the next page of a result that was too large for one response.

        Its `value` continues the value at `path` of the earlier pages. A page without a `cursor` is the last one.

        Args:
            cursor: The `cursor` of the page before.
        """
        return await pages.next(cursor, context)

    # The call that had the first page was granted, and each page requires that it still is.
    marked = cast("Operation", operation_of(next_page))
    spec = replace(marked.spec, access_control=UNGRANTED)
    return replace(marked, spec=spec, needs_grant=False)


def result_owner(context: OperationContext) -> list[Any]:
    """Return the key of the caller of a stored result: the identity without its expiry, or else the session."""
    identity = context.identity
    if identity is None:
        return [None, context.channel.session]
    return [replace(identity, expires_at=None), ""]


def _caller(context: OperationContext) -> bytes:
    return msgspec.json.encode(result_owner(context), order="deterministic")


def _enveloped(page: bytes, envelope: ResponseEnvelope[Any]) -> ResponseEnvelope[Any]:
    """Return a page in the envelope of its result."""
    meta, data = envelope.meta, _decode(page)
    if isinstance(meta, MCPResponseMeta):
        # The content blocks repeat the whole result.
        content = [TextContent(text=page.decode())]
        meta = replace(meta, content=content, structured_content=data)
    return ResponseEnvelope(data, meta)


# ------------------------------------------------------------ splitting


def split(value: Any, max_bytes: int) -> Iterator[tuple[str, Any]]:
    """Split a JSON value into fragments of at most `max_bytes`; yield the path and the value of each.

    Only a number or a property name can exceed the limit.
    """
    if isinstance(value, (dict, list, str)) and value:
        yield from _Splitter(max_bytes).split(value, "")
    else:
        yield "", value


class _Splitter:
    """Fills pages one by one with the parts of a value."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._page: Any = None
        """The value of the current page, as far as it is filled; None between two pages."""
        self._path = ""
        self._room = self._whole = 0
        """The bytes that are left for the value of the page, and those that an empty page has."""

    def _begin(self, path: str, value: Any) -> Any:
        """Begin a page that continues the value at a path; return the container for its next parts."""
        self._path, self._page = path, type(value)()
        self._room = self._whole = self._room_at(path)
        return self._page

    def _room_at(self, path: str) -> int:
        return max(self._max_bytes - len(_encode(path)), _LITTLE)

    def _end(self) -> tuple[str, Any]:
        page, self._page = self._page, None
        return self._path, page

    def split(self, value: Any, path: str, part: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield the pages that a value fills; `part` is its beginning in the current page, which is still empty."""
        if isinstance(value, str):
            yield from self._split_text(value, path)
            return
        for key, item in _items_of(value):
            if self._page is None:
                part = self._begin(path, value)
            label = len(_encode(key)) + 2 if is_object(value) else 2
            size = label + size_of(item, self._whole)
            is_begun, is_too_large = self._room < self._whole, size > self._room
            fits_next = size <= self._whole or self._room < _LITTLE + label
            if is_begun and is_too_large and fits_next:
                yield self._end()
                part = self._begin(path, value)
                size = label + size_of(item, self._whole)
            is_whole = size <= self._room or not item
            if is_whole or not (isinstance(item, str) or is_object(item) or is_list(item)):
                _add(part, key, item)
                self._room -= size
            elif isinstance(item, str):
                beginning = _piece(item, 0, max(self._room - label, _LITTLE))
                _add(part, key, beginning)
                yield self._end()
                yield from self._split_text(item, path + pointer(key), len(beginning))
            else:
                inner: Any = type(item)()
                _add(part, key, inner)
                self._room -= label + 2
                yield from self.split(item, path + pointer(key), inner)
        if part is not None and part is self._page:
            yield self._end()

    def _split_text(self, text: str, path: str, start: int = 0) -> Iterator[tuple[str, str]]:
        room = self._room_at(path)
        while start < len(text):
            piece = _piece(text, start, room)
            yield path, piece
            start += len(piece)


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if is_object(value) else enumerate(list_of(value))


def _add(container: Any, key: Any, value: Any) -> None:
    if is_list(container):
        container.append(value)
    else:
        container[key] = value


def _piece(text: str, start: int, room: int) -> str:
    """Return as many characters of a text as fit, beginning at `start`."""
    count = room
    while (size := len(_encode(text[start : start + count]))) > room and count > 1:
        count = max(1, count * room // size - 1)
    return text[start : start + count]


def size_of(value: Any, limit: int) -> int:
    """Return the size of a value as JSON in bytes; any number above `limit` if it is larger."""
    if isinstance(value, str):
        return len(_encode(value)) if len(value) <= limit else limit + 1
    if is_object(value) or is_list(value):
        size = 2
        for key, item in _items_of(value):
            label = len(_encode(key)) + 2 if is_object(value) else 1
            size += label + size_of(item, limit - size)
            if size > limit:
                break
        return size
    return len(_encode(value))
