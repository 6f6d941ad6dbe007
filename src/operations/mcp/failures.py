"""Failures of a server: of requests, with the errors that callers get, and of its start, with a report for operators.

Rule 1: a failure knows whether the request may have been carried out. Only what surely was not, or may be repeated,
        is sent again.
Rule 2: errors that our own transports detect pass through the SDK as JSON-RPC errors, sealed with a number no server
        knows: a server cannot make us believe that a request never reached it.
Rule 3: the report shows the command, its folder, how it ended, its output and advice (`str` of a `StartError`). Others
        see the error's message and details, which contain none of that.
Rule 4: the values of `headers`, the token, and values from the environment are secrets. So are values of `env` whose
        name indicates a secret, or that are too long for a setting. An argument is shown, unless the option before it,
        or its own name, indicates a secret. The output of a server passes through the redactor as well.
"""

import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import unquote, unquote_plus

import httpx2
import msgspec
from mcp import MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, JSONRPCError
from pydantic import ValidationError

from operations._decoding import decode_json
from operations._json import MAX_REQUEST_VALUES, JSONValueError, is_list, is_object, object_of
from operations._mcp_config import ClientCredentials, MCPClientConfig
from operations._text import names_a_secret, without_secrets
from operations.errors import CallError, ErrorCode, timeout_error
from operations.front.public_errors import HIDDEN, SHORTEST, Redactor, parts_of
from operations.types import JSONObject

Kind: TypeAlias = Literal[
    "unreachable", "closed", "session", "lost", "too_large", "status", "malformed", "credential"
]

_SEAL = token_hex(16)

_BODY_BYTES = 4096
"""How much of an error's body is kept for the caller."""

_WHO_ASKS = frozenset({401, 403})

_TOO_LONG = re.compile(r"event exceeded the \d+ byte limit")
"""The SDK's message for an event that its own reader rejected."""


