"""The fixture of the official MCP conformance suite, as operations: `python -m tests.mcp_serving.conformance PORT`."""

import asyncio
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import uvicorn

from operations import (
    CallError,
    ErrorCode,
    ErrorDefinition,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    ResponseEnvelope,
    Schema,
    mcp_envelope,
)
from operations.base.types import JSONObject
from operations.contract.envelopes import (
    ImageContent,
    MCPContentBlock,
    MCPResourceContent,
    ResourceContent,
    TextContent,
)
from operations.contract.functions import Function
from operations.mcp import hand_over, list_roots, release_stream, to_mcp
from operations.runs import Runs

PNG = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
WAV = b64decode("UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=")
IMAGE = ImageContent(data=b64encode(PNG).decode(), mime_type="image/png")

registry = OperationRegistry(runs=Runs(f"sqlite:{Path(mkdtemp()) / 'runs.db'}"))


def tool(name: str, **meta: Any) -> Callable[[Function], Function]:
    return registry.operation(
        f"test.{name}",
        type="query",
        description=f"The tool {name} of the conformance suite.",
        meta={"mcp": {"name": name, **meta}},
    )


def resource(name: str, uri: str, mime_type: str) -> Callable[[Function], Function]:
    meta = {"mcp": {"name": name, "resource": {"uri": uri, "mimeType": mime_type}}}
    return registry.operation(f"test.{name}", type="query", meta=meta)


def prompt(name: str) -> Callable[[Function], Function]:
    meta = {"mcp": {"name": name, "prompt": True}}
    description = f"The prompt {name} of the conformance suite."
    return registry.operation(f"test.{name}", type="query", description=description, meta=meta)


def blocks(*content: MCPContentBlock) -> ResponseEnvelope[Any]:
    return mcp_envelope(None, is_error=False, content=list(content))


def question(**properties: Any) -> JSONObject:
    return {"type": "object", "properties": properties, "required": list(properties)}


# ---------------------------------------------------------------- tools


@tool("test_simple_text")
async def simple_text() -> str:
    return "This is a simple text response for testing."


@tool("test_image_content")
async def image_content() -> bytes:
    return PNG


@tool("test_audio_content")
async def audio_content() -> bytes:
    return WAV


@tool("test_embedded_resource")
async def embedded_resource() -> Any:
    text = "This is an embedded resource content."
    inside = MCPResourceContent(uri="test://embedded-resource", mime_type="text/plain", text=text)
    return blocks(ResourceContent(resource=inside))


@tool("test_multiple_content_types")
async def multiple_content_types() -> Any:
    inside = MCPResourceContent(
        uri="test://mixed-content-resource",
        mime_type="application/json",
        text='{"test":"data","value":123}',
    )
    return blocks(
        TextContent(text="Multiple content types test:"), IMAGE, ResourceContent(resource=inside)
    )


@tool("test_tool_with_logging")
async def tool_with_logging(context: OperationContext) -> str:
    for message in ("started", "processing data", "completed"):
        await context.log(
            "info", f"Tool {message}" if "data" in message else f"Tool execution {message}"
        )
        await asyncio.sleep(0.05)
    return "done"


@tool("test_logging_tool")
async def logging_tool(context: OperationContext) -> str:
    await context.log("info", "a message")
    return "done"


@tool("test_tool_with_progress")
async def tool_with_progress(context: OperationContext) -> str:
    for done in (0, 50, 100):
        await context.progress(done, 100, f"Completed step {done} of 100")
        await asyncio.sleep(0.05)
    return "done"


@registry.operation(
    "test.test_error_handling",
    description="Fails.",
    meta={"mcp": {"name": "test_error_handling"}},
    errors=[ErrorDefinition("INTENTIONAL")],
)
async def error_handling() -> str:
    raise CallError("INTENTIONAL", "This tool intentionally returns an error for testing")


@tool("test_sampling")
async def sampling(prompt: str, context: OperationContext) -> str:
    message = {"role": "user", "content": {"type": "text", "text": prompt}}
    answer = await context.sample({"messages": [message], "maxTokens": 100})
    return f"LLM response: {answer['content']['text']}"


@tool("test_elicitation")
async def elicitation(message: str, context: OperationContext) -> str:
    schema = question(
        username={"type": "string", "description": "User's response"},
        email={"type": "string", "description": "User's email address"},
    )
    answer = await context.elicit(message, schema)
    return f"User response: action={answer['action']}, content={answer.get('content')}"


@tool("test_elicitation_sep1034_defaults")
async def elicitation_defaults(context: OperationContext) -> str:
    schema: JSONObject = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "User name", "default": "John Doe"},
            "age": {"type": "integer", "description": "User age", "default": 30},
            "score": {"type": "number", "description": "User score", "default": 95.5},
            "status": {
                "type": "string",
                "enum": ["active", "inactive", "pending"],
                "default": "active",
            },
            "verified": {"type": "boolean", "description": "Verification status", "default": True},
        },
        "required": [],
    }
    answer = await context.elicit("Please review and update the form fields with defaults", schema)
    return f"Elicitation completed: action={answer['action']}, content={answer.get('content')}"


