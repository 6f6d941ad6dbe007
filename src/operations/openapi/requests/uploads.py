"""Files as arguments: content, a path or an open file, base64 text, or an object that also gives name and type.

Rule: `bytes`, paths and open files come from code of this process only. They are held aside while the rest of the input
is converted and validated as JSON.
"""

import base64
import binascii
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, NamedTuple, cast

from operations._json import is_list, is_object, object_of, text_of
from operations.errors import CallError, ErrorCode
from operations.openapi.files import (
    FileContent,
    FilesRoot,
    is_file_value,
    is_target_value,
    refused,
)

OCTETS = "application/octet-stream"


class Upload(NamedTuple):
    """A file to send; what the argument does not give is empty."""

    content: bytes | FileContent
    filename: str = ""
    content_type: str = ""

    def read(self, name: str) -> bytes:
        """Return the content for a place that cannot hold a file by reference.

        Raises:
            CallError: `VALIDATION_ERROR` if it is one.
        """
        if isinstance(self.content, FileContent):
            raise refused(name, "a file cannot be sent from disk here: pass its bytes")
        return self.content


def upload_of(value: Any, name: str, root: FilesRoot | None = None) -> Upload | None:
    """Return the file that the argument `name` is, or None if it is none.

    Args:
        value: The argument.
        name: Its name.
        root: The folder below which an object may name a file as `path`.

    Raises:
        CallError: `VALIDATION_ERROR` if its text is not base64, or there is no such file.
    """
    if isinstance(value, str):
        return Upload(from_base64(value, name))
    if is_file_value(value):
        content = _content(value, name)
        return Upload(content, content.filename if isinstance(content, FileContent) else "")
    described = object_of(value)
    given: Any = described.get("content")
    if isinstance(given, str):
        given = from_base64(given, name)
    elif isinstance(described.get("text"), str):
        given = described["text"].encode()
    elif isinstance(described.get("path"), str) and root is not None:
        content = root.content(described["path"], name)
        return _named(content, described)
    if not is_file_value(given):
        return None
    return _named(_content(given, name), described)


def _content(value: Any, name: str) -> bytes | FileContent:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(cast("bytes", value))
    return FileContent.of(value, name)


def _named(content: bytes | FileContent, described: Any) -> Upload:
    own = content.filename if isinstance(content, FileContent) else ""
    return Upload(
        content, text_of(described.get("filename")) or own, text_of(described.get("contentType"))
    )


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """An input without its files, and the files.

    Attributes:
        value: The input, with a text in place of each file.
    """

    value: Any
    _files: dict[str, Any]
    _target: tuple[str, Any] | None

    def restore(self, value: Any) -> Any:
        """Return `value`, which was made from the input without its files, with the files in it."""
        restored = self._restored(value) if self._files else value
        if self._target is not None:
            restored = {**restored, self._target[0]: self._target[1]}
        return restored

    def _restored(self, value: Any) -> Any:
        if is_object(value):
            return {name: self._restored(item) for name, item in value.items()}
        if is_list(value):
            return [self._restored(item) for item in value]
        return self._files.get(value, value) if type(value) is str else value


def hold_files(value: Any, save_to: str, *, is_deep: bool) -> HeldFiles | None:
    """Take the files out of an input; return None if there are none.

    Args:
        value: The input.
        save_to: The argument that names the file to save the response to.
        is_deep: Whether there may be files to send.
    """
    target: tuple[str, Any] | None = None
    if is_object(value) and is_target_value(value.get(save_to)):
        target = (save_to, value[save_to])
        value = {name: item for name, item in value.items() if name != save_to}
    files: dict[str, Any] = {}
    if is_deep and _has_files(value, 0):
        value = _without_files(value, files, 0)
    return HeldFiles(value, files, target) if files or target is not None else None


def _has_files(value: Any, depth: int) -> bool:
    if type(value) in _PLAIN or depth > _MAX_DEPTH:
        return False
    if is_object(value):
        return any(_has_files(item, depth + 1) for item in value.values())
    if is_list(value):
        return any(_has_files(item, depth + 1) for item in value)
    return is_file_value(value)


def without_files(value: Any) -> Any:
    """Return `value` with a text in place of each file."""
    return _without_files(value, {}, 0)


def _without_files(value: Any, files: dict[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return value
    if is_object(value):
        return {name: _without_files(item, files, depth + 1) for name, item in value.items()}
    if is_list(value):
        return [_without_files(item, files, depth + 1) for item in value]
    if type(value) in _PLAIN or not is_file_value(value):
        return value
    # Valid base64, and nothing that another argument could be.
    stand_in = token_hex(16)
    files[stand_in] = value
    return stand_in


_MAX_DEPTH = 8
_PLAIN = frozenset({str, int, float, bool, type(None)})


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
