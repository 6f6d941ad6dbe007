"""Credentials of requests: schemes of the document, credentials of the operator or of the caller."""

import asyncio
import base64
from typing import Any, cast
from urllib.parse import parse_qs

import pytest
from aiohttp import web
from tests.openapi.echo import Echo
from tests.openapi.serving import document, imported, serving

from operations import CallError, ErrorCode, Identity, OperationContext
from operations.openapi import (
    BasicCredential,
    ClientCredentials,
    HTTPAuth,
    HTTPServiceConfig,
    PasswordCredentials,
    RefreshToken,
    from_openapi,
)
from operations.openapi.source.config import credential_of
from operations.openapi.source.security import TokenSource


def secured(scheme: dict[str, Any], **more: Any) -> dict[str, Any]:
    return document(
        **{
            "security": [{"key": ["read"]}],
            "components": {"securitySchemes": {"key": scheme}},
            **more,
        }
    )


BEARER = {"type": "http", "scheme": "bearer"}


@pytest.mark.parametrize(
    ("auth", "name", "value"),
    [
        (HTTPAuth(type="bearer", token="t"), "authorization", "Bearer t"),
        (HTTPAuth(type="bearer", token="t", prefix="Token"), "authorization", "Token t"),
        (HTTPAuth(type="bearer", token="t", header_name="X-Auth"), "x-auth", "Bearer t"),
        (HTTPAuth(type="apiKey", token="t"), "x-api-key", "t"),
        (HTTPAuth(type="apiKey", token="t", header_name="X-Key", prefix="Key="), "x-key", "Key=t"),
        (HTTPAuth(type="basic", token="u:p"), "authorization", "Basic dTpw"),
        (HTTPAuth(type="basic", token="dTpw"), "authorization", "Basic dTpw"),
        ({"type": "apiKey", "token": "t", "headerName": "X-Key"}, "x-key", "t"),
        ({"type": "basic", "username": "u", "password": "p"}, "authorization", "Basic dTpw"),
    ],
)
async def test_one_credential_signs_every_request(
    auth: Any, name: str, value: str, echo: Echo
) -> None:
    echo.seen.clear()
    async with imported(document(), base_url=echo.url, auth=auth) as registry:
        await registry.execute("api.call", {})

    assert echo.seen[0].header(name) == value


@pytest.mark.parametrize("kind", ["bearer", "apiKey", "basic"])
@pytest.mark.parametrize(
    "found",
    [("u", "p"), BasicCredential(username="u", password="p"), ("a", "b", "c"), {"a": 1},
     ClientCredentials(client_id="i", client_secret="s")],
    ids=repr,
)  # fmt: skip
async def test_an_object_that_is_not_text_is_not_sent_as_a_token(
    kind: Any, found: Any, echo: Echo
) -> None:
    echo.seen.clear()
    auth = HTTPAuth(type=kind, token=lambda _: found)
    async with imported(document(), base_url=echo.url, auth=auth) as registry:
        if kind == "basic" and (found == ("u", "p") or isinstance(found, BasicCredential)):
            await registry.execute("api.call", {})
            assert echo.seen[0].header("authorization") == "Basic dTpw"
            return
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
    assert caught.value.code == ErrorCode.ACCESS_DENIED
    assert echo.seen == []


@pytest.mark.requirement("R08")
@pytest.mark.parametrize("credential", [None, "", 5, b"k", [], ("u",)], ids=repr)
def test_a_value_that_is_no_credential_is_rejected_at_once(credential: Any) -> None:
    """For example an environment variable that is not set, without which the call would not be signed."""
    config = HTTPServiceConfig(namespace="api", credentials={"key": credential})
    with pytest.raises(ValueError, match="credentials: 'key'"):
        from_openapi(document(), config)


@pytest.mark.parametrize(
    "credential", [("u", "p"), BasicCredential(username="u", password="p"), "u:p"]
)
async def test_basic_credentials_come_in_any_shape(credential: Any, echo: Echo) -> None:
    echo.seen.clear()
    doc = secured({"type": "http", "scheme": "basic"})
    async with imported(doc, base_url=echo.url, credentials={"key": credential}) as registry:
        await registry.execute("api.call", {})

    assert echo.seen[0].header("authorization") == "Basic dTpw"


