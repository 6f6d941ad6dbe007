"""Operations as the tools of an agent, in the form of every provider."""

import asyncio
import json
import sys
from base64 import b64encode
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.agents.service import AGENT, CALLS, FAILURES, RAN, shop

from operations import MissingExtraError, OperationRegistry, mcp_envelope
from operations.agents import Toolbox
from operations.authority.grants import Grants, read_token
from operations.tools import ToolConfig, configure_tools


def openai_call(name: str, arguments: Any) -> Any:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "c1", "type": "function", "function": function}


def responses_call(name: str, arguments: Any) -> Any:
    text = json.dumps(arguments)
    return SimpleNamespace(type="function_call", call_id="c1", name=name, arguments=text)


def anthropic_call(name: str, arguments: Any) -> Any:
    return SimpleNamespace(type="tool_use", id="c1", name=name, input=arguments)


def langchain_call(name: str, arguments: Any) -> Any:
    return {"type": "tool_call", "id": "c1", "name": name, "args": arguments}


def gemini_call(name: str, arguments: Any) -> Any:
    return SimpleNamespace(function_call=SimpleNamespace(id="c1", name=name, args=arguments))


def gemini_text(message: Any) -> tuple[str, str]:
    found = message["function_response"]
    response = found["response"]
    return found["id"], json.dumps(response.get("result", response), separators=(",", ":"))


FORMS: dict[str, tuple[Callable[[str, Any], Any], Callable[[Any], tuple[str, str]]]] = {
    "openai": (openai_call, lambda m: (m["tool_call_id"], m["content"])),
    "responses": (responses_call, lambda m: (m["call_id"], m["output"])),
    "anthropic": (anthropic_call, lambda m: (m["tool_use_id"], m["content"])),
    "langchain": (langchain_call, lambda m: (m["tool_call_id"], m["content"])),
    "gemini": (gemini_call, gemini_text),
}


@pytest.fixture
def toolbox() -> Toolbox:
    return Toolbox(shop(), identity=AGENT, allow=["shop.*"], max_bytes=2_000)


@pytest.mark.requirement("R07")
@pytest.mark.parametrize("max_tools", [100, 0], ids=["listed", "searched"])
async def test_a_revoked_grant_has_no_tools(max_tools: int) -> None:
    grants = Grants("k" * 32)
    token = grants.create(AGENT, "bot", operations=["shop.*"])
    identity = await grants.resolve(token)
    toolbox = Toolbox(shop(), identity=identity, max_tools=max_tools)
    search = openai_call("tools__search", {"query": "item"})
    before = json.dumps([toolbox.openai(), await toolbox.run(search)])

    await grants.revoke(read_token(token)[1][0].id)
    after = toolbox.openai()
    denied = [await toolbox.run(call) for call in (search, openai_call("shop__item", {"id": 1}))]

    assert '"shop__item"' in before or "shop.item" in before
    assert "shop__item" not in json.dumps(after)
    assert all("ACCESS_DENIED" in message["content"] for message in denied)


@pytest.mark.requirement("R63")
async def test_search_tools_find_and_call_what_a_grant_covers() -> None:
    grants = Grants("k" * 32)
    token = grants.create(AGENT, "bot", operations=["shop.item"], calls={"*": 1})
    toolbox = Toolbox(shop(), identity=await grants.resolve(token), max_tools=0)

    async def run(tool: str, **arguments: Any) -> str:
        return str((await toolbox.run(openai_call(tool, arguments)))["content"])

    found = await run("tools__search", query="shop")
    called = await run("tools__call", operation="shop.item", input={"id": 1})
    again = await run("tools__call", operation="shop.item", input={"id": 1})
    others = [spec.id for spec in shop().specs() if spec.id != "shop.item"]

    assert "shop.item" in found
    assert not any(other in found for other in others)
    assert '"error"' not in called
    assert "RESOURCE_EXHAUSTED" in again
    for other in others:
        assert "OPERATION_NOT_FOUND" in await run("tools__describe", operation=other)
        assert "OPERATION_NOT_FOUND" in await run("tools__call", operation=other, input={})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [7, ["shop__item"], {"a": 1}], ids=repr)
