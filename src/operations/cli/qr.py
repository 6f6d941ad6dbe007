"""Short texts as QR codes, which a phone reads from a terminal.

Rule 1: only what an address needs is written (ISO/IEC 18004): bytes, up to version 5 with error correction of level L,
        whose codewords are one block.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

_DATA, _CHECK = (19, 34, 55, 80, 108), (7, 10, 15, 20, 26)
"""The codewords of data and of error correction, by version, from 1."""

_PADDING = (0xEC, 0x11)
_QUIET = 2
"""The light modules around a code; readers of phones need no more."""

_HALVES = {(False, False): "█", (False, True): "▀", (True, False): "▄", (True, True): " "}
"""Two modules, one above the other, as a character whose foreground is light."""

_MASKS: tuple[Callable[[int, int], int], ...] = (
    lambda x, y: (x + y) % 2,
    lambda x, y: y % 2,
    lambda x, y: x % 3,
    lambda x, y: (x + y) % 3,
    lambda x, y: (x // 3 + y // 2) % 2,
    lambda x, y: x * y % 2 + x * y % 3,
    lambda x, y: (x * y % 2 + x * y % 3) % 2,
    lambda x, y: ((x + y) % 2 + x * y % 3) % 2,
)
"""Conditions, by column and row: a module of data is inverted where the chosen one is 0."""


def qr_lines(text: str) -> list[str]:
    """Return lines of characters that show a text as a QR code, light on dark.

    Raises:
        ValueError: If the text has more than 106 bytes.
    """
    dark = qr_modules(text)
    size = len(dark)

    def at(x: int, y: int) -> bool:
        return 0 <= x < size and 0 <= y < size and dark[y][x]

    columns = range(-_QUIET, size + _QUIET)
    return [
        "".join(_HALVES[at(x, y), at(x, y + 1)] for x in columns)
        for y in range(-_QUIET, size + _QUIET, 2)
    ]


def qr_modules(text: str) -> list[list[bool]]:
    """Return the rows of a QR code; True is a dark module.

    Raises:
        ValueError: If the text has more than 106 bytes.
    """
    data = text.encode()
    # The mode takes 4 bits, the length 8.
    fitting = (number for number, size in enumerate(_DATA, 1) if len(data) + 2 <= size)
    version = next(fitting, None)
    if version is None:
        raise ValueError(f"a text of {len(data)} bytes is too long for a QR code")
    codewords = _codewords(data, _DATA[version - 1])
    bits = list(_bits([*codewords, *_corrections(codewords, _CHECK[version - 1])]))
    return min((_drawn(version, bits, mask) for mask in range(8)), key=_penalty)


# ------------------------------------------------------------ codewords


def _bits(codewords: Iterable[int]) -> Iterator[int]:
    return (each >> shift & 1 for each in codewords for shift in range(7, -1, -1))


def _codewords(data: bytes, size: int) -> list[int]:
    """Return the bytes with their mode (4: bytes) and length, padded."""
    text = f"0100{len(data):08b}{''.join(f'{each:08b}' for each in data)}"
    text += "0" * min(4, 8 * size - len(text))
    text += "0" * (-len(text) % 8)
    found = [int(text[at : at + 8], 2) for at in range(0, len(text), 8)]
    return found + [_PADDING[each % 2] for each in range(size - len(found))]


def _product(a: int, b: int) -> int:
    """Multiply in the field of 256 elements, modulo x^8 + x^4 + x^3 + x^2 + 1."""
    found = 0
    for shift in range(7, -1, -1):
        found = found << 1 ^ (found >> 7) * 0x11D
        found ^= (b >> shift & 1) * a
    return found


def _corrections(data: list[int], count: int) -> list[int]:
    """Return the codewords of error correction: the remainder of a division by (x - 1)(x - 2)(x - 4)..."""
    divisor, root = [*[0] * (count - 1), 1], 1
    for _ in range(count):
        shifted = [*divisor[1:], 0]
        divisor = [_product(a, root) ^ b for a, b in zip(divisor, shifted, strict=True)]
        root = _product(root, 2)
    rest = [0] * count
    for each in data:
        factor, rest = each ^ rest[0], [*rest[1:], 0]
        rest = [a ^ _product(b, factor) for a, b in zip(rest, divisor, strict=True)]
    return rest


# ------------------------------------------------------------ modules


def _drawn(version: int, bits: list[int], mask: int) -> list[list[bool]]:
    """Return the modules of a code with one of the eight masks."""
    size = 17 + 4 * version
    fixed: dict[tuple[int, int], bool] = {}
    for each in range(size):
        fixed[6, each] = fixed[each, 6] = each % 2 == 0
    for x, y in ((3, 3), (size - 4, 3), (3, size - 4)):
        fixed |= _square(x, y, 4, size)
    if version > 1:
        fixed |= _square(size - 7, size - 7, 2, size)
    fixed |= _format(mask, size)
    rows = [[False] * size for _ in range(size)]
    for (x, y), is_dark in fixed.items():
        rows[y][x] = is_dark
    given = iter(bits)
    for x, y in _path(size):
        if (x, y) not in fixed:
            rows[y][x] = bool(next(given, 0)) != (_MASKS[mask](x, y) == 0)
    return rows


def _square(x: int, y: int, radius: int, size: int) -> dict[tuple[int, int], bool]:
    """Return nested squares around a module: a finder with its light border (4), or an alignment pattern (2)."""
    found: dict[tuple[int, int], bool] = {}
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            if 0 <= x + dx < size and 0 <= y + dy < size:
                ring = max(abs(dx), abs(dy))
                found[x + dx, y + dy] = ring not in ((2, 4) if radius == 4 else (1,))
    return found


def _format(mask: int, size: int) -> dict[tuple[int, int], bool]:
    """Return both copies of the level (1: L) and the mask, with their check bits, and the module that is dark."""
    given = rest = 1 << 3 | mask
    for _ in range(10):
        rest = rest << 1 ^ (rest >> 9) * 0x537
    word = (given << 10 | rest) ^ 0x5412
    down = [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        size - 7,
        size - 6,
        size - 5,
        size - 4,
        size - 3,
        size - 2,
        size - 1,
    ]
    across = [*range(size - 1, size - 9, -1), 7, 5, 4, 3, 2, 1, 0]
    found = {(8, size - 8): True}
    for each in range(15):
        is_dark = bool(word >> each & 1)
        found[8, down[each]] = found[across[each], 8] = is_dark
    return found


def _path(size: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the bits: in pairs of columns from the right, up and down in turns, without column 6."""
    columns = [*range(size - 1, 6, -2), 5, 3, 1]
    for number, right in enumerate(columns):
        for step in range(size):
            y = step if number % 2 else size - 1 - step
            yield right, y
            yield right - 1, y


def _penalty(rows: list[list[bool]]) -> int:
    """Return how hard a code is to read: long runs and large blocks of one colour."""
    found = 0
    for line in (*rows, *map(list, zip(*rows, strict=True))):
        text = "".join(" #"[each] for each in line)
        for run in text.replace("# ", "#\n ").replace(" #", " \n#").split("\n"):
            found += max(0, len(run) - 2) if len(run) >= 5 else 0
        # What looks like a finder.
        found += 40 * (text.count("# ### #    ") + text.count("    # ### #"))
    for above, below in pairwise(rows):
        blocks = zip(above, above[1:], below, below[1:], strict=False)
        found += 3 * sum(len(set(block)) == 1 for block in blocks)
    return found
