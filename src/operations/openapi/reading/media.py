"""Media types: what kind each is.

Every call asks about the same few media types, so the results are kept.
"""

import re
from functools import lru_cache

EVENT_STREAM = "text/event-stream"

_TEXTUAL = re.compile(
    r"text/.*|application/(.*\+)?(xml|yaml|x-yaml|javascript|graphql|x-ndjson|ndjson|jsonl|x-jsonlines|json-seq|sql|toml|jwt|csv)"
)

_YAML = re.compile(r"(application|text)/(.*\+)?(x-)?ya?ml")

_EXACT = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})
_MISSPELT = {
    "json": "application/json",
    "applicationjson": "application/json",
    "xml": "application/xml",
    "applicationxml": "application/xml",
    "text": "text/plain",
    "plain": "text/plain",
    "textplain": "text/plain",
    "plaintext": "text/plain",
    "html": "text/html",
    "binary": "application/octet-stream",
    "octetstream": "application/octet-stream",
    "applicationoctetstream": "application/octet-stream",
}
"""By its letters alone: the media type that is meant."""

_SEQUENCE = re.compile(r"application/(jsonl|x-jsonl|x-jsonlines|x-ndjson|ndjson|(.*\+)?json-seq)")


def essence(media_type: str) -> str:
    """Return `type/subtype` in lower case, without parameters; of a header that came twice, the first."""
    return media_type.partition(";")[0].partition(",")[0].strip().lower()


def parameter_of(media_type: str, name: str) -> str:
    """Return a parameter of a media type, such as its charset; empty if it has none."""
    for part in media_type.split(";")[1:]:
        key, _, value = part.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"')
    return ""


@lru_cache
def is_json(media_type: str) -> bool:
    """Return whether it is JSON: `application/json`, `text/json`, or anything `+json`."""
    kind = essence(media_type)
    return kind in {"application/json", "text/json"} or kind.endswith("+json")


@lru_cache
def says_nothing(media_type: str) -> bool:
    """Return whether it does not describe the content: it is absent, malformed, or stands for any bytes."""
    kind = essence(media_type)
    return "/" not in kind or kind in {"application/octet-stream", "binary/octet-stream"}


@lru_cache
def is_sequence(media_type: str) -> bool:
    """Return whether it is a sequence of JSON values."""
    return _SEQUENCE.fullmatch(essence(media_type)) is not None


@lru_cache
def is_stream(media_type: str) -> bool:
    """Return whether it is a sequence of items: server-sent events, JSON Lines or the like."""
    return essence(media_type) == EVENT_STREAM or is_sequence(media_type)


@lru_cache
def is_text(media_type: str) -> bool:
    """Return whether its content is text in some charset, other than JSON."""
    return _TEXTUAL.fullmatch(essence(media_type)) is not None


@lru_cache
def is_form(media_type: str) -> bool:
    """Return whether it is a URL-encoded form."""
    return essence(media_type) == "application/x-www-form-urlencoded"


@lru_cache
def is_multipart(media_type: str) -> bool:
    """Return whether it is made of parts."""
    return essence(media_type).startswith("multipart/")


@lru_cache
def is_range(media_type: str) -> bool:
    """Return whether it stands for several types (`image/*`)."""
    return "*" in essence(media_type)


def concrete(media_type: str, default: str) -> str:
    """Return `media_type`, or `default` if it is a range."""
    return default if is_range(media_type) else media_type


@lru_cache
def is_plain_json(media_type: str) -> bool:
    """Return whether it is JSON of no particular kind."""
    return essence(media_type) in {"application/json", "text/json"}


@lru_cache
def is_json_patch(media_type: str) -> bool:
    """Return whether it is a list of changes (RFC 6902)."""
    return essence(media_type) == "application/json-patch+json"


@lru_cache
def is_yaml(media_type: str) -> bool:
    """Return whether it is YAML."""
    return _YAML.fullmatch(essence(media_type)) is not None


@lru_cache
def intended(media_type: str) -> str:
    """Return the media type that a misspelt one stands for; any other unchanged."""
    kind = essence(media_type)
    letters = "".join(filter(str.isalpha, kind))
    if kind in _EXACT or "+" in kind or "*" in kind:
        return media_type
    if letters in {"multipart", "multipartform"} or "formdata" in letters:
        return "multipart/form-data"
    if "urlencode" in letters:
        return "application/x-www-form-urlencoded"
    return _MISSPELT.get(letters, media_type) if kind not in _MISSPELT.values() else media_type
