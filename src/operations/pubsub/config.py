"""The options of connections to brokers, and the validation of addresses.

An address may contain a password. The libraries quote malformed addresses in errors, so they receive only valid ones.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import strerror
from pathlib import Path
from socket import gaierror
from ssl import SSLContext, SSLError, create_default_context
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit, urlunsplit

from operations.base.errors import TransportError
from operations.base.json.values import MAX_REQUEST_VALUES
from operations.base.text import enforce_lists
from operations.base.types import Count, Seconds
from operations.io.proxies import tls_reason

NOT_PRIVATE = (
    "the broker allows this client to access the mailboxes of others: set permissions as in docs/recipes,"
    " or connect without private=True"
)

NOT_PERMITTED = (
    "the broker's permissions do not allow it. They name the client that a user may be: connect with that name as "
    "client=, or add the missing permission, see Permissions in docs/calls.md"
)

ANY_CLIENT = "any"
"""The default name of clients."""

_CLIENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WORKER = re.compile(r"[0-9a-f]{32}")


def is_worker_in(space: str, address: str) -> bool:
    """Return whether an address in the space of control addresses is that of one worker, not of a group."""
    return address.startswith(space) and _WORKER.fullmatch(address, len(space)) is not None


def enforce_client(name: str) -> None:
    """Raise an error unless the name of a client is a single word in keys, channels and subjects.

    Raises:
        TransportError: If it is not, because it could be confused with the name of another client.
    """
    if _CLIENT.fullmatch(name) is None:
        raise TransportError(
            f"{name!r} cannot be the name of a client: it has up to 64 letters, digits, '_' and '-'"
        )


PING_INTERVAL = 5
"""Seconds between pings to a NATS server. After two pings without a response (15 s), the client connects to another
one."""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Settings of connections to every broker."""

    url: str = field(repr=False)

    password: str | None = field(default=None, repr=False, kw_only=True)
    """The password of the user."""

    prefix: str = field(kw_only=True)
    """The prefix of every key, channel or subject, so that several applications can share a broker."""

    client: str = field(default=ANY_CLIENT, kw_only=True)
    """The name of this client in the names of its queues and mailboxes, for the broker's permissions: letters, digits,
    `_` and `-` (see docs/calls.md)."""

    trusted: bool = field(default=False, kw_only=True)
    """Trust the `identity` inside events. Set this only if every client of the broker may act as any identity."""

    private: bool = field(default=False, kw_only=True)
    """Raise an error unless the broker's permissions block this client from the mailboxes and requests of other
    clients."""

    secret: str | bytes | None = field(default=None, repr=False, kw_only=True)
    """The secret that signs every message; unsigned messages are dropped. All clients of a prefix must use the same
    secret."""

    max_values: Count = field(default=MAX_REQUEST_VALUES, kw_only=True)
    """The largest number of JSON values in a message, in both directions. All clients should use the same limit."""

    connect_timeout: Seconds = field(default=5.0, kw_only=True)
    """The time limit in seconds for connecting, including the handshake. A broker that is starting or elects a leader
    is retried until then."""

    ca_file: str | Path | None = field(default=None, kw_only=True)
    """A file with the trusted certificate authorities for TLS, instead of the system's."""

    cert_file: str | Path | None = field(default=None, kw_only=True)
    """A file with the certificate of this client, for servers that require one."""

    key_file: str | Path | None = field(default=None, kw_only=True)
    """A file with the private key, if it is not in `cert_file`."""

    def enforce_files(self, *names: str) -> None:
        """Raise an error unless the files that these fields name exist. Libraries read some of them late, or never.

        Raises:
            TransportError: With the field and the file.
        """
        for name in names:
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise TransportError(f"{name}: there is no file {path}")

    def tls_context(self, password: str | None = None) -> SSLContext | None:
        """Return the context for TLS with the files of this config; None if it names none.

        Args:
            password: The password of an encrypted private key.

        Raises:
            TransportError: If a file cannot be used.
        """
        self.enforce_files("ca_file", "cert_file", "key_file")
        if self.ca_file is None and self.cert_file is None:
            return None
        try:
            context = create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file, password)
        except OSError as error:
            raise TransportError(f"the certificates cannot be read: {error}") from error
        return context


