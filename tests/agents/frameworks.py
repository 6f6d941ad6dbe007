"""Run a scripted model of each agent framework with a toolbox. `scripts/matrix` installs the frameworks.

python -m tests.agents.frameworks langchain pydantic-ai openai-agents openai anthropic gemini
"""

import asyncio
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from typing import Any, TypeAlias

from tests.agents.service import AGENT, CALLS, FAILURES, RAN, shop

from operations import OperationRegistry
from operations.agents import Toolbox

Call: TypeAlias = tuple[str, dict[str, Any], str]
"""The tool, its arguments, and a part of the text that the model must read."""

PICTURE = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def toolbox() -> Toolbox:
    return Toolbox(shop(), identity=AGENT, allow=["shop.*"], max_bytes=2_000)


async def langchain(box: Toolbox) -> dict[str, tuple[str, bool]]:
    """Bind the tools to a scripted chat model, run its tool calls, and return each `ToolMessage`."""
    messages = import_module("langchain_core.messages")
    tools = {each.name: each for each in box.langchain()}
    function_calling = import_module("langchain_core.utils.function_calling")
    for tool in tools.values():
        listed = function_calling.convert_to_openai_tool(tool)["function"]
        assert listed["name"] == tool.name
        assert listed["parameters"]["type"] == "object"
    texts: dict[str, tuple[str, bool]] = {}
    for kind, (name, arguments, _) in CALLS.items():
        model_says = messages.AIMessage(
            content="", tool_calls=[{"name": name, "args": arguments, "id": kind}]
        )
        (call,) = model_says.tool_calls
        if name in tools:
            message = await tools[name].ainvoke(call)
        else:  # An agent loop answers calls of unknown tools itself.
            message = messages.convert_to_messages([await box.run(call)])[0]
        assert message.tool_call_id == kind
        texts[kind] = message.content, message.status == "error"
    return texts


def _listed(tools: list[Any]) -> dict[str, Call]:
    """Return the calls of tools that the framework knows."""
    known = {each.name for each in tools}
    return {kind: call for kind, call in CALLS.items() if call[0] in known}


async def pydantic_ai(box: Toolbox) -> dict[str, tuple[str, bool]]:
    """Let a `FunctionModel` call every tool, one per step, and return the results that it read."""
    script = _listed(box.pydantic_ai())
    returned = await _run_pydantic_ai(box, script)
    texts = {kind: (text, '"error":' in text) for kind, text in returned.items()}
    return texts | await _run_directly(box, [kind for kind in CALLS if kind not in script])


async def _run_pydantic_ai(box: Toolbox, script: dict[str, Call]) -> dict[str, Any]:
    framework = import_module("pydantic_ai")
    parts = import_module("pydantic_ai.messages")
    models = import_module("pydantic_ai.models.function")
    remaining = list(script.items())

    def respond(_messages: Any, _info: Any) -> Any:
        if not remaining:
            return parts.ModelResponse(parts=[parts.TextPart("done")])
        kind, (name, arguments, _) = remaining.pop(0)
        return parts.ModelResponse(
            parts=[parts.ToolCallPart(tool_name=name, args=arguments, tool_call_id=kind)]
        )

    agent = framework.Agent(models.FunctionModel(respond), tools=box.pydantic_ai())
    result = await agent.run("Go.")
    return {
        part.tool_call_id: part.content
        for message in result.all_messages()
        for part in message.parts
        if isinstance(part, parts.ToolReturnPart)
    }


async def openai_agents(box: Toolbox) -> dict[str, tuple[str, bool]]:
    """Let a scripted `Model` of the OpenAI Agents SDK call every tool, one per turn."""
    script = _listed(box.openai_agents())
    returned = await _run_openai_agents(box, script)
    texts = {kind: (text, '"error":' in text) for kind, text in returned.items()}
    return texts | await _run_directly(box, [kind for kind in CALLS if kind not in script])


async def _run_openai_agents(box: Toolbox, script: dict[str, Call]) -> dict[str, Any]:
    agents = import_module("agents")
    responses = import_module("openai.types.responses")
    remaining = list(script.items())

    class Scripted(agents.Model):  # type: ignore[misc, name-defined]
        async def get_response(self, *_given: Any, **_more: Any) -> Any:
            if remaining:
                kind, (name, arguments, _) = remaining.pop(0)
                item: Any = responses.ResponseFunctionToolCall(
                    type="function_call", call_id=kind, name=name, arguments=json.dumps(arguments)
                )
            else:
                text = responses.ResponseOutputText(type="output_text", text="done", annotations=[])
                item = responses.ResponseOutputMessage(
                    id="m1", type="message", role="assistant", status="completed", content=[text]
                )
            return agents.ModelResponse(output=[item], usage=agents.Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            raise NotImplementedError

    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="scripted", model=Scripted(), tools=box.openai_agents())
    result = await agents.Runner.run(agent, "Go.", max_turns=20)
    return {
        item.raw_item["call_id"]: item.raw_item["output"]
        for item in result.new_items
        if item.type == "tool_call_output_item"
    }


