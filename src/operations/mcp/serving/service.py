"""Implement the methods of the protocol for a registry: take parameters, return results in wire form.

Rule 1: this module does not depend on transports. The SDK's server and the lean path of `requests` both use it.
Rule 2: every result is for one caller. Operations that the caller may not call are neither listed nor found.
"""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from math import inf
from typing import Any, Final, TypeVar, cast

import mcp_types as types
import msgspec
from mcp import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec.structs import replace

from operations._resilience import TimeLimit
from operations._text import suggestion
from operations.access import Identity
from operations.context import CLOSED, NOTHING, CallerChannel, OperationContext
from operations.envelopes import LocalResponseMeta, ResponseEnvelope, add_changes
from operations.errors import CallError, ErrorCode, timed_out
from operations.front import Front
from operations.front.config import MCPServerSettings
from operations.front.http import RequestState
from operations.front.limits import call_seconds
from operations.front.public_errors import public_error
from operations.front.search import may_call
from operations.mcp.codec import INPUT, is_imported
from operations.mcp.serving.catalog import (
    Catalog,
    Prompt,
    Resource,
    arguments_from_text,
    prompt_result,
    publish_addresses,
    resource_result,
)
from operations.mcp.serving.tools import (
    Run,
    Tool,
    gateway_tools,
    run_gateway_tool,
    text_block,
    text_of,
)
from operations.observe import now
from operations.registry import OperationRegistry
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

ItemT = TypeVar("ItemT")

_BYTES_PER_TOKEN = 4
_RESOURCE_NOT_FOUND = -32002
"""The error code before 2026-07-28; since then it is `INVALID_PARAMS`."""


_BLOCKS_SINCE: Final = {"audio": "2025-03-26", "resource_link": "2025-06-18"}
"""The revisions that introduced types of blocks."""

_LATEST_BLOCK: Final = max(_BLOCKS_SINCE.values())


class Asker(msgspec.Struct, frozen=True):
    """The sender of a request, its front, and its protocol version."""

    identity: Identity | None
    protocol_version: str
    front: Front

    capabilities: Mapping[str, Any] = NOTHING
    """The capabilities that the client declared."""

    caller: str = "at:"
    """The key of the caller for limits."""

    request_id: str = ""
    """The id of the HTTP request, which is also the id of its call."""

    metadata: Mapping[str, Any] = NOTHING

    meta: Mapping[str, Any] = NOTHING
    """The `_meta` to forward to the server of an imported operation."""

    deadline: float | None = None
    """The deadline that the caller itself set, in milliseconds since the epoch."""

    @classmethod
    def of(
        cls,
        state: RequestState,
        protocol_version: str,
        capabilities: Mapping[str, Any],
        trace: Mapping[str, Any] = NOTHING,
        meta: Mapping[str, Any] = NOTHING,
    ) -> "Asker":
        """Return the sender of an HTTP request.

        The trace context in `_meta` takes precedence over that in the headers.
        """
        context = state.context
        return cls(
            state.identity,
            protocol_version,
            state.front,
            capabilities,
            state.caller,
            context.request_id,
            {**context.metadata, **trace} if trace else context.metadata,
            meta,
            context.deadline if b"operations-timeout" in state.headers else None,
        )

    @property
    def modern(self) -> bool:
        """Whether the client uses 2026-07-28 or later."""
        return self.protocol_version in MODERN_PROTOCOL_VERSIONS