async def test_a_credential_can_depend_on_the_caller(echo: Echo) -> None:
    echo.seen.clear()

    async def token(context: OperationContext) -> str:
        assert context.identity is not None
        return f"token-of-{context.identity.id}"

    async with imported(secured(BEARER), base_url=echo.url, credentials={"key": token}) as registry:
        await asyncio.gather(
            *(
                registry.execute("api.call", {}, OperationContext(identity=Identity(who, [])))
                for who in ("ann", "ben")
            )
        )

    sent = {seen.header("authorization") for seen in echo.seen}
    assert sent == {"Bearer token-of-ann", "Bearer token-of-ben"}


async def test_a_header_of_the_caller_beside_a_fixed_credential_is_computed_for_every_call(
    echo: Echo,
) -> None:
    echo.seen.clear()

    def name(context: OperationContext) -> str | None:
        return None if context.identity is None else context.identity.id

    config = {"credentials": {"key": "fixed-token"}, "headers": {"X-Caller": name}}
    async with imported(secured(BEARER), base_url=echo.url, **config) as registry:
        for who in ("ann", "ben"):
            await registry.execute("api.call", {}, OperationContext(identity=Identity(who, [])))

    assert [seen.header("x-caller") for seen in echo.seen] == ["ann", "ben"]
    assert {seen.header("authorization") for seen in echo.seen} == {"Bearer fixed-token"}


@pytest.mark.requirement("R08")
@pytest.mark.parametrize("place", ["auth", "credentials"])
async def test_a_credential_that_cannot_be_obtained_rejects_the_call(
    place: str, echo: Echo
) -> None:
    echo.seen.clear()

    def fail(context: OperationContext) -> str:
        raise KeyError("CANARY")

    config: dict[str, Any] = (
        {"auth": HTTPAuth(type="bearer", token=fail)}
        if place == "auth"
        else {"credentials": {"key": fail}}
    )
    async with imported(secured(BEARER), base_url=echo.url, **config) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.ACCESS_DENIED
    assert "CANARY" not in str(caught.value.to_wire())
    assert echo.seen == []


async def test_the_first_alternative_with_credentials_is_used(echo: Echo) -> None:
    echo.seen.clear()
    schemes = {name: {"type": "apiKey", "in": "header", "name": name} for name in ("a", "b", "c")}
    doc = document(
        security=[{"a": [], "b": []}, {"c": []}, {}], components={"securitySchemes": schemes}
    )
    for credentials in ({"a": "1", "c": "3"}, {"a": "1", "b": "2", "c": "3"}, {}):
        async with imported(doc, base_url=echo.url, credentials=credentials) as registry:
            await registry.execute("api.call", {})

    sent = [[seen.header(name) for name in "abc"] for seen in echo.seen]
    assert sent == [[None, None, "3"], ["1", "2", None], [None, None, None]]


async def test_an_operation_without_security_gets_no_scheme(echo: Echo) -> None:
    echo.seen.clear()
    doc = secured(BEARER, security=[])
    doc["security"] = [{"key": []}]
    async with imported(doc, base_url=echo.url, credentials={"key": "t"}) as registry:
        await registry.execute("api.call", {})

    assert echo.seen[0].header("authorization") is None


@pytest.mark.parametrize("security", [{}, {"security": [{"token": []}, {"key": []}]}])
async def test_an_api_key_that_is_also_a_required_parameter_is_sent(
    security: dict[str, Any], echo: Echo
) -> None:
    echo.seen.clear()
    places = {"key": "query", "token": "header", "other": "query"}
    doc = document(
        parameters=[
            {"in": "query", "name": "key", "required": True, "schema": {"type": "string"}},
            {"in": "header", "name": "Token", "required": True, "schema": {"type": "string"}},
            {"in": "query", "name": "other", "schema": {"type": "string"}},
        ],
        components={
            "securitySchemes": {
                name: {"type": "apiKey", "in": place, "name": name}
                for name, place in places.items()
            }
        },
        **security,
    )
    credentials = {name: f"{name}-secret" for name in places}
    async with imported(doc, base_url=echo.url, credentials=credentials) as registry:
        await registry.execute("api.call", {})

    (seen,) = echo.seen
    assert (seen.query, seen.header("token")) == ("key=key-secret", "token-secret")


