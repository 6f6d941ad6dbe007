"""Operations of an API that go on after their response: the call waits for the result, in a run.

    202, Operation-Location: /jobs/7 -> GET /jobs/7 -> running, GET /jobs/7 -> succeeded -> the result

Rule 1: the request is a step of the run: an attempt that continues asks for the result, and never repeats the request
        unless its method is repeatable.
Rule 2: an address of another origin gets no credentials, and must be public unless the operator names its host.
Rule 3: an API that does not respond for a while does not end the wait.
"""

import asyncio
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode
from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_REQUEST_VALUES, JSONValueError, object_of, text_of
from operations.base.redaction import redaction
from operations.base.retry import retry_after
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.io.hosts import joined_url, normal_url, origin_of
from operations.io.http.client import REDIRECTS, REPEATABLE, Draft, written_names
from operations.openapi.reading import media
from operations.openapi.source.client import ServiceClient
from operations.openapi.source.reflected import may_repeat
from operations.openapi.source.responses import WholeResponse, shown_headers, with_response

_FIRST_SECONDS: Final = 0.2
_GROWTH: Final = 1.5
_LAST_SECONDS: Final = 10.0
"""The first pause in seconds, its growth, and the longest, if the API names none with `Retry-After`."""

_LONGEST_SECONDS: Final = 600.0
"""The longest pause that an API may name, in seconds."""

_PATIENCE_SECONDS: Final = 600.0
"""Seconds without a response of the API after which its operation counts as lost."""

_MAX_REQUESTS: Final = 100_000
_STATUSES: Final = frozenset({429, 500, 502, 503, 504})
"""The statuses after which the same request for a state is sent again."""

_RETRIED: Final = (ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT, ErrorCode.RESOURCE_EXHAUSTED)
_LOCATIONS: Final = ("operation-location", "azure-asyncoperation")
"""The headers with the address of a state, in their order."""

_KEPT: Final = frozenset({*_LOCATIONS, "location", "retry-after", "date", "content-type"})
"""The headers of the first response that the run stores."""

_WORKING: Final = frozenset({
    "accepted", "created", "creating", "deleting", "inprogress", "notstarted", "pending", "processing", "queued",
    "running", "started", "submitted", "updating", "validating", "waiting", "working",
})  # fmt: skip
"""The values of `status` for an operation that goes on, without case and separators."""

_FAILED: Final = frozenset({"error", "errored", "failed", "failure", "expired", "rejected"})
_CANCELLED: Final = frozenset({"aborted", "canceled", "cancelled"})
_SEPARATORS: Final = re.compile(r"[\s_-]+")
_VERSION: Final = re.compile(r"v[0-9]+[a-z0-9]*")


async def finished(
    client: ServiceClient, draft: Draft, context: OperationContext
) -> tuple[WholeResponse, bool]:
    """Send a request in a run; return the response with the result, and whether it is that of the request itself.

    Args:
        client: Sends the requests of the service.
        draft: The request.
        context: The context of the call.

    Raises:
        CallError: If a request fails, or the operation failed, was cancelled, or is lost.
    """
    live: list[WholeResponse] = []

    async def begin() -> JSONObject:
        response = await client.exchange(draft, context)
        live[:] = [response]
        return _stored(response, draft)

    stored = await context.step("call", begin, once=draft.method not in REPEATABLE)
    first = _restored(stored)
    found = await _Follower(client, draft, context).follow(first)
    # The first response has the credentials that its data must not repeat.
    return (live[0] if found is first and live else found), found is first


def _stored(response: WholeResponse, draft: Draft) -> JSONObject:
    """Return what a run stores of a response: nothing that repeats a credential of its request."""
    secrets, content = response.secrets, response.content
    if may_repeat(content, secrets):
        content = redaction(*secrets)(content.decode(errors="replace")).encode()
    headers = shown_headers(response.headers, secrets)
    return {
        "url": f"{draft.base.rstrip('/')}{draft.path}",
        "status": response.status,
        "headers": {name: text for name, text in headers.items() if name in _KEPT},
        "content": b64encode(content).decode(),
    }


def _restored(stored: JSONObject) -> WholeResponse:
    content = b64decode(stored["content"])
    return WholeResponse(stored["url"], stored["status"], stored["headers"], content)


