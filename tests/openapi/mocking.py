"""Sends a generated request for every operation of a document to Prism, a mock server that checks requests.

    python -m tests.openapi.mocking PRISM DOCUMENT ...

`scripts/mock` installs Prism and names 25 documents. A request fails if Prism finds a violation in it.
"""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
from tests.limits import scaled
from tests.servers import free_port

from operations import CallError, OperationRegistry, OperationSpec, OperationType
from operations.base.json.values import list_of, object_of
from operations.base.types import JSONObject
from operations.openapi import HTTPServiceConfig, from_openapi_file
from operations.openapi.reading.document import Description
from operations.openapi.reading.files import decode_document
from operations.schema.outline import Outline

LISTENING = re.compile(rb"Prism is listening")


@asynccontextmanager
async def mocking(prism: str, path: Path) -> AsyncGenerator[str]:
    """Run Prism for a document; yield its address."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        prism, "mock", "--host", "127.0.0.1", "--port", str(port), str(path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(scaled(120)):
            lines: list[bytes] = []
            async for line in process.stdout:
                lines.append(line)
                if LISTENING.search(line):
                    break
            else:
                raise RuntimeError(b"".join(lines[-5:]).decode())
        # Its log is read, so that it never waits for its reader.
        reading = asyncio.create_task(process.stdout.read())
        yield f"http://127.0.0.1:{port}"
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


_DEPTH = 6
_NULL = frozenset({"null"})
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
    "email": "someone@example.com",
    "uri": "https://example.com",
    "url": "https://example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "byte": "aGVsbG8=",
    "base64": "aGVsbG8=",
}


def sample(outline: Outline, depth: int = _DEPTH) -> Any:
    """Return a sample value for a schema, based on its keywords."""
    schema = outline.schema
    if "default" in schema and schema["default"] is not None:
        return schema["default"]
    if examples := list_of(schema.get("examples")):
        return examples[0]
    if outline.choices:
        return outline.choices[0]
    members = [member for member in outline.members if member.types != _NULL]
    if members and depth > 0:
        return sample(members[0], depth - 1)
    types = outline.types
    if outline.properties or "object" in types:
        return _object(outline, depth)
    if "array" in types:
        return _array(outline, depth)
    return _scalar(schema, types)


def _object(outline: Outline, depth: int) -> JSONObject:
    if depth <= 0:
        return {}
    properties = outline.properties
    return {name: sample(properties.get(name, Outline({})), depth - 1) for name in outline.required}


def _array(outline: Outline, depth: int) -> list[Any]:
    if depth <= 0:
        return []
    if first := list_of(outline.schema.get("prefixItems")):
        return [sample(outline.inner(each), depth - 1) for each in first]
    count = min(max(1, outline.schema.get("minItems", 1)), 3)
    return [sample(outline.items, depth - 1) for _ in range(count)]


def _scalar(schema: JSONObject, types: frozenset[str]) -> Any:
    if types & {"integer", "number"}:
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is None and "exclusiveMinimum" in schema:
            low = schema["exclusiveMinimum"] + 1
        found = low if low is not None and low > 1 else 1
        return high if high is not None and high < found else found
    if "boolean" in types:
        return True
    if types == _NULL:
        return None
    form: Any = schema.get("format")
    text = _FORMATS.get(form, "text")
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


def arguments_of(spec: OperationSpec) -> Any:
    """Return arguments that are valid for an operation; None if none are found."""
    value = sample(Outline.of(spec.input_schema))
    created = spec.input_schema.cast(value, "create").value
    return next((given for given in (value, created) if spec.input_schema.check(given)), None)


async def examine(prism: str, path: Path) -> tuple[Counter[str], list[str]]:
    """Call every operation once; return counts, and the violations that Prism found."""
    counts: Counter[str] = Counter()
    violations: list[str] = []
    async with mocking(prism, path) as url, OperationRegistry() as registry:
        config = HTTPServiceConfig(
            namespace="api", base_url=url, retries=0, credentials=await _credentials(path)
        )
        service = await from_openapi_file(path, config)
        if any("set auth=" in problem.reason for problem in service.problems):
            config = replace(config, auth={"type": "bearer", "token": "x"})
            service = await from_openapi_file(path, config)
        registry.register_all(service)
        for operation in list(registry):
            spec = operation.spec
            arguments = arguments_of(spec)
            if arguments is None:
                counts["without arguments"] += 1
                continue
            counts["requests"] += 1
            status, headers = await _send(registry, spec, arguments)
            found = [
                item
                for item in json.loads(headers.get("sl-violations", "[]"))
                if item["location"][0] == "request" and item["severity"] == "Error"
            ]
            counts[f"status {status // 100}xx"] += 1
            if found or status in {404, 405, 415, 422}:
                violations.append(f"{spec.name} {status}: {found} {arguments}"[:400])
    return counts, violations


async def _credentials(path: Path) -> dict[str, Any]:
    """Return something for every security scheme of a document: Prism looks whether there is one."""
    document = decode_document(await anyio.Path(path).read_bytes())
    return {
        name: ("user", "password") if object_of(scheme).get("scheme") == "basic" else "x"
        for name, scheme in Description(document).reader.security_schemes().items()
    }


async def _send(
    registry: OperationRegistry, spec: OperationSpec, arguments: Any
) -> tuple[int, dict[str, str]]:
    try:
        if spec.type is OperationType.SUBSCRIPTION:
            async for envelope in registry.subscribe(spec.id, arguments):
                meta: Any = envelope.meta
                return meta.status_code, meta.headers
            return 200, {}
        meta = (await registry.execute(spec.id, arguments)).meta
    except CallError as error:
        details = object_of(error.details)
        return details.get("statusCode", 0), object_of(details.get("headers"))
    return meta.status_code, meta.headers


async def main(prism: str, paths: list[Path]) -> int:
    """Examine documents and print what was found."""
    total: Counter[str] = Counter()
    failed = 0
    for path in paths:
        counts, violations = await examine(prism, path)
        total += counts
        failed += len(violations)
        print(path.name, dict(counts))
        for violation in violations:
            print("   ", violation)
    print(dict(total), f"{failed} with violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], [Path(name) for name in sys.argv[2:]])))
