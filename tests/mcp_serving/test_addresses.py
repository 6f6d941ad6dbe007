"""Addresses of views through a hub: the forms that clients use, and the exact spelling that the server gets."""

from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.mcp_serving.support import serving
from tests.mcp_serving.test_apps import HOST, UI
from tests.mcp_serving.test_tasks import Client

from operations import OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.shared.addresses import scoped, unscoped
from operations.mcp.shared.codec import CHANGES_KEY
from operations.runs import Runs

PAGE = "ui://clock/app.html"
OPEN: dict[str, Any] = {"type": "object"}


class Upstream:
    """A server with views whose tool returns `structured`; it notes what it is asked."""

    def __init__(
        self,
        structured: Any = None,
        *,
        resources: Sequence[str] = (PAGE,),
        templates: Sequence[str] = (),
        page: str = PAGE,
        **tool: Any,
    ) -> None:
        self.structured = structured
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self._tool = {"name": "show", "inputSchema": OPEN, "_meta": {"ui": {"resourceUri": page}}}
        self._tool |= tool
        self._resources, self._templates = resources, templates

    async def answer(self, request: Request) -> Response:
        message = await request.json()
        params = {**message.get("params", {})}
        params.pop("_meta", None)
        result = getattr(self, message["method"].replace("/", "_"))(params)
        if message["method"] in ("tools/call", "resources/read"):
            self.asked.append(params)
            self.headers.append(request.headers.get("mcp-name"))
        complete = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", **result}
        return JSONResponse({"jsonrpc": "2.0", "id": message.get("id"), "result": complete})

    def server_discover(self, _: Any) -> Any:
        capabilities: dict[str, Any] = {
            "tools": {},
            "resources": {},
            "prompts": {},
            "extensions": {UI: {}},
        }
        server = {"name": "up", "version": "1"}
        versions = ["2026-07-28"]
        return {
            "supportedVersions": versions,
            "serverInfo": server,
            "capabilities": capabilities,
        }

    def tools_list(self, _: Any) -> Any:
        return {"tools": [self._tool]}

    def resources_list(self, _: Any) -> Any:
        return {"resources": [{"uri": each, "name": "r"} for each in self._resources]}

    def resources_templates_list(self, _: Any) -> Any:
        return {
            "resourceTemplates": [{"uriTemplate": each, "name": "t"} for each in self._templates]
        }

    def prompts_list(self, _: Any) -> Any:
        return {"prompts": [{"name": "ask"}]}

    def prompts_get(self, _: Any) -> Any:
        link = {"type": "resource_link", "uri": PAGE, "name": "r"}
        embedded = {"type": "resource", "resource": {"uri": PAGE, "text": PAGE}}
        blocks = [link, embedded, {"type": "text", "text": PAGE}]
        return {"messages": [{"role": "user", "content": each} for each in blocks]}

    def tools_call(self, _: Any) -> Any:
        text = {"type": "text", "text": PAGE}
        return {"content": [text], "structuredContent": self.structured, "isError": False}

    def resources_read(self, params: Any) -> Any:
        return {"contents": [{"uri": params["uri"], "text": "page"}]}


@asynccontextmanager
async def hub(
    *, runs: Runs | None = None, options: dict[str, Any] | None = None, **upstreams: Upstream
) -> AsyncGenerator[tuple[Client, OperationRegistry]]:
    """Serve a hub in front of servers by their namespaces."""
    registry = OperationRegistry(runs=runs)
    async with AsyncExitStack() as stack:
        for namespace, upstream in upstreams.items():
            routes = [Route("/mcp", upstream.answer, methods=["POST"])]
            address = await stack.enter_async_context(serving(Starlette(routes=routes)))
            config = MCPClientConfig(url=f"{address}/mcp", **(options or {}))
            connection = connect_mcp(namespace, config)
            registry.register_all(await stack.enter_async_context(connection))
        await stack.enter_async_context(registry)
        app = to_mcp(registry, disclosure="tools").asgi_app()
        async with serving(app) as address, aiohttp.ClientSession() as http:
            yield Client(http, address), registry


