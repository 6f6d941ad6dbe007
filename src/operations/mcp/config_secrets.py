"""The secrets in the configuration of an MCP server, for the redactor of its messages and reports.

Rule 1: the values of `headers`, the token, and what was filled in from the environment are secrets. So are values of
        `env` whose name says so, or that are too long for a setting.
Rule 2: an argument is shown, unless the option before it, or its own name, says that it is a secret.
Rule 3: what a server says passes through the redactor as well: it may repeat what we sent.
"""

import logging
import re
import shlex
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote, unquote_plus

import msgspec

from operations._mcp_config import ClientCredentials, MCPClientConfig
from operations._text import names_a_secret, without_secrets
from operations.front.public_errors import HIDDEN, SHORTEST, Redactor, parts_of

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
        # A value may begin with a dash; what looks like `-v` or `--verbose` is the next option.
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
    if isinstance(value, list):
        return [_shown_json(item, hidden) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    result = dict[str, Any]()
    for name, item in cast("dict[str, Any]", value).items():
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
    """Keep the secrets in addresses out of what the HTTP client and the SDK log; once is enough."""
    for name in ("httpx2", "mcp.client.streamable_http", "mcp.client.sse"):
        # The same filter is not added twice.
        logging.getLogger(name).addFilter(_without_queries)
