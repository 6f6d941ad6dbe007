"""Kinds of paging, as declared by a document or a rule.

Each kind returns the changes for the next request, given the last response; None ends the list. A kind that `counts`
continues until a page is empty, so that its end depends on the server.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from operations.base.errors import invalid_argument
from operations.base.json.values import list_of, object_of, pointer, text_of, unescape
from operations.base.types import JSONObject
from operations.io.hosts import joined_url

_INDEX = re.compile("-?[0-9]{1,9}")
_LINK = re.compile(r"<([^<>]*)>([^<]*)")
_REL = re.compile(r";\s*rel\s*=\s*(?:\"([^\"]*)\"|([^\s;,]+))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Page:
    """One response, and its request."""

    arguments: JSONObject
    url: str
    headers: Mapping[str, str]
    data: Any


Next: TypeAlias = JSONObject | str | None
"""The arguments of the next request, or its address, which must be of the same origin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPaging:
    """The `Link` header has the address of the next page (RFC 8288)."""

    counts: ClassVar = False

    def following(self, page: Page) -> Next:
        """Return how to request the page after `page`; None if it is the last."""
        for target, attributes in _LINK.findall(page.headers.get("link", "")):
            for quoted, bare in _REL.findall(attributes):
                if "next" in (quoted or bare).lower().split():
                    return joined_url(page.url, str(target))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class URLPaging:
    """A field of the response has the address of the next page."""

    next: str
    """A JSON pointer into the response."""

    counts: ClassVar = False

    def following(self, page: Page) -> Next:
        """Return how to request the page after `page`; None if it is the last."""
        url = text_of(value_at(page.data, self.next))
        return joined_url(page.url, url) if url else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorPaging:
    """A field of the response is the cursor for an argument of the next request."""

    argument: str
    """The argument for the cursor."""

    next: str
    """A JSON pointer into the response."""

    counts: ClassVar = False

    def following(self, page: Page) -> Next:
        """Return how to request the page after `page`; None if it is the last."""
        cursor = value_at(page.data, self.next)
        if cursor is None or cursor is False or cursor == "":
            return None
        if cursor == page.arguments.get(self.argument):
            return None
        return {**page.arguments, self.argument: cursor}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePaging:
    """An argument counts pages; a page without items ends the list."""

    argument: str = "page"
    """The argument that counts."""

    first: int = 1
    """The number of the first page."""

    items: str = ""
    """A JSON pointer to the list in the response."""

    counts: ClassVar = True

    def following(self, page: Page) -> Next:
        """Return how to request the page after `page`; None if it is the last."""
        if not list_of(value_at(page.data, self.items)):
            return None
        number = _number(page, self.argument, self.first)
        return {**page.arguments, self.argument: number + 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetPaging:
    """An argument counts items; a page without items, or with fewer items than the limit, ends the list."""

    argument: str = "offset"
    """The argument that counts."""

    limit: str | None = None
    """The argument for the number of items in a page."""

    items: str = ""
    """A JSON pointer to the list in the response."""

    counts: ClassVar = True

    def following(self, page: Page) -> Next:
        """Return how to request the page after `page`; None if it is the last."""
        count = len(list_of(value_at(page.data, self.items)))
        wanted = page.arguments.get(self.limit) if self.limit else None
        if not count or (isinstance(wanted, int) and count < wanted):
            return None
        offset = _number(page, self.argument, 0)
        return {**page.arguments, self.argument: offset + count}


def _number(page: Page, argument: str, first: int) -> int:
    """Return the number in an argument of a page's request; `first` if it is absent or null.

    Raises:
        CallError: `VALIDATION_ERROR` if it is not a number.
    """
    given = page.arguments.get(argument)
    try:
        return first if given is None else int(given)
    except (TypeError, ValueError):
        message = f"{argument!r} must be a number, because it counts the pages."
        raise invalid_argument(pointer(argument), message, "type") from None


Paging: TypeAlias = LinkPaging | URLPaging | CursorPaging | PagePaging | OffsetPaging


def value_at(data: Any, place: str) -> Any:
    """Return the value at a JSON pointer in `data`; None if it does not exist."""
    for token in place.split("/")[1:]:
        key = unescape(token)
        if isinstance(data, list) and _INDEX.fullmatch(key):
            items, index = list_of(data), int(key)  # pyright: ignore[reportUnknownArgumentType]
            data = items[index] if -len(items) <= index < len(items) else None
        else:
            data = object_of(data).get(key)
    return data


def declared_paging(operation: JSONObject, responses: JSONObject) -> Paging | None:
    """Return the paging that a document declares: `x-ms-pageable`, or a `Link` header."""
    ms = object_of(operation.get("x-ms-pageable"))
    if link := text_of(ms.get("nextLinkName")):
        return URLPaging(next=pointer(link))
    for status, response in responses.items():
        headers = {str(name).lower() for name in object_of(object_of(response).get("headers"))}
        if status.startswith("2") and "link" in headers:
            return LinkPaging()
    return None
