"""Report why a server did not start, without its secrets.

Rule 1: the error shows the command, its folder, how it ended, its output and advice (`str` of the error).
        Others see the error's message and details, which contain none of that.
Rule 2: the values of `headers`, the token, and values from the environment are secrets. So are values of
        `env` whose name indicates a secret, or that are too long for a setting.
Rule 3: an argument is shown, unless the option before it, or its own name, indicates a secret.
Rule 4: the output of a server passes through the redactor as well: it may repeat secrets that we sent.
"""

import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_plus

import msgspec

from operations._json import is_list, is_object
from operations._mcp_config import ClientCredentials, MCPClientConfig
from operations._text import names_a_secret, without_secrets
from operations.errors import CallError, ErrorCode
from operations.front.public_errors import HIDDEN, SHORTEST, Redactor, parts_of
from operations.mcp.stdio import Child
from operations.types import JSONObject

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
    failure: CallError, config: MCPClientConfig, child: Child, redactor: Redactor, advice: str
) -> StartError:
    """`failure` with everything that helps to repair it.

    Args:
        failure: The error for callers.
        config: Of the server.
        child: Its process, if it has one.
        redactor: Of the same configuration.
        advice: What to do next; empty for the usual advice.
    """
    if config.kind == "memory":
        return StartError(failure.message, failure.details, "")
    facts: list[tuple[str, str]] = []
    if config.kind == "stdio":
        facts.append(("command", command_line(config, redactor)))
        facts.append(("folder", str(Path(config.cwd or ".").absolute())))
        if child.exit_code is not None:
            facts.append(("exit code", str(child.exit_code)))
        facts += [("printed", line) for line in child.stray]
        facts += [("output", line) for line in child.stderr]
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
