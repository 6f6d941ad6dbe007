"""The configuration of MCP servers, checked before any of them is started.

Rule 1: a server is started only from such a configuration, as a list of arguments, never through a shell.
Rule 2: `repr` shows no value that may contain secrets: arguments, environment, headers, queries.
Rule 3: this module does not import the MCP SDK, which is slow to import and needs the `mcp` extra.
"""

import logging
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from operations.base.files import expanded, home_folder, is_path, read_small
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_REQUEST_VALUES,
    MAX_RESPONSE_VALUES,
    JSONValueError,
    is_object,
    list_of,
    object_of,
    with_texts,
)
from operations.base.text import (
    enforce_durations,
    enforce_lists,
    names_a_secret,
    suggestion,
    without_secrets,
)
from operations.base.types import Count, JSONObject, Seconds
from operations.contract.access import AccessControl
from operations.contract.specs import (
    Descriptions,
    InputPolicy,
    OperationSpec,
    OutputPolicy,
    enforce_descriptions,
    enforce_policy,
)
from operations.io.proxies import ConnectionConfig
from operations.sources.credentials import CallerToken, TokenFunction

logger = logging.getLogger("operations.mcp")

Transport: TypeAlias = Literal["stdio", "http", "sse", "memory"]

AskHandler: TypeAlias = Callable[[JSONObject], Awaitable[JSONObject]]
"""Answers a question of a server: takes the parameters and returns the result, both as JSON of the protocol."""

PinPolicy: TypeAlias = Literal["off", "warn", "strict"]
"""The reaction to a changed definition: `off` ignores it, `warn` reports it, `strict` also rejects calls until you
accept it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPClientCredentials:
    """OAuth client credentials for one authorization server."""

    client_id: str
    """The id of the client."""

    client_secret: str = field(repr=False)
    """The secret of the client."""

    issuer: str
    """The authorization server that issued the credentials; they are sent only to this server."""

    scope: str | None = None
    """The scopes to ask for, separated by spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthLogin:
    """A person signs in through a browser once (`operations login`); the tokens are stored and refreshed."""

    scope: str | None = None
    """The scopes to request, separated by spaces; by default those that the server asks for."""

    client_id: str | None = None
    """The id of a client that is already registered; by default each sign-in registers a new client."""

    client_secret: str | None = field(default=None, repr=False)
    """The secret of that client."""

    redirect_port: int = 0
    """The local port for the redirect of the browser, as registered with the client; 0 selects a free port."""

    store: str | Path | None = None
    """The file that holds the tokens; by default one per server in the user's state folder."""


class RequestAuth(Protocol):
    """Signs requests, as any `httpx2.Auth` does."""

    def async_auth_flow(self, request: Any) -> AsyncGenerator[Any, Any]:
        """Yield the request, signed."""
        ...


