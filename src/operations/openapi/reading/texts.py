"""Decode the bytes of a document to JSON builtins, within a size.

JSON goes through msgspec, anything else through YAML 1.2.
"""

import codecs
from collections.abc import Callable
from importlib import import_module
from typing import Any

from operations._collector import gc_paused
from operations._json import (
    MAX_DOCUMENT_DEPTH,
    MAX_DOCUMENT_VALUES,
    JSONLimitError,
    JSONValueError,
    decode_json,
)
from operations.errors import DocumentError

MAX_DOCUMENT_BYTES = 64 << 20

MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks: UTF-32 before UTF-16, whose marks begin alike."""


def decode_document(content: bytes | str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """`content`, JSON or YAML, as JSON builtins.

    Raises:
        DocumentError: If it is neither, or larger than `max_bytes`.
    """
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if len(raw) > max_bytes:
        raise DocumentError(f"larger than {max_bytes} bytes")
    for mark, encoding in MARKS:
        if raw.startswith(mark):
            raw = raw[len(mark) :].decode(encoding, "replace").encode()
            break
    if raw.lstrip()[:1] in (b"{", b"["):
        try:
            with gc_paused():
                return decode_json(
                    raw, max_values=MAX_DOCUMENT_VALUES, max_depth=MAX_DOCUMENT_DEPTH
                )
        except JSONLimitError as error:
            raise DocumentError(error.reason) from None
        except JSONValueError:
            pass  # YAML's flow style begins with the same characters
    # Only now is a YAML reader needed, and a missing extra worth a complaint.
    decode_yaml: Callable[[str], Any] = import_module("operations.openapi.reading.yaml").decode_yaml
    try:
        with gc_paused():
            return decode_yaml(raw.decode())
    except UnicodeDecodeError:
        raise DocumentError("not UTF-8 text") from None
    except RecursionError:
        raise DocumentError("nested too deeply") from None
