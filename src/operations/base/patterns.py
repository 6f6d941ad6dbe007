"""Match operation ids with patterns, such as `price.*`: `*`, `?` and `[...]`, as in file names.

Rule 1: the patterns of a set are compiled together, once. Matching reads an id once for all patterns, and never goes
        back, so its time is proportional to the length of the id and the total length of the patterns, whatever the
        patterns are. A regular expression with hundreds of alternatives takes up to a thousand times as long to
        compile, and a hundred times as long to match.
Rule 2: nothing is shared between sets. A cache for all callers could be emptied by one of them, and all would then
        compile their patterns again for each call.
"""

import re
from collections.abc import Iterable
from os.path import commonprefix
from string import ascii_letters, digits
from typing import Final

_SPECIAL: Final = re.compile(r"[*?\[]")
_CHARACTERS: Final = frozenset(ascii_letters + digits + "_-.")
"""The characters of ids."""

_LONGEST: Final = 1_024
"""No id is longer."""

_ANY_TEXT: Final = frozenset({"*"})
"""The part `*` of a pattern."""


class Patterns:
    """A set of patterns.

    Args:
        patterns: The patterns; a text without `*`, `?` and `[` matches only itself.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.ids = set[str]()
        """The patterns that match only themselves."""
        prefixes, others = list[str](), list[str]()
        for pattern in dict.fromkeys(patterns):
            special = _SPECIAL.search(pattern)
            if special is None:
                self.ids.add(pattern)
            elif pattern[special.start() :] == "*":
                prefixes.append(pattern[:-1])
            else:
                others.append(pattern)
        self._prefixes = tuple(prefixes)
        self._others = _Automaton(others) if others else None

    def cover(self, operation_id: str) -> bool:
        """Return whether a pattern matches an id."""
        return (
            operation_id in self.ids
            or operation_id.startswith(self._prefixes)
            or (self._others is not None and self._others.run(operation_id) != 0)
        )

    def matching(self, *operation_ids: str) -> set[str]:
        """Return the patterns that match at least one of the ids."""
        found = self.ids.intersection(operation_ids)
        found.update(f"{each}*" for each in self._prefixes if _starts(operation_ids, each))
        if self._others is not None:
            for operation_id in operation_ids:
                found.update(self._others.matching(operation_id))
        return found


def _starts(operation_ids: tuple[str, ...], prefix: str) -> bool:
    return any(each.startswith(prefix) for each in operation_ids)


class _Automaton:
    """Runs all patterns at once. Each bit of an integer is the state of one pattern after some of its parts.

    For `a*b?` these are the bits 0 (nothing matched, may only be followed by `a`), 1 (`a` matched, stays set for every
    character because of `*`), 2 (`b` matched) and 3 (the whole pattern).
    """

    def __init__(self, patterns: list[str]) -> None:
        self._ends: dict[int, str] = {}
        self._first = self._stays = self._last = 0
        steps: dict[frozenset[str], list[int]] = {}
        firsts, stays, position = list[int](), list[int](), 0
        for pattern in patterns:
            firsts.append(position)
            for part in _parts(pattern):
                if part is _ANY_TEXT:
                    stays.append(position)
                else:
                    steps.setdefault(part, []).append(position)
                    position += 1
            self._ends[position] = pattern
            position += 1
        size = position // 8 + 1
        self._first, self._stays = _bits(firsts, size), _bits(stays, size)
        self._last = _bits(self._ends, size)
        self._trail: tuple[str, list[int]] = "", [self._first]
        """The last id, and the states before and after each of its characters, up to one without any state."""
        self._steps = dict.fromkeys(_CHARACTERS, 0)
        for characters, positions in steps.items():
            bits = _bits(positions, size)
            for character in characters:
                self._steps[character] |= bits

    def run(self, operation_id: str) -> int:
        """Return the bits of the patterns that match an id."""
        if len(operation_id) > _LONGEST:
            return 0
        stays, steps = self._stays, self._steps
        # Begin where the last id differs: a listing asks for many that begin with the same namespace.
        before, states = self._trail
        same = len(commonprefix((before, operation_id)))  # noqa: RUF071 - of texts
        position = min(same, len(states) - 1)
        state, states = states[position], states[: position + 1]
        for character in operation_id[position:]:
            if not state:
                break
            state = ((state & steps.get(character, 0)) << 1) | (state & stays)
            states.append(state)
        # One assignment, because threads may ask at the same time.
        self._trail = operation_id, states
        return state & self._last

    def matching(self, operation_id: str) -> list[str]:
        """Return the patterns that match an id."""
        bits = self.run(operation_id)
        return [pattern for end, pattern in self._ends.items() if bits >> end & 1] if bits else []


def _bits(positions: Iterable[int], size: int) -> int:
    found = bytearray(size)
    for position in positions:
        found[position >> 3] |= 1 << (position & 7)
    return int.from_bytes(found, "little")


def _parts(pattern: str) -> list[frozenset[str]]:
    """Return the parts of a pattern: `_ANY_TEXT` for `*`, and the characters that match each other part."""
    parts: list[frozenset[str]] = []
    position, end = 0, len(pattern)
    while position < end:
        character = pattern[position]
        position += 1
        close = -1
        if character == "[":
            # A `]` that begins the set belongs to it.
            after = position + pattern.startswith("!", position)
            close = pattern.find("]", after + pattern.startswith("]", after))
        if close >= 0:
            parts.append(_class(pattern[position:close]))
            position = close + 1
        elif character == "*":
            if parts[-1:] != [_ANY_TEXT]:
                parts.append(_ANY_TEXT)
        elif character == "?":
            parts.append(_CHARACTERS)
        else:
            parts.append(frozenset(character) & _CHARACTERS)
    return parts


def _class(text: str) -> frozenset[str]:
    """Return the characters of ids in a set, such as `a-z` or `!0-9`."""
    is_inverted = text.startswith("!")
    text = text[is_inverted:]
    found, position = set[str](), 0
    while position < len(text):
        low, high = text[position], text[position : position + 3]
        if len(high) == 3 and high[1] == "-":
            found.update(each for each in _CHARACTERS if low <= each <= high[2])
            position += 3
        else:
            found.add(low)
            position += 1
    return _CHARACTERS - found if is_inverted else _CHARACTERS & found
