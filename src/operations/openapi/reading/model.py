"""Describe one operation in the same way for every version of OpenAPI, and name operations and arguments.

`openapi3.py` and `swagger2.py` fill in the model; all other modules know only this. Its values hold JSON and each
other, so they are in no cycle and the garbage collector need not visit them.

Rule 1: a name consists of `[A-Za-z0-9_.-]`.
Rule 2: no name depends on the order of paths, methods or parameters.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
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
    """OpenAPI 3.2: the schema of one item of a stream, a list of parts or a sequence."""

    encoding: JSONObject = {}
    """By property: how it is written into a form."""

    prefix_encoding: tuple[Any, ...] = ()
    """3.2: how the first parts of a list are written."""

    item_encoding: JSONObject = {}
    """3.2: how its other parts are."""

    part_headers: dict[str, tuple[Parameter, ...]] = {}
    """By property: the headers that its part of a multipart body may have."""


class Body(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The body of a request, in every representation that the document offers."""

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


MAX_NAME = 240
"""How long an operation's name may be; longer ones end in a digest."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def operation_names(operations: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a unique name for each `(wanted name, method, path)`, in the order given.

    The wanted name (an `operationId`) is kept, made safe, if no other operation wants the same; otherwise,
    and without one, the name is made of method and path; if even those are the same, a digest of both is added.
    """
    entries = list(operations)
    is_safe = _SAFE.fullmatch
    wanted = [
        name
        if is_safe(name) is not None and len(name) <= MAX_NAME
        else safe_name(name) or path_name(method, path)
        for name, method, path in entries
    ]
    if len(set(wanted)) == len(entries):
        return wanted
    counts = Counter(wanted)
    taken = {name for name, count in counts.items() if count == 1}
    again = {
        index: path_name(method, path)
        for index, (_, method, path) in enumerate(entries)
        if counts[wanted[index]] > 1
    }
    counts = Counter(again.values())
    for index, name in again.items():
        if counts[name] > 1 or name in taken:
            _, method, path = entries[index]
            name = _with_digest(name, f"{method} {path}")  # noqa: PLW2901 - the name is what is refined
        wanted[index] = name
    return wanted


def safe_name(text: str) -> str:
    """Return `text` with every run of unsafe characters as one underscore; empty if nothing is left."""
    if _SAFE.fullmatch(text) and len(text) <= MAX_NAME:
        return text
    name = _UNSAFE.sub("_", text).lstrip(".-").strip("_")
    return name if len(name) <= MAX_NAME else _with_digest(name, text)


def path_name(method: str, path: str) -> str:
    """Return `get_users_id_posts` for `GET /users/{id}/posts`."""
    return safe_name(f"{method.lower()}_{path.strip('/')}".rstrip("_"))


def _with_digest(name: str, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{name[: MAX_NAME - 11]}_{digest}"


def argument_names(
    parameters: Sequence[tuple[str, str]], reserved: Iterable[str] = ()
) -> list[str]:
    """Return the argument each parameter `(name, place)` is given by, in the order given.

    That is its own name. A name used in two places, or reserved, gets the place added: `id_path`, `id_query`.
    """
    counts = Counter(name for name, _ in parameters)
    counts.update(reserved)
    taken = {name for name, count in counts.items() if count == 1}
    taken.update(reserved)
    result: list[str] = []
    for name, place in parameters:
        argument = name
        if counts[name] > 1:
            argument = unused_name(f"{name}_{place}", taken)
            taken.add(argument)
        result.append(argument)
    return result


def unused_name(wanted: str, taken: Container[str]) -> str:
    """Return `wanted`, with underscores appended until it is not among `taken`."""
    while wanted in taken:
        wanted += "_"
    return wanted
