"""Identifying callers: keys, tokens, sessions, and errors of resolvers."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.requests import HTTPConnection
from tests.server.asgi import Client
from tests.servers import free_port

from operations import Identity, OperationContext, OperationRegistry
from operations.server import APIKeys, CredentialError, any_of, create_app, hash_key, new_key
from operations.server.signin.tokens import JWTs, default_identity

ISSUER, AUDIENCE = "https://issuer.example", "https://api.example"


def serving(identity: Any, **options: Any) -> Client:
    registry = OperationRegistry()

    @registry.operation("who.am", type="query")
    async def am(context: OperationContext) -> dict[str, Any]:
        who = context.identity
        return {"id": who.id, "scopes": sorted(who.scopes)} if who else {"id": None}

    @registry.operation("who.secret", type="query", scopes=["secret"])
    async def secret() -> str:
        return "42"

    @registry.operation("who.stream", scopes=["secret"])
    async def stream() -> Any:
        yield 42

    return Client(create_app(registry, identity=identity, **options))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("identity", [{"my key": Identity("alice")}, "my key", [None]], ids=str)
def test_an_identity_that_is_not_a_function_is_rejected_before_serving(identity: Any) -> None:
    with pytest.raises(TypeError, match=r"identity takes functions .*, such as APIKeys\("):
        serving(identity)


# ------------------------------------------------------------ failing closed


@pytest.mark.requirement("R08")
async def test_a_server_that_requires_credentials_and_knows_none_rejects_everything_but_probes() -> (
    None
):
    client = serving(None, anonymous=False, mcp=True, websocket=True)
    paths = ("/who/am", "/who/secret", "/search", "/schema?operation=who.am", "/openapi.json")
    for target in (*paths, "/metrics", "/mcp", "/operations", "/nothing/here"):
        for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT"):
            response = await client.request(method, target)
            assert response.status == 401, (method, target)
            assert "www-authenticate" in response.headers
    response = await client.post("/call", {"operation": "who.am"}, headers=bearer("anything"))
    assert response.status == 401
    assert (await client.get("/healthz")).status == 200


@pytest.mark.parametrize("console", [True, False])
async def test_paths_that_no_operation_can_have_are_not_found_without_a_credential(
    console: bool,
) -> None:
    client = serving(lambda _: None, anonymous=False, console=console)

    for target in ("/favicon.ico", "/.well-known/oauth-authorization-server"):
        assert (await client.get(target)).status == 404, target
    for target in ("/nothing", "/nothing/here"):
        assert (await client.get(target)).status == 401, target


async def test_no_scope_can_break_out_of_a_challenge() -> None:
    registry, scope = OperationRegistry(), 'a"b\\c\r\nset-cookie: é'

    @registry.operation("who.odd", type="query", scopes=[scope])
    async def odd() -> int:
        return 42

    app = create_app(registry, identity=lambda _: Identity("ann"), scopes_supported=[scope])
    response = await Client(app).get("/who/odd")
    challenge = 'Bearer error="insufficient_scope", scope="a\\"b\\\\cset-cookie: "'
    assert (response.status, response.headers["www-authenticate"]) == (403, challenge)


@pytest.mark.requirement("R08")
@pytest.mark.parametrize("fault", [RuntimeError("db down"), CredentialError("x"), KeyError("x")])
async def test_a_resolver_that_raises_rejects_everything_but_probes(fault: Exception) -> None:
    def resolve(connection: HTTPConnection) -> Identity | None:
        raise fault

    client = serving(resolve)

    for target in ("/who/am", "/search", "/schema?operation=who.am", "/openapi.json", "/metrics"):
        response = await client.get(target)
        assert (response.status, response.json["code"]) == (401, "ACCESS_DENIED"), target
        assert b"db down" not in response.body
    assert (await client.post("/call", json={"operation": "who.am"})).status == 401
    assert (await client.get("/healthz")).status == 200


@pytest.mark.requirement("R08")
@pytest.mark.parametrize("odd", ["alice", True, {"id": "alice"}, 7])
async def test_a_resolver_that_returns_another_type_rejects_the_request(odd: Any) -> None:
    assert (await serving(lambda _: odd).get("/who/am")).status == 401


async def test_resolvers_may_be_coroutine_functions_and_see_the_whole_request() -> None:
    async def by_certificate(connection: HTTPConnection) -> Identity | None:
        name = connection.headers.get("x-client-cn")
        return Identity(name) if name else None

    client = serving(by_certificate)

    assert (await client.get("/who/am", headers={"x-client-cn": "eve"})).json["id"] == "eve"
    assert (await client.get("/who/am")).json["id"] is None


@pytest.mark.parametrize(
    ("first", "second", "status", "who"),
    [
        (None, None, 200, None),
        (None, "b", 200, "b"),
        ("a", "b", 200, "a"),
        ("raise", "b", 200, "b"),
        ("raise", None, 401, None),
        (None, "raise", 401, None),
    ],
)
async def test_the_first_resolver_that_accepts_the_credential_is_used(
    first: str | None, second: str | None, status: int, who: str | None
) -> None:
    def saying(name: str | None) -> Any:
        def resolve(_: HTTPConnection) -> Identity | None:
            if name == "raise":
                raise CredentialError("not mine")
            return Identity(name) if name else None

        return resolve

    response = await serving([saying(first), saying(second)]).get("/who/am")

    assert response.status == status
    if status == 200:
        assert response.json["id"] == who
    assert any_of() is not None


# ------------------------------------------------------------ API keys


def test_keys_are_long_random_and_never_kept() -> None:
    keys = {new_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(len(key) >= 43 for key in keys)
    with pytest.raises(ValueError, match="not hashed") as caught:
        APIKeys({"my-plain-key": Identity("alice")})
    assert "my-plain-key" not in str(caught.value)


async def test_a_key_is_known_by_its_hash_from_a_table_or_a_function() -> None:
    async def find(digest: str) -> Identity | None:
        return Identity("alice") if digest == hash_key("k") else None

    for keys in (APIKeys({hash_key("k").upper(): Identity("alice")}), APIKeys(find)):
        client = serving(keys)
        assert (await client.get("/who/am", headers=bearer("k"))).json["id"] == "alice"
        assert (await client.get("/who/am", headers={"x-api-key": "k"})).json["id"] == "alice"
        assert (await client.get("/who/am", headers=bearer("K"))).status == 401
        assert (await client.get("/who/am", headers=bearer("k" * 5000))).status == 401
        assert (await client.get("/who/am?key=k&api_key=k")).status == 422


@pytest.mark.parametrize(
    ("sent", "status"),
    [("{key}", 401), ("Token {key}", 401), ("Bearer", 401), ("Bearer ", 401), ("Bearer {key}", 200),
     # A proxy may have checked it and passed it on.
     ("Basic dXNlcjpwYXNz", 200)],
)  # fmt: skip
async def test_a_key_without_its_scheme_is_rejected_with_advice(sent: str, status: int) -> None:
    key = new_key()
    client = serving(APIKeys({hash_key(key): Identity("ann", [])}))

    response = await client.get("/who/am", headers={"authorization": sent.format(key=key)})

    assert response.status == status
    if status == 401:
        assert "`Authorization: Bearer KEY`" in response.json["message"]


async def test_a_file_of_keys_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.server.signin.identity._LOOK_AGAIN", 0)
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({hash_key("old"): {"id": "alice", "scopes": ["secret"]}}))
    client = serving(APIKeys.from_file(path))
    assert (await client.get("/who/secret", headers=bearer("old"))).status == 200

    path.write_text(json.dumps({hash_key("renewed"): {"id": "alice", "scopes": ["secret"]}}))
    assert (await client.get("/who/secret", headers=bearer("old"))).status == 401
    assert (await client.get("/who/secret", headers=bearer("renewed"))).status == 200

    path.unlink()
    assert (await client.get("/who/secret", headers=bearer("renewed"))).status == 401
    with pytest.raises(OSError, match=r"keys\.json"):
        APIKeys.from_file(path)


@pytest.mark.requirement("R16")
async def test_no_credential_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = serving([APIKeys({hash_key("CANARY-k"): Identity("alice")}), tokens()])

    with caplog.at_level(logging.DEBUG):
        for credential in ("CANARY-k", "CANARY-wrong", token() + "CANARY", "CANARY.a.b"):
            await client.get("/who/am", headers=bearer(credential))
            await client.get("/who/am", headers={"x-api-key": credential})
            await client.get("/who/am", headers={"cookie": f"operations_session={credential}"})

    assert caplog.records
    assert "CANARY" not in caplog.text


# ------------------------------------------------------------ JSON Web Tokens

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = ec.generate_private_key(ec.SECP256R1())


def jwks(key: ec.EllipticCurvePrivateKey = KEY, kid: str = "one") -> dict[str, Any]:
    public = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {"keys": [{**public, "kid": kid, "use": "sig", "alg": "ES256"}]}


def tokens(**options: Any) -> JWTs:
    return JWTs(**{"issuer": ISSUER, "audience": AUDIENCE, "jwks": jwks(), **options})


def token(key: Any = KEY, kid: str = "one", algorithm: str = "ES256", **claims: Any) -> str:
    payload = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "alice",
        "exp": time.time() + 60,
        "scope": "secret other",
        **claims,
    }
    held = {name: value for name, value in payload.items() if value is not ...}
    return jwt.encode(held, key, algorithm, headers={"kid": kid})


def critical() -> str:
    """Return a token with an extension that its verifier must understand."""
    claims = jwt.decode(token(), options={"verify_signature": False})
    return jwt.encode(claims, KEY, "ES256", headers={"kid": "one", "crit": ["x"], "x": 1})


@pytest.mark.requirement("R23", "R51")
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (token, 200),
        (lambda: token(aud=["x", AUDIENCE]), 200),
        (lambda: token(exp=time.time() - 10), 200),  # within the leeway
        (lambda: token(aud=f"{AUDIENCE}/"), 200),
        (lambda: token(aud=f"{AUDIENCE}//"), 401),
        (lambda: token(aud=f"{AUDIENCE}/mcp"), 401),
        (lambda: token(aud="https://other.example"), 401),
        (lambda: token(aud=...), 401),
        (lambda: token(iss="https://evil.example"), 401),
        (lambda: token(iss=...), 401),
        (lambda: token(iss="https"), 401),
        (lambda: token(exp=time.time() - 3600), 401),
        (lambda: token(exp=...), 401),
        (lambda: token(nbf=time.time() + 3600), 401),
        (lambda: token(sub=...), 401),
        (lambda: token(sub=""), 401),
        (lambda: token(act={"sub": ""}), 401),
        (lambda: token(scope=7), 401),
        (lambda: token(key=OTHER_KEY), 401),
        (lambda: token(kid="two"), 401),
        (lambda: token(key="secret" * 10, algorithm="HS256"), 401),
        (lambda: token(key=None, algorithm="none"), 401),
        (lambda: token()[:-4] + "AAAA", 401),
        (critical, 401),
        (lambda: "not.a.token", 401),
        (lambda: "x" * 20_000, 401),
    ],
    ids=[
        "plain",
        "one of several audiences",
        "just expired",
        "the same address with a slash",
        "two slashes",
        "other path",
        "other audience",
        "no audience",
        "other issuer",
        "no issuer",
        "part of the issuer",
        "expired",
        "no expiry",
        "not yet",
        "no subject",
        "empty subject",
        "empty actor",
        "odd scope",
        "other key",
        "unknown key",
        "shared secret",
        "unsigned",
        "altered",
        "critical header",
        "no token",
        "too long",
    ],
)
async def test_a_token_is_valid_only_for_its_audience(sent: Any, status: int) -> None:
    response = await serving(tokens()).get("/who/secret", headers=bearer(sent()))

    assert response.status == status


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        (
            {"exp": -3600},
            "has expired. Get a new one; if it is new, the clock of its issuer differs.",
        ),
        ({"nbf": 3600}, "is not valid yet: the clock of its issuer differs."),
        ({"iat": 3600}, "is not valid yet: the clock of its issuer differs."),
    ],
)
async def test_the_error_of_a_token_names_different_clocks(
    claims: dict[str, int], reason: str
) -> None:
    given: dict[str, Any] = {name: time.time() + seconds for name, seconds in claims.items()}
    sent, forged = token(**given), token(key=OTHER_KEY, **given)

    response = await serving(tokens()).get("/who/secret", headers=bearer(sent))
    unknown = await serving(tokens()).get("/who/secret", headers=bearer(forged))

    assert response.json["message"] == f"The credential is not valid. It {reason}"
    assert unknown.json["message"] == "The credential is not valid"


async def test_an_identity_from_a_token_has_the_issuer_of_the_token() -> None:
    connection = HTTPConnection(
        {"type": "http", "headers": [(b"authorization", b"Bearer " + token().encode())]}
    )
    mine = JWTs(
        issuer=ISSUER, audience=AUDIENCE, jwks=jwks(), identity=lambda _: Identity("shared")
    )

    assert [
        (each.id, each.issuer)
        for each in [await tokens()(connection), await mine(connection)]
        if each
    ] == [
        ("alice", ISSUER),
        ("shared", ISSUER),
    ]


async def test_a_resolver_cannot_return_a_caller_without_an_id() -> None:
    response = await serving(lambda _: Identity("", ["secret"])).get("/who/secret")

    assert response.status == 401


async def test_claims_become_an_identity_by_default_or_by_a_function() -> None:
    claims: dict[str, Any] = {"scope": "a b", "scp": ["c"], "permissions": "d"}
    plain = await serving(tokens()).get("/who/am", headers=bearer(token(**claims)))
    own = serving(tokens(identity=lambda claims: Identity("x-" + claims["sub"], ["secret"])))

    assert plain.json == {"id": "alice", "scopes": ["a", "b", "c", "d"]}
    assert (await own.get("/who/am", headers=bearer(token()))).json["id"] == "x-alice"


def test_tokens_need_one_source_of_keys() -> None:
    for options in ({}, {"jwks": {"keys": []}, "secret": "x"}, {"jwks_url": "file:///etc/passwd"}):
        with pytest.raises((ValueError, jwt.PyJWTError)):
            JWTs(issuer=ISSUER, audience=AUDIENCE, **options)


@contextmanager
def issuer(publish: Callable[[], bytes], path: str = "/jwks") -> Generator[Client]:
    """Run an issuer that sends the result of `publish`; yield a client of a server that accepts its tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", "/jwks")
            self.end_headers()
            self.wfile.write(publish())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}{path}"
            yield serving(tokens(jwks=None, jwks_url=address))
        finally:
            server.shutdown()
            thread.join()


