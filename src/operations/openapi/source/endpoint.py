"""The handler of an imported operation: builds the request, sends it, and wraps the response in an envelope."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, DocumentError, ErrorCode
from operations.base.json.values import canonical, is_list, is_object, object_of
from operations.base.types import JSONObject, JSONSchema
from operations.contract.context import OperationContext
from operations.contract.envelopes import DescribedEnvelope, ResponseEnvelope, add_changes
from operations.io.files import StreamedBody, Target, file_target, refused
from operations.io.hosts import joined_url, normal_url, origin_of
from operations.io.http.client import Draft, name_key, written_names
from operations.openapi.reading.document import Description, DocumentOperation
from operations.openapi.reading.expected import ANY_JSON, Expected, ResponseData
from operations.openapi.source.bodies import HeldFiles, hold_files, without_files
from operations.openapi.source.client import ServiceClient
from operations.openapi.source.decoding import JSONReader
from operations.openapi.source.long_running import finished
from operations.openapi.source.paging import Page, Paging
from operations.openapi.source.parameters import template_names
from operations.openapi.source.reflected import may_repeat, without_reflected
from operations.openapi.source.request_plan import RequestPlan
from operations.openapi.source.responses import WholeResponse, meta_of, read_data, with_response
from operations.openapi.source.streaming import EventStream, read_all
from operations.schema import Schema
from operations.schema.casting.typed import REFUSALS

_LARGE = 256 * 1024
"""Responses of at least this many bytes are decoded in a thread."""

_decode = msgspec.json.Decoder().decode

MAX_PAGES = 10_000
"""The largest number of pages that a subscription reads, in case the list does not end."""


class Endpoint:
    """One operation of a service. Its schemas are built on first use.

    Args:
        client: Sends the requests of the service.
        description: The document.
        entry: The operation in the document.
        is_stream: Whether this is a subscription to a stream.
        is_split: Whether the document declares both a stream and other responses, which are separate operations.
        is_long: Whether the API may go on after its response, so that a run waits for the result.

    Attributes:
        entry: The operation in the document.
        input: The schema of the arguments.
        output: The schema of the data of any successful response.
    """

    __slots__ = (
        "_client", "_description", "_expected", "_is_split", "_plan", "_security", "_server", "entry", "input",
        "is_long", "is_stream", "output",
    )  # fmt: skip

    def __init__(
        self,
        client: ServiceClient,
        description: Description,
        entry: DocumentOperation,
        *,
        is_stream: bool,
        is_split: bool = False,
        is_long: bool = False,
    ) -> None:
        self._client = client
        self._description = description
        self._is_split = is_split
        self._plan: RequestPlan | None = None
        self._server: str | None = None
        self.entry = entry
        self.is_stream = is_stream
        self.is_long = is_long
        schemas = description.schemas
        self.input = Schema(self.input_schema, lenient=True, shared=schemas.requests)
        self.output = Schema(self.output_schema, lenient=True, shared=schemas.responses)

    @property
    def has_address(self) -> bool:
        """Whether the address of the operation is known."""
        try:
            origin_of(self._find_server()[0])
        except (CallError, ValueError):
            return False
        return True

    def input_schema(self) -> JSONSchema:
        """Return the schema of the arguments, built when first needed."""
        return self._ready().input_schema()

    def output_schema(self) -> JSONSchema:
        """Return the schema of the data, built when first needed."""
        self._ready()
        return self._expected.schema()

    async def call(self, input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        """Send the request and return the response.

        Raises:
            CallError: If the request fails, or the response is an error.
        """
        plan = self._plan or self._ready()
        draft = self._draft(input)
        given = cast("JSONObject", input).get(plan.save_to) if type(input) is dict else None
        target = None if given is None else self._target(given)
        if self.is_long and target is None and context.scope is not None:
            return await self._finished(draft, context)
        response = await self._client.exchange(draft, context, target)
        if target is not None:
            return _saved(response, given)
        return await self._read(response)

    async def _finished(self, draft: Draft, context: OperationContext) -> ResponseEnvelope[Any]:
        """Return the result of an operation of the API that goes on after its response."""
        response, is_first = await finished(self._client, draft, context)
        if is_first:
            return await self._read(response)
        config = self._client.config
        reader = JSONReader(config.response_values, config.max_response_depth)
        data = read_data(response, ANY_JSON, reader)
        if may_repeat(response.content, response.secrets):
            data = without_reflected(data, response.secrets)
        # Without a schema: the document describes the first response.
        return DescribedEnvelope(data, meta_of(response, response.secrets))

    @property
    def save_to(self) -> str:
        """The argument that names the file to save the response to."""
        return self._ready().save_to

    @property
    def takes_files(self) -> bool:
        """Whether the body of the request may contain files."""
        return self._ready().takes_files

    @property
    def returns_files(self) -> bool:
        """Whether the document declares a response that is neither JSON nor text."""
        return self._ready().returns_files

    def hold(self, value: Any) -> HeldFiles | None:
        """Replace the files in an input; return None if it has no files."""
        plan = self._plan or self._ready()
        if not plan.takes_files and plan.save_to not in object_of(value):
            return None
        return hold_files(value, plan.save_to, is_deep=plan.takes_files)

    def _target(self, given: Any) -> Target:
        """Return the file to save to: a path or an open file, or a relative path below `files_root`."""
        if not isinstance(given, str):
            return file_target(given, self.save_to)
        root = self._description.schemas.files.root
        if root is None:
            raise refused(self.save_to, "no files_root is configured")
        return root.target(given, self.save_to)

    async def subscribe(
        self, input: Any, context: OperationContext
    ) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield one envelope per event of a stream.

        Raises:
            CallError: If the request fails, or the response is an error.
        """
        draft = self._draft(input)
        events = EventStream(
            self._client,
            draft,
            context,
            self._expected.find,
            is_ours=self._client.config.restore and "x-operations" in self.entry.operation,
        )
        async with aclosing(events.envelopes()) as envelopes:
            async for envelope in envelopes:
                yield envelope

    async def pages(
        self, paging: Paging, input: Any, context: OperationContext
    ) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield one envelope per page of a list.

        Raises:
            CallError: If a page cannot be read, or the next page has another origin.
        """
        arguments: JSONObject = dict(input)
        draft = self._draft(arguments)
        asked: set[tuple[str, str, bytes | StreamedBody | None]] = set()
        last = b""
        for _ in range(MAX_PAGES):
            here = _question(draft)
            asked.add(here)
            response = await self._client.exchange(draft, context)
            envelope = await self._read(response)
            this = canonical(envelope.data) if paging.counts else b""
            if this and this == last:
                # For a page beyond the end, many servers return the last page again.
                return
            last = this
            following = paging.following(
                Page(arguments, response.url, response.headers, envelope.data)
            )
            # The caller may modify the data from here on.
            yield envelope
            if is_object(following):
                arguments = following
                draft = self._draft(arguments)
            elif isinstance(following, str):
                draft = self._at(following, draft)
            else:
                return
            if _question(draft) == here:
                return
            if _question(draft) in asked:
                raise CallError(ErrorCode.EXECUTION_ERROR, "The pages repeat.")
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"There are more than {MAX_PAGES} pages.")

    def _at(self, url: str, draft: Draft) -> Draft:
        """Return the request for the address in a response, which must have the same origin."""
        origin = origin_of(draft.base)
        try:
            is_same = origin_of(url) == origin
        except ValueError:
            is_same = False
        if not is_same:
            raise CallError(
                ErrorCode.EXECUTION_ERROR, "The address of the next page has another origin."
            )
        there = urlsplit(normal_url(url))
        # The address may repeat a key of the query, which is added again.
        keys = self._client.security.keys
        pieces = there.query.split("&") if there.query else []
        query = [each for each in pieces if keys.isdisjoint(written_names("query", [each]))]
        return replace(draft, base=str(origin), path=there.path or "/", query=query)

    def replay(self, status: int, content_type: str, content: bytes) -> ResponseEnvelope[Any]:
        """Return the envelope of a successful response as if the API had sent it.

        Raises:
            CallError: `EXECUTION_ERROR` if the content does not match the document.
        """
        self._ready()
        return self._envelope(WholeResponse("", status, {"content-type": content_type}, content))

    async def _read(self, response: WholeResponse) -> ResponseEnvelope[Any]:
        """Return the envelope of a response; decode a large response in a thread, so that other tasks can run."""
        if len(response.content) <= _LARGE:
            return self._envelope(response)
        return await asyncio.to_thread(self._envelope, response)

    def _envelope(self, response: WholeResponse) -> ResponseEnvelope[Any]:
        expected, content = self._expected, response.content
        key = (response.status, response.headers.get("content-type", ""))
        described = expected.found.get(key) or expected.find(*key)
        schema = described.listed if described.is_stream else described.schema
        is_clean = not described.is_open and self._is_clean(content, described)
        config = self._client.config
        reader = JSONReader(config.response_values, config.max_response_depth)
        data = _decode(content) if is_clean else self._data(response, described, reader)
        if may_repeat(content, response.secrets):
            found = without_reflected(data, response.secrets)
            # The schema may not accept what replaces a credential.
            data, is_clean = found, is_clean and found is data
        meta = meta_of(response, response.secrets)
        if reader.changes:
            meta = add_changes(meta, reader.changes)
        is_clean = is_clean or described.is_open or reader.is_deep
        return DescribedEnvelope(data, meta, schema, size=len(content), is_clean=is_clean)

    def _is_clean(self, content: bytes, described: ResponseData) -> bool:
        """Return whether a text is known to be JSON that is valid, within the limits, and needs no change."""
        check = described.check_text or described.find_check()
        if check is None or len(content) >= 2 * self._client.config.response_values:
            return False
        try:
            check(content)
        except REFUSALS:
            return False
        return True

    def _data(self, response: WholeResponse, described: ResponseData, reader: JSONReader) -> Any:
        """Return the data of any response, which is normalised later."""
        read = read_all if described.is_stream else read_data
        try:
            return read(response, described, reader)
        except CallError as error:
            limit = self._client.config.max_error_bytes
            raise with_response(error, response, limit) from None

    def _draft(self, input: Any) -> Draft:
        plan = self._plan or self._ready()
        if self._server is None:
            self._server, query = self._find_server()
            if query:
                plan.literal_query = (query, *plan.literal_query)
        expected, given = self._expected, self._arguments(input)
        arguments = cast("JSONObject", given) if type(given) is dict else {}
        draft = plan.draft(self.entry.method, self._server, arguments, expected.headers)
        draft.security = self._security
        draft.redirects = expected.redirects
        return draft

    def _arguments(self, input: Any) -> Any:
        """Return the arguments of the request: integers also if they were given as floats, such as 5.0."""
        if not _has_whole_float(input):
            return input
        return _with_integers(input, self.input.cast(without_files(input), "keep").value)

    def _ready(self) -> RequestPlan:
        plan = self._plan
        if plan is None:
            client, description, entry = self._client, self._description, self.entry
            try:
                model = description.reader.read_model(entry.item, entry.operation)
            except DocumentError as error:
                raise CallError(
                    ErrorCode.EXECUTION_ERROR, f"The document does not describe this call: {error}"
                ) from error
            plan = RequestPlan(
                entry.path,
                model,
                description.schemas,
                owned=client.security.owned,
                flatten=client.config.flatten_body,
                streams=self.is_stream if self._is_split else None,
            )
            self._expected = Expected(
                model,
                description.schemas,
                self.output,
                method=entry.method,
                is_stream=self.is_stream,
                is_split=self._is_split,
            )
            required = {name_key(p.place, p.name) for p in model.parameters if p.required}
            self._security = client.security.plan(entry.operation.get("security"), required)
            self._plan = plan
        return plan

    def _find_server(self) -> tuple[str, str]:
        """Return the address and its query: the configured one, or the document's first server as an absolute URL."""
        config, description, entry = self._client.config, self._description, self.entry
        url = config.base_url
        if url is None:
            variables = config.server_variables
            url = description.reader.server_url(entry.item, entry.operation, variables)
            if missing := template_names(url):
                raise CallError(
                    ErrorCode.EXECUTION_ERROR,
                    f"The server's address {url} needs a value for {', '.join(missing)}:"
                    " set server_variables, or base_url.",
                )
            if description.address is not None:
                url = joined_url(description.address, url)
        with suppress(ValueError):
            url = normal_url(url)
        server, _, query = url.partition("?")
        return server, query


