"""Test operations: replace some of them during a test, and inspect their calls.

With pytest, the fixture `under_test` of `operations.testing.plugin` does the same. `FakeUpstream` is an HTTP API that
responds with the examples of its OpenAPI document, without a network.
"""

import inspect
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from http.client import responses
from types import TracebackType
from typing import Any, Self, overload
from urllib.parse import urlsplit

import msgspec

from operations.base.errors import OperationsError
from operations.base.json.values import object_of
from operations.base.text import suggestion
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.events import CallEvent, CallStarted
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.openapi import HTTPRequest, HTTPServiceConfig, from_openapi
from operations.openapi.source.diagnosis import examples_of
from operations.registry.registry import OperationRegistry

__all__ = ["Fake", "FakeUpstream", "RegistryUnderTest"]


class Fake:
    """A replacement for an operation.

    Attributes:
        inputs: The inputs of its calls, in order.
    """

    def __init__(self, result: Any, spec: OperationSpec) -> None:
        self.inputs: list[Any] = []
        self._result = result
        self._spec = spec
        if callable(result) or isinstance(result, BaseException):
            return
        if spec.type is not OperationType.SUBSCRIPTION:
            self._enforce_possible(result)
        elif isinstance(result, Sequence):
            for item in result:  # pyright: ignore[reportUnknownVariableType]
                self._enforce_possible(item)

    async def __call__(self, input: Any, context: OperationContext) -> Any:
        """Record a call and return the result; raise it if it is an exception."""
        result = self._respond(input)
        return self._enforce_possible(await result if inspect.isawaitable(result) else result)

    async def stream(self, input: Any, context: OperationContext) -> AsyncGenerator[Any]:
        """Record a subscription and yield the items of the result; raise it if it is an exception."""
        result = self._respond(input)
        if isinstance(result, AsyncIterable):
            async for item in result:  # pyright: ignore[reportUnknownVariableType]
                yield self._enforce_possible(item)
        else:
            for item in result:
                yield self._enforce_possible(item)

    def _enforce_possible(self, result: Any) -> Any:
        """Return a result that the operation itself could return.

        Raises:
            OperationsError: If it does not match the output schema, even after it was normalised.
        """
        schema, data = self._spec.output_schema, result
        if isinstance(data, ResponseEnvelope):
            data = data.data  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if schema.is_unknown or schema.is_binary or isinstance(data, bytes):
            return result
        _, changes = schema.compile().normaliser("cast")(data)
        wrong = [each for each in changes or () if each.kind == "mismatch"]
        if wrong:
            place = wrong[0].path or "the result"
            raise OperationsError(
                f"The fake of {self._spec.id} returns what the operation cannot return: {place} {wrong[0].message}"
            )
        return result

    def _respond(self, input: Any) -> Any:
        self.inputs.append(input)
        result = self._result(input) if callable(self._result) else self._result
        if isinstance(result, BaseException):
            raise result
        return result


class RegistryUnderTest:
    """A registry whose operations can be replaced for the length of a `with` block.

    Attributes:
        called: The ids of all operations that were called, nested calls included, in order.
    """

    def __init__(self, registry: OperationRegistry) -> None:
        self.registry = registry
        self.called: list[str] = []
        self._originals: dict[str, Operation] = {}
        self._stop: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self._stop = self.registry.observe(self._see)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
        for original in self._originals.values():
            self.registry.register(original, replace=True)
        self._originals.clear()

    def _see(self, event: CallEvent) -> None:
        if isinstance(event, CallStarted):
            self.called.append(event.operation_id)

    @overload
    def fake(self, operation_id: str, result: Callable[[Any], object]) -> Fake: ...
    @overload
    def fake(self, operation_id: str, result: object = None) -> Fake: ...
    def fake(self, operation_id: str, result: object = None) -> Fake:
        """Replace an operation until the block ends. Access, input and output are still checked.

        Args:
            operation_id: An operation that is registered.
            result: The result to return, an exception to raise, or a function that returns one of these for an input;
                it may be a coroutine function. For a subscription, the result is an iterable of its items; it may be
                asynchronous.

        Raises:
            OperationsError: If there is no such operation, or it cannot return this result. A result of a function is
                checked when it is called.
        """
        original = self.registry.get(operation_id)
        if original is None:
            known = [spec.id for spec in self.registry.specs()]
            raise OperationsError(
                f"There is no operation {operation_id!r}: register it before you replace it."
                + suggestion(operation_id, known)
            )
        self._originals.setdefault(operation_id, original)
        fake = Fake(result, original.spec)
        is_stream = original.spec.type is OperationType.SUBSCRIPTION
        handler = fake.stream if is_stream else fake
        self.registry.register(Operation(original.spec, handler), replace=True)
        return fake

    async def call(
        self,
        operation_id: str,
        input: Any = None,
        *,
        caller: str | None = None,
        scopes: Iterable[str] = (),
    ) -> Any:
        """Call an operation and return its data.

        Args:
            operation_id: The operation.
            input: Its input.
            caller: The id of the caller. Without caller and scopes, the call has no identity.
            scopes: The scopes of the caller.

        Raises:
            CallError: As the call would.
        """
        granted = list(scopes)
        is_known = caller is not None or bool(granted)
        identity = Identity(caller or "tester", granted) if is_known else None
        context = OperationContext(identity=identity)
        return (await self.registry.execute(operation_id, input, context)).raise_for_error().data