async def test_published_keys_are_fetched_once_for_unknown_ids() -> None:
    fetched: list[bytes] = []

    def publish() -> bytes:
        fetched.append(json.dumps(jwks()).encode())
        return fetched[-1]

    with issuer(publish) as client:
        responses = await asyncio.gather(
            *(client.get("/who/secret", headers=bearer(token(kid=k))) for k in ("one",) * 5),
            *(client.get("/who/secret", headers=bearer(token(kid=f"k{n}"))) for n in range(15)),
        )

    assert [response.status for response in responses] == [200] * 5 + [401] * 15
    assert len(fetched) == 1


@pytest.mark.requirement("R60")
@pytest.mark.parametrize("sent", [b"<h1>Down for maintenance</h1>", b'{"keys": []}', b'["x"]'])
async def test_tokens_are_not_wrong_while_the_keys_of_their_issuer_cannot_be_read(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = [sent]
    with issuer(lambda: published[-1]) as client:
        during = [await client.get("/who/secret", headers=bearer(token())) for _ in range(30)]
        published.append(json.dumps(jwks()).encode())
        monkeypatch.setattr("operations.server.signin.tokens._PAUSE", 0.0)
        after = await client.get("/who/secret", headers=bearer(token()))

    assert [response.status for response in during] == [503] * 30
    assert after.status == 200


async def test_keys_are_read_only_from_the_configured_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with issuer(json.dumps(jwks()).encode, "/moved") as client:
        assert (await client.get("/who/secret", headers=bearer(token()))).status == 503
    assert "cannot fetch the keys of an issuer at http://127.0.0.1:" in caplog.text


async def test_a_proxy_on_the_way_to_the_keys_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    monkeypatch.setenv("https_proxy", f"http://me:s3cret@127.0.0.1:{port}")
    client = serving(tokens(jwks=None, jwks_url="https://id.example.com/jwks"))

    assert (await client.get("/who/secret", headers=bearer(token()))).status == 503
    assert f"id.example.com/jwks: through the proxy http://127.0.0.1:{port}: " in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("pause", [0.0, 60.0], ids=["fetched again", "not fetched again"])
async def test_keys_that_could_not_be_fetched_for_a_day_are_not_used(
    pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = [json.dumps(jwks()).encode()]
    with issuer(lambda: published[-1]) as client:
        before = await client.get("/who/secret", headers=bearer(token()))
        published.append(b"down")
        monkeypatch.setattr("operations.server.signin.tokens._MAX_AGE", 0.0)
        monkeypatch.setattr("operations.server.signin.tokens._PAUSE", 0.0)
        monkeypatch.setattr("operations.server.signin.tokens._STALE_AGE", 0.0)
        at_once = await client.get("/who/secret", headers=bearer(token()))
        monkeypatch.setattr("operations.server.signin.tokens._PAUSE", pause)
        later = await client.get("/who/secret", headers=bearer(token()))

    assert [before.status, at_once.status, later.status] == [200, 503, 503]


async def test_a_slow_issuer_delays_only_tokens_with_an_unknown_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.server.signin.tokens._MAX_AGE", 0.0)
    monkeypatch.setattr("operations.server.signin.tokens._PAUSE", 0.0)
    fetched: list[bytes] = []
    release = Event()

    def publish() -> bytes:
        fetched.append(json.dumps(jwks()).encode())
        if len(fetched) > 1:
            release.wait(10)
        return fetched[-1]

    with issuer(publish) as client:

        async def status(kid: str) -> int:
            return (await client.get("/who/secret", headers=bearer(token(kid=kid)))).status

        try:
            assert await status("one") == 200
            unknown = asyncio.create_task(status("two"))
            # The keys are old, and the second fetch hangs: known keys are used meanwhile.
            assert [await status("one") for _ in range(3)] == [200] * 3
            assert not unknown.done()
            release.set()
            assert await unknown == 401
        finally:
            release.set()

    assert len(fetched) <= 3, "one fetch at a time"


# ------------------------------------------------------------ sessions


async def test_signing_in_sets_a_cookie_that_scripts_and_other_sites_cannot_use() -> None:
    client = serving(APIKeys({hash_key("k"): Identity("alice", ["secret"])}))
    assert (await client.post("/session")).status == 401

    signed_in = await client.post("/session", headers=bearer("k"))
    cookie = signed_in.headers["set-cookie"]
    sent = {"cookie": cookie.partition(";")[0]}

    assert signed_in.json == {"identity": {"id": "alice", "scopes": ["secret"]}}
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {p.strip() for p in cookie.split(";")}
    assert "k" not in sent["cookie"].partition("=")[2][:1] or len(sent["cookie"]) > 50
    assert (await client.get("/session", headers=sent)).json["identity"]["id"] == "alice"
    assert (await client.get("/who/secret", headers=sent)).status == 200
    assert (await client.get("/who/stream", headers=sent)).status == 200

    signed_out = await client.request("DELETE", "/session", headers=sent)
    assert "Max-Age=0" in signed_out.headers["set-cookie"]
    assert (await client.get("/who/secret", headers=sent)).status == 401


@pytest.mark.parametrize("console", [False, True])
async def test_sessions_end_after_a_time(console: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serving(APIKeys({hash_key("k"): Identity("alice", ["secret"])}), console=console)
    signed_in = await client.post("/session", headers=bearer("k"))
    sent = {"cookie": signed_in.headers["set-cookie"].partition(";")[0]}
    now = time.monotonic()

    assert (await client.get("/who/none", headers=sent)).status == 404
    monkeypatch.setattr("operations.server.signin.identity.monotonic", lambda: now + 9 * 3600)

    assert (await client.get("/who/secret", headers=sent)).status == 401
    assert (await client.get("/who/none", headers=sent)).status == 401
    assert (await client.get("/who/none", headers={"cookie": "other=1"})).status == 404
    assert not console or (await client.get("/", headers=sent)).status == 200


async def test_a_session_cannot_open_another_session() -> None:
    client = serving(APIKeys({hash_key("k"): Identity("alice")}))
    signed_in = await client.post("/session", headers=bearer("k"))
    cookie = {"cookie": signed_in.headers["set-cookie"].partition(";")[0]}

    response = await client.post("/session", headers=cookie)

    assert response.status == 403
    assert "set-cookie" not in response.headers


async def test_the_cookie_of_an_invented_session_is_rejected() -> None:
    client = serving(APIKeys({}))

    response = await client.get("/who/am", headers={"cookie": "operations_session_80=guess"})

    assert response.status == 401


def test_the_act_claim_of_a_token_becomes_acting() -> None:
    claims = {"sub": "alice", "act": {"sub": "sub-agent", "act": {"sub": "agent"}}}
    assert default_identity(claims).acting == ("agent", "sub-agent")
    with pytest.raises(KeyError):
        default_identity({"sub": "alice", "act": {}})
