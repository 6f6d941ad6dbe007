"""Private names of other packages: which are used, where, and with which versions they were tested."""

import ast
import importlib
import inspect
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
from tests.conftest import PROJECT

import operations

TESTED = {"mcp": "2.3", "nats-py": "2.16"}
"""The minor versions with which the private names below were tested. After an upgrade run the tests of the package,
compare the names with its source, then change the number."""

USED = {
    "operations.mcp.shared.sdk": {
        "mcp.client._probe",
        "ClientSession._stamp",
        "ClientSession._x_mcp_header_maps",
        "JSONRPCDispatcher._closed",
        "JSONRPCDispatcher._dispatch",
        "JSONRPCDispatcher._final_write",
        "JSONRPCDispatcher._handle_request",
        "JSONRPCDispatcher._write",
        "_connection",
        "_lowlevel_server",
        "_request_outbound",
    },
    "operations.pubsub.nats.client": {
        "Client._connect_command",
        "Client._current_server",
        "Client._flush_pending",
        "Client._flush_queue",
        "Client._max_pending_size",
        "Client._pending",
        "Client._pending_data_size",
        "Client._process_connect_init",
        "Client._process_err",
        "Client._process_info",
        "Client._process_msg",
        "Client._process_op_err",
        "Client._ps",
        "Client._reconnection_task",
        "Client._send_ping",
        "Client._sid",
        "Client._transport",
        "_io_writer",
    },
}
"""The private names of other packages that each module uses: one module per package."""

NOT_PRIVATE = {
    "_asdict",
    "_field_defaults",
    "_fields",
    "_replace",
    "_abc_impl",
    "_is_protocol",
    "_is_runtime_protocol",
    "_unregister_task",
}
"""Public names of named tuples, names that the standard library adds to classes, a documented function of asyncio."""


def _is_private(name: str) -> bool:
    return name.strip("_") != "" and name[0] == "_" != name[-1] and name not in NOT_PRIVATE


def _accessed(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module imports, or takes from something other than `self`, `cls` and `super()`."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                ours = module.partition(".")[0] in ("operations", "__future__")
                if not ours and any(map(_is_private, module.split("."))):
                    yield module
                elif not ours:
                    yield from (f"{module}.{each.name}" for each in names if _is_private(each.name))
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "other")):
                pass
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name) if _is_private(name):
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if _is_private(name):
                    yield name
            case _:
                pass


@cache
def _defined(base: type) -> frozenset[str]:
    """Return the private names that a class defines, in its body and on its instances."""
    names = set(vars(base))
    try:
        source = dedent(inspect.getsource(base))
    except (OSError, TypeError):
        # Made at run time, or written in C.
        source = ""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case _:
                pass
    return frozenset(name for name in names if _is_private(name))


def _is_foreign(base: type) -> bool:
    package = base.__module__.partition(".")[0]
    return package not in {"operations", "msgspec"} and package not in sys.stdlib_module_names


def _inherited(tree: ast.Module, module: object) -> Iterator[str]:
    """Yield the private names of foreign base classes that the classes of a module use or replace."""
    for definition in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found = getattr(module, definition.name, None)
        foreign = list(filter(_is_foreign, found.__mro__)) if isinstance(found, type) else []
        if not foreign:
            continue
        used = set(vars(found))
        for node in ast.walk(definition):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    used.add(name)
                case _:
                    pass
        for base in foreign:
            yield from (f"{base.__name__}.{name}" for name in used & _defined(base))


def test_private_names_of_each_package_are_used_by_one_module_only() -> None:
    used: defaultdict[str, set[str]] = defaultdict(set)
    for info in pkgutil.walk_packages(operations.__path__, "operations."):
        if info.name.endswith("__main__"):
            continue
        spec = find_spec(info.name)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        used[info.name] |= set(_accessed(tree))
        used[info.name] |= set(_inherited(tree, importlib.import_module(info.name)))

    assert {module: names for module, names in used.items() if names} == USED


@pytest.mark.parametrize("name", TESTED)
def test_the_private_names_were_tested_with_the_installed_version(name: str) -> None:
    assert version(name).startswith(f"{TESTED[name]}."), (
        f"{name} {version(name)} is installed: check the private names that USED lists, then change TESTED"
    )


@pytest.mark.parametrize("name", TESTED)
def test_the_lock_file_pins_the_tested_versions(name: str) -> None:
    lock = (PROJECT / "requirements.lock").read_text(encoding="utf-8")

    assert f"\n{name}=={TESTED[name]}." in lock.replace("[nkeys]", "")
