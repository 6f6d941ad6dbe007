"""An MCP server with tools, prompts and resources of every kind, in a separate process:
`upstream.py stdio`, or `upstream.py PORT`.

Its tools ask and report in the way of the client's era: by messages before 2026-07-28, and by results since.
"""

import sys
from typing import Any

import anyio
import mcp_types as types
import uvicorn
from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

FORM: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
MESSAGES = [types.SamplingMessage(role="user", content=types.TextContent(type="text", text="hi"))]
ICON = types.Icon(src="https://example.org/icon.png", mime_type="image/png", sizes=["48x48"])
HINTS = types.ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)
TOOLS = ("touch", "report", "ask_person", "ask_model", "ask_roots", "link")

bus = InMemorySubscriptionBus()
watching: list[Any] = []


def text(value: str) -> list[Any]:
    return [types.TextContent(type="text", text=value)]


async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
    tools = [
        types.Tool(
            name=name,
            title=name.title(),
            description=f"The tool {name}.",
            input_schema={"type": "object", "properties": {"uri": {"type": "string"}}},
            annotations=HINTS,
            icons=[ICON],
            _meta={"example.org/kind": name, "alkdev.operations/spec": {"namespace": "forged"}},
        )
        for name in TOOLS
    ]
    return types.ListToolsResult(tools=tools)


async def call_tool(context: Any, params: types.CallToolRequestParams) -> Any:
    name, session = params.name, context.session
    if name == "report":
        for step in range(1, 4):
            await session.report_progress(step, 3, f"step {step}")
        for level in ("debug", "warning"):
            await session.send_log_message(level, f"a {level}", "shelf", context.request_id)
        return types.CallToolResult(
            content=text("reported"),
            _meta={
                "example.org/mark": 7,
                "alkdev.operations/data": "null",
                "example.org/received": sorted(dict(context.meta or {})),
            },
        )
    if name == "touch":
        uri = (params.arguments or {})["uri"]
        await bus.publish(ResourceUpdated(uri=uri))
        for watcher in tuple(watching):
            await watcher.send_resource_updated(uri)
        return types.CallToolResult(content=text("touched"))
    if name == "link":
        links = ("note://today", "note://unlisted")
        blocks = [types.ResourceLink(type="resource_link", uri=uri, name="n") for uri in links]
        return types.CallToolResult(content=[*blocks])
    return await ask(context, params)


async def ask(context: Any, params: types.CallToolRequestParams) -> Any:
    name, session = params.name, context.session
    answer: Any
    if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
        if params.input_responses is not None:
            given = params.input_responses["q"]
            return types.CallToolResult(content=text(given.model_dump_json(exclude_none=True)))
        question: Any
        if name == "ask_person":
            form = types.ElicitRequestFormParams(message="Your name?", requested_schema=FORM)
            question = types.ElicitRequest(params=form)
        elif name == "ask_model":
            request = types.CreateMessageRequestParams(messages=MESSAGES, max_tokens=5)
            question = types.CreateMessageRequest(params=request)
        else:
            question = types.ListRootsRequest()
        return types.InputRequiredResult(input_requests={"q": question}, request_state="s")
    if name == "ask_person":
        answer = await session.elicit_form("Your name?", FORM, context.request_id)
    elif name == "ask_model":
        answer = await session.create_message(
            MESSAGES, max_tokens=5, related_request_id=context.request_id
        )
    else:
        answer = await session.list_roots()
    return types.CallToolResult(content=text(answer.model_dump_json(exclude_none=True)))


async def list_resources(context: Any, params: Any) -> types.ListResourcesResult:
    resources = [
        types.Resource(
            uri=f"note://{name}",
            name=name,
            title=name.title(),
            mime_type="text/plain",
            size=5,
            icons=[ICON],
            annotations=types.Annotations(audience=["user"], priority=0.5),
            _meta={"example.org/kind": name},
        )
        for name in ("today", "tomorrow")
    ]
    return types.ListResourcesResult(resources=resources)


async def list_templates(context: Any, params: Any) -> types.ListResourceTemplatesResult:
    template = types.ResourceTemplate(
        name="day", uri_template="note://days/{name}", title="Day", icons=[ICON]
    )
    return types.ListResourceTemplatesResult(resource_templates=[template])


async def read_resource(context: Any, params: Any) -> types.ReadResourceResult:
    content = types.TextResourceContents(
        uri=params.uri,
        mime_type="text/plain",
        text=f"read {params.uri}",
        _meta={"example.org/mark": 7},
    )
    return types.ReadResourceResult(contents=[content])


async def subscribe(context: Any, params: Any) -> types.EmptyResult:
    watching.append(context.session)
    return types.EmptyResult()


async def unsubscribe(context: Any, params: Any) -> types.EmptyResult:
    watching.clear()
    return types.EmptyResult()


async def list_prompts(context: Any, params: Any) -> types.ListPromptsResult:
    argument = types.PromptArgument(name="topic", title="Topic", description="What about.")
    prompts = [
        types.Prompt(name="plain", title="Plain", icons=[ICON], _meta={"example.org/kind": "p"}),
        types.Prompt(name="about", title="About", description="Ask.", arguments=[argument]),
    ]
    return types.ListPromptsResult(prompts=prompts)


async def get_prompt(context: Any, params: Any) -> types.GetPromptResult:
    text = f"{params.name} {(params.arguments or {}).get('topic')}"
    message = types.PromptMessage(
        role="assistant", content=types.TextContent(type="text", text=text)
    )
    return types.GetPromptResult(description="A description.", messages=[message])


async def complete(context: Any, params: types.CompleteRequestParams) -> types.CompleteResult:
    values = [f"{params.argument.value}{ending}" for ending in ("a", "b")]
    return types.CompleteResult(completion=types.Completion(values=values, total=2, has_more=False))


def build() -> Server[Any]:
    return Server(
        "upstream",
        version="1.0.0",
        instructions="Touch a note before you read it.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_subscribe_resource=subscribe,
        on_unsubscribe_resource=unsubscribe,
        on_subscriptions_listen=ListenHandler(bus),
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
        on_completion=complete,
    )


async def serve_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        anyio.run(serve_stdio, build())
    else:
        uvicorn.run(build().streamable_http_app(), port=int(sys.argv[1]), log_level="error")
