"""Puts arguments into a path template, such that no argument can leave its place.

Rule: the path that is sent has the template's segments and literals; an argument fills its own place or is refused.
"""

import re
from typing import Any
from urllib.parse import quote, unquote

from operations._json import list_of, object_of
from operations.errors import CallError, ErrorCode

MAX_ENCODINGS = 8
"""How many layers of percent-encoding are looked through; what has more is refused."""

_TEMPLATE = re.compile(r"\{([^{}/]+)\}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SEPARATOR = re.compile(r"[/\\]")
_DOTS = frozenset({".", ".."})


def template_names(path: str) -> list[str]:
    """The names in braces, in order, each once."""
    return list(dict.fromkeys(_TEMPLATE.findall(path)))


def split_template(path: str) -> list[str]:
    """Literals and names in turn: literals at even places, percent-encoded where they must be."""
    parts = _TEMPLATE.split(path)
    return [part if index % 2 else literal(part) for index, part in enumerate(parts)]


def literal(text: str) -> str:
    """A piece of the template as it stands in a request."""
    return quote(text, safe="/%-._~!$&'()*+,;=:@")


def enforce_argument(name: str, value: Any) -> None:
    """Let through what may stand in a path.

    Raises:
        CallError: With code `VALIDATION_ERROR`, for an empty value, control characters, and dot segments under
            any number of encodings.
    """
    if type(value) is str:
        _enforce_text(name, value)
    for item in list_of(value):
        enforce_argument(name, item)
    for key, item in object_of(value).items():
        enforce_argument(name, key)
        enforce_argument(name, item)


def _enforce_text(name: str, text: str) -> None:
    for _ in range(MAX_ENCODINGS):
        if _CONTROL.search(text):
            raise refusal(name, "control characters")
        # Some servers cut a segment at ";" before they look at its dots.
        if any(piece.partition(";")[0].strip() in _DOTS for piece in _SEPARATOR.split(text)):
            raise refusal(name, "a dot segment")
        decoded = unquote(text, errors="replace")
        if decoded == text:
            return
        text = decoded
    raise refusal(name, "too many layers of encoding")


def enforce_segments(path: str, template: str) -> None:
    """Let a filled template through: whatever the arguments and marks of a segment make together.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if segments came or went, or one became dots.
    """
    segments, originals = path.split("/"), template.split("/")
    if len(segments) != len(originals):
        raise refusal(template, "a slash")
    for segment, original in zip(segments, originals, strict=True):
        if "{" in original:
            _enforce_text(original.strip("{}"), segment)


def refusal(name: str, what: str) -> CallError:
    """The error for an argument that may not stand in a path."""
    message = f"The path argument {name!r} may not be or contain {what}."
    return CallError(
        ErrorCode.VALIDATION_ERROR,
        message,
        {"errors": [{"path": "/" + name, "message": message, "keyword": "path"}]},
    )