async def test_a_name_that_is_not_a_text_names_no_tool(
    form: str, name: Any, toolbox: Toolbox
) -> None:
    write, read = FORMS[form]

    call_id, text = read(await toolbox.run(write(name, {"id": 1})))

    assert call_id == "c1"
    assert "OPERATION_NOT_FOUND" in text
    assert "There is no tool" in text


@pytest.mark.parametrize("form", FORMS)
async def test_calls_of_every_provider_return_its_result_message(
    form: str, toolbox: Toolbox
) -> None:
    write, read = FORMS[form]

    for kind, (name, arguments, expected) in CALLS.items():
        call_id, text = read(await toolbox.run(write(name, arguments)))
        assert call_id == "c1"
        assert expected in text, kind
        assert ('"error":' in text) == (kind in FAILURES)

    ran = [
        (step.operation_id, step.outcome, [each.operation_id for each in step.steps])
        for step in toolbox.transcript
    ]
    assert ran == list(RAN.values())
    assert toolbox.transcript.to_json()[1]["changes"] == {"input": 1}
    assert "  shop.item: success" in str(toolbox.transcript)


async def test_the_lists_of_all_providers_name_the_same_tools(toolbox: Toolbox) -> None:
    names = [
        [each["function"]["name"] for each in toolbox.openai()],
        [each["name"] for each in toolbox.openai_responses()],
        [each["name"] for each in toolbox.anthropic()],
        [each["name"] for each in toolbox.gemini()],
    ]

    assert len(set(map(tuple, names))) == 1
    assert "shop__refund" not in names[0]
    assert names[0][-1] == "results__next"


async def test_only_allowed_operations_are_tools() -> None:
    toolbox = Toolbox(shop(), identity=AGENT, allow=["shop.item"])

    refused = await toolbox.run(anthropic_call("shop__log", {}))

    assert [each["name"] for each in toolbox.anthropic()] == ["shop__item", "results__next"]
    assert refused["is_error"]
    with pytest.raises(ValueError, match="allow"):
        Toolbox(shop(), allow="shop.*")


async def test_a_large_result_is_read_page_by_page(toolbox: Toolbox) -> None:
    lines: list[str] = []
    message = await toolbox.run(anthropic_call("shop__log", {}))
    while True:
        assert len(message["content"]) <= 2_000
        page = json.loads(message["content"])
        lines += page["value"]
        if "cursor" not in page:
            break
        message = await toolbox.run(anthropic_call("results__next", {"cursor": page["cursor"]}))

    assert lines == [f"line {number}" for number in range(1000)]


@pytest.mark.parametrize("max_tools", [3, 100])
async def test_pages_of_the_registry_are_those_of_the_toolbox(max_tools: int) -> None:
    registry = shop()
    configure_tools(registry, {"shop.log": ToolConfig(max_bytes=1_500)})
    toolbox = Toolbox(registry, identity=AGENT, max_bytes=3_000, max_tools=max_tools)
    by_id = {"operation": "shop.log"}
    call = (
        anthropic_call("tools__call", by_id) if max_tools == 3 else anthropic_call("shop__log", {})
    )

    page = json.loads((await toolbox.run(call))["content"])
    following = await toolbox.run(anthropic_call("results__next", {"cursor": page["cursor"]}))

    assert json.loads(following["content"])["value"][0] == f"line {len(page['value'])}"
    assert len(following["content"]) > 1_500


