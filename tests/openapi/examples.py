"""Sends every response example of a document from a real server and compares what reaches the caller.

`test_examples.py` does so for some documents, `scripts/examples` for all of them.
"""

import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
from aiohttp import web
from tests.openapi.serving import serving

from operations import CallError, Operation, OperationRegistry, OperationType, Schema
from operations.base.errors import DocumentError
from operations.base.json.values import is_list, is_object, object_of
from operations.base.types import JSONSchema
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.openapi.reading.document import Description
from operations.openapi.reading.files import decode_document
from operations.openapi.reading.media import is_json
from operations.openapi.reading.schemas import Direction, SchemaConverter
from operations.openapi.source.diagnosis import Example, examples_of
from operations.openapi.source.parameters import template_names

HARMLESS = frozenset({"stripped", "filled"})
"""The allowed changes to a value that is valid under its own schema."""

HONEST = HARMLESS | {"converted", "mismatch"}
"""The allowed changes to any value: nothing is invented."""


def built_schema(converter: SchemaConverter, schema: Any, direction: Direction) -> JSONSchema:
    """Return a converted schema as a separate document."""
    draft = converter.draft(direction)
    return draft.close(draft.convert(schema))


@dataclass
class Report:
    """How many examples arrived how, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])


@asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[tuple["_Server", OperationRegistry, Description]]:
    server = _Server()
    async with serving(server.respond) as url, OperationRegistry() as registry:
        config = HTTPServiceConfig(namespace="api", base_url=url, retries=0)
        document = decode_document(await anyio.Path(path).read_bytes())
        async with from_openapi(document, config) as service:
            for operation in service:
                # The requests are not what is examined here.
                spec = msgspec.structs.replace(operation.spec, input_schema=Schema({}))
                registry.register(Operation(spec, operation.handler, None, False))
            yield server, registry, Description(document)


class _Server:
    def __init__(self) -> None:
        self.status = 200
        self.media_type = "application/json"
        self.body = b""

    async def respond(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": self.media_type}
        return web.Response(body=self.body, status=self.status, headers=headers)


async def examine(path: Path) -> Report:
    """Send every example of a document."""
    report = Report()
    try:
        async with opened(path) as (server, registry, description):
            by_place = {
                (o.spec.meta["method"], o.spec.meta["path"]): o.spec
                for o in reversed(list(registry))
            }
            schemas: dict[int, Schema] = {}
            for example in examples_of(description, description.entries()):
                spec = by_place.get((example.entry.method, example.entry.path))
                if spec is None or example.entry.method == "HEAD":
                    continue
                server.status, server.media_type = example.status, example.media_type
                try:
                    server.body = (
                        msgspec.json.encode(example.value)
                        if is_json(example.media_type)
                        else example.value.encode()
                    )
                except (TypeError, ValueError):
                    continue
                if example.status in {204, 205, 304} or example.status < 200:
                    continue
                report.counts["examples"] += 1
                arguments = dict.fromkeys(template_names(example.entry.path), "1")
                outcome = await _outcome(registry, spec, arguments)
                schema = schemas.get(id(example.schema))
                if schema is None:
                    built = built_schema(description.schemas, example.schema, Direction.RESPONSE)
                    schema = schemas[id(example.schema)] = Schema(built, lenient=True)
                _judge(report, example, outcome, is_valid=schema.check(example.value))
    except DocumentError as error:
        report.failures.append(f"{path.name}: {error}")
    return report


async def _outcome(registry: OperationRegistry, spec: Any, arguments: Any) -> Any:
    try:
        if spec.type is not OperationType.SUBSCRIPTION:
            return await registry.execute(spec.id, arguments)
        async with aclosing(registry.subscribe(spec.id, arguments)) as items:
            async for envelope in items:
                return envelope
    except CallError as error:
        return error
    return None


def differences(before: Any, after: Any) -> Iterator[str]:
    """Yield the kinds of all differences."""
    if is_object(before) and is_object(after):
        for name in before.keys() | after.keys():
            if name not in after:
                yield "stripped"
            elif name not in before:
                yield "filled"
            else:
                yield from differences(before[name], after[name])
    elif is_list(before) and is_list(after) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from differences(one, other)
    elif type(before) is not type(after) or before != after:
        yield "converted"


def _judge(report: Report, example: Example, outcome: Any, *, is_valid: bool) -> None:
    report.counts["valid"] += is_valid
    where = f"{example.entry.method} {example.entry.path} {example.status}"
    if isinstance(outcome, CallError):
        body = object_of(outcome.details).get("body", example)
        is_same = example.status >= 300 and (
            body == example.value or object_of(outcome.details).get("truncated")
        )
        if not is_same:
            report.failures.append(f"{where}: {outcome.code} {outcome.message}")
        report.counts["errors"] += 1
        return
    if outcome is None:
        report.failures.append(f"{where}: nothing arrived")
        return
    found = Counter(differences(example.value, outcome.data))
    listed: Counter[str] = Counter()
    for change in outcome.meta.changes:
        listed[change.kind] += change.count
    report.counts["unchanged"] += not found
    is_whole = sum(listed.values()) == outcome.meta.changes_count
    problems = [kind for kind in listed if kind not in (HARMLESS if is_valid else HONEST)]
    problems += [
        f"{kind} {count}, listed {listed[kind]}"
        for kind, count in found.items()
        if (is_whole and listed[kind] != count) or (not is_whole and not outcome.meta.changes_count)
    ]
    if problems:
        report.failures.append(
            f"{where}: {'valid' if is_valid else 'invalid'}: {'; '.join(problems)}"
        )


async def main(paths: list[Path]) -> int:
    """Examine documents and print what was found."""
    total: Counter[str] = Counter()
    failed = 0
    for path in paths:
        report = await examine(path)
        total += report.counts
        failed += len(report.failures)
        for failure in report.failures:
            print(f"{path.name}: {failure}")
    print(", ".join(f"{count} {name}" for name, count in total.items()), f"- {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    shared = Path(__file__).parents[3] / "shared" / "openapi"
    chosen = [Path(argument) for argument in sys.argv[1:]] or sorted(shared.iterdir())
    sys.exit(anyio.run(main, chosen))
