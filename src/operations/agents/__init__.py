"""Operations as tools for agents, with limits and a transcript of the calls.

`formats` has the form of each model provider.

Rule 1: a tool runs with the agent's identity, and only if `allow` matches it. The registry makes all other checks.
Rule 2: the model always receives a result message, also for denied calls, required approvals and unknown tools.
Rule 3: agent frameworks are extras: each is imported when its tools are requested.
"""

import asyncio
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from importlib import import_module
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from operations.agents.formats.contract import (
    Block,
    Image,
    Loss,
    Outcome,
    ToolCall,
    ToolDefinition,
    ToolFormat,
    ToolLimits,
)
from operations.agents.formats.kinds import format_of, read_call
from operations.agents.formats.schemas import (
    definition,
    input_of,
    provider_tools,
    read_arguments,
)
from operations.base.errors import (
    CallError,
    ErrorCode,
    MissingExtraError,
    map_error,
    operation_not_found,
)
from operations.base.json.values import JSONValueError, to_json
from operations.base.patterns import Patterns
from operations.base.text import enforce_lists, suggestion, tool_name
from operations.base.types import JSONObject
from operations.contract.access import Identity, access_denied
from operations.contract.channel import CallerChannel
from operations.contract.context import OperationContext, may_call, new_request_id
from operations.contract.envelopes import (
    ImageContent,
    MCPResponseMeta,
    ResponseEnvelope,
    TextContent,
    sniffed,
)
from operations.contract.events import CallEvent, CallFinished, CallStarted
from operations.contract.functions import operation, operations_of
from operations.contract.specs import OperationSpec, OperationType, describable, is_for_models
from operations.front.public_errors import public_error
from operations.front.search import Gateway
from operations.registry.registry import OperationRegistry
from operations.tools.pages import NEXT, ResultPages, next_operation

__all__ = [
    "Image",
    "Loss",
    "Outcome",
    "Step",
    "ToolCall",
    "ToolDefinition",
    "ToolFormat",
    "ToolLimits",
    "Toolbox",
    "Transcript",
    "format_of",
    "provider_tools",
]

# ------------------------------------------------------------ transcripts


class Step(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True):
    """One call."""

    operation_id: str
    request_id: str

    input: Any = None
    """The arguments of a tool call; the arguments of nested calls are not recorded."""

    outcome: str = "pending"
    """`pending`, `success`, or the code of the error."""

    duration: float | None = None
    """Duration in seconds; None while the call runs."""

    changes: dict[str, int] | None = None
    """How many values of the input and the result were changed, by kind."""

    steps: list["Step"] = []
    """The nested calls of this call."""


class Transcript:
    """The steps of an agent, oldest first. Iterate over it, print it, or write `to_json()` to a file.

    Args:
        limit: The largest number of stored tool calls; the oldest are removed first.
    """

    def __init__(self, limit: int = 1_000) -> None:
        self._steps: deque[Step] = deque(maxlen=limit)
        self._running: dict[str, Step] = {}

    def __iter__(self) -> Iterator[Step]:
        return iter(tuple(self._steps))

    def __len__(self) -> int:
        return len(self._steps)

    def __str__(self) -> str:
        return "\n".join(line for step in self for line in _lines(step, 0))

    def to_json(self) -> list[JSONObject]:
        """Return the steps as JSON."""
        return [msgspec.to_builtins(step) for step in self]

    def begin(self, operation_id: str, request_id: str, input: Any) -> Step:
        """Record a tool call."""
        try:
            shown = to_json(input)
        except JSONValueError as error:
            shown = f"not JSON: {error}"
        step = Step(operation_id=operation_id, request_id=request_id, input=shown)
        self._steps.append(step)
        self._running[request_id] = step
        return step

    def end(self, step: Step, duration: float) -> None:
        """Record the end of a tool call."""
        step.duration = duration
        self._forget(step)

    def observe(self, event: CallEvent) -> None:
        """Record the nested calls of running tool calls; ignore all other events."""
        if isinstance(event, CallStarted):
            parent = self._running.get(event.parent_request_id or "")
            if parent is not None and event.request_id not in self._running:
                step = Step(operation_id=event.operation_id, request_id=event.request_id)
                parent.steps.append(step)
                self._running[event.request_id] = step
        elif isinstance(event, CallFinished):
            found = self._running.get(event.request_id)
            if found is not None:
                found.outcome = event.code or "success"
                found.duration, found.changes = event.duration, event.changes

    def _forget(self, step: Step) -> None:
        self._running.pop(step.request_id, None)
        for each in step.steps:
            self._forget(each)