class ServerError(Exception):
    """A request that brought no result.

    Attributes:
        error: The error for the caller.
        unsent: The request was surely not carried out.
        broken: Whether the connection cannot be used any more.
    """

    def __init__(self, error: CallError, *, unsent: bool = False, broken: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.unsent = unsent
        self.broken = broken


def seal(kind: Kind, message: str, **details: Any) -> JSONObject:
    """Return a JSON-RPC error object for a failure that our transport found."""
    data = {"seal": _SEAL, "kind": kind, "details": details}
    return {"code": CONNECTION_CLOSED, "message": message, "data": data}


def sealed(kind: Kind, message: str, **details: Any) -> MCPError:
    """Return the same as an exception."""
    return MCPError(**seal(kind, message, **details))


def read_failure(error: Exception, server: str, redactor: Redactor) -> ServerError:
    """Return the failure behind an error of the SDK during a request to `server`, without the secrets of `redactor`."""
    failure = _read(error, server)
    found = failure.error
    failure.error = CallError(
        found.code,
        redactor.redact(found.message),
        redactor.redact_all(found.details),
        retryable=found.retryable,
    )
    return failure


def _read(error: Exception, server: str) -> ServerError:
    if isinstance(error, MCPError):
        return _of_protocol(error, server)
    if isinstance(error, ValidationError):
        message = f"{server} sent a response that the protocol does not allow"
        return ServerError(CallError(ErrorCode.EXECUTION_ERROR, message))
    if isinstance(error, httpx2.HTTPStatusError):
        status = error.response.status_code
        message = f"{server} answered with HTTP status {status}"
        found = CallError(ErrorCode.UNAVAILABLE, message, {"statusCode": status})
    else:
        message = f"{server} cannot be reached: {type(error).__name__}"
        found = CallError(ErrorCode.UNAVAILABLE, message)
    return ServerError(found, broken=True)


def _of_protocol(error: MCPError, server: str) -> ServerError:
    data: Any = error.data
    if object_of(data).get("seal") == _SEAL:
        return _of_transport(error.message, data, server)
    if error.code == CONNECTION_CLOSED and _TOO_LONG.search(error.message):
        message = f"{server} answered with too large an event"
        return ServerError(CallError(ErrorCode.RESOURCE_EXHAUSTED, message))
    if error.code == CONNECTION_CLOSED:
        message = f"the connection to {server} was lost during the call"
        return ServerError(CallError(ErrorCode.UNAVAILABLE, message))
    details: JSONObject = {"code": error.code, "message": error.message}
    if data is not None:
        details["data"] = data
    if error.code == REQUEST_TIMEOUT:
        late = timeout_error(f"{server} did not answer in time")
        late.details.update(details)
        return ServerError(late)
    return ServerError(CallError(ErrorCode.EXECUTION_ERROR, f"{server}: {error.message}", details))


def _of_transport(message: str, data: JSONObject, server: str) -> ServerError:
    kind: Kind = data["kind"]
    details: JSONObject | None = data["details"] or None
    if kind == "credential":
        found: Any = data["details"]
        return ServerError(CallError(found["code"], message, retryable=found["retryable"]))
    text = f"{server} {message}"
    if kind == "too_large":
        return ServerError(CallError(ErrorCode.RESOURCE_EXHAUSTED, text, details))
    if kind in ("status", "malformed"):
        return ServerError(CallError(ErrorCode.EXECUTION_ERROR, text, details))
    return ServerError(
        CallError(ErrorCode.UNAVAILABLE, text, details),
        unsent=kind in ("unreachable", "closed", "session"),
        # The next HTTP exchange may succeed after a failed one, but not after the session was lost.
        broken=kind in ("closed", "session"),
    )


def refusal(
    status: int, content_type: str, body: bytes, redactor: Redactor, *, had_session: bool
) -> JSONObject:
    """Return the JSON-RPC error that an HTTP error status means.

    A JSON-RPC error in the body is passed on, unless the status rejects the caller: then the status decides the advice
    alone. Otherwise the error has the status and the beginning of the body.
    """
    if had_session and (status == 404 or (status == 400 and b"session" in body.lower())):
        return seal("session", "has forgotten this session")
    if content_type.startswith("application/json") and status not in _WHO_ASKS:
        error = _rpc_error(body)
        if error is not None:
            return error
    # Redacted before it is cut: half a secret would not be found.
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


def answered_id(message: bytes) -> int | None:
    """Return the id of the request that a message answers, if that much of it can be read."""
    with suppress(msgspec.DecodeError, RecursionError):
        answer = msgspec.json.decode(message, type=_Answer)
        if answer.method is None:
            return msgspec.json.decode(answer.id, type=int)
    return None


def root_cause(error: BaseException) -> BaseException:
    """The first real exception inside groups of groups: users never see a group."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


# ------------------------------------------------------------ secrets

_LONG = 12
"""A shorter value of a variable with an ordinary name is a setting, such as `LOG_LEVEL=error`."""

_NAMED = re.compile(r"(?P<name>-{0,2}[\w.-]+)(?P<sign>=|:\s*)(?P<value>.+)", re.DOTALL)
_URL = re.compile(
    r"[A-Za-z][\w+.-]*://(?:(?P<login>[^/?#\s\"'<>]*)@)?[^?#\s\"'<>]*"
    r"(?:\?(?P<query>[^#\s\"'<>]*))?(?:#[^\s\"'<>]*)?"
)


def redactor_for(config: MCPClientConfig) -> Redactor:
    """Return a redactor of the secrets of one configuration."""
    return Redactor(_secrets(config))


def command_line(config: MCPClientConfig, redactor: Redactor) -> str:
    """Return the command line of a server, to be read and copied."""
    shown = [shown for shown, _ in _arguments(config)]
    # A word that was hidden is not quoted; the others are if they must be.
    return " ".join(
        word if HIDDEN in word else shlex.quote(word)
        for word in map(redactor.redact, [config.command or "", *shown])
    )


def _secrets(config: MCPClientConfig) -> Iterator[str]:
    yield from config.secrets
    if isinstance(config.auth, str):
        yield config.auth
    elif isinstance(config.auth, ClientCredentials):
        yield config.auth.client_secret
    yield from _of_addresses(config.url or "")
    for value in config.headers.values():
        yield from parts_of(value)
    for name, value in config.env.items():
        yield from _of_addresses(value)
        shortest = SHORTEST if names_a_secret(name) else _LONG
        yield from (part for part in parts_of(value) if len(part) >= shortest)
    for _, hidden in _arguments(config):
        for value in hidden:
            yield from parts_of(value)


def _of_addresses(text: str) -> Iterator[str]:
    """The passwords, or logins without one, and the values in the queries of the addresses in `text`."""
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
    """Each argument as it may be shown, and what of it may not."""
    follows_secret = False
    for argument in config.args:
        is_option = argument.startswith("-")
        # A value may begin with a dash; text like `-v` or `--verbose` is the next option.
        is_value = not is_option or (len(argument) > 2 and not argument.startswith("--"))
        if follows_secret and is_value:
            yield HIDDEN, [argument]
            follows_secret = False
        else:
            yield _shown(argument)
            is_named = _NAMED.fullmatch(argument) is not None
            follows_secret = is_option and not is_named and names_a_secret(argument)


def _shown(text: str) -> tuple[str, list[str]]:
    """An argument, or a piece of one, as it may be shown, and what of it may not."""
    named = _NAMED.fullmatch(text)
    if named is not None and not _URL.match(text):
        if names_a_secret(named["name"]):
            return f"{named['name']}{named['sign']}{HIDDEN}", [named["value"]]
        shown, hidden = _shown(named["value"])
        return f"{named['name']}{named['sign']}{shown}", hidden
    if text.lstrip().startswith(("{", "[")):
        try:
            value: Any = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            pass
        else:
            hidden = list[str]()
            shown_value = _shown_json(value, hidden)
            return (msgspec.json.encode(shown_value).decode(), hidden) if hidden else (text, [])
    return _URL.sub(lambda match: without_secrets(match[0]), text), list(_of_addresses(text))


def _shown_json(value: Any, hidden: list[str]) -> Any:
    """The JSON `value` as it may be shown; `hidden` gets what may not."""
    if isinstance(value, str):
        shown, secrets = _shown(value)
        hidden += secrets
        return shown
    if is_list(value):
        return [_shown_json(item, hidden) for item in value]
    if not is_object(value):
        return value
    result = dict[str, Any]()
    for name, item in value.items():
        if isinstance(item, str) and names_a_secret(name):
            hidden.append(item)
            result[name] = HIDDEN
        else:
            result[name] = _shown_json(item, hidden)
    return result


# ------------------------------------------------------------ logs of others


class _WithoutQueries(logging.Filter):
    """Lets every record through, its addresses without login and query."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "://" in message:
            record.msg = _URL.sub(lambda match: without_secrets(match[0]), message)
            record.args = None
        return True


_without_queries = _WithoutQueries()


def redact_logged_addresses() -> None:
    """Redact secrets in addresses that the HTTP client and the SDK log; installed once per process."""
    for name in ("httpx2", "mcp.client.streamable_http", "mcp.client.sse"):
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
    404: "see that the path is right: it often ends in /mcp, and servers of 2024 need transport sse",
    405: 'a server of 2024 needs transport "sse", and often the path /sse',
}
_RUN_BY_HAND = "run the command by hand in that folder: it should wait in silence for what is typed"