@tool("test_elicitation_sep1330_enums")
async def elicitation_enums(context: OperationContext) -> str:
    plain = ["option1", "option2", "option3"]
    titled = [
        {"const": f"value{n}", "title": f"{word} Option"}
        for n, word in ((1, "First"), (2, "Second"), (3, "Third"))
    ]
    schema: JSONObject = {
        "type": "object",
        "properties": {
            "untitledSingle": {"type": "string", "enum": plain},
            "titledSingle": {"type": "string", "oneOf": titled},
            "legacyEnum": {
                "type": "string",
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            "untitledMulti": {"type": "array", "items": {"type": "string", "enum": plain}},
            "titledMulti": {"type": "array", "items": {"anyOf": titled}},
        },
        "required": [],
    }
    answer = await context.elicit("Please select options from the enum fields", schema)
    return f"Elicitation completed: action={answer['action']}, content={answer.get('content')}"


@tool("test_reconnection")
async def reconnection() -> str:
    await release_stream()
    await asyncio.sleep(0.1)
    return "Reconnection test completed"


def _json_schema_tool() -> Operation:
    schema: JSONObject = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    }
    spec = OperationSpec(
        namespace="test",
        name="json_schema_2020_12_tool",
        type=OperationType.QUERY,
        description="Tool with JSON Schema 2020-12 features",
        input_schema=Schema(schema),
        meta={"mcp": {"name": "json_schema_2020_12_tool"}},
    )

    async def echo(value: Any, _context: OperationContext) -> str:
        return f"JSON Schema 2020-12 tool called with: {value}"

    return Operation(spec, echo)


registry.register(_json_schema_tool())


# ---------------------------------------------------------------- since 2026-07-28


@tool("test_missing_capability", requires=["sampling"])
async def missing_capability() -> str:
    return "done"


@tool("test_streaming_elicitation")
async def streaming_elicitation(context: OperationContext) -> str:
    await context.progress(1, 2, "asking")
    await context.elicit("Go on?", question(ok={"type": "boolean"}))
    return "done"


def _custom_header_tool() -> Operation:
    spec = OperationSpec(
        namespace="test",
        name="x_mcp_header",
        type=OperationType.QUERY,
        description="Takes an argument that is mirrored in a header.",
        input_schema=Schema(
            {
                "type": "object",
                "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
            }
        ),
        meta={"mcp": {"name": "test_x_mcp_header"}},
    )

    async def echo(value: Any, _context: OperationContext) -> str:
        return f"region: {value.get('region')}"

    return Operation(spec, echo)


registry.register(_custom_header_tool())


@tool("test_trigger_tool_change")
async def trigger_tool_change() -> str:
    _toggle("test.test_appearing_tool", {"name": "test_appearing_tool"})
    return "done"


@tool("test_trigger_prompt_change")
async def trigger_prompt_change() -> str:
    _toggle("test.test_appearing_prompt", {"name": "test_appearing_prompt", "prompt": True})
    return "done"


def _toggle(operation_id: str, meta: JSONObject) -> None:
    if operation_id in registry:
        registry.unregister(operation_id)
    else:

        async def appear() -> str:
            return "here"

        registry.operation(operation_id, type="query", description="New.", meta={"mcp": meta})(
            appear
        )


NAME = question(name={"type": "string"})
OK = question(ok={"type": "boolean"})
GREETING: JSONObject = {
    "messages": [{"role": "user", "content": {"type": "text", "text": "Generate a greeting"}}],
    "maxTokens": 50,
}


@tool("test_input_required_result_elicitation")
async def input_elicitation(context: OperationContext) -> str:
    answer = await context.elicit("What is your name?", {"$id": "user_name", **NAME})
    return f"Hello, {answer['content']['name']}!"


@tool("test_input_required_result_sampling")
async def input_sampling(context: OperationContext) -> str:
    answer = await context.sample(GREETING)
    return str(answer["content"]["text"])


@tool("test_input_required_result_request_state")
async def input_request_state(context: OperationContext) -> str:
    await context.elicit("Please confirm", OK)
    return "state-ok"


@tool("test_input_required_result_tampered_state")
async def input_tampered_state(context: OperationContext) -> str:
    await context.elicit("Please confirm", OK)
    return "state-ok"


@tool("test_input_required_result_multiple_inputs")
async def input_multiple(context: OperationContext) -> str:
    name, greeting, roots = await asyncio.gather(
        context.elicit("What is your name?", NAME), context.sample(GREETING), list_roots()
    )
    return f"{greeting['content']['text']} {name['content']['name']} {roots}"


@tool("test_input_required_result_list_roots")
async def input_list_roots() -> str:
    return f"Roots: {[root['uri'] for root in await list_roots()]}"


@tool("test_input_required_result_multi_round")
async def input_multi_round(context: OperationContext) -> str:
    name = await context.elicit("Step 1: What is your name?", NAME)
    color = question(color={"type": "string"})
    answer = await context.elicit("Step 2: What is your favorite color?", color)
    return f"{name['content']['name']}: {answer['content']['color']}"