Auth: TypeAlias = (
    str | Literal["oauth"] | TokenFunction | MCPClientCredentials | CallerToken | RequestAuth
)
"""A bearer token, a function that returns one for each request, OAuth credentials, or any `httpx2.Auth`.

`oauth` is a short form of `login=OAuthLogin()`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPClientConfig(ConnectionConfig):
    """The configuration of one MCP server: a `command` to start, a `url`, or a `server` object of this process.

    Raises:
        ValueError: If a field is not valid; the message names it.
    """

    command: str | None = None
    """The program to start; it serves MCP on its standard input and output."""

    args: Sequence[str] = ()
    """The arguments of the program."""

    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Environment variables, in addition to the few that a child process inherits (PATH, HOME and similar)."""

    cwd: str | Path | None = None
    """The folder to start the program in."""

    url: str | None = None
    """The address of a running server."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every request."""

    auth: Auth | None = field(default=None, repr=False)
    """The credential for the server: a bearer token, a token that depends on the caller, or OAuth credentials; `oauth`
    if a person signs in (`login`)."""

    login: OAuthLogin | None = None
    """A person signs in to the server through a browser, with `operations login`."""

    allowed_hosts: Collection[str] = ()
    """Hosts (`host`, `host:port` or an origin) that OAuth discovery may reach even at private addresses; others must be
    public."""

    server: Any = None
    """An `mcp.server.Server` or `MCPServer` to talk to in this process."""

    transport: Transport | None = None
    """None: `stdio` for a command, streamable `http` for a URL. `sse` is the transport of 2024."""

    version: str = "auto"
    """A protocol revision, or `auto`: the newest that both sides support."""

    connect_timeout: Seconds = 30
    """Seconds for starting, negotiating and the first listing."""

    timeout: Seconds | None = 60
    """Seconds for one call, unless its deadline is earlier. Each progress report restarts the timer, and the timer
    stops while the caller answers a question of the server. None for no limit."""

    max_timeout: Seconds | None = 600
    """Seconds for one call that keeps reporting progress. None for no limit."""

    answer_timeout: Seconds = 300
    """Seconds that a caller may take to answer all questions of one call."""

    per_caller: bool = False
    """Open one connection per caller. A server with a protocol revision before 2026-07-28 then sends its questions and
    log messages to the right caller when several callers use it concurrently."""

    reconnect_timeout: Seconds = 5
    """Seconds that calls wait for a lost server to reconnect; after that they fail at once."""

    shutdown_timeout: Seconds = 2
    """Seconds that a child process has to exit after its stdin is closed, before it is killed."""

    lazy: bool = False
    """Stop the server after its tools are listed, and start it again at the first call."""

    idle_timeout: Seconds | None = None
    """Seconds without a call after which the server is stopped until the next one. None: never."""

    allow: Collection[str] | None = None
    """Names or patterns (`read_*`) of the tools to import; None for all."""

    deny: Collection[str] = ()
    """Names or patterns of tools to exclude, even if `allow` includes them."""

    queries: Collection[str] = ()
    """Names or patterns of tools that you know to be read-only."""

    durable: Collection[str] | None = None
    """Names or patterns of tools whose calls are runs, if the registry keeps runs. A task of the server then survives
    this process. None: tools with `execution.taskSupport`, or all tools of a server with tasks that marks none."""

    extensions: Collection[str] | None = None
    """Extensions of the protocol that are declared to the server, besides tasks. None: MCP Apps and, on a connection of
    one caller (`per_caller`), those that its client declares. A list limits both."""

    baggage: bool = False
    """Send the W3C `baggage` in the `_meta` of a client's request to the server. It may contain data that a third party
    must not see."""

    trust_annotations: bool = False
    """Trust what the server declares about its tools: read-only, idempotent, exported contracts."""

    access: AccessControl | Callable[[OperationSpec], AccessControl] | None = None
    """The access rule of imported operations, or a function that returns a rule for each spec; None for no
    restriction."""

    namespace: str | None = None
    """The namespace of the operations; None for the name of the server."""

    output: OutputPolicy | None = None
    """The output policy of these operations; None for the policy of the registry."""

    input: InputPolicy | None = None
    """The input policy of these operations; None: `convert` for callers that are models, `strict` for all others."""

    exact_schemas: bool = True
    """List the output schemas of the tools to MCP clients as the server lists them. If not, they also accept any other
    result, and larger schemas are omitted (above 2 kB, or a share of 64 kB for all)."""

    descriptions: Descriptions = "full"
    """The descriptions of operations and arguments in lists of MCP tools: `full`, or `short` for the first
    sentences."""

    token_budget: Count | None = None
    """The tokens that the tools of this source should take in a list, estimated at four bytes each; `operations doctor`
    warns if they take more."""

    pin: PinPolicy = "warn"
    """The reaction to a changed tool definition: `off`, `warn` (report it) or `strict` (also reject calls until you
    accept it)."""

    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Accepted digests by name, from `client.pins`: the first listing is compared with them."""

    elicit: AskHandler | None = None
    """Answers the questions that the server asks a person; by default they are declined."""

    sample: AskHandler | None = None
    """Answers the server's sampling requests; by default they are declined."""

    log_level: str | None = None
    """The lowest level of log messages to request from the server."""

    secrets: Collection[str] = field(default=(), repr=False)
    """Texts to redact in reports, in addition to the values of `env` and `headers` that look like secrets."""

    max_message_bytes: Count = 16 * 1024 * 1024
    """The largest message accepted from the server, in bytes."""

    max_message_values: Count = MAX_RESPONSE_VALUES
    """The largest number of JSON values accepted in one message of the server."""

    concurrency: Count = 100
    """The number of concurrent calls. Further calls wait for a free slot, and fail with `RESOURCE_EXHAUSTED` if no call
    finishes for five seconds."""

    max_tools: Count = 10_000
    """The largest number of tools, resources, templates or prompts imported from one server; the rest is reported."""

    def __post_init__(self) -> None:
        enforce_lists(
            args=self.args,
            allow=self.allow,
            deny=self.deny,
            queries=self.queries,
            durable=self.durable,
            extensions=self.extensions,
            secrets=self.secrets,
            allowed_hosts=self.allowed_hosts,
        )
        enforce_durations(
            connect_timeout=self.connect_timeout,
            timeout=self.timeout,
            max_timeout=self.max_timeout,
            answer_timeout=self.answer_timeout,
            reconnect_timeout=self.reconnect_timeout,
            shutdown_timeout=self.shutdown_timeout,
            idle_timeout=self.idle_timeout,
        )
        enforce_policy(self.output, self.input)
        enforce_descriptions(self.descriptions)
        if self.auth == "oauth":
            object.__setattr__(self, "auth", None)
            object.__setattr__(self, "login", self.login or OAuthLogin())
        if self.login is not None and self.auth is not None:
            raise ValueError("login replaces auth: give one of them")
        if sum(target is not None for target in (self.command, self.url, self.server)) != 1:
            raise ValueError("an MCP server needs exactly one of command, url and server")
        if self.transport is not None and self.transport not in self._possible():
            raise ValueError(f"transport must be {' or '.join(self._possible())} for this server")
        if self.url is not None and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError("the url of an MCP server starts with http:// or https://")
        self.enforce_connection()
        for name, value in self.headers.items():
            if any(character in name + value for character in "\r\n\0"):
                raise ValueError("headers must not contain line breaks or NUL")
        started = (self.command or "", str(self.cwd or ""), *self.args)
        if any("\0" in text for text in (*started, *self.env, *self.env.values())):
            raise ValueError("command, args, env and cwd must not contain NUL")
        if any(not name or "=" in name for name in self.env):
            raise ValueError("the names in env must not be empty or contain =")

    def _possible(self) -> tuple[Transport, ...]:
        if self.command is not None:
            return ("stdio",)
        return ("http", "sse") if self.url is not None else ("memory",)

    @property
    def kind(self) -> Transport:
        """The configured transport, or the default for the kind of server."""
        return self.transport or self._possible()[0]

    @property
    def target(self) -> str:
        """The server's command or address, without secrets."""
        if self.command is not None:
            return Path(self.command).name
        if self.url is not None:
            return without_secrets(self.url)
        return type(self.server).__name__

    def guarded(self, spec: OperationSpec) -> OperationSpec:
        """Return `spec` with the configured access rule."""
        if self.access is None:
            return spec
        rule = self.access(spec) if callable(self.access) else self.access
        return msgspec.structs.replace(spec, access_control=rule)

    def __repr__(self) -> str:
        return f"<MCPClientConfig {self.kind} {self.target}>"

    @classmethod
    def from_entry(
        cls, entry: Mapping[str, Any], environ: Mapping[str, str] | None = None, **options: Any
    ) -> "MCPClientConfig":
        """Return the configuration for one entry of an `mcp.json`; `options` are fields that override it.

        `${NAME}`, `${env:NAME}` and `${NAME:-default}` are replaced by values from `environ` (by default the
        environment of the process). Reports show neither these values nor those of an `envFile`. `disabledTools`,
        `excludeTools`, `includeTools` and `enabledTools` of other clients select the imported tools. Other keys of
        those clients are ignored; none of them grants access. The fields of this class have the same effect as in
        Python, also in camelCase, except `timeout` and `version`, which have another meaning in other clients. Unknown
        keys are ignored with a warning (`unknown_keys`).

        Raises:
            ValueError: If a field is not valid or a variable is not set; the message names it.
        """
        variables = os.environ if environ is None else environ
        # An mcp.json holds none of these; a mapping in code may.
        objects = {name: entry[name] for name in _OBJECTS if not _is_json(entry.get(name))}
        entry = {key: value for key, value in entry.items() if key not in objects}
        if entry.get("access") is not None:
            # Ignoring it would open the operations to everyone.
            raise ValueError("'access' must be an AccessControl or a function")
        options = {**objects, **options}
        unknown = [f"{ascii(key)[1:-1]} {words}" for key, words in unknown_keys(entry).items()]
        for each in unknown:
            logger.warning("ignored in an MCP server's entry: %s", each)
        if not any(entry.get(key) for key in _TARGETS) and not options.keys() & _TARGETS:
            known = "it needs a command (a program to start) or a url (a running server)"
            raise ValueError(". ".join([known, *unknown]))
        fields = {**_entry_fields(entry, variables), **options}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from None