class _Follower:
    """Waits for one operation of an API."""

    def __init__(self, client: ServiceClient, draft: Draft, context: OperationContext) -> None:
        self._client, self._draft, self._context = client, draft, context
        self._reports = 0
        self._reported = ""

    async def follow(self, first: WholeResponse) -> WholeResponse:
        """Return the response with the result.

        Raises:
            CallError: If the operation failed, was cancelled, or is lost.
        """
        body = _object(first)
        address = _named(first) or self._google(first, body)
        if address is None:
            return first
        is_google, has_state = _named(first) is None, _has_state(first)
        response, pause = first, _FIRST_SECONDS
        for _ in range(_MAX_REQUESTS):
            wanted = min(retry_after(response.headers), _LONGEST_SECONDS)
            await asyncio.sleep(wanted or pause)
            pause = min(pause * _GROWTH, _LAST_SECONDS)
            response = await self._ask(address)
            if response.status in REDIRECTS:
                return await self._result(address, response)
            body = _object(response)
            state = _SEPARATORS.sub("", text_of(body.get("status"))).lower()
            if is_google:
                if body.get("done") is not True:
                    continue
                if body.get("error") is not None:
                    raise _failed(response, "failed")
                found = msgspec.json.encode(body.get("response"))
                return replace(response, content=found, headers=_JSON)
            if state in _FAILED or state in _CANCELLED:
                raise _failed(response, "cancelled" if state in _CANCELLED else "failed")
            if response.status == 202 or state in _WORKING:
                address = _named(response) or address
                await self._report(text_of(body.get("status")))
                continue
            where = text_of(body.get("resourceLocation")) or first.headers.get("location", "")
            if has_state and where:
                return await self._ask(joined_url(first.url, where))
            return response
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The operation of the API does not end.")

    def _google(self, first: WholeResponse, body: JSONObject) -> str | None:
        """Return the address of an operation that a body names as Google's APIs do; None for any other body."""
        name = text_of(body.get("name")).strip("/")
        if "operations/" not in f"{name}/" or body.get("done") is True or not name:
            return None
        if not (body.keys() & {"done", "metadata"}):
            return None
        parts = urlsplit(first.url).path.split("/")
        versions = [index for index, part in enumerate(parts) if _VERSION.fullmatch(part)]
        if not versions:
            return None
        path = "/".join(parts[: versions[0] + 1])
        return f"{origin_of(first.url)}{path}/{name}"

    async def _result(self, address: str, response: WholeResponse) -> WholeResponse:
        where = response.headers.get("location", "")
        result = await self._ask(joined_url(response.url or address, where))
        if not 200 <= result.status < 300:
            raise _failed(result, "has no result")
        return result

    async def _ask(self, url: str) -> WholeResponse:
        """Return the response for an address; wait for an API that does not respond."""
        loop = asyncio.get_running_loop()
        ends, pause = loop.time() + _PATIENCE_SECONDS, _FIRST_SECONDS
        while True:
            try:
                return await self._get(url)
            except CallError as error:
                error.begun = None
                details = object_of(error.details)
                is_temporary = error.code in _RETRIED or details.get("statusCode") in _STATUSES
                if not is_temporary or loop.time() > ends:
                    raise
                wanted = min(retry_after(object_of(details.get("headers"))), _LONGEST_SECONDS)
            await asyncio.sleep(max(wanted, pause))
            pause = min(pause * _GROWTH, _LAST_SECONDS)

    async def _get(self, url: str) -> WholeResponse:
        """Send one request.

        Raises:
            CallError: `ACCESS_DENIED` if the address may not be called, and all errors of a request.
        """
        draft, client = self._draft, self._client
        try:
            url, origin = normal_url(url), origin_of(url)
        except ValueError as error:
            message = f"The API names an address for the state of its operation that is {error}."
            raise CallError(ErrorCode.EXECUTION_ERROR, message) from None
        if origin != origin_of(draft.base):
            response = await client.fetch_unsigned(url)
            if not (200 <= response.status < 300 or response.status in REDIRECTS):
                limit = client.config.max_error_bytes
                message = f"HTTP {response.status}"
                raise with_response(CallError(ErrorCode.EXECUTION_ERROR, message), response, limit)
            return response
        there = urlsplit(url)
        keys = client.security.keys
        pieces = there.query.split("&") if there.query else []
        query = [each for each in pieces if keys.isdisjoint(written_names("query", [each]))]
        polled = Draft(
            method="GET",
            base=str(origin),
            path=there.path or "/",
            query=query,
            headers={"Accept": draft.headers.get("Accept", "*/*")},
            security=draft.security,
            redirects=frozenset(map(str, REDIRECTS)),
        )
        return await client.exchange(polled, self._context)

    async def _report(self, message: str) -> None:
        if message and message != self._reported:
            self._reported = message
            self._reports += 1
            await self._context.progress(self._reports, None, message)


_JSON: Final[Mapping[str, str]] = {"content-type": "application/json"}


def _has_state(response: WholeResponse) -> bool:
    return any(response.headers.get(name) for name in _LOCATIONS)


def _named(response: WholeResponse) -> str | None:
    """Return the address of a state that the headers of a response name."""
    names = (*_LOCATIONS, "location") if response.status == 202 else _LOCATIONS
    found = next(filter(None, map(response.headers.get, names)), None)
    return None if found is None else joined_url(response.url, found)


def _object(response: WholeResponse) -> JSONObject:
    """Return the JSON object of a state; an empty one for any other body."""
    if not media.is_json(response.headers.get("content-type", "")):
        return {}
    with suppress(JSONValueError, ValueError):
        return object_of(decode_json(response.content, max_values=MAX_REQUEST_VALUES))
    return {}


def _failed(response: WholeResponse, outcome: str) -> CallError:
    """Return the error of an operation of the API."""
    error = object_of(_object(response).get("error"))
    said = text_of(error.get("message"))
    message = f"The operation of the API {outcome}{said and ': ' + said}"
    code = ErrorCode.ABORTED if outcome == "cancelled" else ErrorCode.EXECUTION_ERROR
    return with_response(CallError(code, message), response, 64 << 10)
