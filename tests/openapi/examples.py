"""Sends every response example of a document from a real server and compares what reaches the caller.

`test_examples.py` does so for some documents, `scripts/examples` for all of them.
"""

import json
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
from operations._json import is_list, is_object, list_of, object_of
from operations.errors import DocumentError
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.openapi.reading.document import Description, Entry
from operations.openapi.reading.media import is_json, is_range, is_stream, is_text
from operations.openapi.reading.schemas import Direction
from operations.openapi.reading.texts import decode_document
from operations.openapi.requests.paths import template_names

TEXT = {"type": "string"}

HARMLESS = frozenset({"stripped", "filled"})
"""What may happen to a value that is valid under its own schema."""

HONEST = HARMLESS | {"converted", "mismatch"}
"""What may happen to any value: nothing is invented."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example of one response."""

    entry: Entry
    status: int
    media_type: str
    value: Any
    schema: Any

    @property
    def where(self) -> str:
        return f"{self.entry.method} {self.entry.path} {self.status}"


@dataclass
class Report:
    """How many examples arrived how, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])


def examples_of(description: Description) -> Iterator[Example]:
    """Yield the examples of all responses that are JSON or text."""
    follow = description.references.object_at
    for entry in description.entries():
        for status, node in object_of(entry.operation.get("responses")).items():
            response = follow(node)
            for media_type, schema, holder in _media(description, entry, response):
                for value in _values(description, schema, holder):
                    sent, sent_type = _meant(value), media_type
                    if is_range(media_type):
                        sent_type = "text/plain" if isinstance(sent, str) else "application/json"
                    is_sendable = is_text(sent_type) and isinstance(sent, str)
                    if is_json(sent_type) or (is_sendable and not is_stream(sent_type)):
                        yield Example(
                            entry=entry,
                            status=_status(str(status)),
                            media_type=sent_type,
                            value=sent,
                            schema=schema if is_json(sent_type) else TEXT,
                        )


def _media(
    description: Description, entry: Entry, response: Any
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield media type, schema, and what holds the examples."""
    if not description.is_swagger:
        for media_type, media in description.references.object_at(response.get("content")).items():
            node = description.references.object_at(media)
            yield media_type, node.get("schema", True), node
        return
    schema = response.get("schema", True)
    for media_type, value in object_of(response.get("examples")).items():
        yield media_type, schema, {"example": value}
    produces = entry.operation.get("produces", description.document.get("produces"))
    for media_type in list_of(produces)[:1] or ["application/json"]:
        yield media_type, schema, {}


def _values(description: Description, schema: Any, holder: dict[str, Any]) -> Iterator[Any]:
    if "example" in holder:
        yield holder["example"]
    for node in description.references.object_at(holder.get("examples")).values():
        example = description.references.object_at(node)
        if "value" in example:
            yield example["value"]
    own = description.schemas.resolve(schema)
    if "example" in own:
        yield own["example"]


def _status(text: str) -> int:
    digits = text[:1] + text[1:].upper().replace("X", "0")
    return int(digits) if digits.isdecimal() and len(digits) == 3 else 500


def _meant(value: Any) -> Any:
    """Return an example that is written as text of JSON as the JSON that it is."""
    if isinstance(value, str) and value.lstrip()[:1] in {"{", "["}:
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def differences(before: Any, after: Any) -> Iterator[str]:
    """Yield the kind of everything that differs."""
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
            for example in examples_of(description):
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
                    built = description.schemas.build(example.schema, Direction.RESPONSE)
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


def _judge(report: Report, example: Example, outcome: Any, *, is_valid: bool) -> None:
    report.counts["valid"] += is_valid
    if isinstance(outcome, CallError):
        body = object_of(outcome.details).get("body", example)
        is_same = example.status >= 300 and (
            body == example.value or object_of(outcome.details).get("truncated")
        )
        if not is_same:
            report.failures.append(f"{example.where}: {outcome.code} {outcome.message}")
        report.counts["errors"] += 1
        return
    if outcome is None:
        report.failures.append(f"{example.where}: nothing arrived")
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
            f"{example.where}: {'valid' if is_valid else 'invalid'}: {'; '.join(problems)}"
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