@dataclass(frozen=True, slots=True)
class RedisConfig(BrokerConfig):
    """A connection to Redis."""

    url: str = field(default="redis://127.0.0.1:6379", repr=False)
    """`redis://`, or `rediss://` for TLS; `redis+sentinel://host:26379,host:26379/mymaster` for a master that Sentinel
    manages; `redis+cluster://host:6379,host:6379` for a cluster, where the prefix determines the shard."""

    prefix: str = field(default="operations:", kw_only=True)

    max_bytes: Count = field(default=16 * 1024 * 1024, kw_only=True)
    """The largest message."""

    max_backlog: Count = field(default=100_000, kw_only=True)
    """The largest number of waiting requests of one client in a queue; further requests are rejected."""

    clients: Collection[str] = field(default=(ANY_CLIENT,), kw_only=True)
    """The clients whose requests a worker consumes. Each client has its own queue."""

    def __post_init__(self) -> None:
        enforce_lists(clients=self.clients)

    @property
    def tls_files(self) -> dict[str, str]:
        """The certificate files, as options of redis-py.

        Raises:
            TransportError: If a file cannot be used; redis-py would notice it only while it connects, without its name.
        """
        self.tls_context(*parse_qs(urlsplit(self.url).query).get("ssl_password", [])[:1])
        files = {
            "ssl_ca_certs": self.ca_file,
            "ssl_certfile": self.cert_file,
            "ssl_keyfile": self.key_file,
        }
        return {name: str(path) for name, path in files.items() if path is not None}

    @property
    def address(self) -> str:
        """The address including the password."""
        if self.password is None:
            return self.url
        parts = urlsplit(self.url)
        login = f"{parts.username or ''}:{quote(self.password, safe='')}"
        return urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}"))


@dataclass(frozen=True, slots=True)
class NatsConfig(BrokerConfig):
    """A connection to NATS."""

    url: str = field(default="nats://127.0.0.1:4222", repr=False)
    """`nats://`, `tls://` (requires TLS), `ws://` or `wss://`; several are separated by commas."""

    prefix: str = field(default="operations", kw_only=True)

    queue: Literal["core", "jetstream"] = field(default="core", kw_only=True)
    """Where requests wait: `core` sends them to workers that are connected; `jetstream` stores them until a worker
    starts them, also across restarts of workers and of the server. To switch to it, restart the workers first."""

    replicas: Count = field(default=1, kw_only=True)
    """The number of servers that store the requests in JetStream, if this client creates the stream: use 3 in a
    cluster."""

    user: str | None = field(default=None, kw_only=True)
    """The user, unless it is in `url`."""

    token: str | None = field(default=None, repr=False, kw_only=True)
    """The authentication token."""

    user_credentials: str | Path | None = field(default=None, kw_only=True)
    """A credentials file (JWT and seed)."""

    nkey_file: str | Path | None = field(default=None, kw_only=True)
    """A file with the seed of an nkey."""

    tls: SSLContext | None = field(default=None, kw_only=True)
    """The TLS context."""

    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, kw_only=True)
    """Further options for `nats.connect`, for example `ping_interval` in seconds."""

    @property
    def login(self) -> dict[str, Any]:
        """The configured options of `nats.connect`."""
        self.enforce_files("user_credentials", "nkey_file")
        user = self.user
        if self.password and not user:
            # A malformed address is rejected when the connection is opened, without quoting it.
            with suppress(ValueError):
                user = urlsplit(self.url.partition(",")[0]).username
        named: dict[str, Any] = {
            "name": f"operations-{self.client}",
            "ping_interval": PING_INTERVAL,
            "max_outstanding_pings": 2,
            "user": user,
            "password": self.password,
            "token": self.token,
            "user_credentials": self.user_credentials and str(self.user_credentials),
            "nkeys_seed": self.nkey_file and str(self.nkey_file),
            "tls": self.tls or self.tls_context(),
        }
        return {**{key: value for key, value in named.items() if value is not None}, **self.options}


def connect_failure(
    error: BaseException | None,
    authority: str = "ca_file",
    certificate: str = "cert_file and key_file",
    plain: str = "",
) -> str:
    """Return why a connection could not be opened, in the words of the operating system, and what to do.

    Errors of other kinds keep their text. The result is empty if the error has none, as most timeouts. The other
    arguments are those of `tls_reason`.
    """
    cause = error
    while cause is not None:
        if isinstance(cause, OSError) and not isinstance(cause, (SSLError, TimeoutError)):
            # The text of asyncio repeats the address; if a host has several, it contains the errors of all.
            numbers = re.findall(r"Errno (\d+)", str(cause)) or [cause.errno or 0]
            text = cause.strerror if isinstance(cause, gaierror) else strerror(int(numbers[0]))
            if text and cause.errno != 0 and int(numbers[0]):
                return f"{text[0].lower()}{text[1:]}; start the server, or check the address"
        cause = cause.__cause__ or cause.__context__
    return tls_reason(str(error or ""), authority, certificate, plain)


