"""Strip, fill and check values by a msgspec type, in C."""

from collections.abc import Callable
from typing import Any

from msgspec import ValidationError, msgpack

from operations.base.json.objects import holds_models, holds_objects, pack_objects, without_objects
from operations.base.work import PIECE, STEP, BudgetSpentError, Work
from operations.schema.casting.structs import PlanType, list_type
from operations.schema.plans import MISSING

pack = msgpack.Encoder().encode
REFUSALS = (LookupError, NotImplementedError, OverflowError, TypeError, ValueError)
"""The exceptions raised for a value that a type does not accept, when it is encoded, decoded or finished."""

_PATIENCE = 8
"""After this many refused items in a row, the other items of a list are not tried."""

_TOGETHER = 10
"""The number of items that are decoded together; one by one if the type refuses one of them."""


_CONTAINERS = frozenset({dict, list})
_OBJECTS = frozenset({dict})
_TEXT = frozenset({str})


class NeedsRepair(Exception):  # noqa: N818 - a signal between passes, not an error
    """The value needs more changes than a pass makes: the quick pass only strips and fills, a trial also converts."""


class TypedStrip:
    """Strips, fills and checks values by a type, in C.

    A value is encoded as MessagePack and decoded again. The result therefore shares no object with the value and
    contains only JSON: invalid Unicode cannot be encoded, and a decimal is encoded as text.

    Args:
        shape: The type.
        closed: The type of values that need no change, if it is known.
        most: The largest number of bytes in the event loop.

    Attributes:
        shape: The type.
        decode: Decodes a value that `pack` encoded.

    Raises:
        TypeError, ValueError: If msgspec does not support the type.
    """

    def __init__(self, shape: PlanType, closed: PlanType | None = None, most: int = PIECE) -> None:
        self.shape = shape
        self.most = most
        self.decode: Callable[[bytes], Any] = msgpack.Decoder(shape.type).decode
        self._decode_list: Callable[[bytes], list[Any]] = msgpack.Decoder(
            list_type(shape.type)
        ).decode
        self._check = None if closed is None else msgpack.Decoder(closed.type).decode
        self._packs = True
        """Whether objects are packed directly; False after one with a special type, such as an aware datetime."""

    def strip(self, value: Any, work: Work | None = None) -> tuple[Any, bool]:
        """Return a value stripped and filled, and whether that changed it.

        Args:
            value: The value.
            work: The budget; by default `most` bytes.

        Raises:
            BudgetSpentError: If the budget does not suffice.
            NeedsRepair: If the type does not accept the value, or the value is larger than a piece.
        """
        finish, must_finish = self.shape.finish, self.shape.must_finish
        try:
            if type(value) is not dict and holds_objects(value):
                if self._packs and not holds_models(value):
                    packed = pack_objects(value)
                    self._enforce_piece(len(packed), work)
                    try:
                        result = self.decode(packed)
                    except ValidationError:
                        self._packs = False
                    else:
                        differs = pack(result) != packed
                        if must_finish and finish is not None:
                            differs = finish([result], [result]) or differs
                        return result, differs
                value = without_objects(value, work)
                if self._is_clean(value):
                    return value, False
            packed = pack(value)
            size = len(packed)
            if size > self.most or work is not None:
                self._enforce_piece(size, work)
            result = self.decode(packed)
            if finish is None or (not must_finish and is_unchanged(value, result)):
                return result, False
            return result, finish([value], [result])
        except REFUSALS:
            raise NeedsRepair from None

    def strip_items(self, values: list[Any], work: Work) -> tuple[list[Any], bool]:
        """Strip the JSON values that the type accepts, and that are not larger than a piece.

        Returns:
            The results, with `MISSING` for values that were not accepted; and whether any result may differ.
        """
        decode, finish = self.decode, self.shape.finish
        results: list[Any] = []
        refused, together = 0, _TOGETHER
        while len(results) < len(values):
            several = values[len(results) : len(results) + together]
            try:
                packed = pack(several)
                work.spend(len(packed) + STEP)
                if len(packed) <= PIECE:
                    results += self._decode_list(packed)
                    refused = 0
                    if len(packed) < PIECE // 8:
                        together *= 2
                    continue
            except REFUSALS:
                pass
            if together > _TOGETHER:
                together = _TOGETHER
                continue
            for value in several:
                result: Any = MISSING
                refused += 1
                if type(value) in _CONTAINERS and refused <= _PATIENCE:
                    try:
                        packed = pack(value)
                        work.spend(len(packed) + STEP)
                        if len(packed) <= PIECE:
                            result = decode(packed)
                            refused = 0
                    except REFUSALS:
                        pass
                results.append(result)
            if refused > _PATIENCE:
                break
        results += [MISSING] * (len(values) - len(results))
        if finish is None:
            return results, False
        accepted = [pair for pair in zip(values, results, strict=True) if pair[1] is not MISSING]
        try:
            return results, finish([value for value, _ in accepted], [each for _, each in accepted])
        except REFUSALS:
            return [MISSING] * len(values), False

    def _enforce_piece(self, size: int, work: Work | None) -> None:
        if work is not None:
            # Enforced at the next step.
            work.left -= size
            if size > PIECE:
                raise NeedsRepair
        elif size > self.most:
            raise BudgetSpentError

    def _is_clean(self, value: Any) -> bool:
        """Return whether a value is known to need no change."""
        if self._check is None:
            return False
        packed = pack(value)
        if len(packed) > PIECE:
            return False
        try:
            self._check(packed)
        except ValidationError:
            return False
        return True


def is_unchanged(before: Any, after: Any) -> bool:
    """Return whether stripping and filling changed nothing."""
    try:
        return bool(before == after)
    except Exception:  # noqa: BLE001 - values that are not plain JSON have comparisons of their own
        return False


def names_of(objects: list[Any]) -> tuple[str, ...] | None:
    """Return the names of objects that all have the same names in the same order; None for other values."""
    if not _OBJECTS.issuperset(map(type, objects)):
        return None
    found: set[tuple[Any, ...]] = set(map(tuple, objects))
    names = found.pop()
    return names if not found and _TEXT.issuperset(map(type, names)) else None