async def _run_directly(box: Toolbox, kinds: list[str]) -> dict[str, tuple[str, bool]]:
    """Run calls of unknown tools, which the framework itself rejects."""
    texts: dict[str, tuple[str, bool]] = {}
    for kind in kinds:
        name, arguments, _ = CALLS[kind]
        call = {"type": "tool_use", "id": kind, "name": name, "input": arguments}
        message = await box.run(call)
        texts[kind] = message["content"], message["is_error"]
    return texts


async def openai(box: Toolbox) -> dict[str, tuple[str, bool]]:
    """Read the tools and calls with the types of OpenAI's package."""
    types = import_module("openai.types.chat")
    adapter = import_module("pydantic").TypeAdapter
    for tool in box.openai():
        adapter(types.ChatCompletionToolParam).validate_python(tool)
    texts: dict[str, tuple[str, bool]] = {}
    for kind, (name, arguments, _) in CALLS.items():
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = types.ChatCompletionMessageFunctionToolCall.model_validate(
            {"id": kind, "type": "function", "function": function}
        )
        message = await box.run(call)
        adapter(types.ChatCompletionToolMessageParam).validate_python(message)
        assert message["tool_call_id"] == kind
        texts[kind] = message["content"], '"error":' in message["content"]
    return texts


async def anthropic(box: Toolbox) -> dict[str, tuple[str, bool]]:
    """Read the tools and calls with the types of Anthropic's package."""
    types = import_module("anthropic.types")
    adapter = import_module("pydantic").TypeAdapter
    for tool in box.anthropic():
        adapter(types.ToolParam).validate_python(tool)
    texts: dict[str, tuple[str, bool]] = {}
    for kind, (name, arguments, _) in CALLS.items():
        call = types.ToolUseBlock.model_validate(
            {"type": "tool_use", "id": kind, "name": name, "input": arguments}
        )
        message = await box.run(call)
        adapter(types.ToolResultBlockParam).validate_python(message)
        texts[kind] = message["content"], message["is_error"]
    return texts


async def gemini(box: Toolbox) -> dict[str, tuple[str, bool]]:
    """Read the declarations and calls with the types of Google's package."""
    types = import_module("google.genai.types")
    types.Tool.model_validate({"function_declarations": box.gemini()})
    texts: dict[str, tuple[str, bool]] = {}
    for kind, (name, arguments, _) in CALLS.items():
        call = types.FunctionCall(id=kind, name=name, args=arguments)
        part = types.Part.model_validate(await box.run(types.Part(function_call=call)))
        response = part.function_response.response
        text = json.dumps(response.get("result", response), separators=(",", ":"))
        texts[kind] = text, "error" in response
    return texts


FRAMEWORKS: dict[str, Callable[[Toolbox], Awaitable[dict[str, tuple[str, bool]]]]] = {
    "langchain": langchain,
    "pydantic-ai": pydantic_ai,
    "openai-agents": openai_agents,
    "openai": openai,
    "anthropic": anthropic,
    "gemini": gemini,
}
"""By name of the framework or provider: runs every call of `CALLS`, and returns the texts, and which are errors."""


async def check(name: str) -> None:
    """Run all calls through one framework, and compare texts and transcript with the expected ones."""
    box = toolbox()
    texts = await FRAMEWORKS[name](box)
    for kind, (_, _, expected) in CALLS.items():
        text, is_error = texts[kind]
        assert expected in text, (name, kind, text)
        assert is_error == (kind in FAILURES), (name, kind, text)
    ran = sorted(
        (step.operation_id, step.outcome, [each.operation_id for each in step.steps])
        for step in box.transcript
    )
    assert ran == sorted(RAN.values()), (name, ran)


async def check_images(name: str) -> None:
    """Let the model of a framework call a tool whose result is an image."""
    registry = OperationRegistry()

    @registry.operation("draw.cup", type="query")
    async def draw() -> bytes:
        return PICTURE

    run = {"pydantic-ai": _run_pydantic_ai, "openai-agents": _run_openai_agents}[name]
    (content,) = (await run(Toolbox(registry), {"image": ("draw__cup", {}, "")}))["image"]
    if name == "pydantic-ai":
        assert (content.data, content.media_type) == (PICTURE, "image/png")
    else:
        assert content["type"] == "input_image"
        assert content["image_url"] == f"data:image/png;base64,{b64encode(PICTURE).decode()}"


if __name__ == "__main__":
    for framework in sys.argv[1:]:
        asyncio.run(check(framework))
        if framework in ("pydantic-ai", "openai-agents"):
            asyncio.run(check_images(framework))
        print(f"{framework}: ok, {len(CALLS)} calls")
