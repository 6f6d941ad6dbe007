"""Hide secrets in text that leaves this process: logs, error messages, reports.

Rule 1: a secret is hidden in every way it may be written: as it is, in JSON, in a Python string, in a URL, and in its
        parts, such as a token without its scheme.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast
from urllib.parse import quote

HIDDEN: Final = "***"

SHORTEST: Final = 4
"""A shorter text is not treated as a secret: it would be found everywhere."""

_KEPT_TOKENS: Final = 8
"""How many of the tokens that were learned later are remembered."""

_SCHEMES: Final = frozenset({"bearer", "basic", "token"})


class Redactor:
    """Hides known secrets.

    Args:
        secrets: The texts to hide.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = _spelled(secrets)
        self._tokens = deque[str](maxlen=_KEPT_TOKENS)
        self._pattern = _pattern(self._secrets)

    def learn(self, credential: str) -> None:
        """Hide one more credential, for example a token that was obtained later."""
        if credential and credential not in self._tokens:
            self._tokens.append(credential)
            learned = _spelled(part for token in self._tokens for part in parts_of(token))
            self._pattern = _pattern(self._secrets | learned)

    def redact(self, text: str) -> str:
        """Return `text` with its secrets hidden."""
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)

    def redact_all(self, value: Any) -> Any:
        """Return the JSON `value` with the secrets in its strings and names hidden."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self.redact_all(item) for item in cast("list[object]", value)]
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self.redact(name): self.redact_all(item) for name, item in items}
        return value


def parts_of(secret: str) -> Iterator[str]:
    """Yield a secret and its parts: a key of several lines is printed line by line, a token without its scheme."""
    yield secret
    yield from (part for part in secret.split() if part.lower() not in _SCHEMES)


def _spelled(secrets: Iterable[str]) -> set[str]:
    """Return the secrets that are long enough, in every way they may be written."""
    found = {text for text in secrets if len(text) >= SHORTEST}
    printed = {ascii(text)[1:-1] for text in found}
    in_json = {json.dumps(text, ensure_ascii=way)[1:-1] for text in found for way in (True, False)}
    in_urls = {quote(text, safe=safe, errors="replace") for text in found for safe in ("", "/")}
    return found | printed | in_json | in_urls


def _pattern(secrets: set[str]) -> re.Pattern[str] | None:
    longest_first = sorted(secrets, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