@pytest.mark.parametrize("place", ["query", "header", "cookie"])
async def test_schemes_that_name_the_same_parameter_send_it_once(place: str, echo: Echo) -> None:
    echo.seen.clear()
    scheme = {"type": "apiKey", "in": place, "name": "api_key"}
    doc = document(
        security=[{"first": [], "second": []}],
        components={"securitySchemes": {"first": scheme, "second": scheme}},
    )
    credentials = {"first": "a", "second": "a"}
    async with imported(doc, base_url=echo.url, credentials=credentials) as registry:
        await registry.execute("api.call", {})

    (seen,) = echo.seen
    sent = {"query": seen.query, "header": seen.header("api_key"), "cookie": seen.header("cookie")}
    assert sent[place] == ("a" if place == "header" else "api_key=a")


async def test_swagger_schemes_are_the_same_schemes(echo: Echo) -> None:
    echo.seen.clear()
    doc = {
        "swagger": "2.0",
        "info": {},
        "paths": {"/x": {"get": {"operationId": "call", "responses": {}}}},
        "security": [{"b": [], "k": []}],
        "securityDefinitions": {
            "b": {"type": "basic"},
            "k": {"type": "apiKey", "in": "query", "name": "key"},
        },
    }
    async with imported(
        doc, base_url=echo.url, credentials={"b": ("u", "p"), "k": "K"}
    ) as registry:
        await registry.execute("api.call", {})

    assert echo.seen[0].header("authorization") == "Basic dTpw"
    assert echo.seen[0].target == "/x?key=K"


class Provider:
    """An OAuth2 provider, an OpenID one, and the API behind them, on one server."""

    def __init__(self, lifetime: float | None = 3600) -> None:
        self.asked: list[tuple[str | None, dict[str, list[str]]]] = []
        self.used: list[str | None] = []
        self.lifetime = lifetime
        self.refused: set[str] = set()
        self.refreshes = False
        self.expired: set[str] = set()
        self.is_away = False

    @property
    def grants(self) -> list[dict[str, str]]:
        return [{key: value for key, (value,) in fields.items()} for _, fields in self.asked]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/.well-known/"):
            return web.json_response({"token_endpoint": f"http://{request.host}/token"})
        if request.path == "/token":
            await asyncio.sleep(0.02)
            self.asked.append(
                (request.headers.get("Authorization"), parse_qs(await request.text()))
            )
            fields = self.asked[-1][1]
            if self.is_away:
                return web.Response(status=503)
            if fields.get("refresh_token", [""])[0] in self.expired:
                return web.json_response({"error": "invalid_grant", "detail": "CANARY"}, status=400)
            answer: dict[str, Any] = {"access_token": f"token{len(self.asked)}"}
            if self.refreshes:
                answer["refresh_token"] = f"refresh{len(self.asked)}"
            if self.lifetime is not None:
                answer["expires_in"] = self.lifetime
            return web.json_response(answer)
        sent = request.headers.get("Authorization")
        self.used.append(sent)
        if sent in self.refused:
            return web.json_response({}, status=401)
        return web.json_response({})


CLIENT = ClientCredentials(client_id="id", client_secret="s3:cret")


def oauth(url: str, flow: str = "clientCredentials", key: str = "tokenUrl") -> dict[str, Any]:
    return secured({"type": "oauth2", "flows": {flow: {key: url, "scopes": {"read": ""}}}})


@pytest.mark.requirement("R08", "R16")
@pytest.mark.parametrize("found", [object, {"access_token": "x"}, 5, ""], ids=str)
@pytest.mark.parametrize("is_auth", [True, False])
async def test_a_function_that_returns_no_credential_rejects_the_call(
    found: Any, is_auth: bool, echo: Echo
) -> None:
    echo.seen.clear()
    config: dict[str, Any] = (
        {"auth": HTTPAuth(type="bearer", token=lambda _: found)}
        if is_auth
        else {"credentials": {"key": lambda _: found}}
    )
    async with imported(secured(BEARER), base_url=echo.url, **config) as registry:
        with pytest.raises(CallError):
            await registry.execute("api.call", {})

    assert echo.seen == []