class Service:
    """Serves MCP requests for one registry."""

    def __init__(self, registry: OperationRegistry, settings: MCPServerSettings) -> None:
        self.settings = settings
        self.registry = registry
        self._catalog = self._pictured()

    @property
    def catalog(self) -> Catalog:
        """The current catalog."""
        if self._catalog.revision != self.registry.revision:
            self._catalog = self._pictured()
        return self._catalog

    def _pictured(self) -> Catalog:
        return Catalog(self.registry, self.settings.names, self.settings.schema_budget)

    def instructions(self, identity: Identity | None) -> str | None:
        """Return our own instructions, and those of the sources with operations that the caller may call.

        The instructions of several sources are separated by headings with their namespaces.
        """
        context = OperationContext(identity=identity)
        imported = [
            key
            for key, specs in self.catalog.instructions.items()
            if any(may_call(spec, context) for spec in specs)
        ]
        own = self.settings.instructions
        if not imported or (own is None and len(imported) == 1):
            return own if not imported else imported[0][1]
        parts = [f"# Tools of {namespace}\n\n{text}" for namespace, text in imported]
        return "\n\n".join(parts if own is None else [own, *parts])

    # ------------------------------------------------------------ tools

    def list_tools(self, asker: Asker, cursor: str | None = None) -> JSONObject:
        """Return one page of the tools, or the gateway tools."""
        return self._tool_page(asker, cursor, Tool.wire)

    def list_tools_encoded(self, asker: Asker, cursor: str | None = None) -> JSONObject:
        """As `list_tools`, with the tools already encoded."""
        return self._tool_page(asker, cursor, Tool.raw)

    def _tool_page(self, asker: Asker, cursor: str | None, wire: Callable[..., Any]) -> JSONObject:
        tools = self._visible(self.catalog.tools.values(), asker)
        if self._hides(tools):
            tools, cursor = list(gateway_tools().values()), None
        return self._page("tools", tools, asker, cursor, partial(wire, modern=asker.modern))

    def _hides(self, tools: Sequence[Tool]) -> bool:
        settings = self.settings
        if settings.disclosure != "auto":
            return settings.disclosure == "gateway"
        return (
            len(tools) > settings.max_tools
            or sum(tool.size for tool in tools) > settings.max_tokens * _BYTES_PER_TOKEN
        )

    def _unknown(self, kind: str, name: str, asker: Asker) -> MCPError:
        """Return the error for an unknown tool or prompt, with a similar name as suggestion."""
        known: dict[str, Any] = {"tool": self.catalog.tools, "prompt": self.catalog.prompts}
        visible: list[Any] = self._visible(known[kind].values(), asker)
        near = suggestion(name, (each.name for each in visible if each.name != name))
        return MCPError(types.INVALID_PARAMS, f"Unknown {kind}: {name}{near and '.'}{near}")

    async def call_tool(
        self,
        asker: Asker,
        name: str,
        arguments: JSONObject,
        channel: CallerChannel = CLOSED,
        limited: "LimitedCall | None" = None,
    ) -> JSONObject:
        """Run a tool; an error of the tool is a result.

        Args:
            asker: The caller.
            name: The name of the tool.
            arguments: Its input.
            channel: The channel to the caller.
            limited: The call, if its request enforces the time limit; otherwise the registry does.

        Raises:
            MCPError: If there is no such tool, or the client lacks a required capability.
        """
        tool = self.catalog.tools.get(name)
        if limited is None:
            limit = None if tool is None else self._limit(tool.spec, asker)
            context = self._context(asker, channel, limit)
        else:
            limited.state.context = context = self._context(asker, channel, limited.limit)
        if tool is None:
            if self.settings.disclosure != "tools":
                result = await run_gateway_tool(
                    name,
                    arguments,
                    asker.front,
                    context,
                    self._runner(asker),
                    asker.caller,
                )
                if result is not None:
                    return _settled(result, asker)
            raise self._unknown("tool", name, asker)
        try:
            asker.front.enforce_visible(tool.spec, asker.identity)
        except CallError as error:
            if error.code == ErrorCode.OPERATION_NOT_FOUND:
                raise self._unknown("tool", name, asker) from None
            return _settled(tool.failure(error, context.request_id, expose=False), asker)
        missing = [name for name in tool.requires if asker.capabilities.get(name) is None]
        if missing:
            raise MCPError(
                types.MISSING_REQUIRED_CLIENT_CAPABILITY,
                f"{name} needs a client with these capabilities: {', '.join(missing)}",
                {"requiredCapabilities": {name: {} for name in missing}},
            )
        value: Any = arguments
        if tool.takes_box:
            value = arguments.get(INPUT)
        return _settled(await self._run(tool, value, context, asker), asker)

    def limited_call(self, asker: Asker, state: RequestState, name: str) -> "LimitedCall | None":
        """Return a tool call whose time limit its request can enforce; None if the registry must do so."""
        tool = self.catalog.tools.get(name)
        limit = None if tool is None else self._limit(tool.spec, asker)
        if tool is None or limit is None:
            return None
        seconds = limit.remaining
        return LimitedCall(asker, state, tool, limit, seconds) if 0 < seconds < inf else None

    def _runner(self, asker: Asker) -> Run:
        async def run(operation_id: str, value: Any, context: OperationContext) -> JSONObject:
            spec = asker.front.find(operation_id, context.identity)
            tool = self.catalog.by_id.get(operation_id)
            if tool is None:
                tool = Tool(operation_id, spec, self.settings.schema_budget)
            limit = self._limit(spec, asker)
            if limit is not None:
                context = replace(
                    context,
                    request_id=context.request_id,
                    env=cast("Any", None),
                    deadline=limit.deadline,
                    limit=limit,
                )
            return await self._run(tool, value, context, asker)

        return run

    async def _run(
        self, tool: Tool, value: Any, context: OperationContext, asker: Asker
    ) -> JSONObject:
        """Run an operation and return the result of its tool."""
        spec = tool.spec
        try:
            if spec.type is OperationType.SUBSCRIPTION:
                envelope = await self._collect(spec, value, context)
                return tool.result(envelope, modern=asker.modern)
            envelope = await self.registry.execute(tool.id, value, context)
        except CallError as error:
            return tool.failure(error, context.request_id, expose=asker.front.expose_errors)
        result = tool.result(envelope, modern=asker.modern)
        if tool.is_imported:
            publish_addresses(result["content"], spec.namespace, self.catalog.addresses)
        return result

    async def _collect(
        self, spec: OperationSpec, value: Any, context: OperationContext
    ) -> ResponseEnvelope[JSONObject]:
        """Run a subscription as a tool: report each item as progress, and return the first items.

        Raises:
            CallError: The error of the subscription. At the time limit, the call returns the items so far instead.
        """
        settings = self.settings
        items: list[Any] = []
        room = settings.max_items_bytes
        complete = False
        meta = LocalResponseMeta(operation_id=spec.id, timestamp=now())
        try:
            async with aclosing(self.registry.subscribe(spec.id, value, context)) as envelopes:
                async for envelope in envelopes:
                    item = envelope.to_wire()["data"]
                    text = text_of(item)
                    room -= len(text)
                    if room < 0:
                        break
                    items.append(item)
                    total = meta.changes_count + envelope.meta.changes_count
                    meta = replace(add_changes(meta, envelope.meta.changes), changes_count=total)
                    await context.progress(len(items), None, text)
                    if len(items) == settings.max_items:
                        break
                else:
                    complete = True
        except CallError as error:
            if error.code != ErrorCode.TIMEOUT or now() < cast("float", context.deadline) - 1:
                raise
        return ResponseEnvelope({"items": items, "complete": complete}, meta)

    # ------------------------------------------------------------ resources

    def list_resources(self, asker: Asker, cursor: str | None = None) -> JSONObject:
        """Return one page of the resources."""
        visible = self._visible(self.catalog.resources.values(), asker)
        return self._page("resources", visible, asker, cursor, Resource.wire)

    def list_templates(self, asker: Asker, cursor: str | None = None) -> JSONObject:
        """Return one page of the resource templates."""
        visible = self._visible(self.catalog.templates, asker)
        return self._page("resourceTemplates", visible, asker, cursor, Resource.wire)

    def find_resource(self, asker: Asker, uri: str) -> tuple[Resource, JSONObject]:
        """Return the resource at `uri`, and the input that reads it.

        Raises:
            MCPError: If there is no such resource that the caller may read.
        """
        found = self.catalog.addresses.find(uri, lambda spec: self.sees(spec, asker))
        if found is not None:
            resource, variables = found
            return resource, arguments_from_text(resource.spec, variables)
        raise MCPError(
            types.INVALID_PARAMS if asker.modern else _RESOURCE_NOT_FOUND,
            "Resource not found",
            {"uri": uri},
        )

    async def read_resource(
        self, asker: Asker, uri: str, channel: CallerChannel = CLOSED
    ) -> JSONObject:
        """Read a resource.

        Raises:
            MCPError: If there is no such resource, or reading it fails.
        """
        resource, value = self.find_resource(asker, uri)
        envelope = await self._execute(resource.spec, value, asker, channel)
        result = resource_result(envelope, uri, resource, self.catalog.addresses)
        return _settled(result, asker, cacheable=True)

    # ------------------------------------------------------------ prompts

    def list_prompts(self, asker: Asker, cursor: str | None = None) -> JSONObject:
        """Return one page of the prompts."""
        visible = self._visible(self.catalog.prompts.values(), asker)
        return self._page("prompts", visible, asker, cursor, Prompt.wire)

    def find_prompt(self, asker: Asker, name: str) -> Prompt:
        """Return the prompt called `name`.

        Raises:
            MCPError: If there is no such prompt that the caller may use.
        """
        prompt = self.catalog.prompts.get(name)
        if prompt is None or not self.sees(prompt.spec, asker):
            raise self._unknown("prompt", name, asker)
        return prompt

    async def get_prompt(
        self, asker: Asker, name: str, arguments: JSONObject, channel: CallerChannel = CLOSED
    ) -> JSONObject:
        """Return a prompt with its arguments filled in.

        Raises:
            MCPError: If there is no such prompt, or its operation fails.
        """
        spec = self.find_prompt(asker, name).spec
        value = arguments_from_text(spec, arguments)
        envelope = await self._execute(spec, value, asker, channel)
        return _settled(prompt_result(envelope, spec), asker)

    def completer(self, spec: OperationSpec, asker: Asker) -> OperationSpec | None:
        """Return the operation that suggests values for an imported prompt or template, if the caller may use it."""
        found = self.registry.get_spec(f"{spec.namespace}.completions.complete")
        is_usable = is_imported(spec) and found is not None and is_imported(found)
        return found if is_usable and found is not None and self.sees(found, asker) else None

    async def complete(
        self,
        completer: OperationSpec,
        spec: OperationSpec,
        params: types.CompleteRequestParams,
        asker: Asker,
    ) -> JSONObject:
        """Return suggestions of the server of an imported prompt or template.

        Raises:
            MCPError: If the server does not respond with suggestions.
        """
        given = params.model_dump(
            by_alias=True, mode="json", exclude_none=True, include={"ref", "argument", "context"}
        )
        name, template = spec.meta.get("name"), spec.meta.get("uriTemplate")
        kind = given["ref"]["type"]
        given["ref"] = {"type": kind} | ({"name": name} if template is None else {"uri": template})
        envelope = await self._execute(completer, given, asker, CLOSED)
        return {"resultType": "complete", "completion": envelope.data}

    # ------------------------------------------------------------ shared

    async def _execute(
        self, spec: OperationSpec, value: Any, asker: Asker, channel: CallerChannel
    ) -> Any:
        """Run an operation, and raise its errors as errors of the protocol."""
        context = self._context(asker, channel, self._limit(spec, asker))
        try:
            return (await self.registry.execute(spec.id, value, context)).raise_for_error()
        except CallError as error:
            wire = public_error(
                error, context.request_id, expose=asker.front.expose_errors
            ).to_wire()
            code = (
                types.INVALID_PARAMS
                if error.code == ErrorCode.VALIDATION_ERROR
                else types.INTERNAL_ERROR
            )
            raise MCPError(code, wire["message"], wire) from error

    def _context(
        self, asker: Asker, channel: CallerChannel, limit: TimeLimit | None
    ) -> OperationContext:
        """Return the context of a call; the time limit of gateway tools and subscriptions cannot be extended."""
        deadline = asker.deadline if limit is None else limit.deadline
        if asker.meta:
            channel = replace(channel, meta=asker.meta)
        return OperationContext(
            request_id=asker.request_id,
            identity=asker.identity,
            metadata=asker.metadata,
            deadline=now() + asker.front.timeout * 1000 if deadline is None else deadline,
            channel=channel,
            lenient=self.settings.lenient_input,
            limit=limit,
            registry=self.registry,
        )

    def _limit(self, spec: OperationSpec, asker: Asker) -> TimeLimit | None:
        """Return the time limit of a call, which questions and progress extend; None for a subscription."""
        if spec.type is OperationType.SUBSCRIPTION:
            return None
        front = asker.front
        return TimeLimit(
            None
            if asker.deadline is not None
            else call_seconds(self.registry.get(spec.id), front.timeout),
            answer_seconds=front.limits.answer_seconds,
            max_seconds=front.max_timeout,
            deadline=asker.deadline,
        )

    def sees(self, spec: OperationSpec, asker: Asker) -> bool:
        """Return whether a caller may call an operation, and may therefore see it."""
        return may_call(spec, OperationContext(identity=asker.identity))

    def _visible(self, items: Iterable[ItemT], asker: Asker) -> list[ItemT]:
        context = OperationContext(identity=asker.identity)
        return [item for item in items if may_call(cast("Any", item).spec, context)]

    def _page(
        self,
        key: str,
        items: Sequence[ItemT],
        asker: Asker,
        cursor: str | None,
        wire: Callable[[ItemT], Any],
    ) -> JSONObject:
        """Return one page of `items`, and the cursor of the next page: its position and the item before it."""
        start = 0 if cursor is None else _start(cursor, items)
        end = start + self.settings.page_size
        page: JSONObject = {key: [wire(item) for item in items[start:end]]}
        if end < len(items):
            place = msgspec.json.encode([end, _key(items[end - 1])])
            page["nextCursor"] = urlsafe_b64encode(place).decode()
        return _settled(page, asker, cacheable=True)


