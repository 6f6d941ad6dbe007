"""Read a response: remove its content coding, read its data by media type, or build the error.

Rule 1: memory stays below the limit, also for compressed responses: decompression runs in bounded steps.
"""

import asyncio
from base64 import b64encode
from collections.abc import Mapping
from contextlib import aclosing, suppress
from http.client import responses as PHRASES  # noqa: N812 - a table
from time import monotonic
from typing import Any

import msgspec

from operations.base.errors import CallError, ErrorCode, timed_out
from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_REQUEST_VALUES, JSONValueError
from operations.base.redaction import redaction, spellings
from operations.base.types import JSONObject
from operations.contract.envelopes import HTTPResponseMeta
from operations.io.files import from_base64
from operations.io.http.client import HTTPResponse
from operations.io.http.decoding import decoded, read_whole
from operations.openapi.reading import media
from operations.openapi.reading.expected import EMPTY, ResponseData
from operations.openapi.source.config import HTTPServiceConfig
from operations.openapi.source.decoding import JSONReader, text_in

_WITHHELD = frozenset({"set-cookie", "set-cookie2", "authorization", "proxy-authorization"})
"""Response headers that are credentials; they are not returned to callers."""


async def read_in_time(response: HTTPResponse, config: HTTPServiceConfig) -> bytes:
    """As `read_whole`, within a time limit, for responses for which the transport does not enforce one.

    Raises:
        CallError: As `read_whole`; `TIMEOUT` if the response does not end in time.
    """
    try:
        async with asyncio.timeout(config.timeout):
            return await read_whole(response, config.max_response_bytes)
    except TimeoutError:
        raise timed_out("The response", config.timeout, "end") from None


class WholeResponse(msgspec.Struct, frozen=True, gc=False):
    """A successful response with its whole body."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    secrets: list[str] = []
    """The credentials of the request, which errors must not contain."""

    saved: int | None = None
    """The size of the body if it was saved to a file; `content` is then empty."""


def shown_headers(headers: Mapping[str, str], secrets: list[str]) -> dict[str, str]:
    """Return the headers that a caller may see, without the credentials of the request."""
    shown = {name: value for name, value in headers.items() if name not in _WITHHELD}
    if not secrets or not any(map("\n".join(shown.values()).__contains__, spellings(*secrets))):
        return shown
    # Many servers repeat the query, with its key, in `Link`.
    redact = redaction(*secrets)
    return {name: redact(text) for name, text in shown.items()}


def meta_of(response: HTTPResponse | WholeResponse, secrets: list[str]) -> HTTPResponseMeta:
    """Return the part of a response that a caller may see beside the data, without `secrets` of the request."""
    headers = shown_headers(response.headers, secrets)
    return HTTPResponseMeta(
        status_code=response.status,
        headers=headers,
        content_type=headers.get("content-type", ""),
    )


def read_data(response: WholeResponse, described: ResponseData, reader: JSONReader) -> Any:
    """Return the data of a successful response that is not a stream: JSON, text, bytes, or None if it is empty.

    Args:
        response: The response.
        described: What the document declares: JSON, also with another content type; or text, so that an empty body is
            empty text.
        reader: Decodes JSON within the limits.

    Raises:
        CallError: `EXECUTION_ERROR` if the content type or the document declares JSON and the body is not JSON;
            `RESOURCE_EXHAUSTED` if it has too many values.
    """
    content, content_type = response.content, response.headers.get("content-type", "")
    if response.status in EMPTY or not content:
        return "" if described.is_text else None
    if media.is_json(content_type):
        return reader.read(content, content_type)
    if described.is_json and (media.is_text(content_type) or media.is_unspecific(content_type)):
        try:
            data = reader.read(content, content_type)
        except CallError as error:
            if error.code == ErrorCode.RESOURCE_EXHAUSTED or not (
                media.is_unspecific(content_type)
                or described.replaces_json(text_in(content, content_type), content_type)
            ):
                raise
        else:
            # A text such as `1.10` is not a number if the document declares a string.
            if not (media.is_text(content_type) and described.keeps_text(data)):
                return data
            reader.changes.clear()
    if media.is_text(content_type):
        return text_in(content, content_type)
    if described.is_base64:
        # Some servers send the bytes themselves.
        with suppress(ValueError):
            return from_base64(b"".join(content.split()))
    return content


async def read_error(
    response: HTTPResponse, limit: int, end: float, secrets: list[str], is_temporary: bool
) -> CallError:
    """Return the error for an error response, with the part of its body within the limits of size and time.

    Args:
        response: The response.
        limit: The limit of its body in bytes.
        end: When it must have arrived, by the monotonic clock.
        secrets: The credentials of the request.
        is_temporary: Whether the same request may be sent again later.
    """
    content, is_cut = b"", False
    try:
        async with asyncio.timeout(end - monotonic()), aclosing(decoded(response)) as body:
            async for piece in body:
                content += piece
                if len(content) > limit:
                    break
    except (CallError, TimeoutError):
        # The status decides; an incomplete body does not change the error.
        is_cut = True
    status = response.status
    whole = WholeResponse("", status, response.headers, content, secrets)
    phrase = response.reason.encode(errors="replace").decode() or PHRASES.get(status, "Unknown")
    return CallError(
        ErrorCode.EXECUTION_ERROR,
        f"HTTP {status}: {redaction(*secrets)(phrase)}",
        _details(whole, limit, is_cut=is_cut),
        retryable=is_temporary,
    )


def with_response(error: CallError, response: WholeResponse, limit: int) -> CallError:
    """Return `error` with the response in its details, in the form of `read_error`."""
    return CallError(error.code, error.message, _details(response, limit))


def _details(response: WholeResponse, limit: int, *, is_cut: bool = False) -> JSONObject:
    """Return the details of an error: the response, without the credentials of the request."""
    redact = redaction(*response.secrets)
    content, is_cut = response.content[:limit], is_cut or len(response.content) > limit
    content_type = response.headers.get("content-type", "")
    details: JSONObject = {
        "statusCode": response.status,
        "headers": shown_headers(response.headers, response.secrets),
        "contentType": redact(content_type),
        "body": None,
    }
    is_text = not content_type or media.is_json(content_type) or media.is_text(content_type)
    if content and not is_text:
        details |= {"body": b64encode(content).decode(), "encoding": "base64"}
    elif content:
        details["body"] = text = redact(text_in(content, content_type))
        if media.is_json(content_type) and not is_cut:
            with suppress(JSONValueError):
                details["body"] = decode_json(text, max_values=MAX_REQUEST_VALUES)
    if is_cut:
        details["truncated"] = True
    return details
