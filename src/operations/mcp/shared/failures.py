"""Failures of a server: errors of requests for callers, and errors of its start with a report for operators.

Rule 1: a failure records whether the request may have run. Only a request that certainly did not run, or that is safe
        to repeat, is retried.
Rule 2: errors that our own transports detect pass through the SDK as JSON-RPC errors, marked with a random number that
        servers do not know. So a server cannot pretend that a request never reached it.
Rule 3: the report (`str` of a `StartError`) shows the command, its folder, its exit code, its output and advice.
        Callers see only the message and details of the error, which contain none of these.
Rule 4: the token and values from the environment or a secret file are secrets. So are values of `headers` and `env`
        whose name indicates a secret, or that are too long for a setting and, in `env`, no paths or URLs. Of a URL,
        the password, the query and long random parts of the path are secrets. An argument is shown, unless the option
        before it, or its own name, indicates a secret. The output of a server passes through the redactor as well.
"""

import logging
import os
import re
import shlex
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from inspect import getfile
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import quote, unquote, unquote_plus

import anyio
import httpx2
import msgspec
from mcp import MCPError
from mcp_types import CONNECTION_CLOSED, PARSE_ERROR, REQUEST_TIMEOUT, JSONRPCError
from pydantic import ValidationError

from operations.base.errors import CallError, ErrorCode, timeout_error
from operations.base.files import is_path
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_REQUEST_VALUES,
    JSONValueError,
    is_list,
    is_object,
    object_of,
)
from operations.base.logs import LogThrottle
from operations.base.redaction import HIDDEN, SHORTEST, Redactor, parts_of
from operations.base.text import names_a_secret, printable, without_secrets
from operations.base.types import JSONObject
from operations.io.proxies import PROXY_LOGIN
from operations.mcp.config import MCPClientConfig, MCPClientCredentials

Kind: TypeAlias = Literal[
    "unreachable", "closed", "session", "lost", "too_large", "status", "malformed", "credential"
]

_SEAL = token_hex(16)

_BODY_BYTES = 4096
"""The largest part of an error body for the caller, in bytes."""

_WHO_ASKS = frozenset({401, 403})

_TOO_LONG = re.compile(r"event exceeded the \d+ byte limit")
"""The SDK's message for an event that its own reader rejected."""

# The SDK reports a lost connection and a timeout with codes that servers use for errors of their own.
_LOST = re.compile(r"Connection closed|SSE stream (failed|ended)")
_UNREADABLE = re.compile(r"Failed to parse (JSON response|SSE message): ")
_LATE = re.compile(r"timed out", re.IGNORECASE)


@dataclass(slots=True)
class Failure:
    """The reason why a request has no result."""

    error: CallError
    """The error for the caller."""

    unsent: bool = False
    """Whether the request certainly did not run."""

    broken: bool = False
    """Whether the connection can no longer be used."""


def seal(kind: Kind, message: str, **details: Any) -> JSONObject:
    """Return a JSON-RPC error object for a failure that our transport detected."""
    data = {"seal": _SEAL, "kind": kind, "details": details}
    return {"code": CONNECTION_CLOSED, "message": message, "data": data}


def sealed(kind: Kind, message: str, **details: Any) -> MCPError:
    """Return the error of `seal` as an exception."""
    return MCPError(**seal(kind, message, **details))


def read_failure(error: Exception, server: str, redactor: Redactor) -> Failure:
    """Return the failure for an error of the SDK during a request to `server`, with secrets redacted."""
    failure = _read(error, server)
    found = failure.error
    failure.error = CallError(
        found.code,
        redactor.redact(found.message),
        redactor.redact_all(found.details),
        retryable=found.retryable,
    )
    return failure


def _read(error: Exception, server: str) -> Failure:
    if isinstance(error, MCPError):
        return _of_protocol(error, server)
    if isinstance(error, ValidationError):
        return _malformed(server)
    if isinstance(error, httpx2.HTTPStatusError):
        status = error.response.status_code
        message = f"{server} answered with HTTP status {status}"
        found = CallError(ErrorCode.UNAVAILABLE, message, {"statusCode": status})
    else:
        message = f"{server} cannot be reached: {type(error).__name__}"
        found = CallError(ErrorCode.UNAVAILABLE, message)
    return Failure(found, broken=True)


def _malformed(server: str) -> Failure:
    message = f"{server} sent a response that the protocol does not allow"
    return Failure(CallError(ErrorCode.EXECUTION_ERROR, message))


