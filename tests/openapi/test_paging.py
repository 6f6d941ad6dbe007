"""Lists of many pages as subscriptions."""

from typing import Any

import pytest
from aiohttp import web
from tests.openapi.serving import document, imported, serving

from operations import CallError, ErrorCode, OperationType
from operations.openapi import (
    CursorPaging,
    HTTPServiceConfig,
    LinkPaging,
    OffsetPaging,
    PagePaging,
    URLPaging,
    from_openapi,
)
from operations.openapi.source.paging import Page, Paging, value_at

ITEMS = list(range(7))


def listing(*names: str, **more: Any) -> dict[str, Any]:
    integer = {"type": "integer"}
    parameters = [{"name": n, "in": "query", "schema": integer} for n in names]
    return document("/items", parameters=parameters, **more)


async def pages(request: web.Request) -> web.Response:
    """The same seven items, in every kind of paging at once."""
    query = request.query
    size = int(query.get("limit", 3))
    start = int(query.get("offset", query.get("cursor", (int(query.get("page", 1)) - 1) * size)))
    items = ITEMS[start : start + size]
    body: dict[str, Any] = {"items": items}
    headers = {}
    if start + size < len(ITEMS):
        link = f"http://{request.host}/items?offset={start + size}"
        body |= {"next": start + size, "nextLink": link}
        headers["Link"] = (
            f'<{link}&first>; rel="first", </items?offset={start + size}>; rel="next last"'
        )
    return web.json_response(body, headers=headers)


@pytest.mark.parametrize(
    "paging",
    [
        LinkPaging(),
        URLPaging(next="/nextLink"),
        CursorPaging(argument="cursor", next="/next"),
        PagePaging(argument="page", items="/items"),
        OffsetPaging(argument="offset", limit="limit", items="/items"),
    ],
    ids=lambda paging: type(paging).__name__,
)
async def test_every_page_is_an_envelope(paging: Paging) -> None:
    doc = listing("cursor", "page", "offset", "limit")
    async with (
        serving(pages) as url,
        imported(doc, base_url=url, pagination={"call": paging}) as registry,
    ):
        assert (await registry.execute("api.call", {})).data["items"] == [0, 1, 2]
        found: list[int] = []
        async for envelope in registry.subscribe("api.call.pages", {}):
            assert envelope.meta.status_code == 200  # type: ignore[union-attr]
            found += envelope.data["items"]
            # Changes of the caller to the data do not affect the next page.
            envelope.data.clear()

    assert found == ITEMS


@pytest.mark.parametrize(
    "paging", [PagePaging(items="/items"), OffsetPaging(items="/items")], ids=lambda p: p.argument
)
async def test_an_argument_that_is_null_counts_from_the_first_page(
    paging: PagePaging | OffsetPaging,
) -> None:
    async with (
        serving(pages) as url,
        imported(
            listing(paging.argument), base_url=url, pagination={"call": paging}, input="convert"
        ) as registry,
    ):
        found: list[int] = []
        async for envelope in registry.subscribe("api.call.pages", {paging.argument: None}):
            found += envelope.data["items"]
    assert found == ITEMS


@pytest.mark.parametrize(
    "paging", [PagePaging(items="/items"), OffsetPaging(items="/items")], ids=lambda p: p.argument
)
def test_an_argument_that_is_not_a_number_cannot_count_pages(
    paging: PagePaging | OffsetPaging,
) -> None:
    page = Page({paging.argument: "last"}, "http://a/", {}, {"items": [1]})
    with pytest.raises(CallError) as caught:
        paging.following(page)
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


def test_the_name_of_a_subscription_to_pages_is_unused() -> None:
    doc = listing()
    doc["paths"]["/pages"] = document(operationId="call.pages")["paths"]["/thing"]
    config = HTTPServiceConfig(namespace="api", pagination={"call": LinkPaging()})
    service = from_openapi(doc, config)
    assert [each.spec.name for each in service] == ["call", "call.pages_", "call.pages"]


async def test_a_rule_decides_by_operation() -> None:
    config = HTTPServiceConfig(
        namespace="api",
        pagination=lambda outline: LinkPaging() if outline.path == "/items" else None,
    )
    names = [operation.spec.id for operation in from_openapi(listing(), config)]
    assert names == ["api.call", "api.call.pages"]
    assert len(list(from_openapi(document("/other"), config))) == 1


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"x-ms-pageable": {"nextLinkName": "@odata.nextLink"}},
            URLPaging(next="/@odata.nextLink"),
        ),
        (
            {"responses": {"200": {"description": "", "headers": {"Link": {}}}}},
            LinkPaging(),
        ),
        ({"responses": {"200": {"$ref": "#/components/responses/Listed"}}}, LinkPaging()),
        ({}, None),
    ],
)
def test_a_document_can_describe_its_paging(more: dict[str, Any], expected: Paging | None) -> None:
    config = HTTPServiceConfig(namespace="api", pagination="document")
    listed = {"description": "", "headers": {"link": {}}}
    doc = listing(components={"responses": {"Listed": listed}}, **more)
    operations = list(from_openapi(doc, config))
    if expected is None:
        assert len(operations) == 1
    else:
        assert operations[1].spec.type is OperationType.SUBSCRIPTION
        assert operations[1].handler.args == (expected,)  # type: ignore[union-attr]


@pytest.mark.requirement("R06")
@pytest.mark.parametrize("following", ["https://elsewhere.example/items?page=2", "http://[x"])
async def test_a_next_page_at_another_origin_is_not_requested(following: str) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"next": following})

    async with (
        serving(respond) as url,
        imported(
            document(), base_url=url, pagination={"call": URLPaging(next="/next")}
        ) as registry,
    ):
        with pytest.raises(CallError, match="origin"):
            async for _ in registry.subscribe("api.call.pages", {}):
                pass


