"""Names that others allow, for ids that they may not."""

import re
from collections.abc import Iterable
from hashlib import sha256


def tool_names(ids: Iterable[str], *, allowed: str, longest: int) -> dict[str, str]:
    """A name for each id: the id itself where it is allowed, else as near to it as it can be, and never twice.

    Args:
        ids: The ids.
        allowed: A regular expression for one character that may stand in a name.
        longest: How many characters a name may have.
    """
    given: dict[str, str] = {}
    taken: set[str] = set()
    for operation_id in ids:
        name = "".join(
            letter if re.fullmatch(allowed, letter) else "_" * (1 + (letter == "."))
            for letter in operation_id
        )
        if len(name) > longest or name in taken:
            digest = sha256(operation_id.encode()).hexdigest()[:8]
            name = f"{name[: longest - 9]}_{digest}"
        taken.add(name)
        given[operation_id] = name
    return given