async def test_many_operations_are_found_described_and_called() -> None:
    toolbox = Toolbox(shop(), identity=AGENT, allow=["shop.*"], max_tools=3, max_bytes=2_000)

    async def run(name: str, **arguments: Any) -> Any:
        return json.loads((await toolbox.run(anthropic_call(name, arguments)))["content"])

    names = {each["name"] for each in toolbox.anthropic()}
    assert names == {"tools__search", "tools__describe", "tools__call", "results__next"}
    assert (await run("tools__search", query="return an item"))[0]["operation"] == "shop.item"
    described = await run("tools__describe", operation="shop.item")
    assert described["inputSchema"]["required"] == ["id"]
    found = await run("tools__call", operation="shop.item", input={"id": 1})
    assert found == {"id": 1, "name": "cup"}
    page = await run("tools__call", operation="shop.log")
    assert (await run("results__next", cursor=page["cursor"]))["value"]
    for hidden in ("shop.refund", "nothing.here"):
        assert "error" in await run("tools__call", operation=hidden, input={"id": 1})
    wrong = await run("tools__call", operation="shop.item", input={"id": "seven"})
    assert (wrong["error"]["code"], wrong["error"]["details"]["errors"][0]["path"]) == (
        "VALIDATION_ERROR",
        "/id",
    )
    call = list(toolbox.transcript)[2]
    assert (call.operation_id, call.steps[0].operation_id) == ("tools.call", "shop.item")


async def test_arguments_given_as_text_are_recorded_as_an_object(toolbox: Toolbox) -> None:
    call = {"id": "c1", "function": {"name": "shop__item", "arguments": '{"id": 1}'}}
    await toolbox.run(call)
    await toolbox.run({"id": "c2", "function": {"name": "shop__item", "arguments": "{"}})
    assert [step.input for step in toolbox.transcript] == [{"id": 1}, "{"]


async def test_arguments_that_are_not_an_object_are_an_error(toolbox: Toolbox) -> None:
    for arguments in ("[1]", "{", "5"):
        call = {"id": "c1", "function": {"name": "shop__item", "arguments": arguments}}
        error = json.loads((await toolbox.run(call))["content"])["error"]
        assert error["code"] == "VALIDATION_ERROR"
        assert error["message"].count("not JSON") == (arguments == "{")
    with pytest.raises(TypeError, match=r"not a tool call .* call it with registry\.execute"):
        await toolbox.run({"nothing": 1})


async def test_changing_a_definition_changes_no_operation(toolbox: Toolbox) -> None:
    toolbox.anthropic()[0]["input_schema"]["properties"]["id"]["type"] = "string"

    assert not (await toolbox.run(anthropic_call("shop__item", {"id": 7})))["is_error"]


@pytest.mark.parametrize("provider", ["openai", "anthropic", "gemini"])
async def test_every_array_has_items_because_providers_reject_tools_without(provider: Any) -> None:
    registry = OperationRegistry()

    @registry.operation("shop.sort", type="query")
    async def sort(values: list, pair: tuple[int, str]) -> None:  # type: ignore[type-arg]
        """Sort values."""

    tool = getattr(Toolbox(registry), provider)()[0]
    tool = tool.get("function", tool)
    properties = tool.get("parameters", tool.get("input_schema"))["properties"]
    assert "items" in properties["values"]
    assert "items" in properties["pair"]


async def test_a_gemini_call_needs_no_arguments(toolbox: Toolbox) -> None:
    message = await toolbox.run({"function_call": {"name": "shop__log"}})

    assert "result" in message["function_response"]["response"]


async def test_an_operation_of_the_user_wins_over_a_tool_that_is_not_listed() -> None:
    registry = OperationRegistry()

    @registry.operation("tools.search", type="query")
    async def search(q: str) -> str:
        return f"mine {q}"

    toolbox = Toolbox(registry)
    message = await toolbox.run(anthropic_call("tools__search", {"q": "a"}))

    assert message["content"] == "mine a"
    assert "tools__search" in {each["name"] for each in toolbox.anthropic()}


async def test_the_transcript_shows_arguments_that_are_not_json(toolbox: Toolbox) -> None:
    for value in ("\ud83d", object()):
        assert (await toolbox.run(anthropic_call("shop__item", {"id": value})))["is_error"]

    assert str(toolbox.transcript).count("not JSON: ") == 2
    assert len(toolbox.transcript.to_json()) == 2


