"""Classify media types.

Every call needs the same few media types, so the results are cached.
"""

import re
from functools import lru_cache

EVENT_STREAM = "text/event-stream"

_TEXTUAL = re.compile(
    r"text/.*|application/(.*\+)?(xml|yaml|x-yaml|javascript|graphql|x-ndjson|ndjson|jsonl|x-jsonlines|json-seq|sql|toml|jwt|csv|x-www-form-urlencoded)"
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
"""The intended media type, by the letters of a misspelled one."""

_SEQUENCE = re.compile(r"application/(jsonl|x-jsonl|x-jsonlines|x-ndjson|ndjson|(.*\+)?json-seq)")


def essence(media_type: str) -> str:
    """Return `type/subtype` in lower case, without parameters; the first if a header was sent twice."""
    return media_type.partition(";")[0].partition(",")[0].strip().lower()


def parameter_of(media_type: str, name: str) -> str:
    """Return a parameter of a media type, such as its charset; empty if it has none."""
    for part in media_type.split(";")[1:]:
        key, _, value = part.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"')
    return ""


def in_utf8(media_type: str) -> str:
    """Return a media type without a charset other than UTF-8."""
    if parameter_of(media_type, "charset").lower() in {"", "utf-8", "utf8"}:
        return media_type
    kind, *parameters = media_type.split(";")
    others = [each for each in parameters if each.partition("=")[0].strip().lower() != "charset"]
    return ";".join([kind, *others])


@lru_cache
def is_json(media_type: str) -> bool:
    """Return whether it is JSON: `application/json`, `text/json`, or anything `+json`."""
    kind = essence(media_type)
    return kind in {"application/json", "text/json"} or kind.endswith("+json")


@lru_cache
def is_unspecific(media_type: str) -> bool:
    """Return whether it does not describe the content: absent, malformed, or a type for arbitrary bytes."""
    kind = essence(media_type)
    return "/" not in kind or kind in {"application/octet-stream", "binary/octet-stream"}


@lru_cache
def is_sequence(media_type: str) -> bool:
    """Return whether it is a sequence of JSON values."""
    return _SEQUENCE.fullmatch(essence(media_type)) is not None


@lru_cache
def is_stream(media_type: str) -> bool:
    """Return whether it is a sequence of items, such as server-sent events or JSON Lines."""
    return essence(media_type) == EVENT_STREAM or is_sequence(media_type)


@lru_cache
def is_text(media_type: str) -> bool:
    """Return whether its content is text other than JSON."""
    return _TEXTUAL.fullmatch(essence(media_type)) is not None


@lru_cache
def is_binary(media_type: str) -> bool:
    """Return whether its content is neither text nor JSON; a range of types is, an absent type is not."""
    return "/" in media_type and not is_json(media_type) and not is_text(media_type)


@lru_cache
def is_xml(media_type: str) -> bool:
    """Return whether it is XML."""
    return essence(media_type).endswith(("/xml", "+xml"))


@lru_cache
def is_form(media_type: str) -> bool:
    """Return whether it is a URL-encoded form."""
    return essence(media_type) == "application/x-www-form-urlencoded"


@lru_cache
def is_multipart(media_type: str) -> bool:
    """Return whether it is multipart."""
    return essence(media_type).startswith("multipart/")


def takes_objects(media_type: str) -> bool:
    """Return whether an object can be sent in this media type: as JSON, as a form, or in parts."""
    return is_json(media_type) or is_form(media_type) or is_multipart(media_type)


@lru_cache
def is_range(media_type: str) -> bool:
    """Return whether it is a range of types (`image/*`)."""
    return "*" in essence(media_type)


def concrete(media_type: str, default: str) -> str:
    """Return `media_type`, or `default` if it is a range."""
    return default if is_range(media_type) else media_type


@lru_cache
def is_plain_json(media_type: str) -> bool:
    """Return whether it is plain JSON, without a more specific subtype."""
    return essence(media_type) in {"application/json", "text/json"}


def is_utf8_json(media_type: str) -> bool:
    """Return whether it is one type of JSON, in UTF-8."""
    return is_json(media_type) and not is_range(media_type) and in_utf8(media_type) == media_type


@lru_cache
def is_json_patch(media_type: str) -> bool:
    """Return whether it is a JSON Patch (RFC 6902)."""
    return essence(media_type) == "application/json-patch+json"


@lru_cache
def is_yaml(media_type: str) -> bool:
    """Return whether it is YAML."""
    return _YAML.fullmatch(essence(media_type)) is not None


@lru_cache
def intended(media_type: str) -> str:
    """Return the intended media type for a misspelled one; others unchanged."""
    kind = essence(media_type)
    letters = "".join(filter(str.isalpha, kind))
    if kind in _EXACT or "+" in kind or "*" in kind:
        return media_type
    if letters in {"multipart", "multipartform"} or "formdata" in letters:
        return "multipart/form-data"
    if "urlencode" in letters:
        return "application/x-www-form-urlencoded"
    return _MISSPELT.get(letters, media_type) if kind not in _MISSPELT.values() else media_type
