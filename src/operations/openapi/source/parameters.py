"""Name arguments, and serialise them into a path, a query, a header or a cookie: the style table of OpenAPI.

Rule 1: every value is first split into items or members; a style only determines the separators.
Rule 2: the request path has the segments and literals of the template. An argument can only fill its own placeholder;
        otherwise it is rejected.
Rule 3: names of arguments do not depend on the order of parameters.
"""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from operations.base.errors import CallError, invalid_argument
from operations.base.json.values import (
    SCALARS,
    is_list,
    is_object,
    list_of,
    object_of,
    unsafe_in_path,
)
from operations.io.http.client import enforce_header
from operations.openapi.reading.media import is_json
from operations.openapi.reading.model import Parameter

_TEMPLATE = re.compile(r"\{([^{}/]+)\}")
_SUSPECT = re.compile(r"[\x00-\x1f\x7f%.]")
"""A text without these characters contains nothing that `unsafe_in_path` finds."""

_NO_TRIPLE = re.compile("%(?![0-9a-fA-F]{2})")

Encode = Callable[[str], str]

_RESERVED_KEPT = ":/?[]@!$'()*,;="
"""The characters that `allowReserved` leaves unencoded. `#`, `&` and `+` would change the query's meaning."""

_PATH_KEPT = ":@!$&'()*+,="
"""The same for a path: without `;`, which begins another parameter of the segment."""

_COOKIE_KEPT = "!#$%&'()*+-./:<=>?@[]^_`{|}~"
"""The characters of a cookie's value (RFC 6265), other than letters and digits."""

_DELIMITERS = {"spaceDelimited": " ", "pipeDelimited": "|", "tabDelimited": "\t"}
"""The separators of lists; a comma in all other styles, which is never encoded."""


def template_names(path: str) -> list[str]:
    """Return the distinct names in braces, in order."""
    return list(dict.fromkeys(_TEMPLATE.findall(path)))


class PathTemplate:
    """The path of an operation and its query, which path parameters may fill as well.

    Args:
        text: The template.
        declared: The declared parameters.

    Attributes:
        parameters: The declared parameters, with exactly the path parameters of the template; undeclared ones are
            strings. A path parameter with its placeholder only in `key={name}` of the query is a query parameter.
        literals: The pieces of the query without placeholders.
        literal: The path, if neither it nor the query has placeholders to fill.
    """

    def __init__(self, text: str, declared: Sequence[Parameter]) -> None:
        path, _, query = text.partition("#")[0].partition("?")
        self._path = path if path.startswith("/") else "/" + path
        self._segments = _split(self._path)
        pieces = query.split("&")
        self.literals = tuple(_literal(piece) for piece in pieces if piece and "{" not in piece)
        known = {p.name for p in declared if p.place == "path"}
        # Other than `key={name}`: `q={a},{b}`, `{name}`.
        filled = [
            piece
            for piece in pieces
            if "{" in piece
            and _TEMPLATE.fullmatch(piece.partition("=")[2]) is None
            and known.issuperset(template_names(piece))
        ]
        self._query = tuple(map(_split, filled))
        self.parameters = _completed("".join([path, *filled]), query, declared)
        has_names = len(self._segments) > 1 or bool(filled)
        self.literal = None if has_names else self._segments[0]

    def fill(self, value: Callable[[str], str]) -> tuple[str, list[str]]:
        """Return the path, and the pieces of the query that path parameters fill.

        Args:
            value: Returns the encoded value of a parameter.

        Raises:
            CallError: With code `VALIDATION_ERROR`, if a segment is unsafe.
        """
        path = _filled(self._segments, value)
        _enforce_segments(path, self._path)
        return path, [_filled(pieces, value) for pieces in self._query]


def _split(template: str) -> list[str]:
    """Return literals and names alternately: literals at even positions, percent-encoded if necessary."""
    parts = _TEMPLATE.split(template)
    return [part if index % 2 else _literal(part) for index, part in enumerate(parts)]


def _filled(pieces: list[str], value: Callable[[str], str]) -> str:
    return "".join([value(each) if index % 2 else each for index, each in enumerate(pieces)])


def _literal(text: str) -> str:
    return quote(text, safe="/%-._~!$&'()*+,;=:@")


def _enforce_argument(name: str, value: Any) -> None:
    """Raise an error for a value that is not allowed in a path."""
    if type(value) is str:
        _enforce_text(name, value)
    elif type(value) not in SCALARS:
        for item in list_of(value):
            _enforce_argument(name, item)
        for key, item in object_of(value).items():
            _enforce_argument(name, key)
            _enforce_argument(name, item)


