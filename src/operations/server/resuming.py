"""Streams that can be taken up where they broke off.

An operation that can says so in its spec: `meta={"resume": {"input": "after", "id": "id"}}`. Each event then has the
item's `id` as its id; a client that comes back with `Last-Event-ID` has it put into the input as `after`, unless the
input says something there itself. `"id": ""` takes the whole item.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from operations._json import is_object
from operations.front.http_errors import malformed
from operations.openapi.exporting.query_arguments import QueryArguments
from operations.specs import OperationSpec
from operations.types import JSONObject

_MAX_ID = 1024


class Resuming:
    """How one operation takes up its stream; does nothing for one that cannot."""

    def __init__(self, spec: OperationSpec) -> None:
        rule: Any = spec.meta.get("resume")
        self._spec = spec
        self._rule: JSONObject | None = rule if isinstance(rule, dict) else None

    def resume(self, input: Any, headers: Mapping[bytes, bytes]) -> Any:
        """The input, with where to go on.

        Raises:
            RequestError: If what the client last saw is no text.
        """
        last = headers.get(b"last-event-id")
        given: Any = {} if input is None else input
        if self._rule is None or last is None or not is_object(given):
            return input
        name = str(self._rule.get("input", "after"))
        if name in given:
            return given
        try:
            text = last.decode()
        except UnicodeDecodeError:
            raise malformed("Last-Event-ID is not UTF-8") from None
        for parameter in QueryArguments(self._spec.input_schema).parameters:
            if parameter.name == name:
                return {**given, name: parameter.convert(text)}
        return {**given, name: text}

    def event_id(self, data: Any) -> bytes | None:
        """The id of an item's event; None where it has none that can be sent."""
        if self._rule is None:
            return None
        name = self._rule.get("id", "id")
        held: Any = data if not name else data.get(name) if is_object(data) else None
        if held is None or isinstance(held, (dict, list)):
            return None
        text = held if isinstance(held, str) else msgspec.json.encode(held).decode()
        is_sendable = len(text) <= _MAX_ID and not any(c in text for c in "\0\r\n")
        return text.encode() if is_sendable else None
