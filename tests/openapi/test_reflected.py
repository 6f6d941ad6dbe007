"""Credentials that an API repeats in a successful response do not reach callers."""

import base64
import json
from typing import Any

import pytest
from aiohttp import web
from tests.openapi.serving import serving

from operations import OperationRegistry
from operations.openapi import BasicCredential, HTTPAuth, HTTPServiceConfig, from_openapi
from operations.openapi.source.reflected import may_repeat, without_reflected

TOKEN = 'tok/en+with"odd<characters>&42'
KEY = "key-0123456789abcdef"
KINDS = ("application/json", "text/plain", "application/x-ndjson", "text/event-stream")


def document(**extra: Any) -> dict[str, Any]:
    content = {kind: {"schema": {"type": "object"}} for kind in KINDS}
    get = {"operationId": "get", "responses": {"200": {"description": "", "content": content}}}
    paths = {f"/{number}": {"get": {**get, "operationId": f"get{number}"}} for number in range(4)}
    for number, kind in enumerate(KINDS):
        schema = {"type": "string"} if kind == "text/plain" else {"type": "object"}
        answer = {"description": "", "content": {kind: {"schema": schema}}}
        paths[f"/{number}"]["get"]["responses"] = {"200": answer}
    return {"openapi": "3.1.0", "info": {"title": "x", "version": "1"}, "paths": paths, **extra}


def encoded(value: Any, way: str) -> str:
    text = json.dumps(value)
    match way:
        case "escaped":
            # As encoders of other languages do.
            return text.replace("/", "\\/").replace("+", "\\u002B").replace("<", "\\u003c")
        case _:
            return text


async def echo(request: web.Request) -> web.Response:
    number = int(request.path.strip("/"))
    seen: dict[str, Any] = {"seen": [request.headers.get("authorization", ""), dict(request.query)]}
    seen |= {"header": request.headers.get("x-api-key", ""), "ok": "other"}
    seen |= {f"name {request.headers.get('x-api-key', '')}": 1}
    authorization = request.headers.get("authorization", "")
    if authorization.startswith("Basic "):
        seen["plain"] = base64.b64decode(authorization.removeprefix("Basic ")).decode()
    text = encoded(seen, request.query.get("way", "plain"))
    kind = KINDS[number]
    if kind == "text/event-stream":
        text = f"data: {text}\n\ndata: [DONE]\n\n"
    return web.Response(text=text + "\n", content_type=kind)


AUTHS: list[tuple[HTTPAuth, list[str]]] = [
    (HTTPAuth(type="bearer", token=TOKEN), [TOKEN]),
    (HTTPAuth(type="apiKey", token=KEY), [KEY]),
    (HTTPAuth(type="basic", username="ann", password="pass:word-of-ann"), ["pass:word-of-ann"]),
]


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(("auth", "secrets"), AUTHS, ids=["bearer", "apiKey", "basic"])
async def test_a_credential_in_a_response_is_redacted(
    number: int, auth: HTTPAuth, secrets: list[str]
) -> None:
    async with serving(echo) as url:
        config = HTTPServiceConfig(namespace="api", base_url=url, auth=auth)
        async with OperationRegistry(from_openapi(document(), config)) as registry:
            operation_id = f"api.get{number}"
            for _ in range(2):
                if registry.get_spec(operation_id).type == "subscription":  # type: ignore[union-attr]
                    found = [each.data async for each in registry.subscribe(operation_id, {})]
                else:
                    found = [(await registry.execute(operation_id, {})).data]
                shown = json.dumps(found, ensure_ascii=False)
                assert "***" in shown
                assert "other" in shown
                for secret in secrets:
                    assert secret not in shown
                    assert json.dumps(secret)[1:-1] not in shown
                    assert base64.b64encode(f"ann:{secret}".encode()).decode() not in shown


@pytest.mark.requirement("R16")
async def test_a_credential_is_found_in_every_encoding_of_json() -> None:
    scheme = {"key": {"type": "apiKey", "in": "query", "name": "key"}}
    extra = {"components": {"securitySchemes": scheme}, "security": [{"key": []}]}
    async with serving(echo) as url:
        config = HTTPServiceConfig(
            namespace="api", base_url=f"{url}?way=escaped", credentials={"key": TOKEN}
        )
        async with OperationRegistry(from_openapi(document(**extra), config)) as registry:
            found = (await registry.execute("api.get0", {})).data

    assert found["seen"][1] == {"way": "escaped", "key": "***"}


def test_data_without_credentials_is_not_copied_and_short_ones_are_words() -> None:
    data = {"a": ["word", 1, None, {"b": "c"}], "secret": "sesame"}

    assert without_reflected(data, [TOKEN, "sesame"]) is data
    assert not may_repeat(json.dumps(data).encode(), [TOKEN, "sesame"])
    assert without_reflected({KEY: [f"x{KEY}"]}, [KEY]) == {"***": ["x***"]}
    assert without_reflected(b"\0" + KEY.encode(), [KEY]) == b"\0" + KEY.encode()


async def test_basic_credentials_of_a_scheme_are_redacted() -> None:
    scheme = {"login": {"type": "http", "scheme": "basic"}}
    extra = {"components": {"securitySchemes": scheme}, "security": [{"login": []}]}
    login = BasicCredential(username="ann", password="pass-of-ann")
    async with serving(echo) as url:
        config = HTTPServiceConfig(namespace="api", base_url=url, credentials={"login": login})
        async with OperationRegistry(from_openapi(document(**extra), config)) as registry:
            found = (await registry.execute("api.get0", {})).data

    assert found["plain"] == "ann:***"