async def read(client: Client, uri: str) -> dict[str, Any]:
    """Return the response to `resources/read`."""
    named = uri if uri.isascii() else f"=?base64?{b64encode(uri.encode()).decode()}?="
    return await client.post("resources/read", {"uri": uri}, HOST, named=named)


# ------------------------------------------------------------ structured content


@pytest.mark.requirement("R77")
async def test_addresses_in_structured_content_are_those_that_clients_use() -> None:
    structured = {
        "view": PAGE,
        "all": [{"at": "ui://clock/b?x=%2F#y"}, PAGE],
        "text": f"see {PAGE}",
        "other": "UIX://clock/app.html",
        "empty": "ui://",
        "lines": f"{PAGE}\n",
        PAGE: 1,
    }
    upstream = Upstream(structured)
    async with hub(oslo=upstream, rome=Upstream(structured)) as (client, registry):
        result = await client.call("oslo__show", {}, HOST)
        at_other = await client.call("rome__show", {}, HOST)
        in_process = (await registry.execute("oslo.show", {})).data

    assert result["structuredContent"] == {
        **structured,
        "view": "ui://oslo/clock/app.html",
        "all": [{"at": "ui://oslo/clock/b?x=%2F#y"}, "ui://oslo/clock/app.html"],
    }
    assert at_other["structuredContent"]["view"] == "ui://rome/clock/app.html"
    # Texts are for models and people, and code in this process calls the server by its own addresses.
    assert result["content"] == [{"type": "text", "text": PAGE}]
    assert in_process == structured
    noted = result["_meta"][CHANGES_KEY]
    assert noted["changesCount"] == 3
    assert noted["changes"] == [
        {"path": "/view", "kind": "address", "count": 3, "message": f'was "{PAGE}"'}
    ]


async def test_results_without_addresses_pass_unchanged() -> None:
    upstream = Upstream({"a": [1, "b", None, {"c": "http://x"}]})
    async with hub(oslo=upstream) as (client, _):
        result = await client.call("oslo__show", {}, HOST)

    assert result["structuredContent"] == upstream.structured
    assert "_meta" not in result or CHANGES_KEY not in result["_meta"]


async def test_a_server_without_views_or_skills_has_no_addresses_to_rewrite() -> None:
    upstream = Upstream({"view": PAGE}, resources=(), _meta={})
    async with hub(oslo=upstream) as (client, _):
        result = await client.call("oslo__show", {"view": "ui://oslo/x"}, HOST)

    assert result["structuredContent"] == {"view": PAGE}
    assert upstream.asked[0]["arguments"] == {"view": "ui://oslo/x"}


@pytest.mark.parametrize(
    "schema", [{"const": PAGE}, {"pattern": "^ui://clock/"}, {"maxLength": len(PAGE)}]
)
async def test_an_address_that_the_output_schema_requires_is_kept(schema: Any) -> None:
    """Clients drop a result that does not match its schema."""
    output = {"type": "object", "properties": {"view": {"type": "string", **schema}}}
    upstream = Upstream({"view": PAGE}, outputSchema=output)
    async with hub(oslo=upstream) as (client, _):
        result = await client.call("oslo__show", {}, HOST)

    assert result["structuredContent"] == {"view": PAGE}
    assert CHANGES_KEY not in result.get("_meta", {})


async def test_an_address_in_a_result_with_an_output_schema_changes() -> None:
    output = {"type": "object", "properties": {"view": {"type": "string", "format": "uri"}}}
    async with hub(oslo=Upstream({"view": PAGE}, outputSchema=output)) as (client, _):
        result = await client.call("oslo__show", {}, HOST)

    assert result["structuredContent"] == {"view": "ui://oslo/clock/app.html"}


async def test_a_server_gets_its_own_addresses_back() -> None:
    upstream = Upstream({"view": PAGE})
    async with hub(oslo=upstream) as (client, _):
        result = await client.call("oslo__show", {}, HOST)
        given = {
            "view": result["structuredContent"]["view"],
            "own": "ui://clock/app.html",
            "other": ["ui://rome/clock/app.html", "see ui://oslo/clock/app.html"],
        }
        again = await client.call("oslo__show", given, HOST)
        # A view that sends the name at its server, and a model that calls through the gateway.
        await client.call("show", {"view": given["view"]}, HOST)

    assert upstream.asked[1]["arguments"] == {**given, "view": PAGE}
    assert upstream.asked[2]["arguments"] == {"view": PAGE}
    changes = again["_meta"][CHANGES_KEY]["changes"]
    assert {"path": "/view", "kind": "input", "count": 1, "message": f'is now "{PAGE}"'} in changes


