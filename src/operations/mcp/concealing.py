"""What a report must not show: the operator's secrets, wherever they turn up.

Rule 1: the values of `env` and `headers`, the token, and what was filled in from the environment are secrets, in our
        own words and in those of the server.
Rule 2: an argument is shown, unless the option before it, or its own name, says that it is a secret.
"""

import re
import shlex
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

from operations.mcp.config import ClientCredentials, MCPClientConfig, without_secrets

HIDDEN = "***"

_SHORTEST = 4
"""A shorter text is no secret, and would be found everywhere."""

_SCHEMES = frozenset({"bearer", "basic", "token"})
_TELLING = re.compile(r"key|token|secret|passw|auth|credential|cookie|pin$", re.IGNORECASE)
_NAMED = re.compile(r"(?P<name>-{0,2}[\w.-]+)(?P<sign>=|:\s+)(?P<value>.+)", re.DOTALL)


class Concealer:
    """Takes the secrets of one configuration out of a text."""

    def __init__(self, config: MCPClientConfig) -> None:
        found = {text for text in _secrets(config) if len(text) >= _SHORTEST}
        written = {ascii(text)[1:-1] for text in found}
        longest_first = sorted(found | written, key=len, reverse=True)
        self._secrets = (
            re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        )

    def conceal(self, text: str) -> str:
        """`text` with its secrets hidden."""
        return text if self._secrets is None else self._secrets.sub(HIDDEN, text)

    def command(self, config: MCPClientConfig) -> str:
        """The command line of a server, to be read and copied."""
        shown = [shown for shown, _ in _arguments(config)]
        # A word that was hidden is not quoted, as the others are where they must be.
        return " ".join(
            word if HIDDEN in word else shlex.quote(word)
            for word in map(self.conceal, [config.command or "", *shown])
        )


def _secrets(config: MCPClientConfig) -> Iterator[str]:
    yield from config.secrets
    if isinstance(config.auth, str):
        yield config.auth
    elif isinstance(config.auth, ClientCredentials):
        yield config.auth.client_secret
    given = [*config.env.values(), *config.headers.values()]
    for _, hidden in _arguments(config):
        given += hidden
    for url in (config.url, *config.args):
        yield from _secrets_of(url or "")
    for value in given:
        yield value
        # A key of several lines is printed line by line, a token without its scheme.
        yield from (part for part in value.split() if part.lower() not in _SCHEMES)


def _secrets_of(url: str) -> Iterator[str]:
    if "://" in url:
        parts = urlsplit(url)
        yield from (value for _, value in parse_qsl(parts.query))
        yield parts.password or ""


def _arguments(config: MCPClientConfig) -> Iterator[tuple[str, list[str]]]:
    """Each argument as it may be shown, and what of it may not."""
    follows_secret = False
    for argument in config.args:
        named = _NAMED.fullmatch(argument)
        is_option = argument.startswith("-")
        if follows_secret and not is_option:
            yield HIDDEN, [argument]
        elif "://" in argument:
            yield without_secrets(argument), []
        elif named is not None and _TELLING.search(named["name"]):
            yield f"{named['name']}{named['sign']}{HIDDEN}", [named["value"]]
        else:
            yield argument, []
        follows_secret = is_option and named is None and _TELLING.search(argument) is not None
