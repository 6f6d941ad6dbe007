"""What is wrong with a script, for a model to act on."""

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from operations.base.json.values import object_of
from operations.base.text import suggestion
from operations.base.types import JSONObject
from operations.code.names import Names
from operations.code.stubs import group_name
from operations.contract.specs import OperationSpec

MAX_DIAGNOSTICS: Final = 20
"""The largest number of diagnostics that one check returns."""

_MAX_MESSAGE: Final = 500

_NO_ATTRIBUTE = re.compile(r"type `(\w+)` has no attribute `(\w+)`")
_NO_NAME = re.compile(r"Name `(\w+)` used when not defined")
_REASSIGNED = re.compile(r"is not assignable to `(\w+)`")
_NO_TASK = re.compile(r"Module `asyncio` has no member")
_NO_MODULE = re.compile(r"[Cc]annot resolve imported module `([\w.]+)`")


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One error of the type check."""

    line: int
    column: int
    message: str

    hint: str | None = None
    """What to do about it."""


def diagnostics_of(
    findings: Iterable[JSONObject],
    names: Names,
    visible: Iterable[OperationSpec],
    *,
    moved: int = 0,
) -> list[Diagnostic]:
    """Return the findings of the type checker as diagnostics, in the order of their lines.

    Args:
        findings: What the checker has reported.
        names: The names of all operations.
        visible: The operations that the caller may call, for suggestions.
        moved: The lines that were put before the script for the check.
    """
    specs = [*visible]
    found: list[Diagnostic] = []
    for each in findings:
        if each.get("severity") not in (None, "error"):
            continue
        place = object_of(each.get("location"))
        message = str(each.get("message", ""))[:_MAX_MESSAGE]
        fix = object_of(each.get("fix")).get("message")
        found.append(
            Diagnostic(
                line=max(1, _number(place.get("row")) - moved),
                column=_number(place.get("column")),
                message=message,
                hint=_hint(message, names, specs) or (fix if isinstance(fix, str) else None),
            )
        )
    return sorted(found, key=lambda each: (each.line, each.column))[:MAX_DIAGNOSTICS]


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _hint(message: str, names: Names, visible: list[OperationSpec]) -> str | None:
    own = [names.names[spec.id] for spec in visible if spec.id in names.names]
    namespaces = dict.fromkeys(group for group, _ in own)
    if found := _NO_ATTRIBUTE.search(message):
        namespace = _namespace_of(found[1], namespaces)
        if namespace is not None:
            near = suggestion(found[2], (name for group, name in own if group == namespace))
            return (near or "Find operations with code.search.").strip()
    if found := _NO_NAME.search(message):
        return suggestion(found[1], namespaces).strip() or (
            "Namespaces are defined; everything else must be imported or assigned first."
        )
    if found := _NO_MODULE.search(message):
        if found[1] in namespaces:
            return f"{found[1]} is defined already: remove the import."
        return "The sandbox has only some modules of the standard library, and no packages."
    if _NO_TASK.search(message):
        return "asyncio has only gather, run and sleep here: gather coroutines instead of tasks."
    if (found := _REASSIGNED.search(message)) and (name := _namespace_of(found[1], namespaces)):
        return f"{name} has the operations {name}.*: choose another name for the variable."
    if "is not awaitable" in message or "Coroutine" in message or "CoroutineType" in message:
        return "Calls return coroutines: write await before the call."
    return None


def _namespace_of(class_: str, namespaces: Iterable[str]) -> str | None:
    """Return the namespace whose class in the stubs has this name."""
    # A number follows if another class has the name.
    plain = class_.rstrip("0123456789")
    found = [each for each in namespaces if group_name(each) in (class_, plain)]
    return next((each for each in found if group_name(each) == class_), next(iter(found), None))
