"""`operations export`: write operations in formats of other programs, with a report of losses.

The Python client is one module with typed async functions.

Rule 1: third-party text (names, enums, descriptions) appears in the module only as a literal made by `repr`.
Rule 2: an identifier in the module is either generated ASCII, or a property name that Python does not change.
Rule 3: a module is returned only after it has compiled.
"""

import ast
import builtins
import keyword
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from operations.agents import Loss, provider_tools
from operations.base.errors import CallError, ErrorCode
from operations.base.json.references import Scopes
from operations.base.json.values import object_of
from operations.base.text import counted, numbered_name, suggestion
from operations.base.types import JSONObject
from operations.cli.lookup import caller
from operations.cli.options import (
    DEFAULTS,
    Common,
    Screen,
    command,
    encoded,
    enforce_writable,
    first_line,
    open_session,
)
from operations.contract.specs import OperationSpec, OperationType, describable
from operations.front.search import visible_specs
from operations.hub import Hub
from operations.openapi import to_openapi
from operations.registry.registry import OperationRegistry
from operations.schema import Schema
from operations.schema.outline import Outline


@command
async def export(
    format: str,
    /,
    *ids: str,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> None:
    """Export operations as an OpenAPI document, as tools for a model, or as a typed Python client.

    Properties that the format cannot express are listed on standard error; with --json the result is
    `{"result", "losses"}`.

    Args:
        format: `openapi`, `mcp` or `python`; or the format of a model provider: `openai`, `openai-responses`,
            `anthropic`, `langchain`, `gemini`, or one that an installed package registers.
        ids: Ids or patterns of operations, such as `shop.*`; by default all operations.
        output: Write to this file instead of standard output.
        as_: Export only operations that this caller of [access.keys] may call; `anonymous` for no identity.
        common: Options of every command.
    """
    screen = common.screen()
    if output is not None:
        enforce_writable(output)
    async with open_session(common, screen) as hub:
        specs = await _chosen(hub, ids, as_)
        result, losses = _exported(format, specs, hub.registry)
    _write(result, losses, output, screen)
    if not screen.json:
        for loss in screen.some(losses, verbose=common.verbose):
            screen.note(f"{loss.operation_id} {loss.place}: {loss.what}", "yellow")


async def _chosen(hub: Hub, patterns: tuple[str, ...], as_: str | None) -> list[OperationSpec]:
    visible = visible_specs(hub.registry, await caller(hub, as_))
    specs = sorted(describable(visible), key=lambda spec: spec.id)
    for pattern in patterns:
        if not any(fnmatchcase(spec.id, pattern) for spec in specs):
            hub.enforce_open(pattern)
            near = suggestion(pattern, (spec.id for spec in specs))
            message = f"No operation matches {pattern!r}.{near}".removesuffix(".")
            raise CallError(ErrorCode.OPERATION_NOT_FOUND, message)
    if not patterns:
        return specs
    return [spec for spec in specs if any(fnmatchcase(spec.id, each) for each in patterns)]


def mcp_tools(specs: Sequence[OperationSpec], registry: OperationRegistry) -> list[JSONObject]:
    """Return operations of a registry as an MCP server lists them, without the contract for importers."""
    from operations.mcp.serving.sizes import tools_of  # noqa: PLC0415 - needs an extra

    return [tool.exported for tool in tools_of(registry, specs)]


def _exported(
    format: str, specs: list[OperationSpec], registry: OperationRegistry
) -> tuple[Any, list[Loss]]:
    match format:
        case "openapi":
            return to_openapi(specs), []
        case "mcp":
            return {"tools": mcp_tools(specs, registry)}, []
        case "python":
            return python_client(specs), []
        case _:
            return provider_tools(specs, format)


def _write(result: Any, losses: list[Loss], output: Path | None, screen: Screen) -> None:
    if output is not None:
        text = result if isinstance(result, str) else encoded(result, indent=2) + "\n"
        output.write_text(text, encoding="utf-8")
        screen.note(f"written to {output}")
    elif screen.json:
        screen.value({"result": result, "losses": [loss.to_json() for loss in losses]})
    elif isinstance(result, str):
        screen.write(result.rstrip("\n"))
    else:
        screen.value(result)


_HEADER = '''\
"""A typed client of {count}. Generated by `operations export python`; do not edit.

    async with Client("http://127.0.0.1:8000") as client:
        ...

It requires only aiohttp.
"""
'''
_TYPING = ("Literal", "NotRequired", "TypedDict")
_RUNTIME = files("operations.cli").joinpath("client_runtime.py").read_text(encoding="utf-8")
"""The part that all clients share. It is not imported, because it needs aiohttp."""

_TAKEN = frozenset(
    {*dir(builtins), *compile(_RUNTIME, "client", "exec").co_names, *_TYPING, "Client"}
)
"""Names that a generated class must not have."""

_TYPES = frozenset({"bool", "bytes", "dict", "float", "int", "list", "str"})
"""Builtins in annotations. In a class with a method of that name, the name alone would be the method."""

_USED_IN_METHODS = frozenset({"self", "given", "cast"})
"""Names that a generated parameter must not have, because the method uses them."""

_SIMPLE = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
}
_MAX_NESTING = 32
"""The largest nesting of an annotation; Python's parser fails at about 100."""