def _of_protocol(error: MCPError, server: str) -> Failure:
    data: Any = error.data
    if object_of(data).get("seal") == _SEAL:
        return _of_transport(error.message, data, server)
    if error.code == CONNECTION_CLOSED and _TOO_LONG.search(error.message):
        message = f"{server} answered with too large an event"
        return Failure(CallError(ErrorCode.RESOURCE_EXHAUSTED, message))
    if error.code == CONNECTION_CLOSED and _LOST.match(error.message):
        message = f"the connection to {server} was lost during the call"
        return Failure(CallError(ErrorCode.UNAVAILABLE, message))
    if error.code == PARSE_ERROR and _UNREADABLE.match(error.message):
        return _malformed(server)
    details: JSONObject = {"code": error.code, "message": error.message}
    if data is not None:
        details["data"] = data
    if error.code == REQUEST_TIMEOUT and _LATE.search(error.message):
        late = timeout_error(f"{server} did not answer in time")
        late.details.update(details)
        return Failure(late)
    return Failure(CallError(ErrorCode.EXECUTION_ERROR, f"{server}: {error.message}", details))


_CODES: dict[Kind, ErrorCode] = {
    "too_large": ErrorCode.RESOURCE_EXHAUSTED,
    "status": ErrorCode.EXECUTION_ERROR,
    "malformed": ErrorCode.EXECUTION_ERROR,
}
"""The codes of failures after which the server is still available."""


def _of_transport(message: str, data: JSONObject, server: str) -> Failure:
    kind: Kind = data["kind"]
    details: JSONObject = data["details"]
    if kind == "credential":
        return Failure(CallError(details["code"], message, retryable=details["retryable"]))
    code = _CODES.get(kind, ErrorCode.UNAVAILABLE)
    return Failure(
        CallError(code, f"{server} {message}", details or None),
        unsent=kind in ("unreachable", "closed", "session"),
        # After a failed HTTP request the next one may succeed, but not after the session was lost.
        broken=kind in ("closed", "session"),
    )


def refusal(
    status: int, content_type: str, body: bytes, redactor: Redactor, *, had_session: bool
) -> JSONObject:
    """Return the JSON-RPC error for an HTTP error status.

    A JSON-RPC error in the body is returned, unless the status rejects the caller: then only the status determines the
    error. Without a JSON-RPC error, the result has the status and the beginning of the body.
    """
    if had_session and (status == 404 or (status == 400 and b"session" in body.lower())):
        return seal("session", "no longer has this session")
    if content_type.startswith("application/json") and status not in _WHO_ASKS:
        error = _rpc_error(body)
        if error is not None:
            return error
    # Redact before truncating, because a truncated secret would not be recognised.
    text = redactor.redact(body.decode("utf-8", "replace"))[:_BODY_BYTES]
    message = f"answered with HTTP status {status}"
    if status in (502, 503, 504):
        return seal("lost", message, statusCode=status)
    return seal("status", message, statusCode=status, body=text)


def _rpc_error(body: bytes) -> JSONObject | None:
    """Return the error in a body that is a JSON-RPC error."""
    with suppress(JSONValueError, ValidationError):
        value: Any = decode_json(body, max_values=MAX_REQUEST_VALUES)
        error = JSONRPCError.model_validate(value).error
        return {"code": error.code, "message": error.message, "data": error.data}
    return None


class _Answer(msgspec.Struct):
    """The parts of a message that identify its request; the rest is not decoded."""

    id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode

_ID_FIRST = re.compile(rb'^\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,15})\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d{1,15})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
_IS_REQUEST = re.compile(rb'^\{\s*(?:"(?:jsonrpc|id)"\s*:[^,{]{1,64},\s*){0,2}"method"\s*:')

EDGE = 256
"""The number of bytes at the beginning and the end of a message that are searched for its id."""


def answered_id(message: bytes) -> int | None:
    """Return the id of the request that a message responds to, even if the message cannot be decoded."""
    try:
        answer = _decode_answer(message)
    except (msgspec.DecodeError, RecursionError):
        return id_at_edge(message[:EDGE], message[-EDGE:])
    with suppress(msgspec.DecodeError):
        if answer.method is None:
            return msgspec.json.decode(answer.id, type=int)
    return None


def id_at_edge(head: bytes, tail: bytes) -> int | None:
    """Return the id of the request that a message responds to, if it is at the beginning or the end of the message."""
    match = _ID_FIRST.search(head) or _ID_LAST.search(tail)
    return int(match[1]) if match and not _IS_REQUEST.search(head) else None


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception that is not a group inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


# ------------------------------------------------------------ secrets

_LONG = 12
"""Shorter values with ordinary names are settings, such as `LOG_LEVEL=error` and `X-Tenant: acme`, and not secrets."""

_NAMED = re.compile(r"(?P<name>-{0,2}[\w.-]+)(?P<sign>=|:\s*)(?P<value>.+)", re.DOTALL)
_URL = re.compile(
    r"[A-Za-z][\w+.-]{0,30}://(?:(?P<login>[^/?#\s\"'<>]*)@)?[^?#\s\"'<>]*"
    r"(?:\?(?P<query>[^#\s\"'<>]*))?(?:#[^\s\"'<>]*)?"
)


_RANDOM = re.compile(r"(?<=/)(?=[^/]*\d)(?=[^/]*[A-Za-z])[\w-]{20,}(?=[/?#]|$)", re.ASCII)
"""A part of a path that looks like a token: long, with letters and digits."""


def redactor_for(config: MCPClientConfig) -> Redactor:
    """Return a redactor of the secrets of one configuration."""
    return Redactor(_secrets(config))


def command_line(config: MCPClientConfig, redactor: Redactor) -> str:
    """Return the command line of a server in a form that can be copied."""
    shown = [_hidden(argument, secrets) for argument, secrets in _arguments(config)]
    # Redacted words are not quoted; other words are quoted if necessary.
    return " ".join(
        word if HIDDEN in word else shlex.quote(word)
        for word in map(redactor.redact, [config.command or "", *shown])
    )


def _secrets(config: MCPClientConfig) -> Iterator[str]:
    yield from config.secrets
    if isinstance(config.auth, str):
        yield config.auth
    elif isinstance(config.auth, MCPClientCredentials):
        yield config.auth.client_secret
        login = [
            quote(text, safe="") for text in (config.auth.client_id, config.auth.client_secret)
        ]
        yield b64encode(":".join(login).encode()).decode()
    yield from _of_addresses(config.url or "")
    for name, value in config.headers.items():
        shortest = SHORTEST if names_a_secret(name) else _LONG
        yield from (part for part in parts_of(value) if len(part) >= shortest)
    for name, value in config.env.items():
        yield from _of_addresses(value)
        is_named = names_a_secret(name)
        if _URL.fullmatch(value):
            # A webhook has its secret in the path.
            yield from _RANDOM.findall(value)
        if is_named or not (is_path(value) or _URL.fullmatch(value)):
            shortest = SHORTEST if is_named else _LONG
            yield from (part for part in parts_of(value) if len(part) >= shortest)
    for _, hidden in _arguments(config):
        for value in hidden:
            yield from parts_of(value)


def _of_addresses(text: str) -> Iterator[str]:
    """Yield the passwords (or logins without one) and the query values of the URLs in `text`."""
    for match in _URL.finditer(text):
        user, _, password = (match["login"] or "").partition(":")
        secret = password or user
        yield from (secret, unquote(secret))
        for piece in (match["query"] or "").split("&"):
            name, sign, value = piece.partition("=")
            given = value if sign else name
            yield from (given, unquote_plus(given))


# ------------------------------------------------------------ arguments


def _arguments(config: MCPClientConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield each argument with its secrets."""
    follows_secret = False
    for argument in config.args:
        is_option = argument.startswith("-")
        # A value may begin with a dash, but text such as `-v` or `--verbose` is the next option.
        is_value = not is_option or (len(argument) > 2 and not argument.startswith("--"))
        if follows_secret and is_value:
            yield argument, [argument]
            follows_secret = False
        else:
            yield argument, list(_secrets_in(argument))
            is_named = _NAMED.fullmatch(argument) is not None
            follows_secret = is_option and not is_named and names_a_secret(argument)


def _hidden(argument: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        if secret:
            argument = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, argument)
    return _URL.sub(lambda match: without_secrets(match[0]), argument)


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the secrets in an argument, or in a part of it."""
    if is_object(value):
        for name, item in value.items():
            is_secret = isinstance(item, str) and names_a_secret(name)
            yield from [item] if is_secret else _secrets_in(item)
    elif is_list(value):
        for item in value:
            yield from _secrets_in(item)
    elif isinstance(value, str):
        named = None if _URL.match(value) else _NAMED.fullmatch(value)
        if named is not None:
            is_secret = names_a_secret(named["name"])
            yield from [named["value"]] if is_secret else _secrets_in(named["value"])
        elif value.lstrip().startswith(("{", "[")):
            with suppress(msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
                yield from _secrets_in(msgspec.json.decode(value))
        yield from _of_addresses(value)


# ------------------------------------------------------------ logs of other libraries


_SDK_LOGGER = "client"
"""The logger of the SDK's sessions, a name that applications may use as well."""

_SDK_FOLDER = str(Path(getfile(MCPError)).parents[1]) + os.sep


class _WithoutQueries(logging.Filter):
    """Removes credentials and queries from URLs in log records, and tracebacks of errors that a server causes.

    A validation error contains responses of the server, and the client itself reports a lost connection. A server can
    cause any number of such records, so only one of them is logged per minute. Records of an application that uses the
    same logger as the SDK are not changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._throttle = LogThrottle()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == _SDK_LOGGER and not record.pathname.startswith(_SDK_FOLDER):
            return True
        cause = record.exc_info[1] if record.exc_info else None
        if isinstance(cause, ValidationError | httpx2.TransportError | anyio.BrokenResourceError):
            record.exc_info = None
            if self._throttle.level() == logging.DEBUG:
                return False
        message = record.getMessage()
        if "://" in message:
            record.msg = _URL.sub(lambda match: without_secrets(match[0]), message)
            record.args = None
        return True


_without_queries = _WithoutQueries()


def filter_logs() -> None:
    """Redact secrets in what the HTTP client and the SDK log. Installed once per process."""
    for name in (_SDK_LOGGER, "httpx2", "mcp.client.streamable_http", "mcp.client.sse"):
        # The same filter is not added twice.
        logging.getLogger(name).addFilter(_without_queries)


# ------------------------------------------------------------ reports

_SIGN_IN = (
    "it requires a credential: set a valid token, as token or headers in operations.toml, "
    "headers in an mcp.json, auth or headers in Python"
)
_STATUS_ADVICE = {
    401: _SIGN_IN,
    403: _SIGN_IN,
    404: "check the path: it often ends in /mcp, and servers of the 2024 protocol need transport sse",
    405: 'a server of the 2024 protocol needs transport "sse", and often the path /sse',
    407: PROXY_LOGIN,
}
_RUN_BY_HAND = (
    "run the command manually in that folder: it should wait for input without printing anything"
)


class StartError(CallError):
    """A server could not be used.

    Attributes:
        report: The attempt, its outcome and advice, as lines of text; without secrets, but not for callers.
    """

    def __init__(self, message: str, details: Any, report: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message, details)
        self.report = report

    def __str__(self) -> str:
        message = printable(self.message)
        return f"{message}\n{self.report}" if self.report else message

    def __reduce__(self) -> tuple[Any, ...]:
        return StartError, (self.message, self.details, self.report), vars(self)


def start_error(
    failure: CallError,
    config: MCPClientConfig,
    observed: list[tuple[str, str]],
    redactor: Redactor,
    advice: str,
) -> StartError:
    """Return `failure` with a report that helps to fix it.

    Args:
        failure: The error for callers.
        config: The configuration of the server.
        observed: Facts about its process, if it has one.
        redactor: The redactor of the configuration.
        advice: The advice; empty for the default.
    """
    if config.kind == "memory":
        return StartError(failure.message, failure.details, "")
    facts: list[tuple[str, str]] = []
    if config.kind == "stdio":
        facts.append(("command", command_line(config, redactor)))
        facts.append(("folder", str(Path(config.cwd or ".").absolute())))
        facts += observed
        advice = advice or _RUN_BY_HAND
    else:
        facts.append(("address", config.target))
        details: JSONObject = failure.details or {}
        elsewhere = "check that the server runs and can be reached from this machine"
        if "CERTIFICATE_VERIFY_FAILED" in failure.message:
            elsewhere = "check its certificate; if the authority is private, set SSL_CERT_FILE to a file with it"
        advice = advice or _STATUS_ADVICE.get(details.get("statusCode", 0), elsewhere)
    facts.append(("next", advice))
    return StartError(failure.message, failure.details, _lines(facts))


def _lines(facts: list[tuple[str, str]]) -> str:
    """Return facts as lines; a repeated name is written once."""
    lines, before = list[str](), ""
    for name, fact in facts:
        label = f"{name}:" if name != before else ""
        lines.append(f"  {label:<11}{fact}")
        before = name
    return "\n".join(lines)