def _entry_fields(entry: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an `MCPClientConfig` that an entry sets, including the secrets in it.

    Raises:
        ValueError: As `MCPClientConfig.from_entry`.
    """
    fields: dict[str, Any] = {}
    secrets: list[str] = []
    for key, name in _ENTRY_FIELDS.items():
        if entry.get(key) is None:
            if name == "max_timeout" and key in entry:
                fields[name] = None
            continue
        value = _filled(entry[key], variables, secrets)
        if name == "env_file":
            # Read before `env`, whose values override it.
            fields["env"] = _read_env(value)
            secrets += filter(None, fields["env"].values())
            continue
        if name == "transport" and isinstance(value, str):
            if value not in _ENTRY_TRANSPORTS:
                raise ValueError(f"{value!r} is not a transport: use stdio, http or sse")
            value = _ENTRY_TRANSPORTS[value]
        try:
            given = msgspec.convert(value, _ENTRY_TYPES[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{key!r}: {error}") from None
        if name == "allow" and name in fields:
            raise ValueError(f"{key!r} has the same meaning as 'allow': use one of them")
        fields[name] = _merged(fields.get(name), given)
    return {**fields, "secrets": secrets}


def _merged(earlier: Any, given: Any) -> Any:
    """Return the values of two keys that set the same field, combined."""
    if isinstance(earlier, dict) and isinstance(given, dict):
        return {**cast("JSONObject", earlier), **cast("JSONObject", given)}
    if isinstance(earlier, list) and isinstance(given, list):
        return [*list_of(earlier), *list_of(given)]
    return given


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, list, Mapping))


_OBJECTS = ("access", "auth", "elicit", "login", "sample", "server")
"""Fields whose values are objects of Python."""

_FOREIGN = frozenset({
    "alwaysAllow", "authProviderType", "autoApprove", "autoStart", "description", "dev", "disabled", "enabled",
    "env_vars", "extensionName", "gallery", "icon", "id", "name", "note", "oauth", "source", "startup_timeout_sec",
    "timeout", "tool_timeout_sec", "tools", "trust", "version",
})  # fmt: skip
"""Keys of other tools, which are ignored without a warning."""

_OWN = [
    each.name
    for each in fields_of(MCPClientConfig)
    if each.name not in {*_OBJECTS, *_FOREIGN, "secrets", "transport"}
]

_ENTRY_FIELDS = {
    "envFile": "env_file",
    **{name: name for name in _OWN},
    **{re.sub("_(.)", lambda match: match[1].upper(), name): name for name in _OWN},
    "includeTools": "allow",
    "enabledTools": "allow",
    "excludeTools": "deny",
    "disabledTools": "deny",
    "serverUrl": "url",
    "httpUrl": "url",
    "type": "transport",
    "transport": "transport",
    "protocolVersion": "version",
}
"""The keys of an entry, and the field that each one sets."""

_ENTRY_TYPES: dict[str, Any] = {
    name: str if Path in get_args(hint) else hint
    for name, hint in get_type_hints(MCPClientConfig, include_extras=True).items()
}

_TARGETS = frozenset({"command", "url", "serverUrl", "httpUrl", "server"})


def unknown_keys(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the unknown keys of an `mcp.json` entry, each with the key that was probably meant."""
    return {
        key: f"is not a known key.{suggestion(key, _ENTRY_FIELDS)}"
        for key in entry
        if key not in _ENTRY_FIELDS
        and key not in _FOREIGN
        and not key.startswith(("_", "//", "x-"))
    }


_ENTRY_TRANSPORTS: dict[str, Transport] = {
    "stdio": "stdio",
    "local": "stdio",
    "http": "http",
    "remote": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "sse": "sse",
}

_REFERENCE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def _filled(value: Any, environ: Mapping[str, str], secrets: list[str]) -> Any:
    """Replace references to environment variables in `value`, at any depth, and add the values to `secrets`.

    Paths are settings, such as `${HOME}`, unless the name of the variable indicates a secret.
    """

    def variable(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = environ.get(name)
        if found is None and default is None:
            raise ValueError(f"the environment variable {name} is not set")
        if found and (names_a_secret(name) or not is_path(found)):
            secrets.append(found)
        return found or default or ""

    def filled(text: str) -> str:
        if "${input:" in text:
            raise ValueError(
                "${input:...} would ask a person, which is not supported: use ${env:NAME}"
            )
        return _REFERENCE.sub(variable, text)

    return with_texts(value, filled)


def read_servers(source: str | Path | Mapping[str, Any]) -> dict[str, JSONObject]:
    """Return the entries of an `mcp.json` by server name, without disabled servers.

    Accepts a file or its content: `{"mcpServers": {...}}`, `{"servers": {...}}`, `{"mcp": {"servers": {...}}}`, or
    only the object with the servers. Variables of editors, such as `${workspaceFolder}`, are replaced in a file.
    `MCPClientConfig.from_entry` resolves references to the environment later, so that a missing variable disables one
    server and not the whole file.

    Raises:
        ValueError: If the document has another form.
        OSError: If the file cannot be read.
    """
    document: Any = source
    folder = None
    if not isinstance(source, Mapping):
        folder = Path(source).absolute().parent
        document = decode_commented(read_small(Path(source)))
    for path in (("mcpServers",), ("mcp", "servers"), ("mcp", "mcpServers"), ("servers",)):
        inner: Any = document
        for key in path:
            inner = cast("JSONObject", inner).get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            document = cast("JSONObject", inner)
            break
    else:
        _enforce_wrapping(document)
    if not isinstance(document, Mapping):
        raise ValueError("an mcp.json is an object with mcpServers")  # noqa: TRY004 - a wrong document
    servers: dict[str, JSONObject] = {}
    for name, entry in cast("Mapping[str, Any]", document).items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"{name!r} is not an object")  # noqa: TRY004 - a wrong document
        entry = cast("JSONObject", entry)
        if entry.get("disabled") is not True and entry.get("enabled") is not False:
            servers[name] = dict(entry)
            if folder is not None:
                servers[name] = with_texts(dict(entry), partial(_in_editor, folder=folder))
                env_file = servers[name].get("envFile")
                if isinstance(env_file, str) and not env_file.startswith("${"):
                    servers[name]["envFile"] = str(folder / expanded(env_file))
    return servers


def _enforce_wrapping(document: Any) -> None:
    """Reject a document whose key for its servers is misspelled."""
    for key, entry in object_of(document).items():
        near, inner = suggestion(key, ("mcpServers", "servers")), object_of(entry).values()
        if near and inner and all(map(is_object, inner)):
            raise ValueError(f"{key!a} is not a known key.{near}")


_COMMENTS = re.compile(rb'("(?:[^"\\]|\\.)*")|//[^\r\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMAS = re.compile(rb'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
_PLACE = re.compile(r"\(byte (\d+)\)$|truncated$")


def decode_commented(text: bytes) -> Any:
    """Decode a JSON document that may contain comments and trailing commas, as editors write them.

    Raises:
        ValueError: If it has another form; the message names the line.
    """
    text = text.removeprefix(b"\xef\xbb\xbf")
    # Blanks in place of a comment keep the positions of the rest.
    plain = _COMMENTS.sub(lambda match: match[1] or re.sub(rb"[^\n]", b" ", match[0]), text)
    plain = _TRAILING_COMMAS.sub(lambda match: match[1] or b" ", plain)
    try:
        return decode_json(plain, max_values=MAX_REQUEST_VALUES)
    except JSONValueError as error:
        place = _PLACE.search(error.reason)
        if place is None:
            raise ValueError(f"the file {error.reason}") from None
        end = int(place[1]) if place[1] else len(plain.rstrip())
        line = plain.count(b"\n", 0, end) + 1
        raise ValueError(f"line {line} {error.reason}") from None


_EDITOR_VARIABLE = re.compile(
    r"\$\{(workspaceFolder|workspaceFolderBasename|userHome|pathSeparator|/)\}"
)


def _in_editor(text: str, folder: Path) -> str:
    """Replace the variables that VS Code and Cursor define in an `mcp.json` in `folder`."""
    workspace = folder.parent if folder.name in (".vscode", ".cursor") else folder
    values = {
        "workspaceFolder": str(workspace),
        "workspaceFolderBasename": workspace.name,
        "userHome": str(home_folder()),
    }
    return _EDITOR_VARIABLE.sub(lambda match: values.get(match[1], os.sep), text)


def _read_env(path: Any) -> dict[str, str]:
    """Return the variables in an env file: lines of `NAME=value`, the value with or without quotes.

    Raises:
        ValueError: If the file cannot be read or a line has another form.
    """
    try:
        lines = read_small(Path(path)).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError, TypeError):
        raise ValueError(f"envFile names no file that can be read: {path}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _ENV_LINE.fullmatch(line)
        if match is not None:
            value = match["quoted"] if match["quote"] else match["value"]
            found[match["name"]] = value
        elif line.strip() and not line.lstrip().startswith("#"):
            raise ValueError(f"line {number} of {path} is not NAME=value")
    return found


_ENV_LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*"""
    r"""(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<value>[^"'#\s](?:[^#]|(?<!\s)#)*?|))\s*(?:\s#.*)?"""
)
"""A line of an env file. Values are literal: references in them are not resolved."""