_MAX_LITERAL = 1 << 64


def python_client(specs: Sequence[OperationSpec]) -> str:
    """Return the source of a module with a class `Client` that has the operations by namespace.

    Raises:
        SyntaxError: If the source does not compile, which would be a defect of this function.
    """
    types = _Types()
    by_namespace: dict[str, list[OperationSpec]] = {}
    for spec in specs:
        by_namespace.setdefault(spec.namespace, []).append(spec)
    classes = {name: types.free(f"{class_name(name)}Namespace") for name in by_namespace}
    namespaces = [
        _namespace(classes[name], name, group, types) for name, group in by_namespace.items()
    ]
    body = "\n\n\n".join([*types.classes, *namespaces, _client(classes)])
    declared = (error.code for spec in specs for error in spec.error_schemas)
    codes = _open_literal(dict.fromkeys([*ErrorCode, *declared]))
    runtime = client_runtime(body + codes).replace("ErrorCode = str\n", f"ErrorCode = {codes}\n", 1)
    source = f"{_HEADER.format(count=counted(len(specs), 'operation'))}{runtime}\n\n{body}\n"
    compile(source, "<operations export python>", "exec", dont_inherit=True)
    return source


def client_runtime(body: str = "") -> str:
    """Return the code that all clients share, with the imports that `body` needs."""
    source = _RUNTIME[_RUNTIME.index('"""\n') + 4 :]
    needed = [name for name in _TYPING if re.search(rf"\b{name}\b", body)]
    names = ", ".join(
        sorted(["Any", "Self", "cast", *needed], key=lambda name: (name == "cast", name))
    )
    if "builtins." in body:
        source = source.replace("import base64\n", "import base64\nimport builtins\n", 1)
    return source.replace("from typing import Any, Self, cast", f"from typing import {names}")


def _client(classes: dict[str, str]) -> str:
    lines = [
        "class Client(BaseClient):",
        '    """Every operation, by namespace."""\n',
        "    def __init__(self, url: str, key: str | None = None, timeout: float = 30) -> None:",
        "        super().__init__(url, key, timeout)",
    ]
    taken = {"connection"}
    for name, class_ in classes.items():
        attribute = _free(_identifier(name), taken)
        lines.append(f"        self.{attribute} = {class_}(self.connection)")
    return "\n".join(lines)


def _namespace(class_: str, name: str, specs: list[OperationSpec], types: "_Types") -> str:
    lines = [
        f"class {class_}:",
        f"    {_docstring(f'The operations of {name}.')}\n",
        "    def __init__(self, connection: Connection) -> None:",
        "        self._connection = connection",
    ]
    taken = set[str]()
    methods = [(_free(_identifier(spec.name), taken), spec) for spec in specs]
    hidden = _TYPES & taken
    lines += ["\n" + _method(method, spec, types, hidden) for method, spec in methods]
    return "\n".join(lines)


def _method(method: str, spec: OperationSpec, types: "_Types", hidden: frozenset[str]) -> str:
    """Return the source of a method; `hidden` are the types with a name that is also a method."""
    hint = class_name(spec.namespace, spec.name)
    parameters, value = _input(spec, hint, types)
    outline = Outline.of(spec.output_schema)
    result = types.annotation(outline, f"{hint}Output", types.home_of(spec.output_schema))
    if spec.output_schema.is_binary and spec.type is not OperationType.SUBSCRIPTION:
        result = "bytes"
    own = {each.name for each in parameters}
    if own & {*re.findall(r"\w+", result)} - _TYPES:
        # In the method, the name of a class would be the parameter.
        parameters, value = _input(spec, hint, types, flat=False)
    signature = ", ".join(["self", *(each.source(hidden) for each in parameters)])
    docstring = f"        {_docstring(spec.title or spec.description or spec.id)}\n"
    if spec.type is OperationType.SUBSCRIPTION:
        return (
            f"    def {method}({signature}) -> {_quoted(f'AsyncIterator[{result}]', hidden)}:\n"
            f"{docstring}"
            f"        return self._connection.subscribe({_literal(spec.id)}, {value})"
        )
    call = f"await self._connection.call({_literal(spec.id)}, {value})"
    return (
        f"    async def {method}({signature}) -> {_quoted(result, hidden)}:\n"
        f"{docstring}"
        f"        return {call if result == 'Any' else f'cast({_quoted(result, _TYPES & own)}, {call})'}"
    )