async def test_an_address_that_begins_with_the_name_of_its_server_stays_what_it_is() -> None:
    """The namespace `clock` and the host of `ui://clock/app.html` are different things."""
    upstream = Upstream({"view": PAGE})
    async with hub(clock=upstream) as (client, _):
        result = await client.call("clock__show", {"own": PAGE}, HOST)
        public = result["structuredContent"]["view"]
        await client.call("clock__show", {"public": public}, HOST)
        pages = [await read(client, PAGE), await read(client, public)]

    assert public == "ui://clock/clock/app.html"
    assert upstream.asked[0]["arguments"] == {"own": PAGE}
    assert upstream.asked[1]["arguments"] == {"public": PAGE}
    assert [each["uri"] for each in upstream.asked[2:]] == [PAGE, PAGE]
    assert [each["result"]["contents"][0]["uri"] for each in pages] == [PAGE, public]


async def test_an_address_at_the_server_is_read_if_only_one_server_lists_it() -> None:
    one, two = Upstream(), Upstream(resources=(PAGE, "ui://two/x", "ui://one/y"))
    async with hub(one=one, two=two) as (client, _):
        ambiguous = await read(client, PAGE)
        # `two` lists an address that begins with the namespace of `one`.
        await read(client, "ui://one/y")
    async with hub(two=two) as (client, _):
        alone = await read(client, PAGE)

    assert "error" in ambiguous
    assert one.asked == [{"uri": "ui://y"}]
    assert alone["result"]["contents"][0]["text"] == "page"
    assert two.asked == [{"uri": PAGE}]


async def test_links_in_prompts_lead_to_the_server() -> None:
    async with hub(oslo=Upstream(), rome=Upstream()) as (client, _):
        found = await client.post("prompts/get", {"name": "oslo__prompts__ask"}, HOST)

    link, embedded, text = [each["content"] for each in found["result"]["messages"]]
    assert link["uri"] == "ui://oslo/clock/app.html"
    assert embedded["resource"] == {"uri": "ui://oslo/clock/app.html", "text": PAGE}
    assert text["text"] == PAGE


async def test_calls_of_the_gateway_use_the_same_addresses() -> None:
    upstream = Upstream({"view": PAGE})
    async with hub(oslo=upstream) as (_, registry):
        app = to_mcp(registry, disclosure="gateway").asgi_app()
        async with serving(app) as address, aiohttp.ClientSession() as http:
            call = {"operation": "oslo.show", "input": {"view": "ui://oslo/clock/app.html"}}
            result = await Client(http, address).call("call", call, HOST)
            batch = await Client(http, address).call("batch", {"calls": [call]}, HOST)

    assert result["structuredContent"] == {"view": "ui://oslo/clock/app.html"}
    assert [each["arguments"] for each in upstream.asked] == [{"view": PAGE}] * 2
    (outcome,) = batch["structuredContent"]["results"]
    assert outcome["envelope"]["data"] == {"view": "ui://oslo/clock/app.html"}


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("disclosure", ["tools", "gateway"])
async def test_addresses_pass_through_two_hubs(trusted: bool, disclosure: Any) -> None:
    upstream = Upstream({"view": PAGE})
    async with hub(oslo=upstream) as (_, inner), AsyncExitStack() as stack:
        app = to_mcp(inner, disclosure=disclosure).asgi_app()
        address = await stack.enter_async_context(serving(app))
        config = MCPClientConfig(url=f"{address}/mcp", trust_annotations=trusted)
        registry = OperationRegistry()
        registry.register_all(await stack.enter_async_context(connect_mcp("inner", config)))
        outer = to_mcp(registry, disclosure="tools").asgi_app()
        address = await stack.enter_async_context(serving(outer))
        client = Client(await stack.enter_async_context(aiohttp.ClientSession()), address)
        tools = (await client.post("tools/list", {}, HOST))["result"]["tools"]
        names = [each["name"] for each in tools]
        (name,) = [each for each in names if "show" in each or each.endswith("call")]
        view = "ui://inner/oslo/clock/app.html"
        given: Any = {"view": view}
        if disclosure == "gateway":
            given = {"operation": "oslo.show", "input": given}
        result = await client.call(name, given, HOST)
        (content,) = (await read(client, view))["result"]["contents"]

    assert result["structuredContent"]["view"] == view
    assert upstream.asked[0]["arguments"] == {"view": PAGE}
    assert content["uri"] == view
    assert upstream.asked[1] == {"uri": PAGE}


