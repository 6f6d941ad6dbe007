"""Large APIs, imported and exported again: the result is complete, always the same, and not larger than the
original."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from operations import OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi_file
from operations.openapi.serving import to_openapi
from operations.openapi.serving.components import PREFIX

SHARED = Path(__file__).parents[3] / "shared"
LARGE = ["octokit__api.github.com.json"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (SHARED / "openapi").exists(), reason="the shared documents are not here"
    ),
]


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("name", LARGE)
async def test_a_large_api_is_exported_whole_and_no_larger_than_twice_itself(name: str) -> None:
    path = SHARED / "openapi" / name
    service = await from_openapi_file(path, HTTPServiceConfig(namespace="large"))
    registry = OperationRegistry(service)

    document = to_openapi(registry)
    text = msgspec.json.encode(document)

    assert len(text) < 2 * path.stat().st_size
    assert len(document["paths"]) == len(registry)
    assert msgspec.json.encode(to_openapi(reversed(list(registry)))) == text
    components = document["components"]["schemas"]
    assert references(document) == {PREFIX + name for name in components}


def references(value: Any) -> set[str]:
    found: set[str] = set()
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, dict):
            reference = held.get("$ref")
            if isinstance(reference, str) and reference.startswith(PREFIX):
                found.add(PREFIX + reference.removeprefix(PREFIX).partition("/")[0])
            waiting.extend(held.values())
        elif isinstance(held, list):
            waiting.extend(held)
    return found