async def test_a_cancelled_call_is_recorded_as_aborted() -> None:
    registry, started = OperationRegistry(), asyncio.Event()

    @registry.operation("slow.wait")
    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    toolbox = Toolbox(registry, max_tools=0)
    call = anthropic_call("tools__call", {"operation": "slow.wait"})
    task = asyncio.create_task(toolbox.run(call))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    (step,) = toolbox.transcript
    assert (step.outcome, step.steps[0].outcome) == ("ABORTED", "ABORTED")


async def test_a_text_is_returned_unchanged() -> None:
    registry = OperationRegistry()

    @registry.operation("text.upper", type="query")
    async def upper(text: str) -> str:
        return text.upper()

    message = await Toolbox(registry).run(anthropic_call("text__upper", {"text": "a"}))

    assert message["content"] == "A"


def imported(*texts: str, is_error: bool = False) -> OperationRegistry:
    """Return a registry with an operation that returns what an MCP server sent."""
    registry, content = OperationRegistry(), [{"type": "text", "text": text} for text in texts]

    @registry.operation("files.read", type="query")
    async def read() -> Any:
        return mcp_envelope(content, is_error=is_error, content=content)

    return registry


@pytest.mark.parametrize("max_tools", [100, 0], ids=["listed", "searched"])
async def test_an_error_of_an_mcp_tool_is_an_error_of_the_tool_call(max_tools: int) -> None:
    toolbox = Toolbox(imported("no such file", is_error=True), max_tools=max_tools)
    name, arguments = ("tools__call", {"operation": "files.read"})
    if max_tools:
        name, arguments = "files__read", {}

    message = await toolbox.run(anthropic_call(name, arguments))

    assert message["is_error"]
    assert json.loads(message["content"]) == {
        "error": {"code": "EXECUTION_ERROR", "message": "no such file"}
    }
    assert [step.outcome for step in toolbox.transcript] == ["EXECUTION_ERROR"]


async def test_a_long_error_of_a_tool_is_shortened() -> None:
    registry = imported("é" * 3_000, "x" * 100_000, is_error=True)
    toolbox = Toolbox(registry, max_bytes=2_000)

    message = await toolbox.run(anthropic_call("files__read", {}))

    error = json.loads(message["content"])["error"]
    assert message["is_error"]
    assert error["message"] == "é" * 1_000 + "... (103001 characters)"


@pytest.mark.parametrize("max_tools", [100, 0], ids=["listed", "searched"])
async def test_the_text_of_an_mcp_tool_is_returned_as_text(max_tools: int) -> None:
    toolbox = Toolbox(imported('a = "x"\n', "b"), max_tools=max_tools)
    call = anthropic_call("files__read", {})
    if not max_tools:
        call = anthropic_call("tools__call", {"operation": "files.read"})

    assert (await toolbox.run(call))["content"] == 'a = "x"\n\nb'


PNG = b"\x89PNG\r\n\x1a\n...."
DATA = b64encode(PNG).decode()
IMAGES = {
    "anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": DATA},
    },
    "responses": {
        "type": "input_image",
        "image_url": f"data:image/png;base64,{DATA}",
        "detail": "auto",
    },
}
"""An image in the result messages of each provider that accepts images there."""


def drawing(*content: dict[str, Any]) -> OperationRegistry:
    """Return a registry with an image as bytes, and one beside text in the content of an MCP tool."""
    registry = OperationRegistry()

    @registry.operation("draw.bytes", type="query")
    async def as_bytes() -> bytes:
        return PNG

    @registry.operation("draw.mcp", type="query")
    async def as_blocks() -> Any:
        return mcp_envelope(list(content), is_error=False, content=content)

    return registry


IMAGE_BLOCK = {"type": "image", "data": DATA, "mimeType": "image/png"}
CAPTION = {"type": "text", "text": "a cup"}


