"""The package as a whole: its public names, its imports, and its forbidden contents."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from tests.conftest import PROJECT
from tests.limits import scaled

import operations
from operations.contract.context import new_request_id

SOURCES = sorted((PROJECT / "src").rglob("*.py"))

CONTRACT = [
    "OperationType", "OperationSpec", "Operation", "OperationHandler", "SubscriptionHandler",
    "OperationContext", "Identity", "AccessControl", "ErrorDefinition", "OperationRegistry",
    "ResponseEnvelope", "LocalResponseMeta", "HTTPResponseMeta", "MCPResponseMeta", "MCPAnnotations",
    "local_envelope", "http_envelope", "mcp_envelope", "is_response_envelope", "unwrap", "RESPONSE_SOURCES",
    "RESPONSE_ENVELOPE_SCHEMA", "RESPONSE_META_SCHEMA", "OPERATION_SPEC_SCHEMA", "CALL_EVENT_SCHEMAS",
    "CallError", "ErrorCode", "map_error", "check_access", "enforce_access", "subscribe", "build_env",
    "Schema", "from_schema", "collect_errors", "validate_or_raise", "format_value_errors", "assert_is_schema",
    "operation", "scan_operations",
]  # fmt: skip


def test_the_contracts_names_are_exported() -> None:
    assert set(CONTRACT) <= set(operations.__all__)
    for name in operations.__all__:
        assert hasattr(operations, name)


def test_names_of_other_modules_exist_there() -> None:
    package: Any = operations
    for module, names in package._ELSEWHERE.items():
        found = import_module(f"operations.{module}")
        assert [name for name in names.split() if not hasattr(found, name)] == []


def test_importing_the_package_loads_only_the_core_three() -> None:
    code = (
        "import sys; before = set(sys.modules); import operations; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*(new - sys.stdlib_module_names))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=scaled(60)
    ).stdout

    loaded = {name for name in printed.split() if not name.startswith("_")}
    # msgspec imports typing_extensions if it is installed.
    assert loaded <= {"operations", "msgspec", "jsonschema_rs", "anyio", "typing_extensions"}


FORBIDDEN = {
    "pickle": r"\bimport pickle\b|\bfrom pickle\b",
    "eval or exec": r"(?<![\w.])(eval|exec)\(",
    "a shell": r"shell=True|os\.system",
    "unsafe YAML": r"yaml\.(unsafe_)?load\(|UnsafeLoader|FullLoader",
    "marshal": r"\bimport marshal\b",
}

EAGER = re.compile(r"(asyncio|loop|\(\))\.create_task\(")


@pytest.mark.requirement("R14")
@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_module_executes_data(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])

    offenders = [str(path) for path in SOURCES if pattern.search(path.read_text(encoding="utf-8"))]

    assert offenders == []


def test_no_task_starts_before_its_creator_continues() -> None:
    # `create_task` runs the first step at once if the program has set `asyncio.eager_task_factory`; `Task` never does.
    offenders = [str(path) for path in SOURCES if EAGER.search(path.read_text(encoding="utf-8"))]

    assert offenders == []


@pytest.mark.requirement("R45")
def test_ids_come_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []

    def urandom(size: int, draw: Callable[[int], bytes] = os.urandom) -> bytes:
        drawn.append(draw(size))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    while not drawn:
        # Until the ids generated in advance are used up.
        first = new_request_id()
    ids = [first, *(new_request_id() for _ in range(100))]

    assert len(set(ids)) == len(ids)
    assert {len(bytes.fromhex(each)) for each in ids} == {16}
    assert all(bytes.fromhex(each) in drawn[0] for each in ids)