class LimitedCall:
    """A call of a tool that runs in the task of its request, which enforces the time limit."""

    __slots__ = ("_asker", "_seconds", "_tool", "limit", "state")

    def __init__(
        self, asker: Asker, state: RequestState, tool: Tool, limit: TimeLimit, seconds: float
    ) -> None:
        self._asker = asker
        self._tool = tool
        self._seconds = seconds
        self.state = state
        self.limit = limit
        limit.is_kept = True

    def start(self) -> None:
        """Start the time limit; the call also ends when its client disconnects."""
        self.state.timeout.start(self._seconds, self.state.receive, self.limit)

    async def run(self, work: Awaitable[JSONObject]) -> JSONObject:
        """Return the result of the work; an error result if the time limit or other code cancelled it."""
        timeout = self.state.timeout
        try:
            return await work
        except asyncio.CancelledError:
            error = self.state.cancelled_elsewhere(self._tool.spec.id)
            if error is not None:
                return self._failure(error)
            if not timeout.timed_out or timeout.stop():
                raise
            return self.late_result()
        finally:
            timeout.pause()

    def late_result(self) -> JSONObject:
        """Return the result of a call that exceeded its time limit."""
        return self._failure(
            timed_out(self._tool.spec.id, self._seconds, deadline=self.limit.deadline)
        )

    def _failure(self, error: CallError) -> JSONObject:
        asker = self._asker
        result = self._tool.failure(error, asker.request_id, expose=asker.front.expose_errors)
        return _settled(result, asker)