@tool("test_input_required_result_capabilities")
async def input_capabilities(context: OperationContext) -> str:
    if context.channel.elicit is not None:
        await context.elicit("What is your name?", NAME)
    if context.channel.sample is not None:
        await context.sample(GREETING)
    return "done"


@prompt("test_input_required_result_prompt")
async def input_prompt(context: OperationContext) -> str:
    schema = question(context={"type": "string"})
    answer = await context.elicit("What context should the prompt use?", schema)
    return f"Use this context: {answer['content']['context']}"


# ---------------------------------------------------------------- tasks


def job(name: str, durable: bool | Literal["required"] = True) -> Callable[[Function], Function]:
    meta = {"mcp": {"name": name}}
    description = f"The tool {name} of the conformance suite."
    return registry.operation(f"task.{name}", description=description, meta=meta, durable=durable)


@tool("greet")
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@job("slow_compute")
async def slow_compute(seconds: float, label: str = "") -> str:
    await asyncio.sleep(seconds)
    return f"{label} done"


@job("failing_job", "required")
async def failing_job() -> str:
    await asyncio.sleep(1)
    raise CallError("INTENTIONAL", "This job intentionally fails")


@job("confirm_delete")
async def confirm_delete(filename: str, context: OperationContext) -> str:
    answer = await context.elicit(f"Delete {filename}?", question(confirm={"type": "boolean"}))
    return f"{filename}: {answer['action']}"


@job("multi_input")
async def multi_input(context: OperationContext) -> str:
    answers = await asyncio.gather(
        context.elicit("What is your name?", NAME), context.elicit("And that of your friend?", NAME)
    )
    return ", ".join(answer["content"]["name"] for answer in answers)


@job("greet_later")
async def greet_later(name: str) -> str:
    await asyncio.sleep(0.5)
    return f"Hello, {name}!"


@tool("test_tool_with_task")
async def tool_with_task(context: OperationContext) -> str:
    answer = await context.elicit("What is your name?", {"$id": "user_name", **NAME})
    run = await registry.start("task.greet_later", answer["content"], context)
    return "" if hand_over(run) else str((await run.result()).data)


def _protocol_error_job() -> Operation:
    spec = OperationSpec(
        namespace="task",
        name="protocol_error_job",
        type=OperationType.MUTATION,
        description="Fails as a tool of another server whose response is an error of the protocol.",
        meta={"source": "mcp", "mcp": {"name": "protocol_error_job"}},
    )

    async def fail(_value: Any, _context: OperationContext) -> str:
        await asyncio.sleep(1)
        details = {"code": -32603, "message": "The server failed"}
        raise CallError(ErrorCode.EXECUTION_ERROR, "The server failed", details)

    return Operation(spec, fail, durable=True)


registry.register(_protocol_error_job())


# ---------------------------------------------------------------- resources


@resource("static_text", "test://static-text", "text/plain")
async def static_text() -> str:
    return "This is the content of the static text resource."


@resource("static_binary", "test://static-binary", "image/png")
async def static_binary() -> bytes:
    return PNG


@resource("template", "test://template/{id}/data", "application/json")
async def template(id: str) -> dict[str, Any]:
    return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}


@resource("watched", "test://watched-resource", "text/plain")
async def watched() -> str:
    return "Watched resource content"


# ---------------------------------------------------------------- prompts


@prompt("test_simple_prompt")
async def simple_prompt() -> str:
    return "This is a simple prompt for testing."


@prompt("test_prompt_with_arguments")
async def prompt_with_arguments(arg1: str, arg2: str) -> str:
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@prompt("test_prompt_with_embedded_resource")
async def prompt_with_embedded_resource(resourceUri: str) -> Any:  # noqa: N803 - the suite's name
    text = "Embedded resource content for testing."
    inside = MCPResourceContent(uri=resourceUri, mime_type="text/plain", text=text)
    return blocks(
        ResourceContent(resource=inside),
        TextContent(text="Please process the embedded resource above."),
    )


@prompt("test_prompt_with_image")
async def prompt_with_image() -> Any:
    return blocks(IMAGE, TextContent(text="Please analyze the image above."))


# ---------------------------------------------------------------- skills


def skills() -> Path:
    """Return a new folder with a skill that has a folder of its own."""
    folder = Path(mkdtemp()) / "pdf-processing"
    (folder / "references").mkdir(parents=True)
    front = "name: pdf-processing\ndescription: Extract, fill, and assemble PDF documents"
    (folder / "SKILL.md").write_text(f"---\n{front}\n---\n\nRead references/FORMS.md.\n")
    (folder / "references" / "FORMS.md").write_text("Fill each field.\n")
    return folder


def main() -> None:
    port = int(sys.argv[1])
    # Jobs of one second are tasks.
    settings: Any = {"task_after": 0.5, "skills": [str(skills())]}
    server = to_mcp(registry, name="operations-conformance", version="1", **settings)
    app = server.asgi_app(lean="--no-lean" not in sys.argv)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