class _Argument(NamedTuple):
    """A parameter of a method."""

    name: str
    kind: str = ""
    default: str = ""

    def source(self, hidden: frozenset[str]) -> str:
        """Return the parameter with its annotation."""
        return (
            f"{self.name}: {_quoted(self.kind, hidden)}{self.default}" if self.kind else self.name
        )


def _input(
    spec: OperationSpec, hint: str, types: "_Types", *, flat: bool = True
) -> tuple[list[_Argument], str]:
    """Return the parameters of a method, if possible one for each property, and the expression for its input."""
    outline = Outline.of(spec.input_schema)
    home = types.home_of(spec.input_schema)
    names = list(outline.properties)
    if not names:
        if "object" in outline.types and not outline.schema.get("additionalProperties"):
            return [], "{}"
        kind = types.annotation(outline, f"{hint}Input", home)
        return [_Argument("input", kind, " = None" if kind == "Any" else "")], "input"
    if not flat or any(not _is_identifier(each) or each in _USED_IN_METHODS for each in names):
        kind = types.annotation(outline, f"{hint}Input", home)
        if outline.required:
            return [_Argument("input", kind)], "input"
        return [_Argument("input", f"{kind} | None", " = None")], "input or {}"
    required = set(outline.required)
    parameters = [_Argument("*")]
    for name in sorted(names, key=lambda name: name not in required):
        kind = types.annotation(outline.properties[name], hint + class_name(name), home)
        parameters.append(
            _Argument(name, kind)
            if name in required
            else _Argument(name, f"{kind} | Unset", " = UNSET")
        )
    arguments = ", ".join(f"{name}={name}" for name in names)
    return parameters, f"given({arguments})"


class _Home(NamedTuple):
    """A document and the scope of its shared definitions, if any."""

    document: int
    scope: str | None

    def key(self, reference: str) -> tuple[str | int, str]:
        """Return the same key for references to the same definition."""
        is_shared = self.scope is not None and reference.startswith("#/$defs/")
        return (self.scope if self.scope is not None and is_shared else self.document, reference)


class _Types:
    """Converts JSON Schemas to annotations, and collects the classes that the annotations need."""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self._names = set(_TAKEN)
        self._by_reference: dict[tuple[str | int, str], str] = {}
        self._by_content: dict[tuple[Any, ...], str] = {}
        self._scopes = Scopes()

    def home_of(self, schema: Schema) -> _Home:
        """Return the document in which the references of `schema` are resolved."""
        try:
            placed = self._scopes.place(schema.document)
        except (ValueError, TypeError, RecursionError):
            placed = None
        return _Home(id(schema), None if placed is None else placed.scope)

    def free(self, wanted: str) -> str:
        """Reserve a class name: `wanted`, with a number appended if it is taken."""
        return _free(wanted, self._names)

    def annotation(self, outline: Outline, hint: str, home: _Home, nesting: int = 0) -> str:
        """Return the annotation for a schema, not yet quoted.

        Args:
            outline: The schema.
            hint: The preferred name of a class for it.
            home: The document that contains the schema; see `home_of`.
            nesting: The number of brackets around the annotation.
        """
        if outline.reference is not None:
            known = self._by_reference.get(home.key(outline.reference))
            if known is not None:
                return known
        if outline.is_recursive or nesting > _MAX_NESTING:
            return "Any"
        if (choices := outline.choices) and all(
            choice is None
            or isinstance(choice, str)
            or (isinstance(choice, int) and abs(choice) < _MAX_LITERAL)
            for choice in choices
        ):
            return _open_literal(choices)
        if outline.properties:
            return self._typed_dict(outline, hint, home)
        if members := outline.members:
            return _union(
                self.annotation(member, f"{hint}{number}", home, nesting)
                for number, member in enumerate(members, 1)
            )
        return _union(
            self._simple(kind, outline, hint, home, nesting + 1) for kind in sorted(outline.types)
        )

    def _simple(self, kind: str, outline: Outline, hint: str, home: _Home, nesting: int) -> str:
        if kind == "array":
            return f"list[{self.annotation(outline.items, f'{hint}Item', home, nesting)}]"
        if kind == "object":
            rest = object_of(outline.schema.get("additionalProperties"))
            if not rest:
                return "dict[str, Any]"
            return (
                f"dict[str, {self.annotation(outline.inner(rest), f'{hint}Value', home, nesting)}]"
            )
        return _SIMPLE.get(kind, "Any")

    def _typed_dict(self, outline: Outline, hint: str, home: _Home) -> str:
        wanted = class_name(outline.reference.rpartition("/")[2]) if outline.reference else hint
        name = self.free(wanted if wanted not in self._names else hint)
        if outline.reference is not None:
            # Registered before its fields are converted, because they may refer to it.
            self._by_reference[home.key(outline.reference)] = name
        required = set(outline.required)
        fields: dict[str, str] = {}
        for field, inner in outline.properties.items():
            kind = self.annotation(inner, name + class_name(field), home)
            fields[field] = kind if field in required else f"NotRequired[{kind}]"
        content = (outline.description, *fields.items())
        known = self._by_content.setdefault(content, name)
        if known != name and outline.reference is None and outline.description:
            self._names.discard(name)
            return known
        self.classes.append(_typed_dict_source(name, fields, outline.description))
        return name