async def test_client_credentials_are_exchanged_once_for_many_callers() -> None:
    provider = Provider()
    async with (
        serving(provider.answer) as url,
        imported(oauth("/token"), base_url=url, credentials={"key": CLIENT}) as registry,
    ):
        await asyncio.gather(*(registry.execute("api.call", {}) for _ in range(20)))

    ((authorization, fields),) = provider.asked
    assert authorization == "Basic " + base64.b64encode(b"id:s3%3Acret").decode()
    assert fields == {"grant_type": ["client_credentials"], "scope": ["read"]}
    assert provider.used == ["Bearer token1"] * 20


async def test_a_token_is_renewed_before_it_expires() -> None:
    provider = Provider(lifetime=2)
    async with (
        serving(provider.answer) as url,
        imported(oauth("/token"), base_url=url, credentials={"key": CLIENT}) as registry,
    ):
        await registry.execute("api.call", {})
        await registry.execute("api.call", {})
        await asyncio.sleep(2)
        await registry.execute("api.call", {})

    assert provider.used == ["Bearer token1", "Bearer token1", "Bearer token2"]


@pytest.mark.parametrize("method", ["get", "post"])
async def test_a_rejected_token_is_renewed_and_the_request_sent_once_more(method: str) -> None:
    provider = Provider(lifetime=None)
    provider.refused = {"Bearer token1", "Bearer token3", "Bearer token4"}
    doc = oauth("/token")
    doc["paths"]["/thing"] = {method: doc["paths"]["/thing"]["get"]}
    async with (
        serving(provider.answer) as url,
        imported(doc, base_url=url, credentials={"key": CLIENT}, retries=0) as registry,
    ):
        await registry.execute("api.call", {})
        assert provider.used == ["Bearer token1", "Bearer token2"]

        provider.refused.add("Bearer token2")
        with pytest.raises(CallError, match="401"):
            await registry.execute("api.call", {})

    assert provider.used[2:] == ["Bearer token2", "Bearer token3"]


