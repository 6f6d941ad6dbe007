"""What an answer says: data by its media type, or the error it is."""

from base64 import b64encode
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from operations._json import (
    MAX_REQUEST_VALUES,
    MAX_RESPONSE_VALUES,
    JSONLimitError,
    JSONValueError,
    count_values,
    decode_json,
    object_of,
)
from operations.envelopes import DescribedEnvelope, HTTPResponseMeta
from operations.errors import CallError, ErrorCode
from operations.front.redaction import Redactor, parts_of
from operations.openapi.exchange.sse import EventStreamDecoder
from operations.openapi.reading import media
from operations.openapi.reading.model import EVENT_STREAM
from operations.openapi.reading.texts import MARKS
from operations.schema import Schema
from operations.types import JSONObject

DONE = "[DONE]"
"""The data with which many APIs end a stream."""

_WITHHELD = frozenset({"set-cookie", "set-cookie2", "authorization", "proxy-authorization"})
"""Headers of an answer that are credentials; they stay here."""

_EMPTY = frozenset({204, 205, 304})
_OAUTH_ERRORS = frozenset({
    "invalid_client", "invalid_grant", "invalid_request", "invalid_scope", "unauthorized_client",
    "unsupported_grant_type",
})  # fmt: skip
"""RFC 6749, 5.2."""

_WIDTHS = {
    b"\0\0\0\1": "utf-32-be",
    b"\1\0\0\0": "utf-32-le",
    b"\0\1\0\1": "utf-16-be",
    b"\1\0\1\0": "utf-16-le",
}


class Answer(msgspec.Struct, frozen=True):
    """A good answer, read to its end."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    secrets: list[str]
    """What was sent to authenticate; to be kept out of errors."""

    saved: int | None = None
    """The size of the body if it was saved to a file; then `content` is empty."""


def shown_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers a caller may see."""
    if _WITHHELD.isdisjoint(headers):
        return dict(headers)
    return {name: value for name, value in headers.items() if name not in _WITHHELD}


def read_data(
    content: bytes,
    content_type: str,
    *,
    status: int,
    expects_json: bool,
    expects_items: bool = False,
    expects_text: bool = False,
    max_values: int = MAX_RESPONSE_VALUES,
) -> Any:
    """The data of a good answer: JSON, text, bytes, or None where there is nothing.

    Args:
        content: The body, without content coding.
        content_type: Its Content-Type; may be empty.
        status: The status code.
        expects_json: Whether the document promises JSON, so that JSON sent as something else is read too.
        expects_items: Whether the document declares a stream, so that its items become a list.
        expects_text: Whether the document declares text, so that an empty body is empty text.
        max_values: How many JSON values it may hold.

    Raises:
        CallError: `EXECUTION_ERROR` if it says it is JSON, or should be, and is not; `RESOURCE_EXHAUSTED` if it holds
            too many values.
    """
    if not content or status in _EMPTY:
        return "" if expects_text else None
    if media.is_json(content_type):
        return _json(content, content_type, max_values)
    if expects_json and (media.is_text(content_type) or media.says_nothing(content_type)):
        try:
            return _json(content, content_type, max_values)
        except CallError as error:
            if error.code == ErrorCode.RESOURCE_EXHAUSTED or not media.says_nothing(content_type):
                raise
    if expects_items and media.is_sequence(content_type):
        lines = content.replace(b"\x1e", b"\n").split(b"\n")
        items: list[Any] = []
        for line in lines:
            if line.strip():
                items.append(_json(line, content_type, max_values))
                max_values -= count_values(items[-1], max_values)
        return items
    if expects_items and media.essence(content_type) == EVENT_STREAM:
        decoder = EventStreamDecoder(max_event_bytes=len(content) + 1)
        events = decoder.feed(content)
        return [event_data(event.data) for event in events if event.data != DONE]
    if media.is_text(content_type):
        return _text(content, content_type)
    return content