def _enforce_text(name: str, text: str) -> None:
    if _SUSPECT.search(text) and (unsafe := unsafe_in_path(text)):
        raise _refusal(name, unsafe)


def _enforce_segments(path: str, template: str) -> None:
    """Raise an error for a filled template if the number of segments changed, or one became a dot segment."""
    segments, originals = path.split("/"), template.split("/")
    if len(segments) != len(originals):
        raise _refusal(template, "a slash")
    for segment, original in zip(segments, originals, strict=True):
        if "{" in original:
            _enforce_text(original.strip("{}"), segment)


def _refusal(name: str, what: str) -> CallError:
    """Return the error for an argument that is not allowed in a path."""
    message = f"The path argument {name!r} may not be or contain {what}."
    return invalid_argument("/" + name, message, "path")


def percent(text: str) -> str:
    """Return `text` with all characters except unreserved ones percent-encoded."""
    return quote(text, safe="-._~")


def percent_reserved(text: str, kept: str = _RESERVED_KEPT, encoding: str = "utf-8") -> str:
    """Return `text` with reserved characters and percent-encoded triples unchanged, for `allowReserved`."""
    return quote(
        _NO_TRIPLE.sub("%25", text), safe="-._~%" + kept, encoding=encoding, errors="strict"
    )


def _percent_path(text: str) -> str:
    return percent_reserved(text, _PATH_KEPT)


def _cookie_value(text: str) -> str:
    """Return the value of a cookie: unchanged (3.2), except for characters that no value may contain."""
    return quote(text, safe=_COOKIE_KEPT)


