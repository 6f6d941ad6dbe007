"""Repair malformed messages of a server, so that a wrong part of a listing or a handshake costs only that part.

Rule 1: a message that can be decoded and a result that the protocol allows are not changed.
Rule 2: only responses to requests for listings and handshakes are repaired. The caller of anything else gets the result
        of the server, or an error.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from copy import deepcopy
from itertools import takewhile
from typing import Any, Final

import msgspec
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError
from pydantic_core import from_json

from operations._json import JSONValueError, as_json, is_object, list_of, object_of, text_of
from operations.mcp.failures import answered_id
from operations.types import JSONObject

# ------------------------------------------------------------ messages that cannot be decoded

FAULT: Final = "operations/fault"
"""The key of the reason, in an object that replaces an entry of a list that is not JSON."""

_METHODS: Final = frozenset(
    {
        "initialize",
        "server/discover",
        "tools/list",
        "resources/list",
        "resources/templates/list",
        "prompts/list",
    }
)
"""The requests whose responses are repaired."""

_MOST_REQUESTS: Final = 100
"""The number of such requests whose responses may still arrive; earlier ones are forgotten."""

_LEVELS: Final = 3
"""Levels of objects that are repaired, such as `capabilities.experimental`."""

_MOST_DIGITS: Final = 4300
"""The largest number of digits that Python converts to an integer."""

_LARGE: Final = 64 * 1024
"""The size in bytes from which a message is repaired in a thread."""


def read_message(text: bytes) -> JSONRPCMessage:
    """Return a message of JSON-RPC.

    The same as `validate_json`, in a fifth of the time for a large message.

    Raises:
        ValueError: If it is not one.
    """
    return jsonrpc_message_adapter.validate_python(from_json(text), by_name=False)


class Repairs:
    """Repairs the responses of one connection to requests for listings and handshakes."""

    def __init__(self) -> None:
        self._requests: deque[Any] = deque(maxlen=_MOST_REQUESTS)
        """The ids of these requests."""

    def sent(self, method: Any, request_id: Any) -> None:
        """Record that a request is sent."""
        if method in _METHODS:
            self._requests.append(request_id)

    async def checked(self, message: bytes) -> bytes:
        """Return `message`, repaired if it cannot be decoded."""
        request_id = answered_id(message)
        if request_id is None or request_id in self._requests:
            try:
                read_message(message)
            except ValueError:
                return await self.repaired(message)
        return message

    async def repaired(self, message: bytes) -> bytes:
        """Return a listing or a handshake without the values that are not JSON; other messages are not changed."""
        if len(message) < _LARGE:
            return _without_faults(message, self._requests)
        return await asyncio.to_thread(_without_faults, message, tuple(self._requests))


def _without_faults(message: bytes, requests: Collection[Any]) -> bytes:
    with suppress(ValueError, RecursionError):
        decoded = object_of(json.loads(message, parse_int=_number))
        if decoded.get("id") in requests and is_object(decoded.get("result")):
            return msgspec.json.encode({**decoded, "result": _pruned(decoded["result"], _LEVELS)})
    return message


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _pruned(value: JSONObject, levels: int) -> JSONObject:
    """Return an object without the members that are not JSON; objects are repaired to this number of levels."""
    kept: JSONObject = {}
    for name, member in value.items():
        if _reason(name) is not None:
            continue
        if isinstance(member, list):
            kept[name] = [_entry(each) for each in list_of(member)]
        elif is_object(member) and levels:
            kept[name] = _pruned(member, levels - 1)
        elif _reason(member) is None:
            kept[name] = member
    return kept


def _entry(value: Any) -> Any:
    reason = _reason(value)
    if reason is None:
        return value
    name = text_of(object_of(value).get("name"))
    return {"name": name.encode(errors="replace").decode(), FAULT: reason}


def _reason(value: Any) -> str | None:
    try:
        as_json(value)
    except JSONValueError as error:
        return str(error)
    return None


# ------------------------------------------------------------ results of the handshake

_REQUIRED: Final[JSONObject] = {
    "capabilities": {"tools": {}},
    "serverInfo": {},
    "name": "",
    "version": "",
}
"""Required fields of a handshake that may be missing, with their defaults."""

_MOST_FAULTS: Final = 100
"""The largest number of faults in one handshake that are repaired."""

_ROUNDS: Final = 4
"""Enough to replace an object, then to add its fields, and to check the result."""


def mended(result: JSONObject, validate: Callable[[JSONObject], object]) -> JSONObject:
    """Remove the optional fields that `validate` rejects from the result of a handshake, and return the result."""
    for _ in range(_ROUNDS):
        try:
            validate(result)
        except ValidationError as error:
            if error.error_count() > _MOST_FAULTS:
                break
            for each in error.errors(include_url=False, include_context=False, include_input=False):
                # A field may already be gone with the object that contained it.
                with suppress(KeyError, TypeError):
                    _mend(result, each["loc"], each["type"])
        else:
            break
    return result


def _mend(result: JSONObject, place: tuple[int | str, ...], kind: str) -> None:
    """Replace or remove the field at `place`; a list with a wrong item is removed as a whole."""
    keys = list(takewhile(lambda key: isinstance(key, str), place))
    *outer, last = map(str, keys)
    holder: Any = result
    for key in outer:
        holder = holder[key]
    if kind == "missing" and len(keys) == len(place):
        holder[last] = deepcopy(_REQUIRED[last])
    elif kind == "model_type" and len(keys) == len(place):
        holder[last] = deepcopy(_REQUIRED.get(last, {}))
    else:
        del holder[last]