def _typed_dict_source(name: str, fields: dict[str, str], description: str) -> str:
    if all(map(_is_identifier, fields)):
        lines = [f"class {name}(TypedDict):\n    {_docstring(description or name)}\n"]
        lines += [f"    {field}: {_quoted(kind)}" for field, kind in fields.items()]
        return "\n".join(lines)
    inside = "".join(f"        {field!r}: {_quoted(kind)},\n" for field, kind in fields.items())
    return f'{name} = TypedDict(\n    "{name}",\n    {{\n{inside}    }},\n)'


def _is_identifier(name: str) -> bool:
    """Return whether an attribute of a class can have exactly this name.

    Python normalises identifiers beyond ASCII and renames those that begin with two underscores.
    """
    return (
        name.isascii()
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and not name.startswith("__")
    )


def _identifier(text: str) -> str:
    """Return `text` as an identifier in snake case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    name = re.sub(r"[^A-Za-z0-9]+", "_", words).strip("_").lower() or "value"
    name = f"n{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) else name


def class_name(*parts: str) -> str:
    """Return words as a class name."""
    words = [word for part in parts for word in re.split(r"[^A-Za-z0-9]+", part) if word]
    name = "".join(word[0].upper() + word[1:] for word in words) or "Value"
    return f"N{name}" if name[0].isdigit() else name


def _free(wanted: str, taken: set[str]) -> str:
    """Reserve a name in `taken`: `wanted`, with a number appended if it is taken."""
    name = numbered_name(wanted, taken, "_" if wanted.islower() else "")
    taken.add(name)
    return name


def _union(kinds: Iterable[str]) -> str:
    found = list(dict.fromkeys(kinds))
    return "Any" if not found or "Any" in found else " | ".join(found)


def _open_literal(values: Collection[Any]) -> str:
    """Return the annotation of an enum: editors suggest its values, and other values are accepted as well."""
    literals = [repr(str(value) if isinstance(value, str) else value) for value in values]
    rest = ["str"] if any(isinstance(value, str) for value in values) else []
    return " | ".join([f"Literal[{', '.join(literals)}]", *rest])


def _literal(text: str) -> str:
    """Return `text` as a literal, in double quotes if they need no escapes."""
    plain = repr(text)
    return f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in plain else plain


def _quoted(annotation: str, hidden: frozenset[str] = frozenset()) -> str:
    """Return an annotation as a literal, with the names in `hidden` as attributes of `builtins`.

    Raises:
        SyntaxError: If it is not an expression.
    """
    tree = ast.parse(annotation, "<annotation>", "eval")
    if not hidden:
        return _literal(annotation)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in hidden:
            node.id = f"builtins.{node.id}"
    return _literal(ast.unparse(tree))


def _docstring(text: str) -> str:
    """Return the first line of a text as a docstring."""
    literal = _literal(first_line(text) or "No description.")
    return f'""{literal}""' if literal[0] == '"' and literal[-2] != "\\" else literal
