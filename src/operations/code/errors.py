"""The errors of calls as exceptions of a script.

The interpreter has no inheritance, so the classes are exceptions that it has already: a family with a common base.

Rule 1: `CallError` catches no other exception: no member of the family is raised by what the script computes.
Rule 2: a class catches no errors of another class: no member is a subclass of another one, or of an exception outside
        of the family that scripts catch, such as `TypeError`.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from operations.base.errors import CallError
from operations.base.json.values import to_json
from operations.base.types import JSONObject
from operations.code.names import BASE_ERROR, Names


@dataclass(frozen=True, slots=True)
class Family:
    """Exceptions of the interpreter with a common base."""

    base: str
    members: tuple[str, ...]


_DECIMAL: Final = Family(
    "decimal.DecimalException",
    tuple(
        f"decimal.{name}"
        for name in (
            "Clamped",
            "ConversionSyntax",
            "DivisionImpossible",
            "InvalidContext",
            "Rounded",
            "Subnormal",
            "Inexact",
        )
    ),
)
"""Raised by decimals only, so that a script without them raises none."""

_SYSTEM: Final = Family(
    "OSError",
    (
        "NotADirectoryError",
        "IsADirectoryError",
        "FileExistsError",
        "FileNotFoundError",
        "PermissionError",
    ),
)
"""Raised by files only, which scripts do not have: `NO_SYSTEM` is raised instead."""

NO_SYSTEM: Final = "NotImplementedError"
"""The exception for functions of the operating system, which scripts do not have."""

_PREAMBLE: Final = """\
import decimal as _decimal
import json as _json
CallError = {base}
{classes}
def error_of(error, _base={base}):
    text = str(error)
    head, separator, details = text.rpartition("\\ndetails: ")
    if not separator:
        head, details = text, "null"
    code, separator, message = head.partition(": ")
    if separator and isinstance(error, _base):
        try:
            return {{"code": code, "message": message, "details": _json.loads(details)}}
        except ValueError:
            pass
    return {{"code": type(error).__name__, "message": text, "details": None}}
"""

_MAX_MESSAGE: Final = 2_000
_MAX_DETAILS: Final = 4_000


class ScriptErrors:
    """The classes of errors of one script.

    Args:
        names: The names of all errors.
        codes: The codes of the errors whose class the script names.
        words: All names in the script.
    """

    def __init__(self, names: Names, codes: Iterable[str], words: set[str]) -> None:
        self._family = _SYSTEM if words & {"decimal", "Decimal"} else _DECIMAL
        self._members = dict(zip(codes, self._family.members, strict=False))
        self._names = {member: names.errors[code] for code, member in self._members.items()}
        self._names[self._family.base] = BASE_ERROR
        self._shown = re.compile(rf"\b_?({'|'.join(map(re.escape, self._names))})\b")
        self._raised: dict[str, CallError] = {}

    @property
    def most(self) -> int:
        """The largest number of error classes that the script may name."""
        return len(self._family.members)

    @property
    def preamble(self) -> str:
        """The source that defines the classes."""
        classes = [
            f"{name} = {_source(member)}"
            for member, name in self._names.items()
            if name != BASE_ERROR
        ]
        return _PREAMBLE.format(base=_source(self._family.base), classes="\n".join(classes))

    def exception(self, error: CallError) -> JSONObject:
        """Return the exception that the error of a call is in the script."""
        member = self._members.get(error.code, self._family.base)
        # Newlines would let a message pose as details.
        message = f"{error.code}: {' '.join(error.message.split())}"[:_MAX_MESSAGE]
        with suppress(TypeError, ValueError):
            if error.details is not None:
                details = msgspec.json.encode(to_json(error.details)).decode()
                if len(details) <= _MAX_DETAILS:
                    message = f"{message}\ndetails: {details}"
        self._raised[message] = error
        return {"exc_type": member, "message": message}

    def cause(self, message: str) -> CallError | None:
        """Return the error of a call that an exception with this message is; None for any other exception."""
        return self._raised.get(message)

    def named(self, text: str) -> str:
        """Return a text of the interpreter with the names that the classes have in the script."""
        return self._shown.sub(lambda match: self._names[match[1]], text)


def _source(member: str) -> str:
    return f"_{member}" if member.startswith("decimal.") else member