async def test_a_list_that_names_itself_as_its_next_page_ends() -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"next": str(request.url), "cursor": "same"})

    doc = document(
        "/items", parameters=[{"name": "cursor", "in": "query", "schema": {"type": "string"}}]
    )
    for paging in (URLPaging(next="/next"), CursorPaging(argument="cursor", next="/cursor")):
        async with (
            serving(respond) as url,
            imported(doc, base_url=url, pagination={"call": paging}) as registry,
        ):
            found = [envelope async for envelope in registry.subscribe("api.call.pages", {})]
        assert len(found) <= 2


@pytest.mark.parametrize("paging", [LinkPaging(), CursorPaging(argument="cursor", next="/next")])
async def test_pages_that_go_round_in_circles_are_an_error(paging: Paging) -> None:
    async def respond(request: web.Request) -> web.Response:
        onward = 2 if request.query.get("cursor") == "1" else 1
        return web.json_response(
            {"next": onward}, headers={"Link": f'</items?cursor={onward}>; rel="next"'}
        )

    items: list[Any] = []
    async with (
        serving(respond) as url,
        imported(listing("cursor"), base_url=url, pagination={"call": paging}) as registry,
    ):
        with pytest.raises(CallError, match="repeat"):
            async for envelope in registry.subscribe("api.call.pages", {}):
                items.append(envelope.data["next"])  # noqa: PERF401 - what came before counts
    assert items == [1, 2, 1]


@pytest.mark.parametrize(
    ("paging", "first"),
    [(PagePaging(items="/items"), 1), (OffsetPaging(argument="page", items="/items"), 0)],
)
async def test_a_server_that_repeats_its_last_page_is_stopped(paging: Paging, first: int) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"items": [min(int(request.query.get("page", first)), first + 1)]})

    async with (
        serving(respond) as url,
        imported(listing("page"), base_url=url, pagination={"call": paging}) as registry,
    ):
        found = [e.data["items"] async for e in registry.subscribe("api.call.pages", {})]
    assert found == [[first], [first + 1]]


async def test_a_next_page_is_at_the_same_origin_however_it_is_spelled() -> None:
    arrived: list[str] = []

    async def respond(request: web.Request) -> web.Response:
        arrived.append(request.raw_path)
        port = request.host.rpartition(":")[2]
        onward = f"HTTP://LOCALHOST:{port}/items/a b?c=d e#f" if len(arrived) == 1 else None
        return web.json_response({"next": onward})

    async with serving(respond) as url:
        named = url.replace("127.0.0.1", "localhost")
        async with imported(
            listing(), base_url=named, pagination={"call": URLPaging(next="/next")}
        ) as registry:
            assert len([e async for e in registry.subscribe("api.call.pages", {})]) == 2
    assert arrived == ["/items", "/items/a%20b?c=d%20e"]


def test_pointers_refer_to_a_value_or_to_none() -> None:
    data = {"a": [{"b/c": 1}], "": 2}
    assert value_at(data, "") == data
    assert value_at(data, "/a/0/b~1c") == 1
    assert value_at(data, "/a/-1/b~1c") == 1
    assert value_at(data, "/a/7") is None
    assert value_at(data, "/a/--1") is None
    assert value_at(data, "/x/y") is None
    assert value_at("text", "/a") is None


def test_a_link_header_without_a_next_page_ends() -> None:
    page = Page({}, "http://x/", {"link": '<http://x/2>; rel="prev"'}, None)
    assert LinkPaging().following(page) is None


@pytest.mark.requirement("R16")
async def test_a_key_in_the_address_of_the_next_page_is_sent_once_and_not_shown() -> None:
    """Many servers repeat the whole query in `Link`."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.rel_url.raw_query_string)
        # Partly decoded, as some servers do.
        link = f"<{request.path}?{request.query_string}&page={len(asked)}>; rel=next"
        return web.json_response([1], headers={"Link": link} if len(asked) < 3 else {})

    schemes = {"key": {"type": "apiKey", "in": "query", "name": "api_key"}}
    doc = listing(
        "limit", components={"securitySchemes": schemes}, security=[{"key": []}],
        responses={"200": {"description": "", "headers": {"Link": {}}}},
    )  # fmt: skip
    options: dict[str, Any] = {"pagination": "document", "credentials": {"key": "s3cret/+key"}}
    async with serving(answer) as url, imported(doc, base_url=url, **options) as registry:
        metas = [e.meta async for e in registry.subscribe("api.call.pages", {"limit": 2})]
    key = "api_key=s3cret%2F%2Bkey"
    assert asked == [f"limit=2&{key}", f"limit=2&page=1&{key}", f"limit=2&page=1&page=2&{key}"]
    assert len(metas) == 3
    assert "s3cret" not in str(metas)


async def test_the_query_of_the_configured_address_is_also_sent_for_the_next_page() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.rel_url.raw_query_string)
        link = f"<{request.path}?{request.query_string}&page=2>; rel=next"
        return web.json_response([1], headers={"Link": link} if len(asked) < 2 else {})

    async with (
        serving(answer) as url,
        imported(
            listing(), base_url=f"{url}?tenant=a", pagination={"call": LinkPaging()}
        ) as registry,
    ):
        assert len([e async for e in registry.subscribe("api.call.pages", {})]) == 2
    assert asked == ["tenant=a", "tenant=a&page=2"]