async def test_a_401_without_a_token_to_renew_is_final() -> None:
    seen: list[str] = []

    async def refuse(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.Response(status=401)

    async with (
        serving(refuse) as url,
        imported(secured(BEARER), base_url=url, credentials={"key": "fixed"}) as registry,
    ):
        with pytest.raises(CallError, match="401"):
            await registry.execute("api.call", {})

    assert len(seen) == 1


async def test_a_cancelled_caller_does_not_cancel_the_token_request_of_others() -> None:
    provider = Provider()
    async with (
        serving(provider.answer) as url,
        imported(oauth("/token"), base_url=url, credentials={"key": CLIENT}) as registry,
    ):
        first = asyncio.create_task(registry.execute("api.call", {}))
        second = asyncio.create_task(registry.execute("api.call", {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first

    assert len(provider.asked) == 1


async def test_the_provider_can_be_discovered() -> None:
    provider = Provider()
    async with serving(provider.answer) as url:
        scheme = {
            "type": "openIdConnect",
            "openIdConnectUrl": f"{url}/.well-known/openid-configuration",
        }
        client = ClientCredentials(client_id="id", client_secret="s", send_in="body", scopes=("x",))
        async with imported(secured(scheme), base_url=url, credentials={"key": client}) as registry:
            await registry.execute("api.call", {})

    assert provider.used == ["Bearer token1"]
    ((authorization, fields),) = provider.asked
    assert authorization is None
    assert fields["client_id"] == ["id"]
    assert fields["client_secret"] == ["s"]
    assert fields["scope"] == ["x"]


FLOWS = ["clientCredentials", "password", "authorizationCode", "implicit", "deviceAuthorization"]


@pytest.mark.parametrize("flow", [*FLOWS, "openIdConnect"])
@pytest.mark.parametrize("is_callable", [False, True])
async def test_a_ready_token_works_for_every_flow(flow: str, is_callable: bool, echo: Echo) -> None:
    echo.seen.clear()
    doc = oauth("https://elsewhere.example/token", flow)
    if flow == "openIdConnect":
        doc = secured({"type": flow, "openIdConnectUrl": "https://elsewhere.example/"})
    credential: Any = (lambda context: "T0KEN") if is_callable else "T0KEN"
    async with imported(doc, base_url=echo.url, credentials={"key": credential}) as registry:
        await registry.execute("api.call", {})

    assert echo.seen[0].header("authorization") == "Bearer T0KEN"


USER = PasswordCredentials(username="ann", password="pa ss", client_id="app")


@pytest.mark.parametrize("credential", [USER, ("ann", "pa ss")])
async def test_a_login_is_exchanged_for_a_token(credential: Any) -> None:
    provider = Provider()
    async with (
        serving(provider.answer) as url,
        imported(
            oauth("/token", "password"), base_url=url, credentials={"key": credential}
        ) as registry,
    ):
        await asyncio.gather(*(registry.execute("api.call", {}) for _ in range(5)))

    (grant,) = provider.grants
    expected = {"grant_type": "password", "username": "ann", "password": "pa ss", "scope": "read"}
    assert grant == (expected | {"client_id": "app"} if credential is USER else expected)
    assert provider.used == ["Bearer token1"] * 5


async def test_a_login_uses_its_refresh_token_as_long_as_that_is_good() -> None:
    provider = Provider(lifetime=0)
    provider.refreshes = True
    provider.expired = {"refresh2"}
    async with (
        serving(provider.answer) as url,
        imported(oauth("/token", "password"), base_url=url, credentials={"key": USER}) as registry,
    ):
        for _ in range(3):
            await registry.execute("api.call", {})

    asked = [(g["grant_type"], g.get("refresh_token")) for g in provider.grants]
    assert asked == [
        ("password", None),
        ("refresh_token", "refresh1"),
        ("refresh_token", "refresh2"),
        ("password", None),
    ]
    assert provider.used == ["Bearer token1", "Bearer token2", "Bearer token4"]


@pytest.mark.parametrize("key", ["tokenUrl", "refreshUrl"])
async def test_a_refresh_token_returns_tokens_and_a_new_refresh_token(key: str) -> None:
    provider = Provider(lifetime=0)
    provider.refreshes = True
    given = RefreshToken(refresh_token="first", client_id="app", client_secret="s")
    doc = oauth("/token", "authorizationCode", key)
    async with (
        serving(provider.answer) as url,
        imported(doc, base_url=url, credentials={"key": given}) as registry,
    ):
        for _ in range(2):
            await registry.execute("api.call", {})
        provider.expired = {"refresh2"}
        with pytest.raises(CallError, match="invalid_grant") as caught:
            await registry.execute("api.call", {})

    assert [grant["refresh_token"] for grant in provider.grants] == [
        "first",
        "refresh1",
        "refresh2",
    ]
    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert "CANARY" not in str(caught.value.to_wire())


async def test_a_flow_without_a_token_endpoint_is_rejected_with_advice() -> None:
    doc = oauth("/token", "implicit", "authorizationUrl")
    async with imported(
        doc, base_url="http://127.0.0.1:1", credentials={"key": CLIENT}
    ) as registry:
        with pytest.raises(CallError, match="set token_url, or a token in credentials"):
            await registry.execute("api.call", {})


async def test_oauth2_metadata_names_the_token_endpoint_too() -> None:
    provider = Provider()
    scheme = {"type": "oauth2", "flows": {}}
    scheme["oauth2MetadataUrl"] = "/.well-known/oauth-authorization-server"
    async with (
        serving(provider.answer) as url,
        imported(secured(scheme), base_url=url, credentials={"key": CLIENT}) as registry,
    ):
        await registry.execute("api.call", {})

    assert provider.used == ["Bearer token1"]


@pytest.mark.parametrize("metadata", [{}, {"token_endpoint": None}, {"token_endpoint": []}, []])
async def test_metadata_without_a_token_endpoint_receives_no_credential(metadata: Any) -> None:
    methods: list[str] = []

    async def respond(request: web.Request) -> web.Response:
        methods.append(request.method)
        return web.json_response(metadata)

    scheme = {"type": "openIdConnect", "openIdConnectUrl": "/.well-known/openid-configuration"}
    async with (
        serving(respond) as url,
        imported(secured(scheme), base_url=url, credentials={"key": CLIENT}) as registry,
    ):
        with pytest.raises(CallError, match="names no token endpoint: set token_url"):
            await registry.execute("api.call", {})

    assert methods == ["GET"]


async def test_callers_with_clients_of_their_own_have_tokens_of_their_own() -> None:
    provider = Provider()

    def find(context: OperationContext) -> ClientCredentials:
        assert context.identity is not None
        return ClientCredentials(client_id="same", client_secret=context.identity.id)

    async with (
        serving(provider.answer) as url,
        imported(oauth("/token"), base_url=url, credentials={"key": find}) as registry,
    ):
        for who in ("ann", "ben", "ann"):
            await registry.execute("api.call", {}, OperationContext(identity=Identity(who, [])))

    assert provider.used == ["Bearer token1", "Bearer token2", "Bearer token1"]


async def test_a_password_is_not_sent_in_clear_text_if_the_scheme_hides_it(echo: Echo) -> None:
    echo.seen.clear()
    doc = secured({"type": "http", "scheme": "digest"})
    async with imported(doc, base_url=echo.url, credentials={"key": ("u", "p")}) as registry:
        with pytest.raises(CallError, match="digest"):
            await registry.execute("api.call", {})

    assert echo.seen == []


def test_a_credential_for_an_unknown_scheme_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    from_openapi(secured(BEARER), HTTPServiceConfig(namespace="api", credentials={"kye": "CANARY"}))
    assert "'kye' does not belong to a security scheme of the document (it has key)" in caplog.text
    assert "CANARY" not in caplog.text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"refresh_token": "r", "client_id": "i"}, RefreshToken(refresh_token="r", client_id="i")),
        (
            {"username": "u", "password": "p", "scopes": ["a"]},
            PasswordCredentials(username="u", password="p", scopes=("a",)),
        ),
        ({"username": "u", "password": "p"}, BasicCredential(username="u", password="p")),
        (("u", "p"), BasicCredential(username="u", password="p")),
    ],
)
def test_credentials_may_have_the_form_of_configuration_files(given: Any, expected: Any) -> None:
    assert credential_of(given) == expected


