"""Secrets are hidden in text, however they are written."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

from operations.base.json.values import with_texts

HIDDEN: Final = "***"

SHORTEST: Final = 4
"""Shorter texts are not treated as secrets, because they would match everywhere."""

_KEPT_TOKENS: Final = 8
"""The number of latest tokens added by `learn` that are kept."""

_SCHEMES: Final = frozenset({"bearer", "basic", "token"})


class Redactor:
    """Redacts known secrets.

    Args:
        secrets: The texts to redact.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = _spelled(secrets)
        self._tokens = deque[str](maxlen=_KEPT_TOKENS)
        self._redact = _redaction(self._secrets)

    def learn(self, credential: str) -> None:
        """Add a credential to redact, for example a token that was obtained later."""
        if credential and credential not in self._tokens:
            self._tokens.append(credential)
            learned = _spelled(part for token in self._tokens for part in parts_of(token))
            self._redact = _redaction(self._secrets | learned)

    def redact(self, text: str) -> str:
        """Return `text` with its secrets redacted."""
        return self._redact(text)

    def redact_all(self, value: Any) -> Any:
        """Return the JSON `value` with the secrets in its strings and names redacted."""
        return with_texts(value, self.redact, names=True)


@lru_cache(maxsize=64)
def spellings(*secrets: str) -> frozenset[str]:
    """Return the secrets and their parts, in every encoding."""
    return _spelled(part for secret in secrets for part in parts_of(secret))


_REFLECTED: Final = 8
"""The length from which a credential is redacted in data, where a short one could be an ordinary word."""


@lru_cache(maxsize=64)
def reflected_spellings(*secrets: str) -> frozenset[str]:
    """Return the secrets that are redacted in data, in every encoding."""
    return _spelled(secret for secret in secrets if len(secret) >= _REFLECTED)


@lru_cache(maxsize=64)
def redaction(*secrets: str) -> Callable[[str], str]:
    """Return a function that redacts the secrets and their parts in a text."""
    return _redaction(spellings(*secrets))


def parts_of(secret: str) -> Iterator[str]:
    """Yield a secret and its parts: the lines of a multi-line key, a token without its scheme."""
    yield secret
    yield from (part for part in secret.split() if part.lower() not in _SCHEMES)


def _spelled(secrets: Iterable[str]) -> frozenset[str]:
    """Return the secrets that are long enough, in every encoding."""
    found = frozenset(text for text in secrets if len(text) >= SHORTEST)
    printed = {ascii(text)[1:-1] for text in found}
    in_json = {json.dumps(text, ensure_ascii=way)[1:-1] for text in found for way in (True, False)}
    in_urls = {quote(text, safe=safe, errors="replace") for text in found for safe in ("", "/")}
    return found | printed | in_json | in_urls


def _redaction(secrets: frozenset[str]) -> Callable[[str], str]:
    if not secrets:
        return str
    longest_first = sorted(secrets, key=len, reverse=True)

    def redact(text: str) -> str:
        # Several times as fast as one regular expression.
        for secret in longest_first:
            text = text.replace(secret, HIDDEN)
        return text

    return redact
