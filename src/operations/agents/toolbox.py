"""The tools of one agent: the operations that it may call, run for it, within bounds.

Rule 1: a tool runs as the agent's identity, and only if `allow` names it: the registry checks everything else.
Rule 2: the model always gets a result message: refusals, approvals and unknown tools are results that it can explain.
"""

import asyncio
import time
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any, Final

from operations._json import to_json
from operations._text import enforce_lists, suggestion, tool_name
from operations.access import Identity
from operations.agents.frameworks import langchain_tools, openai_agents_tools, pydantic_ai_tools
from operations.agents.providers import DIALECTS, Definition, Provider, definition, input_of
from operations.agents.tool_calls import Outcome, read_arguments, read_call
from operations.agents.transcript import Transcript
from operations.context import CallerChannel, OperationContext, new_request_id
from operations.errors import ErrorCode, map_error, operation_not_found
from operations.front.public_errors import public_error
from operations.front.search import Gateway, may_call
from operations.functions import operation, operations_of
from operations.registry import OperationRegistry
from operations.result_pages import NEXT, ResultPages, next_operation
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

MAX_TOOLS: Final = 100
"""Operations beyond which an agent gets tools for searching instead of one tool for each."""

MAX_BYTES: Final = 50_000
"""Bytes of one result; larger ones are returned in pages."""


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
        identity: The agent; None for one without identity.
        allow: Patterns of the operations that the agent may use, such as `github.get_*`.
        max_bytes: Bytes of one result. A larger one ends in a cursor, and the agent gets the tool `results__next`.
        max_tools: With more operations than this, the agent gets three tools instead: search, describe and call.
        timeout: Seconds that one tool call may take.
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
    ) -> None:
        enforce_lists(allow=allow)
        self.transcript = Transcript()
        self._registry = registry
        self._identity = identity
        self._allow = tuple(allow)
        self._max_bytes = max_bytes
        self._max_tools = max_tools
        self._timeout = timeout
        self._pages = ResultPages(registry)
        self._session = new_request_id()
        finder = _Finder(registry, Gateway(registry, shows=self._shows))
        self._own = OperationRegistry([*operations_of(finder), next_operation(self._pages)])
        self._names: dict[str, str] = {}
        self._revision = -1

    # ------------------------------------------------------------ tools by provider

    def openai(self) -> list[JSONObject]:
        """Return the tools for OpenAI's chat completions, and for the APIs that follow them."""
        return self._provider_tools("openai")

    def openai_responses(self) -> list[JSONObject]:
        """Return the tools for OpenAI's responses API."""
        return [{"type": "function", **each["function"], "strict": False} for each in self.openai()]

    def anthropic(self) -> list[JSONObject]:
        """Return the tools for Anthropic's messages."""
        return self._provider_tools("anthropic")

    def gemini(self) -> list[JSONObject]:
        """Return the function declarations for Gemini: `tools=[{"function_declarations": toolbox.gemini()}]`."""
        return self._provider_tools("gemini")

    def langchain(self) -> list[Any]:
        """Return the tools as LangChain's `StructuredTool`s.

        Raises:
            MissingExtraError: If the extra `langchain` is not installed.
        """
        return langchain_tools(self._definitions("anthropic"), self._run)

    def pydantic_ai(self) -> list[Any]:
        """Return the tools as `Tool`s of pydantic-ai.

        Raises:
            MissingExtraError: If the extra `pydantic-ai` is not installed.
        """
        return pydantic_ai_tools(self._definitions("anthropic"), self._run)

    def openai_agents(self) -> list[Any]:
        """Return the tools as `FunctionTool`s of the OpenAI Agents SDK.

        Raises:
            MissingExtraError: If the extra `openai-agents` is not installed.
        """
        return openai_agents_tools(self._definitions("openai"), self._run)

    def _provider_tools(self, provider: Provider) -> list[JSONObject]:
        wrap = DIALECTS[provider].wrap
        tools = self._definitions(provider)
        return [wrap(each.name, each.description, each.schema) for each in tools]

    def _definitions(self, provider: Provider) -> list[Definition]:
        dialect = DIALECTS[provider]
        return [definition(spec, dialect, _ignore) for spec in self._listed()]

    def _listed(self) -> list[OperationSpec]:
        """Return the operations that are tools of their own."""
        context = self._context("")
        own = {spec.id: spec for spec in self._own.specs()}
        allowed = [spec for spec in self._registry.specs() if self._shows(spec, context)]
        if len(allowed) > self._max_tools:
            return list(own.values())
        return [*(spec for spec in allowed if spec.id != NEXT), own[NEXT]]

    def _shows(self, spec: OperationSpec, context: OperationContext) -> bool:
        return (
            spec.type is not OperationType.SUBSCRIPTION
            and any(fnmatchcase(spec.id, pattern) for pattern in self._allow)
            and may_call(spec, context)
        )

    # ------------------------------------------------------------ running

    async def run(self, tool_call: Any) -> JSONObject:
        """Run a tool call, as a provider's object or dict, and return the provider's result message.

        Errors are results too, so that the model can react to them.

        Raises:
            TypeError: If `tool_call` is not a tool call of a known provider.
        """
        call = read_call(tool_call)
        return call.reply(await self._run(call.name, call.arguments))

    async def _run(self, name: str, arguments: Any) -> Outcome:
        """Run a tool by its name; `arguments` are an object or its JSON text."""
        request_id, start = new_request_id(), time.monotonic()
        step = self.transcript.begin(name, request_id, arguments)
        stop = self._registry.observe(self.transcript.observe)
        try:
            registry, spec = self._find(name)
            step.operation_id = spec.id
            given = input_of(spec, read_arguments(name, arguments))
            context = self._context(request_id)
            envelope = await registry.execute(spec.id, given, context)
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
            advice = _ADVICE.get(error.code)
            return Outcome(error={**wire, "advice": advice} if advice else wire)
        finally:
            stop()
            self.transcript.end(step, time.monotonic() - start)

    def _find(self, name: str) -> tuple[OperationRegistry, OperationSpec]:
        """Return the operation of a tool, and the registry that runs it.

        Raises:
            CallError: `OPERATION_NOT_FOUND`, with the name that was probably meant.
        """
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
            whole=True,  # The toolbox itself makes the pages.
            deadline=(time.time() + self._timeout) * 1000,
            channel=CallerChannel(session=self._session),
        )


def _ignore(_place: str, _what: str) -> None:
    """Drop a loss: the operation validates everything."""


class _Finder:
    """The tools of an agent that has too many operations for a tool each."""

    def __init__(self, registry: OperationRegistry, gateway: Gateway) -> None:
        self._registry = registry
        self._gateway = gateway

    @operation("tools.search", type="query")
    async def search(  # noqa: D417
        self, query: str, context: OperationContext, limit: int = 10
    ) -> list[JSONObject]:
        """Find operations by plain words, best first. Read the schema of one with `tools__describe` before a call.

        Args:
            query: A few words, such as `close an issue`.
            limit: How many at most.
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
            input: Its input, by the schema that `tools__describe` returns.
        """
        self._gateway.spec(operation, context)
        return (await self._gateway.call(operation, input, context)).data
