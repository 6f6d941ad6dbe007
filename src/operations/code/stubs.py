"""Operations as typed Python stubs, for models that write scripts and for the check of a script before its first call.

The operations of a namespace are the methods of a class, and the namespace is a variable of that class.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from operations.base.errors import SchemaError
from operations.base.text import first_sentence, printable
from operations.code.names import BASE_ERROR, BOUNDS, TYPES, Names, Parameters, parameters_of
from operations.contract.specs import OperationSpec, OperationType
from operations.schema.hints import TypeHints, class_name, literal, quoted
from operations.schema.outline import Outline

PRELUDE: Final = """\
from typing import Any, Literal, NotRequired, TypedDict

class CallError(Exception):
    "The base class of the errors of calls. str(error) is 'CODE: message'."

class ErrorFields(TypedDict):
    code: str
    message: str
    details: Any

def error_of(error: BaseException) -> ErrorFields:
    "Return the fields of the error of a call."
    ...
"""
"""What every script has, beside its operations."""

_BUILTINS: Final = frozenset({"bool", "bytes", "dict", "float", "int", "list", "str"})

_RESERVED: Final = TYPES | {"builtins", BASE_ERROR}

_MAX_LINE: Final = 120
"""The largest number of characters of the description of an operation."""


class Stubs:
    """The stubs of some operations.

    Args:
        names: The names of all operations.
        specs: The operations, which the caller may call.
        errors: The codes of the errors that get a class, besides those that the operations declare.
        namespaces: The namespaces that are declared in any case.
        depth: How deeply objects are nested in the types; deeper ones have no types.
    """

    def __init__(
        self,
        names: Names,
        specs: Iterable[OperationSpec],
        errors: Collection[str] = (),
        namespaces: Iterable[str] = (),
        depth: int | None = None,
    ) -> None:
        self._names = names
        # A type must not hide an error or a namespace.
        self._types = TypeHints(
            {*_RESERVED, *names.errors.values(), *names.operations}, brief=True, depth=depth
        )
        self._codes = dict.fromkeys(errors)
        self._methods: dict[str, list[str]] = {each: [] for each in namespaces}
        self.parts: list[str] = []
        """The source that each operation has added, in order."""
        for spec in specs:
            self._add(spec)

    def _add(self, spec: OperationSpec) -> None:
        before = len(self._types.classes)
        declared = [error for error in spec.error_schemas if error.code not in self._codes]
        try:
            method = _method(spec, self._names, self._types)
        except SchemaError:
            # Its schema cannot be built: the call itself reports that.
            method = f"async def {self._names.names[spec.id][1]}(self, **named: Any) -> Any: ..."
        self._codes |= dict.fromkeys(error.code for error in declared)
        self._methods.setdefault(self._names.names[spec.id][0], []).append(method)
        added = [*self._types.classes[before:], method]
        added += [_error_class(self._names, error.code) for error in declared]
        self.parts.append("\n".join(added))

    @property
    def source(self) -> str:
        """The stubs, without the prelude."""
        lines = [_error_class(self._names, code) for code in self._codes]
        lines += self._types.classes
        for namespace, methods in self._methods.items():
            group = self._types.free(group_name(namespace))
            lines.append(f"class {group}:")
            lines += [] if methods else ["    ..."]
            lines += [f"    {line}" for method in methods for line in method.split("\n")]
            lines.append(f"{namespace}: {group}")
        return "\n".join(lines) + "\n"


def group_name(namespace: str) -> str:
    """Return the preferred name of the class of a namespace."""
    return f"{class_name(namespace)}Operations"


def _error_class(names: Names, code: str) -> str:
    return f"class {names.errors[code]}({BASE_ERROR}): {literal(code)}"


def _method(spec: OperationSpec, names: Names, types: TypeHints) -> str:
    namespace, name = names.names[spec.id]
    hidden = _BUILTINS & names.operations[namespace].keys()
    hint = class_name(namespace, name)
    home = types.home_of(spec.output_schema)
    result = types.annotation(Outline.of(spec.output_schema), f"{hint}Output", home)
    if spec.output_schema.is_binary:
        result = "bytes"
    if spec.type is OperationType.SUBSCRIPTION:
        result = f"list[{result}]"
    parameters = parameters_of(spec)
    signature = ", ".join(["self", *_parameters(spec, parameters, hint, types, hidden)])
    return (
        f"async def {name}({signature}) -> {_annotation(result, hidden)}:\n"
        f"    {_description(spec, names)}"
    )


def _parameters(
    spec: OperationSpec,
    parameters: Parameters,
    hint: str,
    types: TypeHints,
    hidden: frozenset[str],
) -> Sequence[str]:
    outline, home = Outline.of(spec.input_schema), types.home_of(spec.input_schema)
    found: list[str] = []
    if not parameters.is_object:
        kind = types.annotation(outline, f"{hint}Input", home)
        found.append(f"input: {_annotation(kind, hidden)}" + (" = ..." if kind == "Any" else ""))
    required = set(outline.required)
    inner = outline.properties
    for name, each in sorted(
        parameters.properties.items(), key=lambda item: item[1] not in required
    ):
        kind = types.annotation(inner[each], hint + class_name(name), home)
        default = "" if each in required else " = ..."
        found.append(f"{name}: {_annotation(kind, hidden)}{default}")
    found += [
        f"{name}: {'int' if each == 'max_items' else 'float'} = {BOUNDS[each]}"
        for name, each in parameters.bounds.items()
    ]
    if found and parameters.is_object:
        found.insert(0, "*")
    additional = outline.schema.get("additionalProperties")
    is_free = not inner and additional is not False
    if parameters.is_object and (is_free or additional is True or isinstance(additional, dict)):
        found.append("**more: Any")
    return found


def _description(spec: OperationSpec, names: Names) -> str:
    words = [printable(first_sentence(spec.title or spec.description or spec.id, _MAX_LINE))]
    if spec.type is OperationType.SUBSCRIPTION:
        words.append("At most max_items items, for at most this many seconds.")
    if spec.error_schemas:
        raised = ", ".join(names.errors[error.code] for error in spec.error_schemas)
        words.append(f"Raises {raised}.")
    return literal(" ".join(words))


def _annotation(kind: str, hidden: frozenset[str]) -> str:
    if not hidden:
        return kind
    return quoted(kind, hidden)[1:-1].replace("\\'", "'")
