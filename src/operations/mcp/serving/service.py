"""Implement the methods of the protocol for a registry: take parameters, return results in wire form.

Rule 1: this module does not depend on transports. The SDK's server and the lean path of `requests` both use it.
Rule 2: every result is for one caller. Operations that the caller may not call are neither listed nor found.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, cast

import mcp_types as types
import msgspec
from mcp import MCPError
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import object_of
from operations.base.text import suggestion
from operations.base.time_limit import TimeLimit
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.channel import CLOSED, CallerChannel
from operations.contract.context import OperationContext, may_call
from operations.contract.envelopes import LocalResponseMeta, ResponseEnvelope, add_changes
from operations.contract.events import now
from operations.contract.specs import (
    OperationSpec,
    OperationType,
    SourceInfo,
    is_describable,
    is_for_models,
)
from operations.front.config import MCPServerSettings
from operations.front.public_errors import public_error
from operations.front.request import RequestState
from operations.front.search import Batch, OperationCall, SchemaRequest
from operations.mcp.serving import relocation
from operations.mcp.serving.apps import bridge
from operations.mcp.serving.caller import ItemT, LimitedCall, MCPCaller
from operations.mcp.serving.catalog import (
    Catalog,
    Prompt,
    Resource,
    arguments_from_text,
    page_of,
    prompt_result,
    properties_of,
    resource_result,
)
from operations.mcp.serving.channels import Elicitations, can_answer
from operations.mcp.serving.sizes import BYTES_PER_TOKEN
from operations.mcp.serving.skills import TOOLS_KEY, Skills, uses
from operations.mcp.serving.tasks import Handover, Tasks, handover
from operations.mcp.serving.tools import (
    Tool,
    gateway_request,
    gateway_tools,
    model_text,
    text_block,
)
from operations.mcp.shared import codec
from operations.mcp.shared.codec import INPUT, is_imported
from operations.mcp.shared.extensions import SKILLS, TASKS, UI, declared
from operations.mcp.shared.interaction import client
from operations.registry.registry import OperationRegistry
from operations.tools.pages import NEXT

_SLICE_SECONDS = 0.01
"""Seconds that building schemas may block the event loop."""

_FRESH_MILLISECONDS = 60_000
"""Milliseconds for which a client may cache a list of ours. It is told about changes earlier, if it listens."""

_MAX_COMPLETIONS = 100
_RESOURCE_NOT_FOUND = -32002
"""The error code before 2026-07-28; since then it is `INVALID_PARAMS`."""


_SCRIPTS: Final = frozenset({"code.search", "code.run", NEXT})
"""The operations that `disclosure="code"` lists."""


class Service:
    """Serves MCP requests for one registry."""

    def __init__(self, registry: OperationRegistry, settings: MCPServerSettings) -> None:
        self.settings = settings
        self.registry = registry
        self._catalog = self._pictured()
        self.elicitations = Elicitations()
        """The calls that wait for answers of clients since 2026-07-28."""

        self.tasks = Tasks(registry, settings, self)
        """The runs, as tasks."""

        self._allowed = settings.extensions
        self.skills = Skills(registry, settings.skills, is_allowed=self._allows(SKILLS))
        """The skills of folders and of imported servers."""

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

    def _allows(self, extension: str) -> bool:
        return self._allowed is None or extension in self._allowed

    def extensions(self, identity: Identity | None) -> dict[str, JSONObject]:
        """Return the extensions of the protocol for clients since 2026-07-28, with their settings.

        What the servers of imported operations offer is listed by namespace, if the caller may call one of these
        operations.
        """
        offered: dict[str, JSONObject] = {TASKS: {}} if self.tasks.is_offered else {}
        if self.catalog.views and self._allows(UI):
            offered[UI] = {}
        if self.skills.is_offered:
            offered[SKILLS] = {"directoryRead": True}
        if self._allows(codec.SOURCES_KEY):
            sources = self.sources(identity).items()
            found = {namespace: info.offers for namespace, info in sources if info.offers}
            offered |= {codec.SOURCES_KEY: found} if found else {}
        return offered

    def sources(self, identity: Identity | None) -> dict[str, SourceInfo]:
        """Return the MCP servers by namespace that have operations which the caller may call."""
        context = OperationContext(identity=identity)
        return {
            namespace: self.catalog.sources[namespace]
            for namespace, specs in self.catalog.of_sources.items()
            if any(may_call(spec, context) for spec in specs)
        }

    # ------------------------------------------------------------ tools

    async def list_tools(self, caller: MCPCaller, cursor: str | None = None) -> JSONObject:
        """Return one page of the tools, or the gateway tools."""
        tools = caller.visible(self.catalog.tools.values())
        if UI not in declared(caller.capabilities):
            tools = [tool for tool in tools if tool.is_for_models]
        shows_all = len(tools) == len(self.catalog.tools)
        scripts = [tool for tool in tools if tool.id in _SCRIPTS]
        if self.settings.disclosure == "code" and scripts:
            tools, shows_all = scripts, False
        elif await self._hides(tools):
            tools, cursor = list(gateway_tools().values()), None
        wire = partial(Tool.wire, modern=caller.modern)
        page = await self._page("tools", tools, caller, cursor, wire, shows_all=shows_all)
        sources = self._sources(tools)
        return page | {"_meta": {codec.SOURCES_KEY: sources}} if sources and not cursor else page

    def _sources(self, tools: Sequence[Tool]) -> JSONObject:
        """Return the self-descriptions of the servers of imported tools, by namespace."""
        known = self.catalog.sources
        names = dict.fromkeys(tool.source for tool in tools if tool.source is not None)
        return {name: known[name].server for name in names if name in known and known[name].server}

    async def _hides(self, tools: Sequence[Tool]) -> bool:
        settings = self.settings
        if settings.disclosure != "auto":
            # A caller that may not run scripts finds operations with the gateway.
            return settings.disclosure in ("gateway", "code")
        if len(tools) > settings.max_tools:
            return True
        size = sum([tool.size async for tool in _usable(tools)])
        return size > settings.max_tokens * BYTES_PER_TOKEN

    def _unknown(self, kind: str, name: str, caller: MCPCaller) -> MCPError:
        """Return the error for an unknown tool or prompt, with a similar name as suggestion."""
        known: dict[str, Any] = {"tool": self.catalog.tools, "prompt": self.catalog.prompts}
        visible: list[Any] = caller.visible(known[kind].values())
        near = suggestion(name, (each.name for each in visible if each.name != name))
        return MCPError(types.INVALID_PARAMS, f"Unknown {kind}: {name}{near and '.'}{near}")

    async def call_tool(
        self,
        caller: MCPCaller,
        name: str,
        arguments: JSONObject,
        channel: CallerChannel = CLOSED,
        limited: LimitedCall | None = None,
    ) -> JSONObject:
        """Run a tool; an error of the tool is a result.

        Args:
            caller: The caller.
            name: The name of the tool.
            arguments: Its input.
            channel: The channel to the caller.
            limited: The call, if its request enforces the time limit; otherwise the registry does.

        Raises:
            MCPError: If there is no such tool, or the client lacks a required capability.
        """
        tool = self.catalog.tools.get(name) or self._tool_of_view(caller, name)
        if limited is None:
            limit = None if tool is None else caller.limit(tool.operation)
            context = self._context(caller, channel, limit)
        else:
            limited.state.context = context = self._context(caller, channel, limited.limit)
        if tool is None or not tool.is_usable:
            return await self._call_gateway_tool(caller, name, arguments, context)
        try:
            caller.front.enforce_visible(tool.spec, caller.identity)
        except CallError as error:
            if error.code != ErrorCode.ACCESS_DENIED:
                return self._unknown_tool(name, caller, context)
            return caller.settled(tool.failure(error, context.request_id, expose=False))
        missing = [each for each in tool.requires if caller.capabilities.get(each) is None]
        if missing:
            raise MCPError(
                types.MISSING_REQUIRED_CLIENT_CAPABILITY,
                f"{name} needs a client with these capabilities: {', '.join(missing)}",
                {"requiredCapabilities": {each: {} for each in missing}},
            )
        value = arguments.get(INPUT) if tool.takes_box else arguments
        return caller.settled(await self._run(tool, value, context, caller))

    def _tool_of_view(self, caller: MCPCaller, name: str) -> Tool | None:
        """Return the tool that a view calls by its name at the server, if only one server with views has it."""
        if name in gateway_tools():
            return None
        named = [tools[name] for tools in self.catalog.views.values() if name in tools]
        visible = caller.visible(named)
        return visible[0] if len(visible) == 1 else None

    async def _call_gateway_tool(
        self, caller: MCPCaller, name: str, arguments: JSONObject, context: OperationContext
    ) -> JSONObject:
        tool = None if self.settings.disclosure == "tools" else gateway_tools().get(name)
        if tool is None:
            return self._unknown_tool(name, caller, context)
        try:
            request, meta = gateway_request(tool, arguments, lenient=context.lenient)
            if isinstance(request, OperationCall):
                result = await self._call_operation(caller, request, context)
            else:
                self._enforce_for_models(request, context)
                data = await self._answer(request, context, caller)
                result = {"content": [text_block(model_text(data))], "structuredContent": data}
                if meta:
                    result["_meta"] = meta
        except CallError as error:
            expose = caller.front.expose_errors
            result = tool.failure(error, context.request_id, expose=expose)
        return caller.settled(result)

    async def _answer(self, request: Any, context: OperationContext, caller: MCPCaller) -> Any:
        """Answer a request to the gateway; calls of a batch have the addresses that clients use."""
        if not isinstance(request, Batch):
            return await caller.front.answer(request, context, caller.key)
        addresses = self.catalog.addresses
        calls: list[OperationCall] = []
        for call in request.calls:
            namespace = self._source_of(call)
            value, _ = relocation.at_server(call.input, namespace, addresses)
            calls.append(replace(call, input=value))
        data = await caller.front.answer(Batch(calls=calls), context, caller.key)
        for call, outcome in zip(calls, data["results"], strict=True):
            namespace = self._source_of(call)
            if namespace is not None and "envelope" in outcome:
                relocation.publish_envelope(outcome["envelope"], namespace, addresses)
        return data

    def _source_of(self, call: OperationCall) -> str | None:
        """Return the namespace of the server of an imported tool; None for other operations."""
        tool = self.catalog.by_id.get(call.operation)
        return None if tool is None else tool.source

    def _enforce_for_models(self, request: Any, context: OperationContext) -> None:
        """Raise an error if a model asks for the contract of a tool that only views call.

        Raises:
            CallError: `OPERATION_NOT_FOUND`.
        """
        if isinstance(request, SchemaRequest):
            spec = self.registry.get_spec(request.operation)
            if spec is not None and not is_for_models(spec):
                raise self.registry.not_found(request.operation, context)

    def _unknown_tool(self, name: str, caller: MCPCaller, context: OperationContext) -> JSONObject:
        """Return the result for a tool that a source may have which is not connected yet.

        Raises:
            MCPError: If there is no such source.
        """
        operation_id = name.replace("__", ".")
        if self.registry.is_absent(operation_id.partition(".")[0]):
            error = self.registry.not_found(operation_id, context)
            if error.code == ErrorCode.UNAVAILABLE:
                result = gateway_tools()["call"].failure(error, context.request_id, expose=False)
                return caller.settled(result)
        raise self._unknown("tool", name, caller) from None

    async def _call_operation(
        self, caller: MCPCaller, call: OperationCall, context: OperationContext
    ) -> JSONObject:
        """Run an operation by its id, and return the result of its tool."""
        spec = caller.front.find(call.operation, context.identity)
        tool = self._tool_of(spec)
        # Before the call runs: its result cannot be written without the schemas.
        tool.enforce_usable()
        limit = caller.limit(self.registry.get(spec.id))
        if limit is not None:
            context = context.changed(deadline=limit.deadline, limit=limit)
        return await self._run(tool, call.input, context, caller)

    def _tool_of(self, spec: OperationSpec) -> Tool:
        tool = self.catalog.by_id.get(spec.id)
        if tool is not None:
            return tool
        return Tool(
            spec.id,
            spec,
            self.settings.schema_budget,
            operation=self.registry.get(spec.id),
            policy=self.registry.output_of(spec.id),
        )

    def limited_call(self, caller: MCPCaller, state: RequestState, name: str) -> LimitedCall | None:
        """Return a tool call whose time limit its request can enforce; None if the registry must do so."""
        tool = self.catalog.tools.get(name)
        limit = None if tool is None else caller.limit(tool.operation)
        if tool is None or limit is None:
            return None
        seconds = limit.remaining
        return LimitedCall(caller, state, tool, limit, seconds) if 0 < seconds < inf else None

    def _run(
        self, tool: Tool, value: Any, context: OperationContext, caller: MCPCaller
    ) -> Coroutine[Any, Any, JSONObject]:
        """Run an operation and return the result of its tool."""
        is_relocated = tool.source in self.catalog.addresses.scopes
        run = self._run_relocated if is_relocated else self._run_at_server
        return run(tool, value, context, caller)

    async def _run_relocated(
        self, tool: Tool, value: Any, context: OperationContext, caller: MCPCaller
    ) -> JSONObject:
        """Do the same for a server whose addresses differ from those that clients use."""
        value, changes = relocation.at_server(value, tool.source, self.catalog.addresses)
        result = await self._run_at_server(tool, value, context, caller)
        relocation.note(result, changes)
        return result

    async def _run_at_server(
        self, tool: Tool, value: Any, context: OperationContext, caller: MCPCaller
    ) -> JSONObject:
        spec = tool.spec
        try:
            if spec.type is OperationType.SUBSCRIPTION:
                envelope = await self._collect(spec, value, context)
                return tool.result(envelope, modern=caller.modern)
            if self.tasks.applies(tool):
                outcome = await self.tasks.call(tool, value, context, caller)
                if isinstance(outcome, dict):
                    return outcome
                envelope = outcome
            elif self.tasks.takes(caller):
                place = Handover()
                handover.set(place)
                envelope = await self.registry.execute(tool.id, value, context)
                if place.run is not None:
                    return self.tasks.created(place.run, caller)
            else:
                envelope = await self.registry.execute(tool.id, value, context)
        except CallError as error:
            return self.failed(tool, error, context.request_id, caller)
        return self.succeeded(tool, envelope, caller)

    def succeeded(
        self, tool: Tool, envelope: ResponseEnvelope[Any], caller: MCPCaller
    ) -> JSONObject:
        """Return the result of a tool for an envelope of its operation."""
        result = tool.result(envelope, modern=caller.modern)
        relocation.publish(result, tool, self.catalog.addresses, modern=caller.modern)
        return result

    def failed(
        self, tool: Tool, error: CallError, request_id: str, caller: MCPCaller
    ) -> JSONObject:
        """Return the result of a tool for an error of its operation.

        Raises:
            MCPError: If the server of an imported operation has answered with an error of the protocol.
        """
        expose = caller.front.expose_errors
        wire = public_error(error, request_id, expose=expose).to_wire()
        of_protocol = error_of_server(tool.spec, wire)
        if of_protocol is not None:
            raise of_protocol from error
        return tool.failed(wire)

    def tool_of(self, operation_id: str) -> Tool:
        """Return the tool of an operation; that of the gateway if the operation is gone."""
        spec = self.registry.get_spec(operation_id)
        return gateway_tools()["call"] if spec is None else self._tool_of(spec)

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
        ends_at = monotonic() + context.remaining
        meta = LocalResponseMeta(operation_id=spec.id, timestamp=now())
        try:
            async with aclosing(self.registry.subscribe(spec.id, value, context)) as envelopes:
                async for envelope in envelopes:
                    item = envelope.to_wire()["data"]
                    text = model_text(item)
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
            if error.code != ErrorCode.TIMEOUT or monotonic() < ends_at - 0.001:
                raise
        return ResponseEnvelope({"items": items, "complete": complete}, meta)

    async def run_interactive(
        self,
        caller: MCPCaller,
        method: Callable[..., Awaitable[JSONObject]],
        channel: CallerChannel,
        name: str,
        params: Mapping[str, Any],
        *what: Any,
    ) -> JSONObject:
        """Run a method of the service for a client since 2026-07-28, or continue it after its questions."""
        caller_key = None if caller.identity is None else caller.identity.key
        run = partial(method, caller, *what)
        key = (caller_key, name, msgspec.json.encode(what, order="deterministic"))
        token = params.get("requestState")
        answers = cast("Mapping[str, Any]", params.get("inputResponses") or {})
        if token is not None:
            return await self.elicitations.resume(token, answers, channel, key)
        if not can_answer(caller.capabilities):
            return await run(channel)
        return await self.elicitations.begin(
            run, channel, caller.capabilities, answers, key, caller.key
        )

    # ------------------------------------------------------------ resources

    async def list_resources(self, caller: MCPCaller, cursor: str | None = None) -> JSONObject:
        """Return one page of the resources."""
        everything = self.catalog.resources.values()
        visible = caller.visible(everything)
        shows_all = len(visible) == len(everything)
        page = await self._page(
            "resources", visible, caller, cursor, Resource.wire, shows_all=shows_all
        )
        if cursor is None:
            page["resources"] = [*self.skills.listed(), *page["resources"]]
        return page

    async def list_templates(self, caller: MCPCaller, cursor: str | None = None) -> JSONObject:
        """Return one page of the resource templates."""
        visible = caller.visible(self.catalog.templates)
        shows_all = len(visible) == len(self.catalog.templates)
        return await self._page(
            "resourceTemplates", visible, caller, cursor, Resource.wire, shows_all=shows_all
        )

    def find_resource(self, caller: MCPCaller, uri: str) -> tuple[Resource, JSONObject]:
        """Return the resource at `uri`, and the input that reads it.

        Raises:
            MCPError: If there is no such resource that the caller may read.
        """
        found = self.catalog.addresses.find(uri, caller.sees)
        if found is not None:
            resource, variables = found
            return resource, arguments_from_text(resource.spec, variables)
        raise MCPError(
            types.INVALID_PARAMS if caller.modern else _RESOURCE_NOT_FOUND,
            "Resource not found",
            {"uri": uri},
        )

    async def read_resource(
        self, caller: MCPCaller, uri: str, channel: CallerChannel = CLOSED
    ) -> JSONObject:
        """Read a resource.

        Raises:
            MCPError: If there is no such resource, or reading it fails.
        """
        of_skill = self.skills.read(uri)
        if of_skill is not None:
            return caller.settled(self._skill_file(caller, *of_skill), freshness=(0, False))
        resource, value = self.find_resource(caller, uri)
        envelope = await self._execute(resource.spec, value, caller, channel)
        result = resource_result(envelope, uri, resource, self.catalog.addresses)
        tools = self.catalog.views.get(resource.source or "")
        if tools is not None:
            shown = {tool.name for tool in caller.visible(tools.values())}
            names = {at: tool.name for at, tool in tools.items() if tool.name in shown}
            bridge(result, str(resource.source), names)
        return caller.settled(result, freshness=(0, False))

    def _skill_file(
        self, caller: MCPCaller, content: JSONObject, operations: Sequence[str]
    ) -> JSONObject:
        """Return a file of a skill; with its `SKILL.md` the tools that the skill uses and the caller may call."""
        result: JSONObject = {"contents": [content]}
        if operations:
            used = [tool for tool in self.catalog.tools.values() if uses(operations, tool.id)]
            shown = [tool.exported for tool in caller.visible(used) if tool.is_usable]
            result["_meta"] = {TOOLS_KEY: shown}
        return result

    # ------------------------------------------------------------ prompts

    async def list_prompts(self, caller: MCPCaller, cursor: str | None = None) -> JSONObject:
        """Return one page of the prompts."""
        visible = caller.visible(self.catalog.prompts.values())
        shows_all = len(visible) == len(self.catalog.prompts)
        return await self._page(
            "prompts", visible, caller, cursor, Prompt.wire, shows_all=shows_all
        )

    def find_prompt(self, caller: MCPCaller, name: str) -> Prompt:
        """Return the prompt called `name`.

        Raises:
            MCPError: If there is no such prompt that the caller may use.
        """
        prompt = self.catalog.prompts.get(name)
        if prompt is None or not caller.sees(prompt.spec):
            raise self._unknown("prompt", name, caller)
        return prompt

    async def get_prompt(
        self, caller: MCPCaller, name: str, arguments: JSONObject, channel: CallerChannel = CLOSED
    ) -> JSONObject:
        """Return a prompt with its arguments filled in.

        Raises:
            MCPError: If there is no such prompt, or its operation fails.
        """
        spec = self.find_prompt(caller, name).spec
        value = arguments_from_text(spec, arguments)
        envelope = await self._execute(spec, value, caller, channel)
        result = prompt_result(envelope, spec)
        source = codec.server_of(spec)
        if source is not None:
            relocation.publish_prompt(result, source, self.catalog.addresses)
        return caller.settled(result)

    async def complete(self, caller: MCPCaller, params: types.CompleteRequestParams) -> JSONObject:
        """Return values for an argument: of the server of an imported prompt or template, or those in its schema.

        Raises:
            MCPError: If there is no such prompt or template, or its server does not respond with suggestions.
        """
        spec = self._completed(caller, params.ref)
        completer = self.registry.get_spec(f"{codec.server_of(spec)}.completions.complete")
        if (
            completer is not None
            and is_imported(completer)
            and is_imported(spec)
            and caller.sees(completer)
        ):
            given = params.model_dump(
                by_alias=True, mode="json", exclude_none=True, include={"argument", "context"}
            )
            name, template = spec.meta.get("name"), spec.meta.get("uriTemplate")
            at_server = {"name": name} if template is None else {"uri": template}
            given["ref"] = {"type": params.ref.type, **at_server}
            completion = (await self._execute(completer, given, caller, CLOSED)).data
        else:
            schema = properties_of(spec).get(params.argument.name, {})
            typed = params.argument.value.lower()
            values = [str(value) for value in schema.get("enum", ())]
            matches = [value for value in values if value.lower().startswith(typed)]
            completion = {
                "values": matches[:_MAX_COMPLETIONS],
                "total": len(matches),
                "hasMore": len(matches) > _MAX_COMPLETIONS,
            }
        return {"resultType": "complete", "completion": completion}

    def _completed(
        self, caller: MCPCaller, ref: types.PromptReference | types.ResourceTemplateReference
    ) -> OperationSpec:
        """Return the operation of a prompt or template that the caller may see."""
        if isinstance(ref, types.PromptReference):
            return self.find_prompt(caller, ref.name).spec
        for template in self.catalog.templates:
            if template.public_uri == ref.uri and caller.sees(template.spec):
                return template.spec
        raise MCPError(types.INVALID_PARAMS, "Unknown resource template")

    # ------------------------------------------------------------ shared

    async def _execute(
        self, spec: OperationSpec, value: Any, caller: MCPCaller, channel: CallerChannel
    ) -> Any:
        """Run an operation, and raise its errors as errors of the protocol."""
        context = self._context(caller, channel, caller.limit(self.registry.get(spec.id)))
        try:
            return (await self.registry.execute(spec.id, value, context)).raise_for_error()
        except CallError as error:
            wire = public_error(
                error, context.request_id, expose=caller.front.expose_errors
            ).to_wire()
            of_protocol = error_of_server(spec, wire)
            if of_protocol is not None:
                raise of_protocol from error
            code = (
                types.INVALID_PARAMS
                if error.code == ErrorCode.VALIDATION_ERROR
                else types.INTERNAL_ERROR
            )
            raise MCPError(code, wire["message"], wire) from error

    def _context(
        self, caller: MCPCaller, channel: CallerChannel, limit: TimeLimit | None
    ) -> OperationContext:
        """Return the context of a call; the time limit of gateway tools and subscriptions cannot be extended."""
        deadline = caller.deadline if limit is None else limit.deadline
        extensions = declared(caller.capabilities)
        if extensions:
            client.set(replace(client.get(), extensions=extensions))
        if caller.meta or caller.identity is None:
            serves_anonymous = caller.front.serves_anonymous
            channel = replace(channel, meta=caller.meta, serves_anonymous=serves_anonymous)
        return OperationContext(
            request_id=caller.request_id,
            identity=caller.identity,
            metadata=caller.metadata,
            deadline=now() + caller.front.timeout * 1000 if deadline is None else deadline,
            channel=channel,
            lenient=self.settings.lenient_input,
            limit=limit,
            registry=self.registry,
        )

    async def _page(
        self,
        key: str,
        items: Sequence[ItemT],
        caller: MCPCaller,
        cursor: str | None,
        wire: Callable[[ItemT], Any],
        *,
        shows_all: bool,
    ) -> JSONObject:
        """Return one page of a list; `shows_all` if nothing is hidden from the caller."""
        shown, following = page_of(items, cursor, self.settings.page_size)
        page: JSONObject = {key: [wire(item) async for item in _usable(shown)]}
        if following is not None:
            page["nextCursor"] = following
        is_public = shows_all and caller.identity is None
        return caller.settled(page, freshness=self._freshness(key, items, is_public=is_public))

    def _freshness(self, key: str, items: Sequence[ItemT], *, is_public: bool) -> tuple[int, bool]:
        """Return for how many milliseconds a client may cache a list, and whether it may show it to other callers.

        The server of an imported entry may set a shorter time. A list that another source will extend is not cached.
        """
        if self.registry.awaits_sources():
            return 0, False
        ttl, sources = _FRESH_MILLISECONDS, self.catalog.sources
        for source in {item.source for item in items}:
            info = None if source is None else sources.get(source)
            stated = None if info is None else info.freshness.get(key)
            if stated is not None:
                ttl, is_public = min(ttl, stated[0]), is_public and stated[1]
        return ttl, is_public


_OF_CONNECTION: Final = frozenset({
    types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT, types.HEADER_MISMATCH, types.UNSUPPORTED_PROTOCOL_VERSION,
    types.PARSE_ERROR, types.INVALID_REQUEST, types.METHOD_NOT_FOUND,
})  # fmt: skip
"""Errors of our connection to a server, which say nothing about that of the client."""


def error_of_server(spec: OperationSpec, wire: JSONObject) -> MCPError | None:
    """Return the JSON-RPC error with which the server of an imported operation has answered; None for other errors.

    Clients act on some of them, such as URL_ELICITATION_REQUIRED (-32042), which no model can do for them.
    """
    details = object_of(wire.get("details"))
    code: Any = details.get("code")
    message: Any = details.get("message")
    if not is_imported(spec) or wire["code"] != ErrorCode.EXECUTION_ERROR:
        return None
    is_answer = type(code) is int and code not in _OF_CONNECTION and isinstance(message, str)
    return MCPError(code, message, details.get("data")) if is_answer else None


async def _usable(items: Iterable[ItemT]) -> AsyncGenerator[ItemT]:
    """Yield the items whose schemas can be built. Building many takes long, so other tasks run in between."""
    began = monotonic()
    for item in items:
        if monotonic() - began > _SLICE_SECONDS:
            await asyncio.sleep(0)
            began = monotonic()
        if is_describable(item.spec):
            yield item