_CUT_OFF = re.compile("connection reset|closed by server|protocol error", re.IGNORECASE)
"""The failures of a connection that Redis does not accept: without TLS, or without a certificate."""


def redis_tls_hint(scheme: str, failure: str) -> str:
    """Return advice for a connection to Redis that failed, if the reason may be TLS."""
    if scheme == "rediss" and (not failure or "WRONG_VERSION_NUMBER" in failure):
        return "; if the port does not use TLS, write redis:// instead of rediss://"
    if scheme == "rediss" and _CUT_OFF.search(failure):
        # The connection may be lost before the reason arrives.
        return "; if the server requires a certificate of its clients, set cert_file and key_file"
    if scheme == "redis" and (not failure or _CUT_OFF.search(failure)):
        return "; if the port uses TLS, write rediss:// instead of redis://"
    return ""


def enforce_address(url: str, schemes: Collection[str], *, needs_host: bool = True) -> None:
    """Raise an error unless the library accepts `url`.

    Raises:
        TransportError: If it is not valid; the message gives the reason without quoting the address.
    """
    problem = _address_problem(url, schemes, needs_host)
    # Raised outside the `except` block, because the original exception quotes the address.
    if problem:
        raise TransportError(f"the address cannot be read: {problem}")


def _address_problem(url: str, schemes: Collection[str], needs_host: bool) -> str:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        return "its host is malformed"
    if parts.scheme not in schemes:
        return "it does not start with " + " or ".join(f"{scheme}://" for scheme in schemes)
    try:
        _ = parts.port
    except ValueError:
        return (
            "its port is not a number up to 65535; "
            "in a user name or password, / ? # @ : , are written %2F %3F %23 %40 %3A %2C"
        )
    if needs_host and not host:
        return "it names no host"
    try:
        unquote(parts.netloc, errors="strict")
    except UnicodeError:
        return "its user name or password is not UTF-8"
    return ""


_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}


class RedisAddress(NamedTuple):
    """A parsed address.

    Attributes:
        kind: `sentinel`, `cluster`, or empty for one server.
        url: The address of one server, for redis-py: the first one, with login and options.
        servers: Host and port of each Sentinel, or of each known node of the cluster.
        service: The name of the master, for Sentinel.
        sentinel_login: The user and password of the Sentinels, if they require a login.
    """

    kind: str
    url: str
    servers: list[tuple[str, int]]
    service: str
    sentinel_login: dict[str, str]


def read_redis_address(url: str) -> RedisAddress:
    """Parse an address of Redis.

    Raises:
        TransportError: If it is malformed.
    """
    scheme, _, kind = url.partition("://")[0].partition("+")
    if kind not in _DEFAULT_PORTS:
        enforce_address(url, ("redis", "rediss", "unix"), needs_host=False)
        return RedisAddress("", url, [], "", {})
    # Only the hosts are a list; a login may contain an encoded comma.
    netloc, slash, path = url.partition("://")[2].partition("/")
    login, at, hosts = netloc.rpartition("@")
    nodes: list[SplitResult] = []
    for host in hosts.split(","):
        node = f"{scheme}://{login}{at}{host}{slash}{path}"
        enforce_address(node, ("redis", "rediss"))
        nodes.append(urlsplit(node))
    servers = [(node.hostname or "", node.port or _DEFAULT_PORTS[kind]) for node in nodes]
    if kind == "cluster":
        return RedisAddress(kind, urlunsplit(nodes[0]), servers, "", {})
    return _sentinel_address(nodes[0], servers)


def _sentinel_address(parts: SplitResult, servers: list[tuple[str, int]]) -> RedisAddress:
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise TransportError(
            "the address cannot be read: it names no master: redis+sentinel://host:26379/mymaster"
        )
    given = parse_qs(parts.query)
    names = {"sentinel_username": "username", "sentinel_password": "password"}
    sentinel_login = {names[key]: values[0] for key, values in given.items() if key in names}
    query = "&".join(part for part in parts.query.split("&") if part.partition("=")[0] not in names)
    url = urlunsplit(parts._replace(path=f"/{database}" if database else "", query=query))
    return RedisAddress("sentinel", url, servers, service, sentinel_login)
