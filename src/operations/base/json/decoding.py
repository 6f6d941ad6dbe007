"""Decode JSON text within limits.

Rule 1: JSON text from outside is decoded by `decode_json`, or by another decoder after `enforce_bounds`. Both check the
        number of bytes and values and the depth before they build any object.
"""

import re
from itertools import accumulate
from typing import Any, Final

import msgspec

from operations.base.json.values import (
    LONE_SURROGATE,
    MAX_MESSAGE_DEPTH,
    JSONLimitError,
    JSONValueError,
)

_ESCAPED_HALF: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def decode_json(
    raw: bytes | str,
    *,
    max_values: int,
    max_bytes: int | None = None,
    max_depth: int = MAX_MESSAGE_DEPTH,
) -> Any:
    """Return the value in a JSON text from outside. The last of duplicate keys is used.

    Raises:
        JSONLimitError: If the text exceeds a limit; this is checked before any object is built.
        JSONValueError: If the text is not JSON.
    """
    if isinstance(raw, str):
        try:
            raw = raw.encode()
        except UnicodeEncodeError:
            raise JSONValueError(LONE_SURROGATE) from None
    enforce_bounds(raw, max_values=max_values, max_bytes=max_bytes, max_depth=max_depth)
    return decode_bounded(raw)


def decode_bounded(raw: bytes) -> Any:
    """Return the value in a JSON text that `enforce_bounds` has checked.

    Raises:
        JSONValueError: If the text is not JSON.
    """
    try:
        return _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The decoder's own message calls a text with a lone surrogate truncated.
        reason = LONE_SURROGATE if _ESCAPED_HALF.search(raw) else f"is not JSON: {error}"
        raise JSONValueError(reason) from None
    except RecursionError:
        raise JSONLimitError("is nested too deeply", "depth") from None


_decode = msgspec.json.Decoder().decode


def enforce_bounds(
    raw: bytes,
    *,
    max_values: int,
    max_bytes: int | None = None,
    max_depth: int = MAX_MESSAGE_DEPTH,
) -> None:
    """Raise an error for a JSON text that is too large to be decoded. Malformed text may pass.

    Raises:
        JSONLimitError: If it has more than `max_bytes` bytes, `max_values` values or `max_depth` levels.
    """
    if max_bytes is not None and len(raw) > max_bytes:
        raise JSONLimitError(f"is larger than {max_bytes:,} bytes", "bytes")
    # Estimates are enough to accept most texts. They take long for a huge text, and other threads could not run.
    if len(raw) > _HUGE or _may_hold_more(raw, max_values):
        _enforce_both(raw, max_values, max_depth)
    elif _may_nest_deeper(raw, max_depth):
        _enforce_depth(raw, max_depth)


_HUGE = 8 * 1024 * 1024
"""Texts larger than this, in bytes, are not estimated."""


_NOT_SEPARATORS = bytes(set(range(256)) - set(b"[{,"))


def _may_hold_more(text: bytes, max_values: int) -> bool:
    """Return whether JSON text may have more than `max_values` values. An upper bound: counts inside strings too."""
    # A value takes at least one byte and a separator.
    if len(text) < 2 * max_values:
        return False
    # One pass, which takes less than half the time of a `count` for each character.
    return len(text.translate(None, _NOT_SEPARATORS)) >= max_values


def _may_nest_deeper(text: bytes, max_depth: int) -> bool:
    """Return whether JSON text may exceed `max_depth` levels. An upper bound: counts brackets in strings too."""
    if len(text) < 2 * max_depth:
        return False
    # Removing a few bytes skips long strings quickly; counting reads every byte.
    rest = text.replace(b"{", b"", max_depth + 1).replace(b"[", b"", max_depth + 1)
    return len(text) - len(rest) > max_depth


_SLICE = 1 << 20
"""Bytes that are scanned at once."""

_SPACE = b" \t\n\r"
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_FEW_LEVELS = 8


def _enforce_both(raw: bytes, max_values: int, max_depth: int) -> None:
    """Count the values and measure the depth slice by slice, and stop at the first limit that is exceeded."""
    count, depth, inside, opened, start = 1, 0, 0, b"", 0
    while start < len(raw):
        part = raw[start : start + _SLICE]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            # An escaped character stays in one slice with its backslash.
            part = raw[start : start + len(part) + 1]
        start += len(part)
        text, inside = _outside_strings(_without_escapes(part), inside)
        text = opened + text
        # An opening bracket at the end waits for the next slice, which shows whether the container is empty.
        opened = text[-1:] if text[-1:] in (b"[", b"{") else b""
        text = text[: len(text) - len(opened)]
        openings = text.count(b"[") + text.count(b"{")
        count += text.count(b",") + openings - text.count(b"[]") - text.count(b"{}")
        if count > max_values:
            raise JSONLimitError(f"contains more than {max_values:,} values", "values")
        if depth + openings > max_depth:
            steps = text.translate(_BRACKETS, _NOT_BRACKETS)
            if max(accumulate(memoryview(steps).cast("b"), initial=depth)) > max_depth:
                raise JSONLimitError(f"is nested too deeply: more than {max_depth} levels", "depth")
        depth += openings - text.count(b"]") - text.count(b"}")


def _outside_strings(raw: bytes, inside: int) -> tuple[bytes, int]:
    """Return a text without spaces and with one letter for each string, and whether it ends inside a string."""
    parts = raw.split(b'"')
    # Strings, which are every other part, become one letter each.
    text = b"s".join(parts[inside::2])
    if inside:
        text = b"s" + text
    is_open = (inside + len(parts)) % 2 == 0
    if is_open:
        text += b"s"
    return text.translate(None, _SPACE), int(is_open)


def _without_escapes(raw: bytes) -> bytes:
    """Return `raw` without escaped quotes, so that every quote begins or ends a string."""
    if b"\\" not in raw:
        return raw
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


def _enforce_depth(raw: bytes, max_depth: int) -> None:
    """Measure the depth exactly, from the quotes and brackets alone."""
    # Removing pairs of adjacent quotes does not change which characters are inside a string.
    structure = _without_escapes(raw).translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    steps = b"".join(structure.split(b'"')[::2]).translate(_BRACKETS)
    left = steps
    for _ in range(min(max_depth, _FEW_LEVELS)):
        # Each pass removes the innermost containers; for most texts these passes are enough.
        left = left.replace(b"\x01\xff", b"")
        if not left:
            return
    if max(accumulate(memoryview(steps).cast("b")), default=0) > max_depth:
        raise JSONLimitError(f"is nested too deeply: more than {max_depth} levels", "depth")