# ------------------------------------------------------------ the spelling of the server

SPELLINGS = [
    "UI://Clock/App.html",
    "Ui://clock/app.html",
    "ui://CLOCK/app.html",
    "ui://clock/%7eada/%2Fx",
    "ui://clock/a?b=%20&B=c",
    "ui://clock/a#Part",
    "ui://clock//a/../b/",
    "ui://clock/a%2eb",
    "UI://clock/é%C3%A9",
]


@pytest.mark.parametrize("uri", SPELLINGS)
async def test_a_server_is_asked_with_its_own_spelling(uri: str) -> None:
    listed, unlisted = Upstream({"view": uri}, resources=(uri,), page=uri), Upstream({"view": uri})
    async with hub(oslo=listed, rome=unlisted) as (client, _):
        tools = (await client.post("tools/list", {}, HOST))["result"]["tools"]
        resources = (await client.post("resources/list", {}, HOST))["result"]["resources"]
        pages = [tool["_meta"]["ui"]["resourceUri"] for tool in tools]
        views = [
            (await client.call(f"{place}__show", {}, HOST))["structuredContent"]["view"]
            for place in ("oslo", "rome")
        ]
        contents = [(await read(client, view))["result"]["contents"][0] for view in views]

    assert views[0] in pages
    assert views[0] in [each["uri"] for each in resources]
    assert [view.startswith("ui://") for view in views] == [True, True]
    assert [content["uri"] for content in contents] == views
    assert [listed.asked[-1], unlisted.asked[-1]] == [{"uri": uri}, {"uri": uri}]


@pytest.mark.parametrize(
    ("template", "uri"),
    [
        ("ui://clock/{name}.html", "ui://clock/a%2eb%7E.html"),
        ("UI://Clock/{name}.html", "UI://Clock/a.html"),
        ("ui://clock/{+path}", "ui://clock/a/%62"),
        ("ui://clock/x{?q}", "ui://clock/x?q=%7E"),
        ("ui://clock/{name}", "ui://clock/%c3%a9"),
    ],
)
async def test_an_address_of_a_template_keeps_its_spelling(template: str, uri: str) -> None:
    upstream = Upstream({"view": uri}, templates=(template,), resources=())
    async with hub(oslo=upstream) as (client, _):
        view = (await client.call("oslo__show", {}, HOST))["structuredContent"]["view"]
        (content,) = (await read(client, view))["result"]["contents"]

    assert content["uri"] == view
    assert upstream.asked[-1] == {"uri": uri}


@pytest.mark.parametrize("scheme", ["ui", "UI", "skill", "Skill"])
@pytest.mark.parametrize("rest", ["a/b", "UI://x", "ui://x", "oslo/a", "skill://a/b", "a"])
def test_every_address_comes_back_as_it_was(scheme: str, rest: str) -> None:
    uri = f"{scheme}://{rest}"
    once = scoped("oslo", uri)
    assert once is not None
    twice = scoped("hub", once)
    assert twice is not None

    assert once.startswith(f"{scheme.lower()}://oslo/")
    assert unscoped(once) == ("oslo", uri)
    assert unscoped(twice) == ("hub", once)


def test_two_spellings_have_two_addresses() -> None:
    spellings = ["ui://a", "UI://a", "Ui://a", "ui://UI://a", "ui://ui://a", "ui://A"]

    assert len({scoped("oslo", each) for each in spellings}) == len(spellings)
