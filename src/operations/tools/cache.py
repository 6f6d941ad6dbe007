"""Results that are kept for a while."""

from collections import OrderedDict
from copy import deepcopy
from time import monotonic
from typing import Any, Final

import msgspec

from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.tools.pages import result_owner

_MAX_ENTRIES = 1_000
_MAX_BYTES = 16 << 20

RUNNING: Final = ("rate", "concurrency", "retry", "cache", "select", "max_bytes")
"""The settings that need their own handler."""


class ResultCache:
    """Caches results by caller and input, up to a limit. They are encoded so that callers cannot change them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[float, bytes, Any]] = OrderedDict()

    def get(self, key: bytes) -> ResponseEnvelope[Any] | None:
        """Return a cached result; None if there is none."""
        expires, data, meta = self._entries.get(key, (0.0, b"", None))
        if expires <= monotonic():
            return None
        self._entries.move_to_end(key)
        return ResponseEnvelope(msgspec.msgpack.decode(data), deepcopy(meta))

    def put(self, key: bytes, envelope: ResponseEnvelope[Any]) -> None:
        """Keep a result, unless it is an error or bytes."""
        meta: Any = envelope.meta
        if isinstance(envelope.data, bytes) or getattr(meta, "is_error", False):
            return
        try:
            data = msgspec.msgpack.encode(envelope.data)
        except (OverflowError, TypeError):
            # Not encodable, such as an integer of more than 64 bits: do not cache it.
            return
        if len(data) + len(key) > _MAX_BYTES:
            return
        self._drop(key)
        self._entries[key] = (monotonic() + self._seconds, data, deepcopy(meta))
        self._bytes += len(data) + len(key)
        while len(self._entries) > _MAX_ENTRIES or self._bytes > _MAX_BYTES:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        _, data, _ = self._entries.pop(key, (0.0, None, None))
        if data is not None:
            self._bytes -= len(data) + len(key)


def caller_of(context: OperationContext) -> str:
    """Return the key of the caller for limits."""
    return "" if context.identity is None else context.identity.limit_key


def cache_key(value: Any, context: OperationContext) -> bytes | None:
    """Return a canonical key from the input and the caller without its expiry; None if the input has files."""
    caller = [*result_owner(context), context.trusted]
    try:
        return msgspec.json.encode([value, caller], order="deterministic")
    except TypeError:
        return None
