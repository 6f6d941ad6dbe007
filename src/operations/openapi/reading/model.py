"""What one operation of a document says, whatever the document's version.

`openapi3.py` and `swagger2.py` fill these in; everything behind them knows only this.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from operations.types import JSONObject

Place = Literal["path", "query", "header", "cookie"]

METHODS = ("get", "put", "post", "patch", "delete", "head", "options", "trace", "query")
"""The methods that make an operation, as documents spell them."""

EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One representation of a body."""

    media_type: str
    schema: Any = True

    item_schema: Any = None
    """3.2: what one item of a stream, a list of parts or a sequence looks like."""

    encoding: JSONObject = field(default_factory=dict[str, Any])
    """By property: how it is written into a form."""

    prefix_encoding: tuple[Any, ...] = ()
    """3.2: how the first parts of a list are written."""

    item_encoding: JSONObject = field(default_factory=dict[str, Any])
    """3.2: how its other parts are."""

    part_headers: dict[str, tuple[Parameter, ...]] = field(
        default_factory=dict[str, tuple[Parameter, ...]]
    )
    """By property: the headers that its part of a multipart body may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What a request carries, in every representation the document offers."""

    required: bool = False
    description: str = ""
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One declared answer."""

    status: str
    """Three digits, `4XX` or `default`."""

    description: str = ""
    media: tuple[Media, ...] = ()
    links: JSONObject = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One operation, complete."""

    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    responses: tuple[Response, ...] = ()