class StartError(CallError):
    """A server could not be used.

    Attributes:
        report: What was tried, the outcome and what to do next, in lines; without secrets, but not for callers.
    """

    def __init__(self, message: str, details: Any, report: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message, details)
        self.report = report

    def __str__(self) -> str:
        return f"{self.message}\n{self.report}" if self.report else self.message


def start_error(
    failure: CallError,
    config: MCPClientConfig,
    observed: list[tuple[str, str]],
    redactor: Redactor,
    advice: str,
) -> StartError:
    """`failure` with everything that helps to repair it.

    Args:
        failure: The error for callers.
        config: Of the server.
        observed: What its process did, if it has one.
        redactor: Of the same configuration.
        advice: What to do next; empty for the usual advice.
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
        elsewhere = "see that the server runs and can be reached from here"
        advice = advice or _STATUS_ADVICE.get(details.get("statusCode", 0), elsewhere)
    facts.append(("next", advice))
    return StartError(failure.message, failure.details, _lines(facts))


def _lines(facts: list[tuple[str, str]]) -> str:
    """The facts one below the other; a name that repeats is written once."""
    lines, before = list[str](), ""
    for name, fact in facts:
        label = f"{name}:" if name != before else ""
        lines.append(f"  {label:<11}{fact}")
        before = name
    return "\n".join(lines)
