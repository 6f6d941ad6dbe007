"""What one operation of a document says, whatever the document's version.

`openapi3.py` and `swagger2.py` fill these in; everything behind them knows only this. These values hold JSON and each
other, so they are in no cycle and the garbage collector need not visit them.
"""

from typing import Any, Literal

import msgspec

from operations.types import JSONObject

Place = Literal["path", "query", "header", "cookie"]

METHODS = ("get", "put", "post", "patch", "delete", "head", "options", "trace", "query")
"""The methods that make an operation, as documents spell them."""

EVENT_STREAM = "text/event-stream"


class Parameter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One value that goes into the path, the query, a header or a cookie."""

    name: str
    place: Place
    required: bool = False
    description: str = ""
    deprecated: bool = False

    schema: Any = True
    """As the document has it, not converted."""

    style: str = "simple"
    explode: bool = False
    allow_reserved: bool = False

    media_type: str | None = None
    """Set where the parameter has `content`: it is serialised as this, and `style` says nothing."""


class Media(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One representation of a body."""

    media_type: str
    schema: Any = True

    item_schema: Any = None
    """3.2: what one item of a stream, a list of parts or a sequence looks like."""

    encoding: JSONObject = {}
    """By property: how it is written into a form."""

    prefix_encoding: tuple[Any, ...] = ()
    """3.2: how the first parts of a list are written."""

    item_encoding: JSONObject = {}
    """3.2: how its other parts are."""

    part_headers: dict[str, tuple[Parameter, ...]] = {}
    """By property: the headers that its part of a multipart body may have."""


class Body(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request carries, in every representation the document offers."""

    required: bool = False
    description: str = ""
    media: tuple[Media, ...] = ()


class Response(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One declared response."""

    status: str
    """Three digits, `4XX` or `default`."""

    description: str = ""
    media: tuple[Media, ...] = ()
    links: JSONObject = {}


class Model(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One operation, complete."""

    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    responses: tuple[Response, ...] = ()
