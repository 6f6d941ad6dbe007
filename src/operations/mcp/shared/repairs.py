"""Repair listings and handshakes, so that a wrong part of one costs only that part.

Rule 1: a message that can be decoded and a result that the protocol allows are not changed.
Rule 2: only listings and handshakes are repaired. The caller of anything else gets the result of the server, or an
        error.
"""

import asyncio
import json
import re
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final, cast

from mcp_types import JSONRPCMessage, Result, jsonrpc_message_adapter
from pydantic import ValidationError
from pydantic_core import from_json

from operations.base.json.values import MAX_DEPTH, is_object, list_of, object_of
from operations.base.types import JSONObject

_REPAIRED: Final = frozenset({
    "tools", "resources", "resourceTemplates", "prompts", "protocolVersion", "supportedVersions",
})  # fmt: skip
"""The fields of results that are listings or handshakes."""

_NOT_REPAIRED: Final = frozenset({"content", "contents", "messages", "structuredContent"})

_MENTIONS: Final = re.compile(rb'"(?:%b)"' % "|".join(_REPAIRED).encode())
"""Found in a message that may be repaired."""

_MOST_DIGITS: Final = 4300
"""The largest number of digits that Python converts to an integer."""

_LEVELS: Final = MAX_DEPTH + 10
"""The levels of a repaired message. An entry with more than `MAX_DEPTH` is skipped; its remainder is not needed."""

_MOST_ERRORS: Final = 100
"""The largest number of errors in one handshake that are repaired; to read more would block the event loop."""


def read_message(text: bytes) -> JSONRPCMessage:
    """Return a message of JSON-RPC.

    The same as `validate_json`, in a fifth of the time for a large message.

    Raises:
        ValueError: If it is not one.
    """
    return jsonrpc_message_adapter.validate_python(from_json(text), by_name=False)


async def checked(message: bytes) -> bytes:
    """Return `message`, repaired if it cannot be decoded."""
    if _MENTIONS.search(message):
        try:
            read_message(message)
        except ValueError:
            return await repaired(message)
    return message


async def repaired(message: bytes) -> bytes:
    """Return a listing or a handshake whose entries can be decoded, and then accepted or skipped one by one.

    A lone surrogate becomes `?`, and a number with too many digits becomes infinite. Other messages are not changed.
    """
    if not _MENTIONS.search(message):
        return message
    # In a thread, because the message may be large.
    return await asyncio.to_thread(_decodable, message)


def _decodable(message: bytes) -> bytes:
    with suppress(ValueError, RecursionError):
        decoded = object_of(json.loads(message, parse_int=_number))
        fields = object_of(decoded.get("result")).keys()
        if fields & _REPAIRED and not fields & _NOT_REPAIRED:
            return json.dumps(_cut(decoded, _LEVELS), ensure_ascii=False).encode(errors="replace")
    return message


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _cut(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        members = cast("JSONObject", value).items()
        return {key: _cut(each, levels - 1) for key, each in members} if levels else None
    if isinstance(value, list):
        return [_cut(each, levels - 1) for each in list_of(value)] if levels else None
    return value


def mended(result: JSONObject, model: type[Result]) -> JSONObject:
    """Return the result of a handshake without the fields that `model` rejects."""
    offers_known = is_object(result.get("capabilities"))
    try:
        model.model_validate(result)
    except ValidationError as error:
        if error.error_count() > _MOST_ERRORS:
            return result
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            # A field may already be gone with the object that contained it.
            with suppress(KeyError, TypeError):
                _mend(result, each["loc"], each["type"])
        if not offers_known:
            result["capabilities"] = {"tools": {}}
        result["serverInfo"] = {"name": "", "version": "", **object_of(result.get("serverInfo"))}
    return result


def _mend(result: JSONObject, place: tuple[int | str, ...], kind: str) -> None:
    """Remove the field at `place`, or empty it if it should be an object; a list is removed as a whole."""
    *outer, last = keys = tuple(takewhile(lambda key: isinstance(key, str), place))
    holder: Any = result
    for key in outer:
        holder = holder[key]
    if kind == "model_type" and keys == place:
        holder[last] = {}
    else:
        del holder[last]