def _lines(step: Step, depth: int) -> Iterator[str]:
    took = "" if step.duration is None else f" {step.duration * 1000:.1f} ms"
    given = "" if step.input is None else f" {msgspec.json.encode(step.input).decode()}"
    yield f"{'  ' * depth}{step.operation_id}{given}: {step.outcome}{took}"
    for each in step.steps:
        yield from _lines(each, depth + 1)


# ------------------------------------------------------------ the toolbox

MAX_TOOLS: Final = 100
"""With more operations than this, an agent gets search tools instead of one tool per operation."""

_SCRIPTS: Final = ("code.search", "code.run")
"""The operations of code mode."""

MAX_BYTES: Final = 50_000
"""The largest result in bytes; larger results are returned in pages."""


_IMAGES: Final = frozenset({"image/gif", "image/jpeg", "image/png", "image/webp"})
"""The types of images that models accept."""

_MAX_IMAGE: Final = 5 * 1024 * 1024
"""The largest image in bytes of base64; larger ones are returned in pages, like other data."""

_ADVICE: Final[dict[str, str]] = {
    ErrorCode.APPROVAL_REQUIRED: (
        "A person has to approve this call. Say so, and repeat the call with the same arguments after the approval."
    ),
    ErrorCode.ACCESS_DENIED: "You are not permitted to do this. Do not repeat the call; say what was refused.",
    ErrorCode.VALIDATION_ERROR: "Correct the arguments and call again.",
}
"""Advice for the model, by error code."""


