"""Serve a registry as an HTTP API: one path per operation, streams, a gateway and an OpenAPI document.

    app = create_app(registry, identity=APIKeys.from_file("keys.json"))

Each caller sees only the operations that it may call. This package needs the `server` extra; JSON Web Tokens
(`operations.server.signin.tokens`) also need the `jwt` extra.
"""

from importlib.util import find_spec

from operations.base.errors import MissingExtraError

# The MCP SDK installs Starlette, but no HTTP parser.
if find_spec("starlette") is None or find_spec("httptools") is None:
    raise MissingExtraError("operations.server", extra="server")

from operations.front.config import JWTConfig, ListenConfig, ServerConfig
from operations.front.credentials import CredentialError
from operations.front.limits import Limits
from operations.server.app import create_app
from operations.server.signin.identity import (
    APIKeys,
    IdentityResolver,
    any_of,
    credential_resolver,
    hash_key,
    new_key,
)

__all__ = [
    "APIKeys",
    "CredentialError",
    "IdentityResolver",
    "JWTConfig",
    "Limits",
    "ListenConfig",
    "ServerConfig",
    "any_of",
    "create_app",
    "credential_resolver",
    "hash_key",
    "new_key",
]
