"""How a value becomes text in a path, a query, a header or a cookie: the style table of OpenAPI.

Every value is taken apart into items or members first; a style is then only which marks stand between them.
"""

from base64 import b64encode
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec

from operations._json import is_list, is_object
from operations.openapi.reading.media import is_json
from operations.openapi.reading.model import Parameter

Encode = Callable[[str], str]

_RESERVED_KEPT = ":/?[]@!$'()*,;="
"""What `allowReserved` leaves as it is. `#`, `&` and `+` would change what the query means and stay encoded."""

_DELIMITERS = {"form": ",", "spaceDelimited": "%20", "pipeDelimited": "%7C", "tabDelimited": "%09"}
_PLAIN_DELIMITERS = {
    "simple": ",", "spaceDelimited": " ", "pipeDelimited": "|", "tabDelimited": "\t",
}  # fmt: skip


def percent(text: str) -> str:
    """`text` with everything but unreserved characters percent-encoded."""
    return quote(text, safe="-._~")


def percent_reserved(text: str) -> str:
    """`text` with reserved characters and percent-encoded triples left alone, as `allowReserved` wants."""
    pieces = text.split("%")
    result = [quote(pieces[0], safe="-._~" + _RESERVED_KEPT)]
    for piece in pieces[1:]:
        is_triple = len(piece) >= 2 and all(c in "0123456789abcdefABCDEF" for c in piece[:2])
        result.append(("%" if is_triple else "%25") + quote(piece, safe="-._~" + _RESERVED_KEPT))
    return "".join(result)


def text_of_value(value: Any) -> str:
    """A primitive as text. Null is empty, bytes are base64; what has parts of its own is JSON."""
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray)):
        return b64encode(value).decode()
    return msgspec.json.encode(value).decode()


def path_value(parameter: Parameter, value: Any) -> str:
    """`value` as it stands in a path segment, percent-encoded."""
    if parameter.media_type is not None:
        return percent(content_text(value, parameter.media_type))
    if parameter.style == "matrix":
        return _matrix(parameter, value)
    if parameter.style == "label":
        mark = "." if parameter.explode else ","
        return "." + _joined(value, parameter.explode, mark, percent)
    mark = _PLAIN_DELIMITERS.get(parameter.style, ",")
    return _joined(value, parameter.explode, mark if mark == "," else percent(mark), percent)


def header_value(parameter: Parameter, value: Any) -> str:
    """`value` as it stands in a header; not encoded, only what has no control characters can be sent."""
    if parameter.media_type is not None:
        return content_text(value, parameter.media_type)
    mark = _PLAIN_DELIMITERS.get(parameter.style, ",")
    return _joined(value, parameter.explode, mark, _same)


def query_pairs(parameter: Parameter, value: Any) -> list[str]:
    """`name=value` pieces of a query, encoded."""
    encode = percent_reserved if parameter.allow_reserved else percent
    if parameter.style == "querystring":
        return [_whole_query(parameter, value)]
    if parameter.media_type is not None:
        return [f"{percent(parameter.name)}={encode(content_text(value, parameter.media_type))}"]
    return form_pairs(
        parameter.name, value, style=parameter.style, explode=parameter.explode, encode=encode
    )


def form_pairs(name: str, value: Any, *, style: str, explode: bool, encode: Encode) -> list[str]:
    """`name=value` pieces, by a query style."""
    mark = _DELIMITERS.get(style, ",")
    fields = _fields(name, value, style, explode, mark, percent, encode)
    return [f"{key}={text}" for key, text in fields]


def plain_fields(name: str, value: Any, *, style: str, explode: bool) -> list[tuple[str, str]]:
    """Names and values by a query style, not encoded: the parts of a multipart form."""
    mark = _PLAIN_DELIMITERS.get(style, ",")
    return _fields(name, value, style, explode, mark, _same, _same)


def _fields(
    name: str, value: Any, style: str, explode: bool, mark: str, rename: Encode, encode: Encode
) -> list[tuple[str, str]]:
    key = rename(name)
    if style == "deepObject":
        return [(k, encode(text_of_value(v))) for k, v in _deep(key, value, rename)]
    if explode:
        if is_list(value) and value:
            return [(key, encode(text_of_value(item))) for item in value]
        if is_object(value) and value:
            return [(rename(k), encode(text_of_value(v))) for k, v in value.items()]
    return [(key, _joined(value, False, mark, encode))]


def cookie_text(parameter: Parameter, value: Any) -> str:
    """`name=value` as it stands in a Cookie header."""
    if parameter.media_type is not None:
        return f"{percent(parameter.name)}={percent(content_text(value, parameter.media_type))}"
    mark = "; " if parameter.style == "cookie" else "&"
    return mark.join(
        form_pairs(parameter.name, value, style="form", explode=parameter.explode, encode=percent)
    )


def content_text(value: Any, media_type: str) -> str:
    """A parameter with `content`: text stays text where it is not declared to be JSON, anything else is JSON."""
    if type(value) is str and not is_json(media_type):
        return value
    return msgspec.json.encode(value).decode()


def _whole_query(parameter: Parameter, value: Any) -> str:
    """3.2's `querystring`: the value is the query."""
    if is_object(value) and (parameter.media_type or "").startswith("application/x-www-form"):
        return "&".join(
            pair
            for name, item in value.items()
            for pair in form_pairs(name, item, style="form", explode=True, encode=percent)
        )
    return percent(content_text(value, parameter.media_type or ""))


def _matrix(parameter: Parameter, value: Any) -> str:
    name = percent(parameter.name)
    if parameter.explode and is_list(value) and value:
        return "".join(f";{name}={percent(text_of_value(item))}" for item in value)
    if parameter.explode and is_object(value) and value:
        members = value.items()
        return "".join(f";{percent(k)}={percent(text_of_value(v))}" for k, v in members)
    text = _joined(value, False, ",", percent)
    return f";{name}={text}" if text else f";{name}"


def _joined(value: Any, explode: bool, mark: str, encode: Encode) -> str:
    """Items or members with `mark` between them; a member is `k=v` where it explodes, else two items."""
    if is_list(value):
        return mark.join([encode(text_of_value(item)) for item in value])
    if is_object(value):
        inner = "=" if explode else mark
        members = value.items()
        return mark.join([f"{encode(k)}{inner}{encode(text_of_value(v))}" for k, v in members])
    return encode(text_of_value(value))


def _deep(key: str, value: Any, rename: Encode) -> list[tuple[str, Any]]:
    """Bracket form: `a[b][c]=1`; lists of plain values as `a[]=1`, of others as `a[0][b]=1`."""
    if is_object(value) and value:
        members = value.items()
        return [pair for k, v in members for pair in _deep(key + rename(f"[{k}]"), v, rename)]
    if is_list(value) and value:
        if any(isinstance(item, (dict, list)) for item in value):
            numbered = enumerate(value)
            return [pair for i, v in numbered for pair in _deep(key + rename(f"[{i}]"), v, rename)]
        return [(key + rename("[]"), item) for item in value]
    return [(key, value or None if isinstance(value, (dict, list)) else value)]


def _same(text: str) -> str:
    return text
