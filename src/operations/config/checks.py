"""What a schema cannot say about a config: which keys go together, and which names are possible.

Rule 1: every check is about one table and gives `(path, message)` pairs; nothing here touches a network.
Rule 2: what a source needs and is not there is no mistake in the config: it costs the source, when that is opened.
"""

import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import TypeAlias
from urllib.parse import urlsplit

from operations._words import suggestion
from operations.config.model import (
    AccessEntry,
    BrokerEntry,
    Config,
    Credential,
    JWTEntry,
    MCPEntry,
    OpenAPIEntry,
    Secret,
    Selection,
    ServeEntry,
)
from operations.config.places import Path

Found: TypeAlias = Iterator[tuple[Path, str]]

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,128}")
_METHODS = ("GET", "PUT", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "QUERY")
_NATS = ("nats", "tls")
_BROKERS = ("redis", "rediss", *_NATS)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HMAC = ("HS256", "HS384", "HS512")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def check(config: Config, folder: FilePath) -> Found:
    """Everything that cannot work in `config`, whose relative paths start at `folder`."""
    for number, module in enumerate(config.modules):
        if not module:
            yield ("modules", number), "is empty. Name a package, a folder or a file."
    for name, service in config.openapi.items():
        yield from _namespace(name, ("openapi", name))
        yield from _openapi(service, ("openapi", name))
    for name, server in config.mcp.items():
        yield from _namespace(name, ("mcp", name))
        if name in config.openapi:
            yield ("mcp", name), f"has the same namespace as [openapi.{name}]. Rename one of them."
        yield from _mcp(server, ("mcp", name))
    for name, broker in config.brokers.items():
        yield from _broker(broker, ("brokers", name))
        if broker.namespace in {*config.openapi, *config.mcp}:
            message = f"is the namespace of something else already: {broker.namespace}."
            yield ("brokers", name, "namespace"), message
    yield from _access(config.access, folder)
    yield from _serve(config.serve, config.access)


def _namespace(name: str, path: Path) -> Found:
    if not _NAMESPACE.fullmatch(name):
        yield path, "is no namespace: use letters, digits, '_' and '-'."


def _openapi(service: OpenAPIEntry, path: Path) -> Found:
    document = service.document
    if "://" in document:
        yield from _web_address(document, (*path, "document"))
    elif not document:
        yield (*path, "document"), "is empty. Name a file or an address."
    if service.base_url is not None:
        yield from _web_address(service.base_url, (*path, "base_url"))
    if service.auth is not None:
        yield from _secret(service.auth.token, (*path, "auth", "token"))
        if service.auth.type != "apiKey" and service.auth.header_name is not None:
            yield (*path, "auth", "header_name"), 'goes with type = "apiKey" only.'
    for name, credential in service.credentials.items():
        yield from _credential(credential, (*path, "credentials", name))
    yield from _headers(service.headers, (*path, "headers"))
    for key, selection in (("include", service.include), ("exclude", service.exclude)):
        if selection is not None:
            yield from _selection(selection, (*path, key))


def _selection(selection: Selection, path: Path) -> Found:
    if not (selection.tags or selection.paths or selection.methods):
        yield path, "selects nothing. Give tags, paths or methods."
    for number, method in enumerate(selection.methods):
        if method.upper() not in _METHODS:
            near = suggestion(method.upper(), _METHODS)
            yield (*path, "methods", number), f"is no HTTP method.{near}"
    for number, pattern in enumerate(selection.paths):
        if not pattern.startswith(("/", "*")):
            yield (*path, "paths", number), "must begin with '/' or '*'."


def _credential(credential: Credential, path: Path) -> Found:
    kinds = [
        name
        for name in ("env", "file", "username", "client_id")
        if getattr(credential, name) is not None
    ]
    if len(kinds) != 1:
        yield path, "needs exactly one of env, file, username and client_id."
    pairs = (
        ("password", "username"),
        ("client_secret", "client_id"),
        ("refresh_token", "client_id"),
        ("token_url", "client_id"),
    )
    for key, partner in pairs:
        if getattr(credential, key) is not None and getattr(credential, partner) is None:
            yield (*path, key), f"goes with {partner}, which is missing."
    if credential.client_id is not None and not (
        credential.client_secret or credential.refresh_token
    ):
        yield (*path, "client_secret"), "is missing. It, or a refresh_token, goes with client_id."
    for key, secret in (
        ("password", credential.password),
        ("client_secret", credential.client_secret),
        ("refresh_token", credential.refresh_token),
    ):
        if secret is not None:
            yield from _secret(secret, (*path, key))


def _secret(secret: Secret, path: Path) -> Found:
    if (secret.env is None) == (secret.file is None):
        yield path, "needs exactly one of env and file."
    elif secret.env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", secret.env):
        yield (*path, "env"), "is no name of an environment variable. Is it the secret itself?"