class Toolbox:
    """Operations as the tools of one agent, for every model provider.

    Args:
        registry: The operations.
        identity: The agent's identity; None for no identity.
        allow: Patterns of the operations that the agent may use, such as `github.get_*`.
        max_bytes: The largest result in bytes. A larger result is returned in pages, which the tool `results__next`
            reads.
        max_tools: With more operations than this, the agent gets three tools instead: search, describe and call.
        disclosure: `code`: the agent gets two tools, which find operations and run scripts that call them; the registry
            needs `operations.code.Code`. `auto`: by `max_tools`.
        timeout: The time limit of one tool call, in seconds.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        identity: Identity | None = None,
        allow: Collection[str] = ("*",),
        max_bytes: int = MAX_BYTES,
        max_tools: int = MAX_TOOLS,
        timeout: float = 60.0,
        disclosure: Literal["auto", "code"] = "auto",
    ) -> None:
        enforce_lists(allow=allow)
        if disclosure == "code" and "*" not in allow:
            message = "scripts are not limited by allow: leave it out, and give the agent a grant"
            raise ValueError(message)
        if disclosure not in ("auto", "code"):
            raise ValueError(f"disclosure must be auto or code, not {disclosure!r}")
        self.transcript = Transcript()
        self._registry = registry
        self._identity = identity
        self._allow = tuple(allow)
        self._allowed = Patterns(allow)
        self._max_bytes = max_bytes
        self._max_tools = max_tools
        self._timeout = timeout
        self._disclosure = disclosure
        self._pages = ResultPages(registry)
        self._session = new_request_id()
        finder = _Finder(Gateway(registry, shows=self._shows, describes=self._shows))
        # A grant need not cover the tools that find operations, because it must cover what they find and call.
        finding = [replace(each, needs_grant=False) for each in operations_of(finder)]
        self._own = OperationRegistry([*finding, next_operation(self._pages)])
        self._names: dict[str, str] = {}
        self._revision = -1

    # ------------------------------------------------------------ tools by provider

    def tools(self, form: str) -> list[JSONObject]:
        """Return the tools in a form: `openai`, `anthropic`, ..., or one that an installed package registers.

        Raises:
            ValueError: If there is no such form, or its package cannot be imported.
        """
        found = format_of(form)
        return [found.write(each) for each in self._definitions(found)]

    def openai(self) -> list[JSONObject]:
        """Return the tools for OpenAI's chat completions, and for the APIs that follow them."""
        return self.tools("openai")

    def openai_responses(self) -> list[JSONObject]:
        """Return the tools for OpenAI's responses API."""
        return self.tools("openai-responses")

    def anthropic(self) -> list[JSONObject]:
        """Return the tools for Anthropic's messages."""
        return self.tools("anthropic")

    def gemini(self) -> list[JSONObject]:
        """Return the function declarations for Gemini: `tools=[{"function_declarations": toolbox.gemini()}]`."""
        return self.tools("gemini")

    def langchain(self) -> list[Any]:
        """Return the tools as LangChain's `StructuredTool`s. An error becomes a `ToolMessage` with status `error`.

        Raises:
            MissingExtraError: If the extra `langchain` is not installed.
        """
        return self._framework_tools("langchain", "langchain_core.tools", _langchain_tool)

    def pydantic_ai(self) -> list[Any]:
        """Return the tools as `Tool`s of pydantic-ai. An error of an operation is the result of the tool.

        Raises:
            MissingExtraError: If the extra `pydantic-ai` is not installed.
        """
        return self._framework_tools("pydantic-ai", "pydantic_ai", _pydantic_ai_tool)

    def openai_agents(self) -> list[Any]:
        """Return the tools as `FunctionTool`s of the OpenAI Agents SDK. An error is the result of the tool.

        Raises:
            MissingExtraError: If the extra `openai-agents` is not installed.
        """
        return self._framework_tools("openai-agents", "agents", _openai_agents_tool, "openai")

    def _framework_tools(
        self,
        extra: str,
        module: str,
        build: "Callable[[Any, ToolDefinition, Run], Any]",
        form: str = "anthropic",
    ) -> list[Any]:
        try:
            framework = import_module(module)
        except ImportError as error:
            raise MissingExtraError(f"Toolbox.{extra.replace('-', '_')}()", extra=extra) from error
        # Not every model behind LangChain accepts images in the result of a tool; the others convert them.
        run = partial(self._run, takes_images=extra != "langchain")
        tools = self._definitions(format_of(form))
        return [build(framework, tool, partial(run, tool.name)) for tool in tools]

    def _definitions(self, form: ToolFormat) -> list[ToolDefinition]:
        return [definition(spec, form.limits, _ignore) for spec in self._listed()]

    def _listed(self) -> list[OperationSpec]:
        """Return the operations that have their own tool."""
        context = self._context("")
        own = {spec.id: spec for spec in self._own.specs()}
        shown = (spec for spec in self._registry.specs() if self._shows(spec, context))
        allowed = list(describable(shown))
        if self._disclosure == "code":
            scripts = [spec for spec in allowed if spec.id in _SCRIPTS]
            if len(scripts) < len(_SCRIPTS):
                raise ValueError(
                    "the registry has no code mode: registry.register_all(Code(registry))"
                )
            return [*scripts, own[NEXT]]
        if len(allowed) > self._max_tools:
            return list(own.values())
        return [*(spec for spec in allowed if spec.id != NEXT), own[NEXT]]

    def _shows(self, spec: OperationSpec, context: OperationContext) -> bool:
        return (
            spec.type is not OperationType.SUBSCRIPTION
            # A script calls whatever its caller may call.
            and (spec.id not in _SCRIPTS or "*" in self._allow)
            and (spec.id in self._allow if spec.authority else self._allowed.cover(spec.id))
            and may_call(spec, context)
            and is_for_models(spec)
        )

    # ------------------------------------------------------------ running

    async def run(self, tool_call: Any, form: str | None = None) -> JSONObject:
        """Run a tool call, as a provider's object or dict, and return the provider's result message.

        Errors are results too, so that the model can react to them.

        Args:
            tool_call: The call.
            form: Its form, as in `tools`; by default the form of ours that it has.

        Raises:
            TypeError: If `tool_call` is not a tool call in this form, or of a known provider.
            ValueError: If there is no such form, or its package cannot be imported.
        """
        written, call = read_call(tool_call, form)
        outcome = await self._run(call.name, call.arguments, takes_images=call.takes_images)
        return written.write_result(call, outcome)

    async def _run(self, name: str, arguments: Any, *, takes_images: bool = False) -> Outcome:
        """Run a tool by its name; `arguments` are an object or its JSON text."""
        request_id, start = new_request_id(), time.monotonic()
        step = self.transcript.begin(name, request_id, arguments)
        stop = self._registry.observe(self.transcript.observe)
        try:
            registry, spec = self._find(name)
            step.operation_id = spec.id
            read = read_arguments(name, arguments)
            if isinstance(arguments, (str, bytes)):
                step.input = read
            given = input_of(spec, read)
            context = self._context(request_id)
            envelope = _readable(await registry.execute(spec.id, given, context))
            blocks = _blocks(envelope, self._max_bytes) if takes_images else []
            if blocks:
                step.outcome = "success"
                return Outcome(blocks=blocks)
            source = given.get("operation") if registry is self._own else spec.id
            if source in self._registry:
                envelope = await self._pages.bound(envelope, context, source, self._max_bytes)
            step.outcome = "success"
            return Outcome(to_json(envelope.data))
        except asyncio.CancelledError:
            step.outcome = ErrorCode.ABORTED
            raise
        except Exception as raised:  # noqa: BLE001 - the model gets a result in any case
            error = map_error(raised)
            step.outcome = error.code
            wire = public_error(error, request_id).to_wire()
            wire["message"] = _shortened(wire["message"], self._max_bytes)
            advice = _ADVICE.get(error.code)
            return Outcome(error={**wire, "advice": advice} if advice else wire)
        finally:
            stop()
            self.transcript.end(step, time.monotonic() - start)

    def _find(self, name: str) -> tuple[OperationRegistry, OperationSpec]:
        """Return the operation of a tool, and the registry that runs it.

        Raises:
            CallError: `OPERATION_NOT_FOUND`, with a similar name as suggestion, or `ACCESS_DENIED` if the grant of the
                agent has ended.
        """
        grant = None if self._identity is None else self._identity.grant
        if grant is not None and grant.has_ended:
            raise access_denied(name)
        if self._revision != self._registry.revision:
            self._revision = self._registry.revision
            self._names = {tool_name(spec.id): spec.id for spec in self._registry.specs()}
        for spec in self._own.specs():
            if tool_name(spec.id) == name and (name not in self._names or spec in self._listed()):
                return self._own, spec
        found = self._registry.get_spec(self._names.get(name, ""))
        if found is None or not self._shows(found, self._context("")):
            near = suggestion(name, (tool_name(spec.id) for spec in self._listed()))
            raise operation_not_found(name, f"There is no tool {name!r}.{near}".removesuffix("."))
        return self._registry, found

    def _context(self, request_id: str) -> OperationContext:
        return OperationContext(
            request_id=request_id,
            identity=self._identity,
            lenient=True,
            whole=True,  # The toolbox itself splits results into pages.
            deadline=(time.time() + self._timeout) * 1000,
            channel=CallerChannel(session=self._session),
        )


