"""What the type checker accepts and the interpreter rejects only when it runs, perhaps after calls.

Rule 1: this is help, not defence. It takes time in proportion to the script, because it runs in this process.
"""

import re
from collections.abc import Collection
from typing import Final

from operations.base.types import JSONObject

GATHER: Final = "asyncio.gather has no return_exceptions here"

_HINT: Final = "Catch CallError in an async function around each call, return the error there, and gather them."

_TEXTS: Final = re.compile(
    r"#[^\n]*"
    r"|'''(?:[^'\\]|\\.|'(?!''))*(?:'''|\\?\Z)"
    r'|"""(?:[^"\\]|\\.|"(?!""))*(?:"""|\\?\Z)'
    r"|'(?:[^'\\\n]|\\.)*'?"
    r'|"(?:[^"\\\n]|\\.)*"?',
    re.DOTALL,
)
"""Comments and texts; those without an end reach to the end of the line or of the script."""

_WORDS: Final = re.compile(r"\w+|==|[.()\[\]{}=]")
_VISIBLE: Final = re.compile(r"[^\n]")


def unsupported(script: str, namespaces: Collection[str]) -> list[JSONObject]:
    """Return findings, in the form of those of the type checker.

    Args:
        script: The source.
        namespaces: The namespaces of operations, which may have parameters with the same names.
    """
    if "return_exceptions" not in script:
        return []
    code = _TEXTS.sub(lambda found: _VISIBLE.sub(" ", found[0]), script)
    callees: list[tuple[str, ...]] = []
    found: list[JSONObject] = []
    before = ("", "", "")
    start = 0
    for match in _WORDS.finditer(code):
        word = match[0]
        if word in ("(", "[", "{"):
            callees.append(before if word == "(" else ())
        elif word in (")", "]", "}") and callees:
            callees.pop()
        is_named = word == "=" and before[2] == "return_exceptions" and bool(callees)
        if is_named and _is_gather(callees[-1], namespaces):
            found.append(_finding(code, start))
        start = match.start()
        before = (*before[1:], word)
    return found


def _is_gather(callee: tuple[str, ...], namespaces: Collection[str]) -> bool:
    """Return whether the three words before a bracket call `asyncio.gather`, whatever its name."""
    match callee:
        case (_, "def", "gather"):
            return False
        case (owner, ".", "gather"):
            return owner not in namespaces
        case (_, _, "gather"):
            return True
        case _:
            return False


def _finding(code: str, start: int) -> JSONObject:
    row = code.count("\n", 0, start) + 1
    column = start - code.rfind("\n", 0, start)
    return {
        "message": GATHER,
        "location": {"row": row, "column": column},
        "fix": {"message": _HINT},
    }
