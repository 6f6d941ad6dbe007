"""A small OAuth authorization server for tests: registration, codes with PKCE, refresh tokens, signed access tokens."""

import base64
import hashlib
import json
import secrets
from time import time
from typing import Any
from urllib.parse import urlencode

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route


class AuthorizationServer:
    """Signs in every client as `user` with the requested scopes, without a prompt.

    Args:
        user: The user that signs in.
        lifetime: Seconds until an access token expires.
        scopes: The scopes that it grants at most.
    """

    def __init__(self, user: str = "ann", *, lifetime: int = 3600, scopes: str = "") -> None:
        self.user = user
        self.lifetime = lifetime
        self.scopes = set(scopes.split())
        self.url = ""
        """Its address; set by the server."""

        self.grants: list[str] = []
        """The grant types that were used, in order."""

        self.exchanged: list[dict[str, str]] = []
        """The forms of token exchanges."""

        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._codes: dict[str, dict[str, str]] = {}
        self._refresh_tokens: dict[str, dict[str, str]] = {}
        self.app = Starlette(
            routes=[
                Route("/.well-known/oauth-authorization-server", self._metadata),
                Route("/.well-known/openid-configuration", self._metadata),
                Route("/jwks", self._jwks),
                Route("/register", self._register, methods=["POST"]),
                Route("/authorize", self._authorize),
                Route("/token", self._token, methods=["POST"]),
            ]
        )

    def access_token(self, audience: str, scope: str = "", **claims: Any) -> str:
        """Return a signed access token."""
        now = int(time())
        claims = {
            "iss": self.url,
            "sub": self.user,
            "aud": audience,
            "scope": scope,
            "iat": now,
            "exp": now + self.lifetime,
            **claims,
        }
        return jwt.encode(claims, self._key, "RS256", headers={"kid": "1"})

    async def _metadata(self, request: Request) -> Response:
        return JSONResponse(
            {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "registration_endpoint": f"{self.url}/register",
                "jwks_uri": f"{self.url}/jwks",
                "response_types_supported": ["code"],
                "grant_types_supported": ["authorization_code", "refresh_token"],
                "code_challenge_methods_supported": ["S256"],
                "token_endpoint_auth_methods_supported": ["none", "client_secret_post"],
            }
        )

    async def _jwks(self, request: Request) -> Response:
        key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        return JSONResponse({"keys": [{**key, "kid": "1", "alg": "RS256", "use": "sig"}]})

    async def _register(self, request: Request) -> Response:
        fields = await request.json()
        client = {"client_id": secrets.token_hex(8), "token_endpoint_auth_method": "none"}
        return JSONResponse({**fields, **client}, status_code=201)

    async def _authorize(self, request: Request) -> Response:
        query = dict(request.query_params)
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_hex(16)
        self._codes[code] = query
        # A client may do without a state: PKCE protects the code.
        state = {"state": query["state"]} if "state" in query else {}
        answer = urlencode({"code": code, "iss": self.url, **state})
        return RedirectResponse(f"{query['redirect_uri']}?{answer}", status_code=302)

    async def _token(self, request: Request) -> Response:
        form = {name: str(value) for name, value in (await request.form()).items()}
        self.grants.append(form["grant_type"])
        if form["grant_type"] == "authorization_code":
            granted = self._codes.pop(form["code"], None)
            digest = hashlib.sha256(form["code_verifier"].encode()).digest()
            challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if granted is None or granted["code_challenge"] != challenge:
                return JSONResponse({"error": "invalid_grant"}, status_code=400)
        elif form["grant_type"] == "refresh_token":
            granted = self._refresh_tokens.pop(form["refresh_token"], None)
            if granted is None:
                return JSONResponse({"error": "invalid_grant"}, status_code=400)
        else:
            return self._issued(request, form)
        scope = self._granted(granted)
        refresh_token = secrets.token_hex(16)
        self._refresh_tokens[refresh_token] = granted
        audience = granted.get("resource") or granted.get("audience", "")
        return JSONResponse(
            {
                "access_token": self.access_token(audience, scope),
                "token_type": "Bearer",
                "expires_in": self.lifetime,
                "refresh_token": refresh_token,
                "scope": scope,
            }
        )

    def _granted(self, fields: dict[str, str]) -> str:
        return " ".join(sorted(self.scopes & set(fields.get("scope", "").split())))

    def _issued(self, request: Request, form: dict[str, str]) -> Response:
        """Return a token for a client itself, or in exchange for one of its user (RFC 8693)."""
        shown = request.headers.get("authorization", "").removeprefix("Basic ")
        client, _, secret = base64.b64decode(shown).decode().partition(":")
        if secret != "hub-secret":
            return JSONResponse({"error": "invalid_client"}, status_code=401)
        user = client
        if form["grant_type"] != "client_credentials":
            self.exchanged.append(form)
            try:
                user = jwt.decode(
                    form["subject_token"],
                    self._key.public_key(),
                    algorithms=["RS256"],
                    options={"verify_aud": False},
                )["sub"]
            except jwt.PyJWTError:
                return JSONResponse({"error": "invalid_grant"}, status_code=400)
        scope = self._granted(form)
        return JSONResponse(
            {
                "access_token": self.access_token(form["audience"], scope, sub=user),
                "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
                "token_type": "Bearer",
                "expires_in": self.lifetime,
            }
        )
