"""Redact the credentials of a request that its response repeats, for example in an echo of the headers."""

import re
from functools import lru_cache
from typing import Any, Final

from operations.base.json.values import is_list, is_object
from operations.base.redaction import HIDDEN, reflected_spellings

_PLAIN: Final = re.compile(r"[A-Za-z0-9]+")


@lru_cache(maxsize=64)
def _marks(*secrets: str) -> tuple[bytes, ...]:
    """Return the longest part of each credential that every encoder of JSON writes as it is."""
    words = (_PLAIN.findall(each) for each in reflected_spellings(*secrets))
    return tuple({max(found, key=len).encode() for found in words if found})


def may_repeat(content: bytes, secrets: list[str]) -> bool:
    """Return whether a body may contain a credential of its request. Quick, and never false by mistake for JSON."""
    return any(mark in content for mark in _marks(*secrets))


def without_reflected(data: Any, secrets: list[str]) -> Any:
    """Return data without the credentials; `data` itself if it contains none.

    A text, the names and the values of JSON are searched. Bytes are not: a file is returned as it is.
    """
    spellings = reflected_spellings(*secrets)
    if not spellings or not _contains(data, spellings):
        return data
    longest_first = sorted(spellings, key=len, reverse=True)

    def redact(text: str) -> str:
        for secret in longest_first:
            text = text.replace(secret, HIDDEN)
        return text

    def copy(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value)
        if is_list(value):
            return [copy(item) for item in value]
        if is_object(value):
            return {redact(name): copy(item) for name, item in value.items()}
        return value

    return copy(data)


def _contains(data: Any, spellings: frozenset[str]) -> bool:
    rest: list[Any] = [data]
    while rest:
        item = rest.pop()
        if is_object(item):
            rest += item
            rest += item.values()
        elif is_list(item):
            rest += item
        elif isinstance(item, str) and any(map(item.__contains__, spellings)):
            return True
    return False
