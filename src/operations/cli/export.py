"""`operations export`: write operations in formats of other programs, with a report of losses.

The Python client is one module with typed async functions, or with blocking ones for `operations.connect`.

Rule 1: a module is returned only after it has compiled.
"""

import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from operations.agents import Loss, provider_tools
from operations.base.errors import CallError, ErrorCode, OperationsError
from operations.base.text import counted, suggestion
from operations.base.types import JSONObject
from operations.cli.lookup import caller
from operations.cli.options import (
    DEFAULTS,
    Common,
    Screen,
    command,
    encoded,
    enforce_writable,
    open_session,
)
from operations.contract.specs import OperationSpec, OperationType, describable
from operations.front.search import visible_specs
from operations.hub import Hub
from operations.openapi import to_openapi
from operations.registry.registry import OperationRegistry
from operations.schema.hints import (
    TypeHints,
    class_name,
    docstring,
    free_name,
    identifier,
    is_identifier,
    literal,
    open_literal,
    quoted,
)
from operations.schema.outline import Outline


@command
async def export(
    format: str,
    /,
    *ids: str,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    sync: Annotated[bool, Parameter(negative="")] = False,
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
        sync: With `python`: a client without `await`, for a registry or `operations.connect(...)`.
        as_: Export only operations that this caller of [access.keys] may call; `anonymous` for no identity.
        common: Options of every command.
    """
    screen = common.screen()
    if sync and format != "python":
        raise OperationsError("--sync is for the format python")
    if output is not None:
        enforce_writable(output)
    async with open_session(common, screen) as hub:
        specs = await _chosen(hub, ids, as_)
        result, losses = (
            (python_client(specs, style=BLOCKING), [])
            if sync
            else _exported(format, specs, hub.registry)
        )
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
            keeps_runs = registry.run_store is not None
            durable = [each.spec.id for each in registry if each.durable] if keeps_runs else None
            return to_openapi(specs, durable=durable), []
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
_BLOCKING_HEADER = '''\
"""Typed calls of {count} without await. Generated by `operations export python --sync`; do not edit.

    hub = Client(operations.connect("http://127.0.0.1:8000"))
    ...
"""
'''
_CLIENT = '''\
class Client(BaseClient):
    """Every operation, by namespace."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 30) -> None:
        super().__init__(url, key, timeout)
'''
_BLOCKING_CLIENT = '''\
class Client:
    """Every operation, by namespace.

    Args:
        registry: Calls them, such as `operations.connect(...)`.
    """

    def __init__(self, registry: OperationRegistry) -> None:
        self.connection = Connection(registry)
'''
_TYPING = ("Literal", "NotRequired", "TypedDict")


def _read(name: str) -> str:
    return files("operations.cli").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class ClientStyle:
    """How a client calls: the parts in which its source differs from others."""

    header: str
    client: str

    runtime: str
    """The part that all clients share."""

    define: str = "async def"
    wait: str = "await "
    iterator: str = "AsyncIterator"


# Read instead of imported, because it needs aiohttp.
ASYNC = ClientStyle(header=_HEADER, client=_CLIENT, runtime=_read("client_runtime.py"))
BLOCKING = ClientStyle(
    header=_BLOCKING_HEADER,
    client=_BLOCKING_CLIENT,
    runtime=_read("blocking_runtime.py"),
    define="def",
    wait="",
    iterator="Iterator",
)

_TAKEN = frozenset({*dir(builtins), *_TYPING, "Client"}).union(
    *(compile(each.runtime, "client", "exec").co_names for each in (ASYNC, BLOCKING))
)
"""Names that a generated class must not have."""

_TYPES = frozenset({"bool", "bytes", "dict", "float", "int", "list", "str"})
"""Builtins in annotations. In a class with a method of that name, the name alone would be the method."""

_USED_IN_METHODS = frozenset({"self", "given", "cast"})
"""Names that a generated parameter must not have, because the method uses them."""


def python_client(specs: Sequence[OperationSpec], *, style: ClientStyle = ASYNC) -> str:
    """Return the source of a module with a class `Client` that has the operations by namespace.

    Raises:
        SyntaxError: If the source does not compile, which would be a defect of this function.
    """
    types = TypeHints(_TAKEN)
    by_namespace: dict[str, list[OperationSpec]] = {}
    for spec in specs:
        by_namespace.setdefault(spec.namespace, []).append(spec)
    classes = {name: types.free(f"{class_name(name)}Namespace") for name in by_namespace}
    namespaces = [
        _namespace(classes[name], name, group, types, style) for name, group in by_namespace.items()
    ]
    body = "\n\n\n".join([*types.classes, *namespaces, _client(classes, style)])
    declared = (error.code for spec in specs for error in spec.error_schemas)
    codes = open_literal(dict.fromkeys([*ErrorCode, *declared]))
    runtime = client_runtime(body + codes, style)
    runtime = runtime.replace("ErrorCode = str\n", f"ErrorCode = {codes}\n", 1)
    source = f"{style.header.format(count=counted(len(specs), 'operation'))}{runtime}\n\n{body}\n"
    compile(source, "<operations export python>", "exec", dont_inherit=True)
    return source


def client_runtime(body: str = "", style: ClientStyle = ASYNC) -> str:
    """Return the code that all clients share, with the imports that `body` needs."""
    source = style.runtime[style.runtime.index('"""\n') + 4 :]
    [known] = re.findall(r"^from typing import (.*)$", source, re.MULTILINE)
    needed = {name for name in (*_TYPING, "cast") if re.search(rf"\b{name}\b", body)}
    names = ", ".join(
        sorted(needed.union(known.split(", ")), key=lambda name: (name == "cast", name))
    )
    if "builtins." in body:
        source = source.replace("\n", "\nimport builtins\n", 1)
    return source.replace(f"from typing import {known}", f"from typing import {names}")


def _client(classes: dict[str, str], style: ClientStyle) -> str:
    lines = [style.client.rstrip("\n")]
    taken = {"connection"}
    for name, class_ in classes.items():
        attribute = free_name(identifier(name), taken)
        lines.append(f"        self.{attribute} = {class_}(self.connection)")
    return "\n".join(lines)


def _namespace(
    class_: str, name: str, specs: list[OperationSpec], types: TypeHints, style: ClientStyle
) -> str:
    lines = [
        f"class {class_}:",
        f"    {docstring(f'The operations of {name}.')}\n",
        "    def __init__(self, connection: Connection) -> None:",
        "        self._connection = connection",
    ]
    taken = set[str]()
    methods = [(free_name(identifier(spec.name), taken), spec) for spec in specs]
    hidden = _TYPES & taken
    lines += ["\n" + _method(method, spec, types, hidden, style) for method, spec in methods]
    return "\n".join(lines)


def _method(
    method: str,
    spec: OperationSpec,
    types: TypeHints,
    hidden: frozenset[str],
    style: ClientStyle,
) -> str:
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
    described = f"        {docstring(spec.title or spec.description or spec.id)}\n"
    if spec.type is OperationType.SUBSCRIPTION:
        return (
            f"    def {method}({signature}) -> {quoted(f'{style.iterator}[{result}]', hidden)}:\n"
            f"{described}"
            f"        return self._connection.subscribe({literal(spec.id)}, {value})"
        )
    call = f"{style.wait}self._connection.call({literal(spec.id)}, {value})"
    return (
        f"    {style.define} {method}({signature}) -> {quoted(result, hidden)}:\n"
        f"{described}"
        f"        return {call if result == 'Any' else f'cast({quoted(result, _TYPES & own)}, {call})'}"
    )


class _Argument(NamedTuple):
    """A parameter of a method."""

    name: str
    kind: str = ""
    default: str = ""

    def source(self, hidden: frozenset[str]) -> str:
        """Return the parameter with its annotation."""
        return f"{self.name}: {quoted(self.kind, hidden)}{self.default}" if self.kind else self.name


def _input(
    spec: OperationSpec, hint: str, types: "TypeHints", *, flat: bool = True
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
    if not flat or any(not is_identifier(each) or each in _USED_IN_METHODS for each in names):
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