def _ignore(_place: str, _what: str) -> None:
    """Ignore a loss: the operation validates its input with the full schema."""


def _shortened(message: str, max_bytes: int) -> str:
    """Return a message, or its beginning and its length if it is too long."""
    start = message.encode()[:max_bytes].decode(errors="ignore")
    return message if start == message else f"{start}... ({len(message)} characters)"


def _readable(envelope: ResponseEnvelope[Any]) -> ResponseEnvelope[Any]:
    """Return a result as the model reads it: the content of an MCP tool as text, if it consists only of text.

    Raises:
        CallError: If an MCP tool reports an error.
    """
    meta = envelope.meta
    if not isinstance(meta, MCPResponseMeta):
        return envelope
    texts = [block.text for block in meta.content if isinstance(block, TextContent)]
    is_text = texts and len(texts) == len(meta.content) and meta.structured_content is None
    if meta.is_error and is_text:
        raise CallError(ErrorCode.EXECUTION_ERROR, "\n".join(texts))
    envelope.raise_for_error()
    if is_text and envelope.data == msgspec.to_builtins(meta.content):
        return replace(envelope, data="\n".join(texts))
    return envelope


def _blocks(envelope: ResponseEnvelope[Any], max_bytes: int) -> list[Block]:
    """Return the texts and images of a result; nothing if it has no image, or if a part is too large."""
    data, meta = envelope.data, envelope.meta
    blocks: list[Block | None] = []
    if isinstance(data, bytes):
        blocks = [_image(b64encode(data).decode("ascii"))]
    elif isinstance(meta, MCPResponseMeta):
        is_content = data == msgspec.to_builtins(meta.content)
        if meta.structured_content is not None:
            blocks = [Outcome(data).text]
        elif not is_content:
            # Middleware has replaced the content.
            return []
        for block in meta.content:
            if isinstance(block, ImageContent):
                blocks.append(_image(block.data) if block.mime_type in _IMAGES else None)
            elif is_content and isinstance(block, TextContent):
                # Models do not accept empty texts.
                blocks += [block.text] if block.text else []
            elif is_content:
                blocks.append(msgspec.json.encode(block).decode())
    usable = [block for block in blocks if block is not None]
    texts = [block for block in usable if isinstance(block, str)]
    has_images = len(texts) < len(usable) == len(blocks)
    return usable if has_images and sum(map(len, texts)) <= max_bytes else []


