"""The names that one caller may use in scripts.

Rule 1: a namespace, an operation or an error that the caller may not see looks like one that does not exist: in values,
        in errors, and in what the type check reports.
"""

import re
from collections.abc import Callable
from typing import Final

from operations.base.errors import ErrorCode
from operations.code.names import Names
from operations.contract.specs import OperationSpec

_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OWN: Final = frozenset(map(str, ErrorCode))


def words_of(script: str) -> set[str]:
    """Return the names in a script, also those in its texts: a call may have a computed name."""
    return set(_WORD.findall(script))


class View:
    """The names that one caller sees.

    Args:
        names: All names.
        sees: Returns the spec of an operation if the caller may call it in a script.
    """

    def __init__(self, names: Names, sees: Callable[[str], OperationSpec | None]) -> None:
        self.names, self._sees = names, sees
        self._namespaces: dict[str, bool] = {}

    def has_namespace(self, namespace: str) -> bool:
        """Return whether the caller may call an operation of a namespace."""
        found = self._namespaces.get(namespace)
        if found is None:
            operations = self.names.operations.get(namespace, {})
            found = any(self._sees(each) is not None for each in operations.values())
            self._namespaces[namespace] = found
        return found

    def has_operation(self, namespace: str, name: str) -> bool:
        """Return whether the caller may call an operation."""
        operation_id = self.names.operations.get(namespace, {}).get(name)
        return operation_id is not None and self._sees(operation_id) is not None

    def operations(self, words: set[str]) -> list[OperationSpec]:
        """Return the operations of which a script names the namespace and the name."""
        found = (
            self._sees(operation_id)
            for namespace in sorted(words & self.names.operations.keys())
            for name, operation_id in self.names.operations[namespace].items()
            if name in words
        )
        return [spec for spec in found if spec is not None]

    def namespaces(self, words: set[str]) -> list[str]:
        """Return the namespaces that a script names."""
        named = sorted(words & self.names.operations.keys())
        return [each for each in named if self.has_namespace(each)]

    def errors(self, words: set[str]) -> list[str]:
        """Return the codes of the errors whose class a script names."""
        return [
            code
            for code, name in self.names.errors.items()
            if name in words and (code in _OWN or self._declares(code))
        ]

    def _declares(self, code: str) -> bool:
        return any(self._sees(each) is not None for each in self.names.declaring.get(code, ()))