def _start(cursor: str, items: Sequence[Any]) -> int:
    """Return the start of a page: after the last item of the previous page, which may have moved.

    Raises:
        MCPError: If the item was removed, or the cursor is not valid.
    """
    try:
        start, last = msgspec.json.decode(urlsafe_b64decode(cursor), type=tuple[int, str])
    except ValueError:
        raise MCPError(
            types.INVALID_PARAMS, "Invalid cursor: list again from the beginning"
        ) from None
    if 0 < start <= len(items) and _key(items[start - 1]) == last:
        return start
    for position, item in enumerate(items, 1):
        if _key(item) == last:
            return position
    raise MCPError(
        types.INVALID_PARAMS, "Invalid cursor: the list has changed; list again from the beginning"
    )


def _key(item: Any) -> str:
    """Return the key of an item of a list: its URI, or its operation."""
    return getattr(item, "uri", "") or item.spec.id


def _settled(result: JSONObject, asker: Asker, *, cacheable: bool = False) -> JSONObject:
    """Return a result in the form of the client's revision."""
    if asker.modern:
        result["resultType"] = "complete"
        if cacheable:
            # Every listing depends on the caller, so it must not be cached for others.
            result |= {"ttlMs": 0, "cacheScope": "private"}
    elif asker.protocol_version < _LATEST_BLOCK:
        # Older clients reject the whole result if it contains a block of an unknown type.
        known = partial(_known_block, version=asker.protocol_version)
        if "content" in result:
            result["content"] = [known(block) for block in result["content"]]
        for message in result.get("messages", ()):
            message["content"] = known(message["content"])
    return result


def _known_block(block: JSONObject, version: str) -> JSONObject:
    """Return a block; as text with its JSON if its type is newer than the client's revision."""
    is_newer = version < _BLOCKS_SINCE.get(block.get("type", ""), "")
    return text_block(text_of(block)) if is_newer else block