def _image(data: str) -> Image | None:
    """Return base64 as an image; None if it is not an image that models accept, or too large."""
    with suppress(ValueError):
        media_type = sniffed(b64decode(data[:_MAX_IMAGE], validate=True))
        if media_type in _IMAGES and len(data) <= _MAX_IMAGE:
            return Image(media_type, data)
    return None


class _Finder:
    """The search tools of an agent that may call too many operations for one tool each."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @operation("tools.search", type="query")
    async def search(  # noqa: D417
        self, query: str, context: OperationContext, limit: int = 10
    ) -> list[JSONObject]:
        """Find operations by keywords, best match first.

        Read the schema of an operation with `tools__describe` before a call.

        Args:
            query: A few words, such as `close an issue`.
            limit: The largest number of results.
        """
        found = await self._gateway.search(query, context, limit=min(max(limit, 1), 50))
        return [{"operation": each.id, "description": each.description[:300]} for each in found]

    @operation("tools.describe", type="query")
    async def describe(self, operation: str, context: OperationContext) -> JSONObject:  # noqa: D417
        """Return the description and the input schema of an operation.

        Args:
            operation: The id, as `tools__search` returns it.
        """
        spec = self._gateway.spec(operation, context)
        return {"description": spec.description, "inputSchema": spec.input_schema.document}

    @operation("tools.call")
    async def call(self, operation: str, context: OperationContext, input: Any = None) -> Any:  # noqa: D417
        """Call an operation.

        Args:
            operation: The id, as `tools__search` returns it.
            input: The input, which must match the schema that `tools__describe` returns.
        """
        self._gateway.spec(operation, context)
        return await self._gateway.call(operation, input, context)


# ------------------------------------------------------------ agent frameworks

Run = Callable[[Any], Awaitable[Outcome]]
"""Runs a tool with arguments as an object or as JSON text."""


def wait_for(call: Coroutine[Any, Any, str], home: asyncio.AbstractEventLoop | None) -> str:
    """Run a call from code that is not asynchronous, and return its result.

    It runs on the event loop on which the tools were created, if that runs in another thread, because connections
    belong to it. Otherwise it runs on a loop of its own: in another thread if this one has a running loop, as in a
    notebook.
    """
    try:
        current = asyncio.get_running_loop()
    except RuntimeError:
        current = None
    if home is not None and home is not current and home.is_running():
        return asyncio.run_coroutine_threadsafe(call, home).result()
    if current is None:
        return asyncio.run(call)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, asyncio.run, call).result()


def _langchain_tool(core: Any, tool: ToolDefinition, run: Run) -> Any:
    async def invoke(**arguments: Any) -> str:
        outcome = await run(arguments)
        if outcome.error is not None:
            raise core.ToolException(outcome.text)
        return outcome.text

    try:
        home = asyncio.get_running_loop()
    except RuntimeError:
        home = None

    def invoke_now(**arguments: Any) -> str:
        return wait_for(invoke(**arguments), home)

    return core.StructuredTool(
        name=tool.name,
        description=tool.description,
        args_schema=tool.schema,
        func=invoke_now,
        coroutine=invoke,
        handle_tool_error=True,
    )


def _pydantic_ai_tool(pydantic_ai: Any, tool: ToolDefinition, run: Run) -> Any:
    def write(block: Block) -> Any:
        if isinstance(block, str):
            return block
        return pydantic_ai.BinaryContent(b64decode(block.data), media_type=block.media_type)

    async def invoke(**arguments: Any) -> Any:
        return (await run(arguments)).content(write)

    return pydantic_ai.Tool.from_schema(
        invoke, name=tool.name, description=tool.description, json_schema=tool.schema
    )


def _openai_agents_tool(agents: Any, tool: ToolDefinition, run: Run) -> Any:
    def write(block: Block) -> Any:
        if isinstance(block, str):
            return agents.ToolOutputText(text=block)
        return agents.ToolOutputImage(image_url=block.url)

    async def invoke(_context: Any, arguments: str) -> Any:
        return (await run(arguments)).content(write)

    return agents.FunctionTool(
        name=tool.name,
        description=tool.description,
        params_json_schema=tool.schema,
        on_invoke_tool=invoke,
        # The strict mode of OpenAI supports only a small part of JSON Schema.
        strict_json_schema=False,
    )
