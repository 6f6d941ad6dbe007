"""What a schema cannot say about a config: which keys go together, and which names are possible.

Rule 1: every check is about one table and gives `(path, message)` pairs; nothing here touches a network.
Rule 2: what a source needs and is not there is no mistake in the config: it costs the source, when that is opened.
"""

import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import TypeAlias
from urllib.parse import urlsplit

from operations._json import object_of
from operations._text import suggestion
from operations.config.derive import Builder, KeyFaultError, Secret, secrets_of
from operations.config.model import (
    AccessEntry,
    BrokerEntry,
    Config,
    Entry,
    JWTEntry,
    MCPEntry,
    OpenAPIEntry,
    ServeEntry,
    entries_of,
)
from operations.config.places import Path
from operations.types import JSONObject

Found: TypeAlias = Iterator[tuple[Path, str]]

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,128}")
_METHODS = ("GET", "PUT", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "QUERY")
_NATS = ("nats", "tls")
_BROKERS = ("redis", "rediss", *_NATS)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HMAC = ("HS256", "HS384", "HS512")
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
_SHORT = {"scopes": "access", "pages": "pagination", "token": "auth"}
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def check(config: Config, folder: FilePath) -> Found:
    """Everything that cannot work in `config`, whose relative paths start at `folder`."""
    for number, module in enumerate(config.modules):
        if not module:
            yield ("modules", number), "is empty. Name a package, a folder or a file."
    for path, secret in secrets_of(config):
        yield from _secret(secret, path)
    for path, entry in entries_of(config):
        faults = list(_entry(entry, path, config))
        yield from faults or _rejected(entry, path, folder)
    yield from _access(config.access, folder)
    yield from _serve(config.serve, config.access)


def _entry(entry: Entry, path: Path, config: Config) -> Found:
    for short, key in _SHORT.items():
        if getattr(entry, short, None) and key in entry.options:
            yield (*path, key), f"goes without {short}, which sets the same."
    match entry:
        case OpenAPIEntry():
            yield from _namespace(str(path[1]), path)
            yield from _openapi(entry, path)
        case MCPEntry():
            yield from _namespace(str(path[1]), path)
            if path[1] in config.openapi:
                yield path, f"has the same namespace as [openapi.{path[1]}]. Rename one of them."
            yield from _mcp(entry, path)
        case BrokerEntry():
            yield from _broker(entry, path)
            if entry.namespace in {*config.openapi, *config.mcp}:
                message = f"is the namespace of something else already: {entry.namespace}."
                yield (*path, "namespace"), message
        case _:
            pass


def _namespace(name: str, path: Path) -> Found:
    if not _NAMESPACE.fullmatch(name):
        yield path, "is no namespace: use letters, digits, '_' and '-'."


def _openapi(service: OpenAPIEntry, path: Path) -> Found:
    document, options = service.document, service.options
    if "://" in document:
        yield from _web_address(document, (*path, "document"))
    elif not document:
        yield (*path, "document"), "is empty. Name a file or an address."
    for key in ("base_url", "proxy"):
        if isinstance(options.get(key), str):
            yield from _web_address(options[key], (*path, key))
    yield from _headers(object_of(options.get("headers")), (*path, "headers"))
    for key in ("include", "exclude"):
        if key in options:
            yield from _selection(options[key], (*path, key))


def _rejected(entry: Entry, path: Path, folder: FilePath) -> Found:
    """Report what the library's own class rejects, with a stand-in for every secret."""
    secrets: set[str | int] = set()

    def reveal(secret: Secret, where: Path) -> str:
        for fault, message in _secret(secret, where):
            raise KeyFaultError(fault, message)
        secrets.add(where[len(path)])
        return "secret"

    target = entry.derived.load()
    try:
        fields = Builder(reveal, folder.joinpath).fields(target, entry.options, path)
        if isinstance(target, type):
            target(**fields, **({"namespace": path[1]} if isinstance(entry, OpenAPIEntry) else {}))
    except KeyFaultError as fault:
        yield fault.path, str(fault)
    except ValueError as error:
        key, _, rest = str(error).partition(" ")
        key = key.rstrip(":")
        if isinstance(error.__context__, OSError) or key in secrets:
            # A file that is missing costs the source; a secret is checked when it is read.
            return
        if key in entry.options:
            yield (*path, key), f"{rest}."
        else:
            yield path, f"cannot be used: {error}."


def _selection(selection: JSONObject, path: Path) -> Found:
    if not any(selection.values()):
        yield path, "selects nothing. Give tags, paths or methods."
    for number, method in enumerate(selection.get("methods", ())):
        if method.upper() not in _METHODS:
            near = suggestion(method.upper(), _METHODS)
            yield (*path, "methods", number), f"is no HTTP method.{near}"
    for number, pattern in enumerate(selection.get("paths", ())):
        if not pattern.startswith(("/", "*")):
            yield (*path, "paths", number), "must begin with '/' or '*'."


def _secret(secret: Secret, path: Path) -> Found:
    if (secret.env is None) == (secret.file is None):
        yield path, "needs exactly one of env and file."
    elif secret.env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", secret.env):
        yield (*path, "env"), "is no name of an environment variable. Is it the secret itself?"


def _headers(headers: JSONObject, path: Path) -> Found:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            yield (*path, name), "is no name of an HTTP header."
        if isinstance(value, str) and name.lower() in _SECRET_HEADERS:
            yield (
                (*path, name),
                'is a secret: write { env = "NAME" } or { file = "PATH" } instead of its value.',
            )


def _mcp(server: MCPEntry, path: Path) -> Found:
    options = server.options
    command, url = options.get("command"), options.get("url")
    for key in ("headers", "auth") if url is None else ("args", "env", "cwd"):
        if options.get(key):
            yield (*path, key), f"goes with {'url' if url is None else 'command'} only."
    if url is None and server.token is not None:
        yield (*path, "token"), "goes with url only."
    if command is not None and not command.strip():
        yield (*path, "command"), "is empty. Name a program."
    elif command is not None and " " in command and not FilePath(command).exists():
        yield (*path, "command"), "is one program, without its arguments: put those in args."
    if url is not None:
        yield from _web_address(url, (*path, "url"))
    yield from _headers(object_of(options.get("headers")), (*path, "headers"))


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


def _access(access: AccessEntry, folder: FilePath) -> Found:
    for name, entry in access.keys.items():
        path: Path = ("access", "keys", name)
        if (entry.key is None) == (entry.sha256 is None):
            yield path, "needs exactly one of key and sha256."
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