def text_of_value(value: Any) -> str:
    """Return a primitive as text: null is empty, bytes are base64, lists and objects are JSON."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray)):
        return b64encode(value).decode()
    return msgspec.json.encode(value).decode()


def path_argument(name: str, parameter: Parameter, value: Any) -> str:
    """Return the argument `name` for a path segment, percent-encoded.

    Raises:
        CallError: With code `VALIDATION_ERROR`, for an empty value, control characters, and dot segments under
            any number of encodings.
    """
    _enforce_argument(name, value)
    text = path_value(parameter, value)
    if not text:
        raise _refusal(name, "an empty value")
    return text


def path_value(parameter: Parameter, value: Any) -> str:
    """Return `value` percent-encoded for a path segment."""
    encode = _percent_path if parameter.allow_reserved else percent
    if parameter.media_type is not None:
        return encode(content_text(value, parameter.media_type))
    if parameter.style == "matrix":
        return _matrix(parameter, value, encode)
    if parameter.style == "label":
        mark = "." if parameter.explode else ","
        return "." + _joined(value, parameter.explode, mark, encode)
    return _joined(value, parameter.explode, _delimiter(parameter.style, percent), encode)


def header_value(parameter: Parameter, value: Any) -> str:
    """Return `value` as the text of a header, not encoded.

    Raises:
        CallError: With code `VALIDATION_ERROR`, for control characters, which could inject another header.
    """
    kind, style = parameter.media_type, parameter.style
    if kind is None:
        text = _joined(value, parameter.explode, _delimiter(style, _unencoded), _unencoded)
    else:
        text = content_text(value, kind)
    enforce_header(parameter.name, text)
    return text


def _delimiter(style: str, encode: Encode) -> str:
    return encode(_DELIMITERS[style]) if style in _DELIMITERS else ","


def query_pairs(parameter: Parameter, value: Any) -> list[str]:
    """Return `name=value` pieces of a query, encoded."""
    encode = percent_reserved if parameter.allow_reserved else percent
    if value == {} and parameter.style == "deepObject":
        return []
    if parameter.media_type is not None:
        return [f"{percent(parameter.name)}={encode(content_text(value, parameter.media_type))}"]
    return form_pairs(
        parameter.name, value, style=parameter.style, explode=parameter.explode, encode=encode
    )


def form_pairs(name: str, value: Any, *, style: str, explode: bool, encode: Encode) -> list[str]:
    """Return `name=value` pieces, by a query style."""
    fields = styled_fields(name, value, style, explode, encode)
    return [f"{key}={text}" for key, text in fields]


def styled_fields(
    name: str, value: Any, style: str, explode: bool, encode: Encode | None = None
) -> list[tuple[str, str]]:
    """Return names and values by a query style; without `encode`, both are plain text, for a multipart form."""
    rename = _unencoded if encode is None else percent
    encode, key = encode or _unencoded, rename(name)
    if style == "deepObject":
        return [(k, encode(text_of_value(v))) for k, v in _deep(key, value, rename)]
    if explode and type(value) not in SCALARS:
        # An empty list or object has no pairs: `a=` would be a list with one empty text.
        if is_list(value):
            return [(key, encode(text_of_value(item))) for item in value]
        if is_object(value):
            members = [(k, item) for k, v in value.items() for item in _items(v)]
            return [(rename(k), encode(text_of_value(item))) for k, item in members]
    return [(key, _joined(value, explode=False, mark=_delimiter(style, rename), encode=encode))]


def _items(member: Any) -> list[Any]:
    """Return the values of a member of an exploded object: a list of scalars is repeated, as servers read a query."""
    is_nested = not is_list(member) or any(isinstance(item, (dict, list)) for item in member)
    return [member] if is_nested else member


def cookie_text(parameter: Parameter, value: Any) -> str:
    """Return `name=value` for a Cookie header."""
    if parameter.media_type is not None:
        return f"{percent(parameter.name)}={percent(content_text(value, parameter.media_type))}"
    mark, encode = ("; ", _cookie_value) if parameter.style == "cookie" else ("&", percent)
    return mark.join(
        form_pairs(parameter.name, value, style="form", explode=parameter.explode, encode=encode)
    )


def content_text(value: Any, media_type: str) -> str:
    """Return a parameter with `content`: text unchanged unless JSON is declared, any other value as JSON."""
    if type(value) is str and not is_json(media_type):
        return value
    return msgspec.json.encode(value).decode()


def _matrix(parameter: Parameter, value: Any, encode: Encode) -> str:
    fields = styled_fields(parameter.name, value, "form", parameter.explode, encode)
    return "".join(f";{name}={text}" if text else f";{name}" for name, text in fields)


def _joined(value: Any, explode: bool, mark: str, encode: Encode) -> str:
    """Join items or members with `mark`; an exploded member is `k=v`, otherwise two items."""
    if type(value) in SCALARS:
        return encode(text_of_value(value))
    if is_list(value):
        return mark.join([encode(text_of_value(item)) for item in value])
    if is_object(value):
        inner = "=" if explode else mark
        members = value.items()
        return mark.join([f"{encode(k)}{inner}{encode(text_of_value(v))}" for k, v in members])
    return encode(text_of_value(value))


def _deep(key: str, value: Any, rename: Encode) -> list[tuple[str, Any]]:
    """Return the bracket form: `a[b][c]=1`; lists of scalars as `a[]=1`, other lists as `a[0][b]=1`."""
    if is_object(value) and value:
        members = value.items()
        return [pair for k, v in members for pair in _deep(key + rename(f"[{k}]"), v, rename)]
    if is_list(value) and value:
        if any(isinstance(item, (dict, list)) for item in value):
            numbered = enumerate(value)
            return [pair for i, v in numbered for pair in _deep(key + rename(f"[{i}]"), v, rename)]
        return [(key + rename("[]"), item) for item in value]
    return [(key, value or None if isinstance(value, (dict, list)) else value)]


def _unencoded(text: str) -> str:
    return text


def _completed(path: str, query: str, parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters, with exactly the path parameters of `path`; others that `query` names are sent there."""
    names = template_names(path)
    declared = {p.name for p in parameters if p.place == "query"}
    result: list[Parameter] = []
    for parameter in parameters:
        if parameter.place != "path" or parameter.name in names:
            result.append(parameter)
        elif (key := _query_key(parameter.name, query)) and key not in declared:
            result.append(msgspec.structs.replace(parameter, name=key, place="query", style="form"))
    known = {p.name for p in result if p.place == "path"}
    added = [
        Parameter(name=name, place="path", required=True, schema={"type": "string"})
        for name in names
        if name not in known
    ]
    return result + added


def _query_key(name: str, query: str) -> str:
    """Return the key of a placeholder in the query of a template; empty if it is not there."""
    pieces = [piece.partition("=") for piece in query.split("&")]
    return next((unquote(key) for key, _, value in pieces if value == f"{{{name}}}"), "")


def argument_names(
    parameters: Sequence[tuple[str, str]], reserved: Iterable[str] = ()
) -> list[str]:
    """Return the argument name of each parameter `(name, place)`, in order.

    An argument has the name of its parameter. If the name is used in two places or reserved, the place is added:
    `id_path`, `id_query`.
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
    """Return `wanted`, with underscores appended until it is not in `taken`."""
    while wanted in taken:
        wanted += "_"
    return wanted