def _headers(headers: dict[str, str | Secret], path: Path) -> Found:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            yield (*path, name), "is no name of an HTTP header."
        if isinstance(value, Secret):
            yield from _secret(value, (*path, name))
        elif any(character in value for character in "\r\n\0"):
            yield (*path, name), "has a line break in its value."
        elif name.lower() in {"authorization", "cookie", "proxy-authorization", "x-api-key"}:
            yield (
                (*path, name),
                'is a secret: write { env = "NAME" } or { file = "PATH" } instead of its value.',
            )


def _mcp(server: MCPEntry, path: Path) -> Found:
    if (server.command is None) == (server.url is None):
        yield path, "needs exactly one of command (a program to start) and url (a running server)."
        return
    for_commands, for_urls = ("args", "env", "cwd"), ("headers", "token")
    for key in for_urls if server.command is not None else for_commands:
        if getattr(server, key):
            partner = "url" if server.command is not None else "command"
            yield (*path, key), f"goes with {partner} only."
    if server.command is not None:
        if not server.command.strip():
            yield (*path, "command"), "is empty. Name a program."
        elif " " in server.command and not FilePath(server.command).exists():
            yield (*path, "command"), "is one program, without its arguments: put those in args."
        if server.transport not in {None, "stdio"}:
            yield (*path, "transport"), "must be stdio for a command."
    elif server.url is not None:
        yield from _web_address(server.url, (*path, "url"))
        if server.transport == "stdio":
            yield (*path, "transport"), "must be http or sse for a url."
    for name, value in server.env.items():
        if isinstance(value, Secret):
            yield from _secret(value, (*path, "env", name))
    yield from _headers(server.headers, (*path, "headers"))
    if server.token is not None:
        yield from _secret(server.token, (*path, "token"))


def _broker(broker: BrokerEntry, path: Path) -> Found:
    parts = urlsplit(broker.url)
    if parts.scheme not in _BROKERS or not parts.hostname:
        yield (*path, "url"), "must be an address such as redis://host:6379 or nats://host:4222."
    elif parts.password:
        yield (*path, "url"), 'holds a password: put it into password = { env = "NAME" }.'
    if broker.durable and parts.scheme not in _NATS:
        yield (*path, "durable"), "goes with NATS only."
    if broker.client is not None and not _NAMESPACE.fullmatch(broker.client):
        yield (*path, "client"), "must be one word of letters, digits, '_' and '-'."
    if broker.namespace is not None:
        yield from _namespace(broker.namespace, (*path, "namespace"))
    for key in ("password", "credential", "secret"):
        secret: Secret | None = getattr(broker, key)
        if secret is not None:
            yield from _secret(secret, (*path, key))


def _access(access: AccessEntry, folder: FilePath) -> Found:
    for name, entry in access.keys.items():
        path: Path = ("access", "keys", name)
        if (entry.key is None) == (entry.sha256 is None):
            yield path, "needs exactly one of key and sha256."
        elif entry.key is not None:
            yield from _secret(entry.key, (*path, "key"))
        for resource in entry.resources:
            if ":" not in resource:
                yield (*path, "resources", resource), 'must be "type:id", or "type:*" for all.'
    if access.jwt is not None:
        yield from _jwt(access.jwt, folder, ("access", "jwt"))


def _jwt(jwt: JWTEntry, folder: FilePath, path: Path) -> Found:
    given = [key for key in ("jwks_url", "public_key", "secret") if getattr(jwt, key) is not None]
    if len(given) != 1:
        yield path, "needs exactly one of jwks_url, public_key and secret."
    if jwt.jwks_url is not None:
        yield from _web_address(jwt.jwks_url, (*path, "jwks_url"))
    if jwt.public_key is not None and not (folder / jwt.public_key).is_file():
        yield (*path, "public_key"), f"names no file: there is no {jwt.public_key}."
    if jwt.secret is not None:
        yield from _secret(jwt.secret, (*path, "secret"))
    if any(algorithm.lower() == "none" for algorithm in jwt.algorithms):
        yield (*path, "algorithms"), 'must not hold "none": such a token is signed by nobody.'
    elif (jwt.secret is not None) != all(name in _HMAC for name in jwt.algorithms):
        yield (
            (*path, "algorithms"),
            "does not go with the key: HS256 and its like go with secret, all others with public keys.",
        )


def _serve(serve: ServeEntry, access: AccessEntry) -> Found:
    guarded = access.keys or access.jwt is not None or serve.public
    if serve.host not in _LOOPBACK and not guarded:
        yield (
            ("serve", "host"),
            "lets other machines in, and nobody has to sign in: add [access.keys.NAME], or public = true.",
        )
    if not serve.doors:
        yield ("serve", "doors"), "is empty. Leave it out for all doors."
    for number, origin in enumerate(serve.allowed_origins):
        parts = urlsplit(origin)
        if origin == "*" or parts.scheme not in {"http", "https"} or parts.path or not parts.netloc:
            yield (
                ("serve", "allowed_origins", number),
                "must be an origin such as https://example.com, without a path.",
            )


def _web_address(url: str, path: Path) -> Found:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        yield path, "is no address."
        return
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        yield path, "must be an address that begins with http:// or https://."
    elif parts.username or parts.password:
        yield path, "holds a login: put it into auth or headers."