class FakeUpstream:
    """A transport that responds as an API would: `HTTPServiceConfig(transport=FakeUpstream(document), ...)`.

    The response is the first example for the lowest successful status. Without an example, it is a value that matches
    the schema. A request that the document does not define receives a 404 response.

    Args:
        document: A decoded OpenAPI or Swagger document.

    Attributes:
        requests: The requests, in order.
    """

    def __init__(self, document: JSONObject) -> None:
        config = HTTPServiceConfig(namespace="upstream", base_url="http://upstream.invalid")
        service = from_openapi(document, config)
        endpoints = list(service.endpoints())
        self.requests: list[HTTPRequest] = []
        self._responses: dict[tuple[str, str], FakeResponse] = {}
        for operation, endpoint in endpoints:
            entry = endpoint.entry
            response = _generated(object_of(entry.operation.get("responses")), operation)
            self._responses[entry.method, entry.path] = response
        found = examples_of(service.description, [each.entry for _, each in endpoints])
        examples = sorted(found, key=lambda example: example.status)
        # The first example with the lowest status is set last.
        for example in reversed(examples):
            if 200 <= example.status < 300:
                response = FakeResponse(example.value, example.status, example.media_type)
                self._responses[example.entry.method, example.entry.path] = response
        # Choose the path with the most fixed characters.
        self._paths = sorted(self._responses, key=lambda key: -len(re.sub(r"\{.*?\}", "", key[1])))
        self._patterns = {path: _pattern(path) for _, path in self._paths}

    def respond(self, method: str, path: str, body: Any = None, *, status: int = 200) -> None:
        """Set the response to a request.

        Args:
            method: The method.
            path: The path as the document writes it, such as `/pets/{id}`.
            body: The body, as JSON.
            status: The status code.

        Raises:
            KeyError: If the document has no such operation.
        """
        key = (method.upper(), path)
        if key not in self._responses:
            raise KeyError(f"the document has no {method.upper()} {path}")
        self._responses[key] = FakeResponse(body, status)

    @asynccontextmanager
    async def send(self, request: HTTPRequest) -> AsyncGenerator["FakeResponse"]:
        """Record a request and respond to it."""
        self.requests.append(request)
        path = urlsplit(request.url).path
        for method, template in self._paths:
            if method == request.method and self._patterns[template].search(path):
                yield self._responses[method, template]
                return
        yield FakeResponse({"message": f"no example of {request.method} {path}"}, 404)

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""


class FakeResponse:
    """A predefined response."""

    def __init__(self, body: Any, status: int, media_type: str = "application/json") -> None:
        self.status = status
        self.reason = responses.get(status, "")
        is_text = isinstance(body, str) and "json" not in media_type
        self._body = (
            b"" if body is None else body.encode() if is_text else msgspec.json.encode(body)
        )
        self.headers: Mapping[str, str] = {"content-type": media_type} if self._body else {}

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body."""
        if self._body:
            yield self._body


def _pattern(template: str) -> "re.Pattern[str]":
    """Return a pattern for the end of a path, which follows the base path of the server."""
    parts = re.split(r"\{.*?\}", template)
    return re.compile("[^/]+".join(map(re.escape, parts)) + "$")


def _generated(declared: JSONObject, operation: Operation) -> FakeResponse:
    """Return a response that matches the schema, for an operation without an example."""
    good = sorted(status for status in map(str, declared) if re.fullmatch("2[0-9][0-9]", status))
    status = int(good[0]) if good else 200
    response = object_of(declared.get(str(status)))
    schema = operation.spec.output_schema
    has_body = "$ref" in response or "content" in response or "schema" in response
    body = schema.cast(None, "create").value if has_body and not schema.is_unknown else None
    return FakeResponse(body, status)