@pytest.mark.requirement("R05")
async def test_a_client_secret_is_not_sent_to_a_host_that_only_the_document_names(
    echo: Echo,
) -> None:
    echo.seen.clear()
    provider = Provider()
    async with serving(provider.answer) as url:
        stolen = oauth(f"{echo.url}/token")
        async with imported(stolen, base_url=url, credentials={"key": CLIENT}) as registry:
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {})
        assert caught.value.code == ErrorCode.EXECUTION_ERROR
        assert echo.seen == []

        configured = ClientCredentials(client_id="id", client_secret="s", token_url=f"{url}/token")
        async with imported(stolen, base_url=url, credentials={"key": configured}) as registry:
            await registry.execute("api.call", {})
    assert provider.used == ["Bearer token1"]


@pytest.mark.requirement("R05")
async def test_a_configured_token_endpoint_may_have_a_private_address(echo: Echo) -> None:
    """Only for tokens: the document cannot make the service send requests there."""
    echo.seen.clear()
    provider = Provider()
    async with serving(provider.answer) as api, serving(provider.answer) as url:
        configured = ClientCredentials(client_id="id", client_secret="s", token_url=f"{url}/token")
        doc = oauth(f"{echo.url}/token")
        async with imported(doc, base_url=api, credentials={"key": configured}) as registry:
            await registry.execute("api.call", {})
        assert provider.used == ["Bearer token1"]

        doc = {**doc, "servers": [{"url": f"{url}/token"}]}
        async with imported(doc, credentials={"key": configured}) as registry:
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {})
    assert caught.value.code == ErrorCode.ACCESS_DENIED
    assert (provider.used, echo.seen) == (["Bearer token1"], [])


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("CANARY", "HTTP 400."),
        ('{"error": "CANARY"}', "HTTP 400."),
        ('{"error": ["CANARY"]}', "HTTP 400."),
        ('{"error": "invalid_grant", "error_description": "CANARY"}', "(invalid_grant)"),
        ('{"error": "interaction_required"}', "(interaction_required)"),
    ],
)
async def test_a_rejection_by_the_provider_is_an_error_with_its_code_only(
    text: str, shown: str
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=400, text=text)

    async with (
        serving(refuse) as url,
        imported(oauth("/token"), base_url=url, credentials={"key": CLIENT}) as registry,
    ):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})

    # Not ACCESS_DENIED: the caller was not rejected.
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.EXECUTION_ERROR, False)
    assert shown in caught.value.message
    assert "CANARY" not in str(caught.value.to_wire())


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_provider_that_cannot_answer_now_is_unavailable(status: int) -> None:
    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async with (
        serving(fail) as url,
        imported(oauth("/token"), base_url=url, credentials={"key": CLIENT}, retries=0) as registry,
    ):
        with pytest.raises(CallError, match=f"responded with HTTP {status}") as caught:
            await registry.execute("api.call", {})

    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)


