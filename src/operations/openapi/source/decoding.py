"""Decode the content of a response: text in its charset, and JSON within limits.

Rule 1: a text with a lone surrogate and a number that no float can hold cost their own value, not the response: the
        surrogate becomes U+FFFD, the number null, and each is reported as a mismatch.
Rule 2: data that nests deeper than `MAX_DEPTH` is not normalised, because a recursive validator can exhaust the stack.
"""

import codecs
import json
import re
from math import inf, isinf
from typing import Any, NoReturn

from operations.base.errors import CallError, ErrorCode
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_RESPONSE_VALUES,
    JSONLimitError,
    JSONValueError,
    Path,
    is_list,
    is_object,
    nests_within,
    pointer_to,
)
from operations.base.types import JSONObject
from operations.openapi.reading import media
from operations.openapi.reading.files import MARKS
from operations.schema import Change
from operations.schema.casting.changes import MAX_PATH

_DECLARED = re.compile(rb"""<\?xml\s[^>]{0,100}?\sencoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")
"""The encoding that an XML document declares."""

_SUPERSETS = {
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
}  # fmt: skip
"""Charsets whose names servers and browsers use for larger ones (WHATWG Encoding)."""

_INDEX = re.compile(r"/\d+(?=/|$)")

_SURROGATE = "contained a lone surrogate, which is not valid Unicode; U+FFFD replaces it"
_TOO_LARGE = "was a number that is too large to be represented, and is null"


def text_in(content: bytes, content_type: str, errors: str = "replace") -> str:
    """Return content as text, in the charset of its byte order mark, its content type or its XML declaration.

    Raises:
        LookupError: If `errors` is `strict` and the charset is unknown.
        ValueError: If `errors` is `strict` and the content is not text in the charset.
    """
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return content[len(mark) :].decode(encoding, errors)
    charset = media.parameter_of(content_type, "charset")
    default = json.detect_encoding(content) if media.is_json(content_type) else "utf-8"
    if not charset and media.is_xml(content_type):
        found = _DECLARED.match(content)
        charset = found[1].decode() if found is not None else ""
    try:
        text = _decoded_text(content, charset or default)
        # Some codecs of Python that are no charsets produce text that cannot be encoded.
        text.encode()
    except (LookupError, ValueError):
        # The charset is unknown, or the text is not valid in it.
        if errors == "strict":
            raise
        text = content.decode("utf-8", "replace") if charset else content.decode("latin-1")
    return text


def _decoded_text(content: bytes, charset: str) -> str:
    try:
        return content.decode(charset)
    except UnicodeError:
        return content.decode(_SUPERSETS.get(codecs.lookup(charset).name, charset))


class JSONReader:
    """Decodes the JSON of one response, or of one event.

    Args:
        max_values: The largest number of values.
        max_depth: The largest depth.

    Attributes:
        max_values: The number of values that are left.
        changes: A mismatch for each location whose values could not be represented, and for data that is too deep.
        is_deep: Whether data was too deep to be normalised.
    """

    __slots__ = ("_max_depth", "changes", "is_deep", "max_values")

    def __init__(self, max_values: int = MAX_RESPONSE_VALUES, max_depth: int = MAX_DEPTH) -> None:
        self.max_values = max_values
        self._max_depth = max_depth
        self.changes: list[Change] = []
        self.is_deep = False

    def read(self, content: bytes, content_type: str, path: Path = ()) -> Any:
        """Return the value of a JSON text, in any charset.

        Args:
            content: The text.
            content_type: The content type, which may name a charset.
            path: The place of the value in the data of the response.

        Raises:
            CallError: `EXECUTION_ERROR` if it is not JSON, `RESOURCE_EXHAUSTED` if it has too many values.
        """
        try:
            return self._read(content, content_type, path)
        except (JSONValueError, LookupError, UnicodeError) as error:
            if isinstance(error, JSONLimitError) and error.limit == "values":
                message = f"The response {error.reason}."
                raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message) from None
            kind = media.essence(content_type) or "without a content type"
            reason = error.reason if isinstance(error, JSONValueError) else f"is not JSON: {error}"
            message = f"The response ({kind}) {reason}."
            raise CallError(ErrorCode.EXECUTION_ERROR, message) from None

    def read_event(self, text: str | bytes, what: str = "An event", path: Path = ()) -> Any:
        """Return the JSON that an event or a line contains; `text` itself if it is not JSON.

        Args:
            text: The content of the event or the line.
            what: Names it in errors.
            path: As for `read`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if it holds too many values.
        """
        try:
            return self._decode(text)
        except JSONLimitError as error:
            if error.limit == "values":
                raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"{what} {error.reason}.") from None
            return text
        except JSONValueError:
            try:
                return self._replaced(text, path)
            except ValueError:
                return text

    def _read(self, content: bytes, content_type: str, path: Path) -> Any:
        try:
            return self._decode(content)
        except JSONLimitError:
            raise
        except JSONValueError:
            # Rarely, it is JSON in another charset or with a byte order mark.
            text: str | bytes = content
            try:
                text = text_in(content, content_type, errors="strict")
                return self._decode(text)
            except JSONLimitError:
                raise
            except (ValueError, LookupError) as error:
                try:
                    return self._replaced(text, path)
                except ValueError:
                    raise error from None

    def _decode(self, text: str | bytes) -> Any:
        data = decode_json(text, max_values=self.max_values, max_depth=self._max_depth)
        return self._measured(data)

    def _measured(self, data: Any) -> Any:
        if self._max_depth > MAX_DEPTH and not nests_within(data, MAX_DEPTH):
            self.is_deep = True
            message = f"is not normalised: it has more than {MAX_DEPTH} levels"
            self.changes.append(Change("", "mismatch", 1, message))
        return data

    def _replaced(self, text: str | bytes, path: Path) -> Any:
        """Return the value of a JSON text within the limits, in which some values may not be representable.

        Raises:
            ValueError: If it is not JSON.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogatepass")
        data = _loads(text)
        notes: dict[tuple[str, str], Change] = {}
        data = _representable(data, path, notes)
        self.changes += notes.values()
        return self._measured(data)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _integer(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else inf


_loads = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer).decode
"""Decodes also lone surrogates, and numbers that no float can hold as infinities."""


def _representable(value: Any, path: Path, notes: dict[tuple[str, str], Change]) -> Any:
    """Return decoded JSON with every value that cannot be represented replaced, and noted."""
    if isinstance(value, str):
        return value if value.isascii() else _text(value, path, notes)
    if is_object(value):
        found: JSONObject = {}
        for key, item in value.items():
            name = _representable(key, (key, path), notes)
            found[name] = _representable(item, (name, path), notes)
        return found
    if is_list(value):
        return [_representable(item, (index, path), notes) for index, item in enumerate(value)]
    if isinstance(value, float) and isinf(value):
        _note(path, _TOO_LARGE, notes)
        return None
    return value


def _text(value: str, path: Path, notes: dict[tuple[str, str], Change]) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        # Two halves of one character may have been encoded separately (CESU-8): that loses nothing.
        fixed = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if fixed.count("\ufffd") > value.count("\ufffd"):
            _note(path, _SURROGATE, notes)
        return fixed
    return value


def _note(path: Path, message: str, notes: dict[tuple[str, str], Change]) -> None:
    place = pointer_to(path).encode(errors="replace").decode()[:MAX_PATH]
    key = (_INDEX.sub("/*", place), message)
    known = notes.get(key)
    count = 1 if known is None else known.count + 1
    notes[key] = Change(place if known is None else known.path, "mismatch", count, message)
