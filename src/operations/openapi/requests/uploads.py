"""Files as arguments: bytes, base64 text, or an object that also says their name and type."""

import base64
import binascii
from typing import Any, NamedTuple

from operations._json import object_of, text_of
from operations.errors import CallError, ErrorCode

OCTETS = "application/octet-stream"


class Upload(NamedTuple):
    """A file to send; what the argument does not say is empty."""

    content: bytes
    filename: str = ""
    content_type: str = ""


def upload_of(value: Any, name: str) -> Upload | None:
    """The file that the argument `name` is; None where it is none.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if its text is not base64.
    """
    if isinstance(value, (bytes, bytearray)):
        return Upload(bytes(value))
    if isinstance(value, str):
        return Upload(from_base64(value, name))
    described = object_of(value)
    content = described.get("content")
    if isinstance(content, str):
        content = from_base64(content, name)
    elif isinstance(described.get("text"), str):
        content = described["text"].encode()
    if not isinstance(content, (bytes, bytearray)):
        return None
    filename, kind = described.get("filename"), described.get("contentType")
    return Upload(bytes(content), text_of(filename), text_of(kind))


def from_base64(text: str, name: str) -> bytes:
    """The bytes that `text` encodes, in either alphabet.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if it is not base64.
    """
    try:
        padded = text + "=" * (-len(text) % 4)
        return base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        message = f"{name!r} must be base64."
        raise CallError(
            ErrorCode.VALIDATION_ERROR,
            message,
            {"errors": [{"path": "/" + name, "message": message, "keyword": "contentEncoding"}]},
        ) from None