async def test_a_refresh_token_is_kept_while_the_provider_is_unavailable() -> None:
    provider = Provider(lifetime=0)
    provider.refreshes = True
    login = PasswordCredentials(username="u", password="p")
    async with (
        serving(provider.answer) as url,
        imported(
            oauth("/token", "password"), base_url=url, credentials={"key": login}, retries=0
        ) as registry,
    ):
        await registry.execute("api.call", {})
        provider.is_away = True
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
        provider.is_away = False
        await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE
    asked = [grant["grant_type"] for grant in provider.grants]
    assert asked == ["password", "refresh_token", "refresh_token"]


async def test_a_stream_is_opened_with_a_new_token_after_a_401() -> None:
    provider = Provider()
    provider.refused = {"Bearer token1"}
    doc = oauth("/token")
    content: dict[str, Any] = {"text/event-stream": {}}
    doc["paths"]["/thing"]["get"]["responses"]["200"]["content"] = content
    async with (
        serving(provider.answer) as url,
        imported(doc, base_url=url, credentials={"key": CLIENT}) as registry,
    ):
        assert [envelope.data async for envelope in registry.subscribe("api.call", {})] == [{}]

    assert provider.used == ["Bearer token1", "Bearer token2"]


@pytest.mark.parametrize("given", [{}, ("u", "p", "q")])
def test_an_invalid_credential_is_rejected(given: Any) -> None:
    with pytest.raises(ValueError, match=r"credential|login"):
        from_openapi(document(), HTTPServiceConfig(namespace="api", credentials={"key": given}))


def test_reprs_hold_no_secret() -> None:
    values = [
        HTTPAuth(type="bearer", token="CANARY"),
        BasicCredential(username="u", password="CANARY"),
        ClientCredentials(client_id="i", client_secret="CANARY", parameters={"a": "CANARY"}),
        PasswordCredentials(username="u", password="CANARY", client_secret="CANARY"),
        RefreshToken(refresh_token="CANARY"),
        TokenSource(cast("Any", None), RefreshToken(refresh_token="r"), {}, (), "", "CANARY"),
    ]
    assert "CANARY" not in repr(values)


def test_a_kind_of_auth_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(ValueError, match='Did you mean "apiKey"'):
        HTTPAuth(type="apikey", token="t")  # type: ignore[arg-type]