def described_envelope(
    data: Any,
    *,
    status: int,
    headers: dict[str, str],
    content_type: str,
    schema: Schema | None,
    sequence: str | None = None,
    is_raw: bool = False,
) -> DescribedEnvelope[Any]:
    """Return the envelope of a successful response, with the schema that describes its data."""
    meta = HTTPResponseMeta(
        status_code=status, headers=headers, content_type=content_type, sequence=sequence
    )
    return DescribedEnvelope(data, meta, schema, is_raw)


def event_data(text: str, *, as_text: bool = False) -> Any:
    """Return the data of an event: JSON if it is, unless the document declares text."""
    if as_text:
        return text
    try:
        return decode_json(text, max_values=MAX_REQUEST_VALUES)
    except JSONValueError as error:
        if isinstance(error, JSONLimitError) and error.limit == "values":
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"An event {error.reason}.") from None
        return text


def _json(content: bytes, content_type: str, max_values: int) -> Any:
    try:
        try:
            return decode_json(content, max_values=max_values)
        except JSONLimitError:
            raise
        except JSONValueError:
            # Rarely it is JSON in another charset, or behind a byte order mark.
            return decode_json(_text(content, content_type), max_values=max_values)
    except JSONValueError as error:
        if isinstance(error, JSONLimitError) and error.limit == "values":
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"The answer {error.reason}.") from None
        kind = media.essence(content_type) or "without a content type"
        raise CallError(
            ErrorCode.EXECUTION_ERROR, f"The answer ({kind}) is not the JSON it should be."
        ) from None


def _text(content: bytes, content_type: str) -> str:
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return content[len(mark) :].decode(encoding, "replace")
    charset = media.parameter_of(content_type, "charset")
    if not charset and media.is_json(content_type):
        # JSON begins with ASCII, so zeros among the first bytes tell the width and order.
        charset = _WIDTHS.get(bytes(byte != 0 for byte in content[:4]), "")
    try:
        return content.decode(charset or "utf-8")
    except (LookupError, ValueError):
        # No such charset, or not in it.
        return content.decode("utf-8", "replace") if charset else content.decode("latin-1")


def oauth_error(content: bytes) -> str:
    """The code that a provider of tokens refuses with, if it is one that the standard names."""
    try:
        said = object_of(decode_json(content, max_values=MAX_REQUEST_VALUES)).get("error")
    except JSONValueError:
        return ""
    return said if isinstance(said, str) and said in _OAUTH_ERRORS else ""


def http_error(
    status: int,
    reason: str,
    headers: Mapping[str, str],
    content: bytes,
    *,
    is_cut: bool,
    secrets: list[str],
) -> CallError:
    """The error that a bad answer is. What was sent to authenticate is not in it."""
    content_type = headers.get("content-type", "")
    redactor = Redactor(part for secret in secrets for part in parts_of(secret))
    details: JSONObject = {
        "statusCode": status,
        "headers": {k: redactor.redact(v) for k, v in shown_headers(headers).items()},
        "contentType": content_type,
        "body": None,
    }
    if content:
        _add_error_body(details, content, content_type, is_cut=is_cut, redactor=redactor)
    if is_cut:
        details["truncated"] = True
    if not reason:
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:
            reason = "Unknown"
    return CallError(
        ErrorCode.EXECUTION_ERROR,
        f"HTTP {status}: {reason}",
        details,
        retryable=status in {429, 502, 503, 504},
    )


def with_answer(error: CallError, answer: Answer, limit: int) -> CallError:
    """`error`, with the answer it is about in its details, as `http_error` has it."""
    content, is_cut = answer.content[:limit], len(answer.content) > limit
    about = http_error(
        answer.status, "", answer.headers, content, is_cut=is_cut, secrets=answer.secrets
    )
    return CallError(error.code, error.message, about.details)


def _add_error_body(
    details: JSONObject, content: bytes, content_type: str, *, is_cut: bool, redactor: Redactor
) -> None:
    if content_type and not media.is_json(content_type) and not media.is_text(content_type):
        details["body"] = b64encode(content).decode()
        details["encoding"] = "base64"
        return
    text = redactor.redact(_text(content, content_type))
    details["body"] = text
    if media.is_json(content_type) and not is_cut:
        try:
            details["body"] = decode_json(text, max_values=MAX_REQUEST_VALUES)
        except JSONValueError:
            return
