"""What the type checker accepts and the interpreter rejects only when it runs, perhaps after calls."""

import io
import tokenize
from collections.abc import Collection, Iterator
from typing import Final

from operations.base.types import JSONObject

GATHER: Final = "asyncio.gather has no return_exceptions here"

_HINT: Final = "Catch CallError in an async function around each call, return the error there, and gather them."

_NO_CALLEE: Final = ("", "")


def unsupported(script: str, namespaces: Collection[str]) -> list[JSONObject]:
    """Return findings, in the form of those of the type checker.

    Args:
        script: The source.
        namespaces: The namespaces of operations, which may have parameters with the same names.
    """
    callees: list[tuple[str, str]] = []
    found: list[JSONObject] = []
    before = (_NO_TOKEN,) * 3
    for token in _tokens(script):
        owner, dot, last = before
        if token.string in ("(", "[", "{"):
            is_called = token.string == "(" and last.type == tokenize.NAME
            callees.append(
                (owner.string if dot.string == "." else dot.string, last.string)
                if is_called
                else _NO_CALLEE
            )
        elif token.string in (")", "]", "}") and callees:
            callees.pop()
        elif token.string == "=" and last.string == "return_exceptions" and callees:
            qualifier, name = callees[-1]
            if name == "gather" and qualifier != "def" and qualifier not in namespaces:
                row, column = last.start
                location = {"row": row, "column": column + 1}
                found.append({"message": GATHER, "location": location, "fix": {"message": _HINT}})
        before = (dot, last, token)
    return found


def _tokens(script: str) -> Iterator[tokenize.TokenInfo]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(script).readline):
            if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT):
                yield token
    except (tokenize.TokenError, SyntaxError):
        # The interpreter reports it.
        return


_NO_TOKEN: Final = tokenize.TokenInfo(tokenize.OP, "", (1, 0), (1, 0), "")