SHADOWS: list[tuple[dict[str, Any], Any, str]] = [
    ({"in": "query", "name": "filter", "style": "form", "explode": True}, {"api_key": "evil"}, "query"),
    ({"in": "query", "name": "filter", "style": "form", "explode": True}, {"API_KEY": "evil"}, "query"),
    ({"in": "query", "name": "filter", "style": "form", "explode": True}, {"api_key[]": "evil"}, "query"),
    ({"in": "query", "name": "filter", "style": "form", "explode": True}, {"api.key": "evil"}, "query"),
    ({"in": "query", "name": "filter", "style": "form", "explode": True}, {" api key": "evil"}, "query"),
    ({"in": "query", "name": "filter", "style": "form", "explode": True}, {"api[key": "evil"}, "query"),
    ({"in": "query", "name": "api_key", "style": "deepObject"}, {"x": "evil"}, "query"),
    ({"in": "query", "name": "API_KEY"}, "evil", "query"),
    ({"in": "query", "name": "q", "allowReserved": True}, "x;api_key=evil", "query"),
    ({"in": "cookie", "name": "prefs", "style": "form", "explode": True}, {"api_key": "evil"}, "cookie"),
    ({"in": "cookie", "name": "prefs", "style": "cookie", "explode": True}, {"api_key": "evil"}, "cookie"),
    ({"in": "header", "name": "api_key"}, "evil", "header"),
    ({"in": "header", "name": "Api.Key"}, "evil", "header"),
]  # fmt: skip


@pytest.mark.requirement("R02")
@pytest.mark.parametrize(("parameter", "value", "place"), SHADOWS)
async def test_an_argument_cannot_shadow_a_configured_credential(
    parameter: dict[str, Any], value: Any, place: str, echo: Echo
) -> None:
    echo.seen.clear()
    name = "Api-Key" if place == "header" else "api_key"
    kind = {"type": "object", "additionalProperties": True} if isinstance(value, dict) else {}
    doc = secured(
        {"type": "apiKey", "in": place, "name": name}, parameters=[{**parameter, "schema": kind}]
    )
    async with imported(doc, base_url=echo.url, credentials={"key": "genuine"}) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {parameter["name"]: value})
        await registry.execute("api.call", {})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert "genuine" not in str(caught.value.to_wire())
    assert len(echo.seen) == 1


@pytest.mark.requirement("R02")
async def test_arguments_add_cookies_to_a_configured_cookie_header_but_replace_none(
    echo: Echo,
) -> None:
    echo.seen.clear()
    doc = document(
        parameters=[
            {"in": "cookie", "name": "prefs", "schema": {"type": "object"}},
            {"in": "cookie", "name": "session", "schema": {"type": "string"}},
        ]
    )
    async with imported(doc, base_url=echo.url, headers={"cookie": "session=genuine"}) as registry:
        await registry.execute("api.call", {"prefs": {"a": 1}})
        for arguments in ({"prefs": {"session": "evil"}}, {"session": "evil"}):
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", arguments)
            assert caught.value.code == ErrorCode.VALIDATION_ERROR

    assert [seen.header("cookie") for seen in echo.seen] == ["session=genuine; a=1"]


@pytest.mark.requirement("R02")
async def test_arguments_replace_no_cookie_that_is_found_at_each_call(echo: Echo) -> None:
    echo.seen.clear()
    doc = document(parameters=[{"in": "cookie", "name": "prefs", "schema": {"type": "object"}}])
    cookie = {"Cookie": lambda context: "session=genuine"}
    async with imported(doc, base_url=echo.url, headers=cookie) as registry:
        await registry.execute("api.call", {"prefs": {"a": 1}})
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"prefs": {"session": "evil"}})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert [seen.header("cookie") for seen in echo.seen] == ["session=genuine; a=1"]


@pytest.mark.requirement("R02")
async def test_arguments_replace_nothing_in_the_query_of_the_base_url(echo: Echo) -> None:
    echo.seen.clear()
    doc = document(parameters=[{"in": "query", "name": "filter", "schema": {"type": "object"}}])
    async with imported(doc, base_url=f"{echo.url}?api_key=genuine") as registry:
        await registry.execute("api.call", {"filter": {"a": 1}})
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"filter": {"API_KEY": "evil"}})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert [seen.query for seen in echo.seen] == ["api_key=genuine&a=1"]


@pytest.mark.requirement("R02")
@pytest.mark.parametrize(
    "name", ["content_length", "X_Forwarded_For", "mcp_session_id", "Transfer.Encoding"]
)
async def test_a_reserved_header_in_another_spelling_is_not_an_argument(
    name: str, echo: Echo
) -> None:
    parameter = {"in": "header", "name": name, "schema": {"type": "string"}}
    async with imported(document(parameters=[parameter]), base_url=echo.url) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {name: "evil"})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
