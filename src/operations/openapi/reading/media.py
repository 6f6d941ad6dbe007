"""Media types: what kind each is, and which of several to prefer.

Every call asks about the same few media types, so the answers are kept.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from operations.openapi.reading.model import Media

_TEXTUAL = re.compile(
    r"text/.*|application/(.*\+)?(xml|yaml|x-yaml|javascript|graphql|x-ndjson|ndjson|jsonl|x-jsonlines|json-seq|sql|toml|jwt|csv)"
)

_SEQUENCE = re.compile(r"application/(jsonl|x-jsonl|x-jsonlines|x-ndjson|ndjson|(.*\+)?json-seq)")


def essence(media_type: str) -> str:
    """`type/subtype` in lower case, without parameters; of a header that came twice, the first."""
    return media_type.partition(";")[0].partition(",")[0].strip().lower()


def parameter_of(media_type: str, name: str) -> str:
    """A parameter of a media type, such as its charset; empty where it has none."""
    for part in media_type.split(";")[1:]:
        key, _, value = part.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"')
    return ""


@lru_cache
def is_json(media_type: str) -> bool:
    """Whether it is JSON: `application/json`, `text/json`, or anything `+json`."""
    kind = essence(media_type)
    return kind in {"application/json", "text/json"} or kind.endswith("+json")


@lru_cache
def says_nothing(media_type: str) -> bool:
    """Whether it tells nothing about the content: it is absent, broken, or only says that there are bytes."""
    kind = essence(media_type)
    return "/" not in kind or kind in {"application/octet-stream", "binary/octet-stream"}


@lru_cache
def is_sequence(media_type: str) -> bool:
    """Whether it is several JSON values, one behind the other."""
    return _SEQUENCE.fullmatch(essence(media_type)) is not None


@lru_cache
def is_text(media_type: str) -> bool:
    """Whether its content is text in some charset, other than JSON."""
    return _TEXTUAL.fullmatch(essence(media_type)) is not None


@lru_cache
def is_form(media_type: str) -> bool:
    """Whether it is a URL-encoded form."""
    return essence(media_type) == "application/x-www-form-urlencoded"


@lru_cache
def is_multipart(media_type: str) -> bool:
    """Whether it is made of parts."""
    return essence(media_type).startswith("multipart/")


@lru_cache
def is_range(media_type: str) -> bool:
    """Whether it stands for several types (`image/*`)."""
    return "*" in essence(media_type)


def concrete(media_type: str, default: str) -> str:
    """`media_type`, or `default` where it stands for several."""
    return default if is_range(media_type) else media_type


def _rank(media: Media) -> int:
    kind = media.media_type
    if is_json(kind):
        return 0 if essence(kind) == "application/json" and ";" not in kind else 1
    for rank, test in ((3, is_multipart), (4, is_form), (6, is_text), (7, is_range)):
        if test(kind):
            return rank
    return 5


def best(media: Iterable[Media]) -> Media | None:
    """The representation to use: JSON first, then forms, then the rest; of equals the first."""
    return min(media, key=_rank, default=None)
