"""A typed client of operations served over HTTP. It requires only aiohttp."""

import base64
import json
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Self, cast

import aiohttp

ErrorCode = str
"""The error codes of the library and of the operations. Servers may add others."""


class OperationError(Exception):
    """Raised when an operation fails.

    Attributes:
        code: A code such as `VALIDATION_ERROR`, or one that the operation declares.
        details: JSON details of the error.
    """

    def __init__(self, code: ErrorCode, message: str, details: Any = None) -> None:
        super().__init__(f"{code}: {message}" if message != code else code)
        self.code: ErrorCode = code
        self.message = message
        self.details = details


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET = Unset.UNSET
"""The default of an optional argument."""


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments without those that are `UNSET`."""
    return {name: value for name, value in arguments.items() if value is not UNSET}


class Connection:
    """The connection that every namespace of a client shares."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session = aiohttp.ClientSession(headers=headers)

    async def call(self, operation: str, input: Any) -> Any:
        """Return the data of one call.

        Raises:
            OperationError: If the operation fails.
        """
        body = {"operation": operation, "input": input}
        with _failures(self._url):
            async with self._session.post(
                f"{self._url}/call", json=body, timeout=self._timeout
            ) as response:
                answer = json.loads(await response.read())
        if response.status >= 400:
            raise _error(answer)
        if answer.get("meta", {}).get("isError"):
            raise _error(answer["meta"].get("structuredContent") or {"details": answer["data"]})
        data = answer["data"]
        return base64.b64decode(data) if answer.get("encoding") == "base64" else data

    async def subscribe(self, operation: str, input: Any) -> AsyncIterator[Any]:
        """Yield the items of a subscription.

        Raises:
            OperationError: If the operation fails.
        """
        body = {"operation": operation, "input": input}
        timeout = aiohttp.ClientTimeout(total=None, connect=self._timeout.total)
        with _failures(self._url):
            async with self._session.post(
                f"{self._url}/subscribe", json=body, timeout=timeout
            ) as response:
                if response.status >= 400:
                    raise _error(json.loads(await response.read()))
                async for event, data in _events(response.content):
                    if event == "error":
                        raise _error(data)
                    if event == "complete":
                        return
                    yield data
        raise OperationError("UNAVAILABLE", "the stream ended unexpectedly")

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, Any]]:
    """Yield the name and the data of each server-sent event."""
    rest = b""
    async for chunk in stream.iter_any():
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            fields = [line.partition(b": ") for line in block.split(b"\n")]
            values = {name: value for name, _, value in fields}
            if b"data" in values:
                yield values.get(b"event", b"").decode(), json.loads(values[b"data"])


@contextmanager
def _failures(url: str) -> Generator[None]:
    """Turn connection errors into `OperationError`s."""
    try:
        yield
    except TimeoutError:
        raise OperationError("TIMEOUT", f"{url} did not respond in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise OperationError("UNAVAILABLE", f"{url} cannot be reached: {error}") from error
    except json.JSONDecodeError:
        raise OperationError(
            "UNKNOWN_ERROR", f"{url} returned a response that is not JSON"
        ) from None


def _error(wire: Any) -> OperationError:
    fields = cast("dict[str, Any]", wire if isinstance(wire, dict) else {})
    return OperationError(
        str(fields.get("code", "UNKNOWN_ERROR")),
        str(fields.get("message", "the operation failed")),
        fields.get("details"),
    )


class BaseClient:
    """Opens a connection for the duration of an `async with` block.

    Args:
        url: The address of `operations serve`.
        key: An access key, if the operations require one.
        timeout: Seconds for one call.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 30) -> None:
        self.connection = Connection(url, key, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.connection.close()