def _has_whole_float(value: Any) -> bool:
    rest: list[Any] = [value]
    while rest:
        item = rest.pop()
        kind = type(item)  # pyright: ignore[reportUnknownVariableType]
        if kind is dict:
            rest += item.values()
        elif kind is list:
            rest += item
        elif kind is float and item.is_integer():
            return True
    return False


def _with_integers(value: Any, cast: Any) -> Any:
    """Return `value` with the integers of `cast` in place of equal floats."""
    if type(value) is float:
        return cast if type(cast) is int and cast == value else value
    if is_object(value) and is_object(cast):
        return {name: _with_integers(item, cast.get(name)) for name, item in value.items()}
    if is_list(value) and is_list(cast) and len(value) == len(cast):
        return list(map(_with_integers, value, cast))
    return value


def _saved(response: WholeResponse, given: Any) -> ResponseEnvelope[Any]:
    """Return the envelope of a response that was saved to a file: a description of the file."""
    kind = response.headers.get("content-type", "")
    data: JSONObject = {"size": response.saved, "contentType": kind}
    if isinstance(given, (str, Path)):
        data = {"path": str(given), **data}
    # Without a schema: the document describes the response, not the file that it was saved to.
    return DescribedEnvelope(data, meta_of(response, response.secrets))


def _question(draft: Draft) -> tuple[str, str, bytes | StreamedBody | None]:
    """Return a key that distinguishes requests for different pages."""
    return draft.base + draft.path, "&".join(draft.query), draft.body
