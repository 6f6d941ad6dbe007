"""The Python names of operations and errors in scripts.

Rule 1: names depend on the registered operations only, never on the caller: a script means the same for everyone.
Rule 2: a name gives no access. Every call passes the pipeline under the id of its operation.
"""

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import is_object
from operations.base.types import JSONObject
from operations.contract.specs import OperationSpec, OperationType
from operations.registry.registry import OperationRegistry
from operations.schema.hints import class_name, free_name, identifier, is_identifier
from operations.schema.outline import Outline

NAMESPACE: Final = "code"
"""The namespace of the operations of code mode itself."""

BASE_ERROR: Final = "CallError"
"""The class of all errors of calls in a script."""

HELPERS: Final = frozenset({BASE_ERROR, "error_of", "arguments"})

TYPES: Final = frozenset({"Any", "ErrorFields", "Literal", "NotRequired", "TypedDict"})
"""The names with which stubs write types: a class of this name would change the types of other operations."""

_MODULES: Final = frozenset(
    {
        *(
            "array",
            "asyncio",
            "base64",
            "binascii",
            "bisect",
            "collections",
            "copy",
            "csv",
            "dataclasses",
            "datetime",
        ),
        *(
            "decimal",
            "enum",
            "functools",
            "hashlib",
            "heapq",
            "html",
            "io",
            "itertools",
            "json",
            "math",
            "operator",
        ),
        *(
            "os",
            "pathlib",
            "random",
            "re",
            "statistics",
            "string",
            "sys",
            "textwrap",
            "time",
            "tomllib",
            "types",
        ),
        *("typing", "unicodedata", "uuid", "zoneinfo"),
    }
)
"""Modules that scripts import: a namespace of this name would hide them."""

_TAKEN: Final = frozenset({*dir(builtins), *_MODULES, *HELPERS, *TYPES})

BOUNDS: Final = {"max_items": 100, "seconds": 10.0}
"""The parameters of a subscription in a script, with their largest values."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How the arguments of a call become its input."""

    properties: Mapping[str, str]
    """The property of each parameter; empty if the whole input is one parameter."""

    is_object: bool
    """Whether each property of the input is a parameter of its own."""

    bounds: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names of the parameters that bound a subscription."""

    def input_of(
        self, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, JSONObject]:
        """Return the input for the arguments of a call, and the bounds of a subscription.

        Raises:
            CallError: `VALIDATION_ERROR` if an argument is not a parameter.
        """
        bounds = {self.bounds[name]: value for name, value in named.items() if name in self.bounds}
        named = {name: value for name, value in named.items() if name not in self.bounds}
        if not self.is_object:
            if len(arguments) + len(named) > 1 or named.keys() - {"input"}:
                raise _bad_arguments("the call takes one argument, input")
            return next(iter((*arguments, *named.values())), None), bounds
        if len(arguments) == 1 and is_object(arguments[0]) and not named:
            # The whole input, as models pass it by habit.
            return arguments[0], bounds
        if arguments:
            raise _bad_arguments("name every argument, as in limit=4")
        # An unknown name stays as it is: the schema decides whether the operation accepts it.
        return {self.properties.get(name, name): value for name, value in named.items()}, bounds


def parameters_of(spec: OperationSpec) -> Parameters:
    """Return the parameters of an operation."""
    outline = Outline.of(spec.input_schema)
    properties = list(outline.properties)
    takes_object = bool(properties) or outline.types == frozenset({"object"})
    taken = {"self"}
    names: dict[str, str] = {}
    for each in sorted(properties, key=lambda name: not is_plain(name)):
        names[free_name(each if is_plain(each) else identifier(each), taken)] = each
    bounds: dict[str, str] = {}
    if spec.type is OperationType.SUBSCRIPTION:
        bounds = {free_name(each, taken): each for each in BOUNDS}
    return Parameters(names, takes_object, bounds)


def is_plain(name: str) -> bool:
    """Return whether a property can be a parameter of the same name."""
    return is_identifier(name) and not keyword.issoftkeyword(name) and name != "self"


def _bad_arguments(reason: str) -> CallError:
    return CallError(ErrorCode.VALIDATION_ERROR, reason, begun=False)


class Names:
    """The names of the operations of a registry.

    Args:
        specs: All operations, whoever may call them.

    Attributes:
        operations: The id of each operation by namespace and name.
        names: The namespace and the name of each operation by id.
        errors: The class of each error by code.
        declaring: The operations that declare an error, by its code.
    """

    def __init__(self, specs: Iterable[OperationSpec]) -> None:
        self.operations: dict[str, dict[str, str]] = {}
        self.names: dict[str, tuple[str, str]] = {}
        self.declaring: dict[str, list[str]] = {}
        namespaces: dict[str, str] = {}
        taken = set(_TAKEN)
        own = {str(code) for code in ErrorCode}
        for spec in sorted(specs, key=lambda spec: spec.id):
            if spec.namespace == NAMESPACE:
                # A script cannot run scripts, which would multiply its limits.
                continue
            namespace = namespaces.get(spec.namespace)
            if namespace is None:
                wanted = identifier(spec.namespace)
                namespace = free_name(f"{wanted}_" if wanted in taken else wanted, taken)
                namespaces[spec.namespace] = namespace
                self.operations[namespace] = {}
            group = self.operations[namespace]
            name = free_name(identifier(spec.name), _Keys(group))
            group[name] = spec.id
            self.names[spec.id] = (namespace, name)
            for error in spec.error_schemas:
                self.declaring.setdefault(error.code, []).append(spec.id)
        self.errors: dict[str, str] = {}
        for code in sorted(own | self.declaring.keys(), key=lambda code: (code not in own, code)):
            self.errors[code] = free_name(_error_class(code), taken)

    def python(self, operation_id: str) -> str:
        """Return the name of an operation in scripts, such as `shop.items`."""
        return ".".join(self.names[operation_id])


class _Keys(set[str]):
    """The names of a group, as a set to which `free_name` adds."""

    def __init__(self, group: Mapping[str, str]) -> None:
        super().__init__(group)


def _error_class(code: str) -> str:
    words = re.split(r"[^A-Za-z0-9]+", code)
    name = class_name(*(word.capitalize() if word.isupper() else word for word in words))
    return f"Error{name[1:]}" if name[1:2].isdigit() and name[0] == "N" else name


class NameTable:
    """The names of a registry, kept until its operations change."""

    def __init__(self, registry: OperationRegistry) -> None:
        self._registry = registry
        self._revision = -1
        self._names = Names(())

    def current(self) -> Names:
        """Return the names of the present operations."""
        if self._revision != self._registry.revision:
            revision = self._registry.revision
            self._names = Names(self._registry.specs())
            self._revision = revision
        return self._names