@pytest.mark.parametrize("form", IMAGES)
@pytest.mark.parametrize("max_tools", [100, 0], ids=["listed", "searched"])
async def test_models_that_accept_images_receive_them(form: str, max_tools: int) -> None:
    toolbox = Toolbox(drawing(CAPTION, IMAGE_BLOCK), max_tools=max_tools)
    write, read = FORMS[form]

    async def run(operation: str) -> Any:
        call = write(operation.replace(".", "__"), {})
        if not max_tools:
            call = write("tools__call", {"operation": operation})
        return read(await toolbox.run(call))[1]

    assert await run("draw.bytes") == [IMAGES[form]]
    text, image = await run("draw.mcp")
    assert (text["text"], image) == ("a cup", IMAGES[form])
    assert {step.outcome for step in toolbox.transcript} == {"success"}


@pytest.mark.parametrize("form", sorted(FORMS.keys() - IMAGES.keys()))
async def test_models_that_accept_only_text_receive_base64(form: str) -> None:
    toolbox = Toolbox(drawing(CAPTION, IMAGE_BLOCK))
    write, read = FORMS[form]

    for name in ("draw__bytes", "draw__mcp"):
        assert DATA in read(await toolbox.run(write(name, {})))[1]


@pytest.mark.parametrize(
    "content",
    [
        [{**IMAGE_BLOCK, "mimeType": "image/tiff"}],
        [{**IMAGE_BLOCK, "data": "no base64"}],
        [{**IMAGE_BLOCK, "data": b64encode(b"no image").decode()}],
        [{**IMAGE_BLOCK, "data": "A" * (5 * 1024 * 1024 + 1)}],
        [IMAGE_BLOCK, {"type": "text", "text": "a" * 60_000}],
        [{"type": "audio", "data": DATA, "mimeType": "audio/wav"}],
    ],
    ids=["type", "base64", "bytes", "large", "text", "audio"],
)
async def test_other_media_are_returned_as_data(content: list[dict[str, Any]]) -> None:
    toolbox = Toolbox(drawing(*content))

    message = await toolbox.run(anthropic_call("draw__mcp", {}))

    found = json.loads(message["content"])
    page = found if isinstance(found, list) else found["value"]
    assert page[0]["type"] == content[0]["type"]


async def test_the_type_of_an_image_is_that_of_its_bytes_and_empty_texts_are_omitted() -> None:
    content = [{"type": "text", "text": ""}, {**IMAGE_BLOCK, "mimeType": "image/jpeg"}]
    toolbox = Toolbox(drawing(*content))

    message = await toolbox.run(anthropic_call("draw__mcp", {}))

    assert message["content"] == [IMAGES["anthropic"]]


async def test_the_data_of_a_tool_is_returned_beside_its_images() -> None:
    registry = drawing()

    @registry.operation("draw.measured", type="query")
    async def measured() -> Any:
        data, content = {"width": 1}, (CAPTION, IMAGE_BLOCK)
        return mcp_envelope(data, is_error=False, content=content, structured_content=data)

    message = await Toolbox(registry).run(anthropic_call("draw__measured", {}))

    assert message["content"] == [{"type": "text", "text": '{"width":1}'}, IMAGES["anthropic"]]


async def test_data_that_middleware_replaces_is_returned_without_the_original_content() -> None:
    registry = drawing(CAPTION, IMAGE_BLOCK)

    @registry.use
    async def hide(call: Any, following: Any) -> Any:
        return replace(await following(call), data=["***"])

    message = await Toolbox(registry).run(anthropic_call("draw__mcp", {}))

    assert message["content"] == '["***"]'


def test_a_missing_framework_names_its_extra(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("langchain_core.tools", "pydantic_ai", "agents"):
        monkeypatch.setitem(sys.modules, module, None)

    for build in (toolbox.langchain, toolbox.pydantic_ai, toolbox.openai_agents):
        with pytest.raises(MissingExtraError, match="pip install"):
            build()
