"""Operations as a typed async client in one Python module."""

import re
from collections.abc import Sequence
from pathlib import Path

from operations.cli.exports.python_types import (
    Types,
    class_name,
    docstring,
    identifier,
    is_identifier,
)
from operations.cli.outline import Outline
from operations.specs import OperationSpec, OperationType

_RUNTIME = Path(__file__).with_name("client_runtime.py")
_HEADER = '''\
"""A typed client of {count} operations. Written by `operations export python`; changes to it will be lost.

    async with Client("http://127.0.0.1:8000") as client:
        ...

It needs aiohttp, and nothing else.
"""
'''
_TYPING = ("Literal", "NotRequired", "TypedDict")
_RESERVED = frozenset({"self", "door"})


def python_client(specs: Sequence[OperationSpec]) -> str:
    """The source of a module with a class `Client`, which has the operations by namespace."""
    types = Types()
    by_namespace: dict[str, list[OperationSpec]] = {}
    for spec in specs:
        by_namespace.setdefault(spec.namespace, []).append(spec)
    namespaces = [_namespace(name, group, types) for name, group in by_namespace.items()]
    body = "\n\n\n".join([*types.classes, *namespaces, _client(list(by_namespace))])
    return _runtime(body, len(specs)) + "\n\n" + body + "\n"


def _runtime(body: str, count: int) -> str:
    """What every client has, with the imports that `body` needs."""
    source = _RUNTIME.read_text(encoding="utf-8")
    source = source[source.index('"""\n') + 4 :]
    needed = [name for name in _TYPING if re.search(rf"\b{name}\b", body)]
    names = ", ".join(
        sorted(["Any", "Self", "cast", *needed], key=lambda name: (name == "cast", name))
    )
    source = source.replace("from typing import Any, Self, cast", f"from typing import {names}")
    return _HEADER.format(count=count) + source


def _client(namespaces: list[str]) -> str:
    lines = [
        "class Client(BaseClient):",
        '    """Every operation, by namespace."""\n',
        "    def __init__(self, url: str, key: str | None = None, timeout: float = 30) -> None:",
        "        super().__init__(url, key, timeout)",
    ]
    for name in namespaces:
        attribute = identifier(name)
        attribute = f"{attribute}_" if attribute in _RESERVED else attribute
        lines.append(f"        self.{attribute} = {class_name(name)}Namespace(self.door)")
    return "\n".join(lines)


def _namespace(name: str, specs: list[OperationSpec], types: Types) -> str:
    lines = [
        f"class {class_name(name)}Namespace:",
        f'    """The operations of {name}."""\n',
        "    def __init__(self, door: Door) -> None:",
        "        self._door = door",
    ]
    taken: set[str] = set()
    for spec in specs:
        method, number = identifier(spec.name), 2
        while method in taken:
            method, number = f"{identifier(spec.name)}_{number}", number + 1
        taken.add(method)
        lines.append("\n" + _method(method, spec, types))
    return "\n".join(lines)


def _method(method: str, spec: OperationSpec, types: Types) -> str:
    hint = class_name(spec.namespace, spec.name)
    parameters, value = _input(spec, hint, types)
    outline = Outline.of(spec.output_schema)
    result = types.annotation(outline, f"{hint}Output", types.home_of(spec.output_schema))
    text = docstring(spec.title or spec.description or spec.id)
    signature = ", ".join(["self", *parameters])
    if spec.type is OperationType.SUBSCRIPTION:
        stream = f'self._door.subscribe("{spec.id}", {value})'
        return (
            f'    def {method}({signature}) -> "AsyncIterator[{result}]":\n'
            f'        """{text}"""\n'
            f"        return {stream}"
        )
    call = f'await self._door.call("{spec.id}", {value})'
    answer = call if result == "Any" else f'cast("{result}", {call})'
    return (
        f'    async def {method}({signature}) -> "{result}":\n'
        f'        """{text}"""\n'
        f"        return {answer}"
    )


def _input(spec: OperationSpec, hint: str, types: Types) -> tuple[list[str], str]:
    """The parameters of a method, and the expression for what it sends."""
    outline = Outline.of(spec.input_schema)
    home = types.home_of(spec.input_schema)
    names = list(outline.properties)
    if not names:
        if "object" in outline.types and not outline.schema.get("additionalProperties"):
            return [], "{}"
        kind = types.annotation(outline, f"{hint}Input", home)
        return [f'input: "{kind}"' + (" = None" if kind == "Any" else "")], "input"
    if not all(is_identifier(name) and name not in _RESERVED for name in names):
        kind = types.annotation(outline, f"{hint}Input", home)
        if outline.required:
            return [f'input: "{kind}"'], "input"
        return [f'input: "{kind} | None" = None'], "input or {}"
    required = set(outline.required)
    parameters = ["*"]
    for name in sorted(names, key=lambda name: name not in required):
        kind = types.annotation(outline.properties[name], hint + class_name(name), home)
        parameters.append(
            f'{name}: "{kind}"' if name in required else f'{name}: "{kind} | Unset" = UNSET'
        )
    arguments = ", ".join(f"{name}={name}" for name in names)
    return parameters, f"given({arguments})"
