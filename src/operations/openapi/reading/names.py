"""Names: of operations, unique and the same however the document is ordered; of arguments, one per parameter.

Rule 1: a name holds only `[A-Za-z0-9_.-]`.
Rule 2: nothing depends on the order of paths, methods or parameters.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence

MAX_NAME = 240
"""How long an operation's name may be; longer ones end in a digest."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def operation_names(operations: Iterable[tuple[str, str, str]]) -> list[str]:
    """A unique name for each `(wanted name, method, path)`, in the order given.

    The wanted name (an `operationId`) is kept, made safe, where nobody else wants the same; otherwise, and
    where there is none, the name is made of method and path; where even those are the same, a digest of both
    is added.
    """
    entries = list(operations)
    is_safe = _SAFE.fullmatch
    wanted = [
        name
        if is_safe(name) is not None and len(name) <= MAX_NAME
        else safe_name(name) or path_name(method, path)
        for name, method, path in entries
    ]
    if len(set(wanted)) == len(entries):
        return wanted
    counts = Counter(wanted)
    taken = {name for name, count in counts.items() if count == 1}
    again = {
        index: path_name(method, path)
        for index, (_, method, path) in enumerate(entries)
        if counts[wanted[index]] > 1
    }
    counts = Counter(again.values())
    for index, name in again.items():
        if counts[name] > 1 or name in taken:
            _, method, path = entries[index]
            name = _with_digest(name, f"{method} {path}")  # noqa: PLW2901 - the name is what is refined
        wanted[index] = name
    return wanted


def safe_name(text: str) -> str:
    """`text` with every run of unsafe characters as one underscore; empty where nothing is left."""
    if _SAFE.fullmatch(text) and len(text) <= MAX_NAME:
        return text
    name = _UNSAFE.sub("_", text).lstrip(".-").strip("_")
    return name if len(name) <= MAX_NAME else _with_digest(name, text)


def path_name(method: str, path: str) -> str:
    """`get_users_id_posts` for `GET /users/{id}/posts`."""
    return safe_name(f"{method.lower()}_{path.strip('/')}".rstrip("_"))


def _with_digest(name: str, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{name[: MAX_NAME - 11]}_{digest}"


def argument_names(
    parameters: Sequence[tuple[str, str]], reserved: Iterable[str] = ()
) -> list[str]:
    """The argument each parameter `(name, place)` is given by, in the order given.

    That is its own name. A name used in two places, or reserved, gets the place added: `id_path`, `id_query`.
    """
    counts = Counter(name for name, _ in parameters)
    counts.update(reserved)
    taken = {name for name, count in counts.items() if count == 1}
    taken.update(reserved)
    result: list[str] = []
    for name, place in parameters:
        argument = name
        if counts[name] > 1:
            argument = unused_name(f"{name}_{place}", taken)
            taken.add(argument)
        result.append(argument)
    return result


def unused_name(wanted: str, taken: Container[str]) -> str:
    """`wanted`, with as many underscores behind it as make it unlike those taken."""
    while wanted in taken:
        wanted += "_"
    return wanted
