"""Measure a call in the process beside a bare await, FastMCP, LangChain and TypeBox."""

import asyncio
import gc
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import _values as v
import msgspec
from _harness import arguments, interleave, main, medians, rate, show, table
from fastmcp import FastMCP
from langchain_core.tools import StructuredTool
from pydantic import BaseModel

from operations import (
    AccessControl,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
)
from operations.authority import Grants, narrow, new_block
from operations.base.work import Work
from operations.server import create_app

HERE = Path(__file__).parent
logging.disable(logging.WARNING)


async def add(a: int, b: int) -> int:
    return a + b


class Owner(BaseModel):
    id: int
    email: str


class Filter(BaseModel):
    status: Literal["open", "closed", "archived"]
    owner: Owner
    min_score: float = 0.0


class Sort(BaseModel):
    field: str
    descending: bool = False


class Item(BaseModel):
    id: int
    name: str
    status: Literal["open", "closed", "archived"]
    score: float
    created: str
    tags: list[str]
    active: bool = True
    owner: str | None = None


async def search(
    tenant: str,
    query: str,
    filter: Filter,
    sort: Sort,
    limit: int = 20,
    offset: int = 0,
    archived: bool = False,
    locale: str = "en",
    trace: str | None = None,
    tags: list[str] | None = None,
) -> list[Item]:
    return v.DIRTY  # type: ignore[return-value]


def build() -> OperationRegistry:
    async def handle_add(input: Any, _context: OperationContext) -> int:
        return input["a"] + input["b"]

    async def handle_search(_input: Any, _context: OperationContext) -> Any:
        return v.DIRTY

    def spec(name: str, given: Any, returned: Any) -> OperationSpec:
        return OperationSpec(
            name=name,
            namespace="bench",
            type=OperationType.QUERY,
            input_schema=from_schema(given),
            output_schema=from_schema(returned),
            access_control=AccessControl(["bench"]),
        )

    registry = OperationRegistry(
        [
            Operation(spec("add", v.ADD_INPUT, v.ADD_OUTPUT), handle_add),
            Operation(spec("search", v.SEARCH_INPUT, v.SEARCH_OUTPUT), handle_search),
        ]
    )
    registry.operation("bench.typed", type="query", scopes=["bench"])(add)
    return registry


async def benchmark() -> None:
    options = arguments()
    registry = build()
    caller = OperationContext(identity=Identity("bench", ["bench"]), registry=registry)
    execute, given, wanted = registry.execute, v.ADD_ARGUMENTS, v.SEARCH_ARGUMENTS
    server = FastMCP("bench")
    server.tool(add)
    server.tool(search)
    tool = StructuredTool.from_function(coroutine=add, name="add", description="add")

    async def bare() -> int:
        return await add(**given)

    async def ours() -> Any:
        return await execute("bench.add", given, caller)

    async def ours_typed() -> Any:
        return await execute("bench.typed", given, caller)

    async def ours_fresh() -> Any:
        return await execute("bench.add", given, OperationContext(trusted=True, registry=registry))

    async def fastmcp() -> Any:
        return await server.call_tool("add", given)

    async def langchain() -> Any:
        return await tool.ainvoke(given)

    table(
        "add(a, b)",
        await interleave(
            {
                "bare await": bare,
                "operations: execute": ours,
                "operations: execute, typed function": ours_typed,
                "operations: execute, a context per call": ours_fresh,
                "FastMCP call_tool": fastmcp,
                "LangChain ainvoke": langchain,
            },
            options.repeats,
            options.budget,
        ),
        "bare await",
    )

    async def ours_search() -> Any:
        return await execute("bench.search", wanted, caller)

    async def fastmcp_search() -> Any:
        return await server.call_tool("search", wanted)

    contenders = {"operations: execute": ours_search, "FastMCP call_tool": fastmcp_search}
    table(
        "search",
        await interleave(contenders, options.repeats, options.budget),
        "operations: execute",
    )
    await granted(options)
    await deadlines(options)
    await beside_typebox(options)
    await types_of_results(options)
    await served(options)
    registration()
    await used()
    import_time()


async def granted(options: Any) -> None:
    """Compare calls with and without a grant: two blocks, an input schema, an expiry. Goal: at most 5 us more."""
    registry, bench = build(), Identity("bench", ["bench"])
    grants = Grants(b"k" * 32)
    token = narrow(
        grants.create(bench, "agent", operations=["bench.*"], seconds=3600),
        new_block("helper", input={"bench.add": {"properties": {"a": {"maximum": 1000}}}}),
    )
    agent = OperationContext(identity=await grants.resolve(token), registry=registry)
    plain, execute = OperationContext(identity=bench, registry=registry), registry.execute

    async def ungranted() -> Any:
        return await execute("bench.add", v.ADD_ARGUMENTS, plain)

    async def with_grant() -> Any:
        return await execute("bench.add", v.ADD_ARGUMENTS, agent)

    async def with_token() -> Any:
        await grants.resolve(token)
        return await execute("bench.add", v.ADD_ARGUMENTS, agent)

    rates = await interleave(
        {
            "no grant": ungranted,
            "a grant": with_grant,
            "a grant, resolved from its token": with_token,
        },
        options.repeats,
        options.budget,
    )
    rows: dict[str, Any] = medians(rates, "no grant")
    for row in rows.values():
        row["more us"] = row["CPU us"] - rows["no grant"]["CPU us"]
    show("add(a, b) with a grant", rows)


@dataclass
class DataPoint:
    x: int
    y: float
    name: str
    tags: list[str]


class StructPoint(msgspec.Struct):
    x: int
    y: float
    name: str
    tags: list[str]


class ModelPoint(BaseModel):
    x: int
    y: float
    name: str
    tags: list[str]


class ModelOfModels(BaseModel):
    at: datetime
    owner: Owner
    point: ModelPoint


async def deadlines(options: Any) -> None:
    """Compare a call with a deadline to the same call in a task. Goal: at most 1.5 times the time."""
    registry, given = OperationRegistry(), v.ADD_ARGUMENTS
    registry.operation("bench.add", type="query")(add)
    context = OperationContext(deadline=(time.time() + 3600) * 1000, registry=registry)

    async def bare() -> int:
        return await add(**given)

    async def execute() -> Any:
        return await registry.execute("bench.add", given)

    async def bare_task() -> Any:
        return await asyncio.ensure_future(bare())

    async def execute_in_task() -> Any:
        return await asyncio.ensure_future(execute())

    async def with_deadline() -> Any:
        return await registry.execute("bench.add", given, context)

    contenders: dict[str, Callable[[], Awaitable[Any]]] = {
        "bare await": bare,
        "bare task": bare_task,
        "operations: execute": execute,
        "operations: execute in a bare task": execute_in_task,
        "operations: execute with a deadline": with_deadline,
    }
    table(
        "deadlines",
        await interleave(contenders, options.repeats, options.budget),
        "operations: execute in a bare task",
    )


async def used(count: int = 2_000) -> None:
    """Measure the memory of operations that were called once. Goal: 15 KB each."""
    rows: dict[str, Any] = {}
    for name, given, returned, value in (
        ("add", v.ADD_INPUT, v.ADD_OUTPUT, 5),
        ("search", v.SEARCH_INPUT, v.SEARCH_OUTPUT, v.ITEMS),
    ):
        arguments = v.ADD_ARGUMENTS if name == "add" else v.SEARCH_ARGUMENTS

        async def handler(_input: Any, _context: OperationContext, value: Any = value) -> Any:
            return value

        gc.collect()
        before = _resident()
        registry = OperationRegistry(
            [
                Operation(
                    OperationSpec(
                        name=f"{name}{index}",
                        namespace="many",
                        type=OperationType.QUERY,
                        # Different documents, which share nothing.
                        input_schema=from_schema({**given, "title": f"{name} {index}"}),
                        output_schema=from_schema({**returned, "title": f"{name} {index}"}),
                    ),
                    handler,
                )
                for index in range(count)
            ]
        )
        for spec in registry.specs():
            await registry.execute(spec.id, arguments)
        gc.collect()
        rows[name] = {"KB each": (_resident() - before) / count / 1024}
    show("2,000 operations that were called once", rows)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def types_of_results(options: Any) -> None:
    """Return the same results as dicts and as objects. Goal: at most twice the time of the dicts."""
    point: Any = {"x": 1, "y": 1.5, "name": "abc", "tags": ["a", "b"]}
    owner: Any = {"id": 1, "email": "ada@example.com"}
    nested: Any = {"at": "2026-01-02T03:04:05Z", "owner": owner, "point": point}
    results: dict[str, tuple[Any, Callable[[], Any]]] = {
        "dict": (DataPoint, lambda: dict(point)),
        "dataclass": (DataPoint, lambda: DataPoint(**point)),
        "msgspec struct": (StructPoint, lambda: StructPoint(**point)),
        "pydantic model": (ModelPoint, lambda: ModelPoint(**point)),
        "dict of dicts": (ModelOfModels, lambda: dict(nested)),
        "pydantic model of models": (ModelOfModels, lambda: ModelOfModels(**nested)),
    }
    registry = OperationRegistry()
    rows: dict[str, Any] = {}
    for count in (1, 220):
        contenders: dict[str, Callable[[], Awaitable[Any]]] = {}
        for index, (name, (kind, build)) in enumerate(results.items()):
            contenders[name] = _returning(registry, f"of{count}.kind{index}", kind, build, count)
        for base, names in (
            ("dict", ["dict", "dataclass", "msgspec struct", "pydantic model"]),
            ("dict of dicts", ["dict of dicts", "pydantic model of models"]),
        ):
            rates = await interleave(
                {name: contenders[name] for name in names}, options.repeats, options.budget
            )
            for name, row in medians(rates, base).items():
                rows[f"{count} x {name}"] = row
    show("results as objects", rows)


def _returning(
    registry: OperationRegistry, operation_id: str, kind: Any, build: Callable[[], Any], count: int
) -> Callable[[], Awaitable[Any]]:
    value = build() if count == 1 else [build() for _ in range(count)]

    async def give() -> Any:
        return value

    give.__annotations__["return"] = kind if count == 1 else list[kind]
    registry.operation(operation_id, type="query")(give)

    async def call() -> Any:
        return await registry.execute(operation_id)

    return call


async def served(options: Any) -> None:
    """Call from code in the process while apps serve the same registry. Goal: at most 1.1 times the time."""
    registries = {count: OperationRegistry() for count in (0, 1, 50)}
    apps = []
    contenders: dict[str, Callable[[], Awaitable[Any]]] = {}
    for count, registry in registries.items():
        registry.operation("bench.add", type="query")(add)
        apps += [create_app(registry) for _ in range(count)]

        async def call(registry: OperationRegistry = registry) -> Any:
            return await registry.execute("bench.add", v.ADD_ARGUMENTS)

        contenders[f"{count} apps"] = call
    table(
        "add(a, b) beside apps",
        await interleave(contenders, options.repeats, options.budget),
        "0 apps",
    )


async def beside_typebox(options: Any) -> None:
    """Normalise an output in alternating rounds: TypeBox in Node, ours here."""
    node = shutil.which("node")
    if node is None or not (HERE / "node_modules").exists():
        sys.exit("cannot measure TypeBox: Node or its package is missing; run scripts/bench core")
    compiled = from_schema(v.SEARCH_OUTPUT).compile()
    states = v.states()
    fixture = msgspec.json.encode({"dirty": v.DIRTY, **states})

    normalise = compiled.normaliser("cast")

    def cast_and_check() -> bool:
        # Checked as well: a mismatch would be the first change in the list.
        _, changes = normalise(v.DIRTY)
        return changes is None or changes[0].kind != "mismatch"

    assert cast_and_check()
    of_states: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {
        "TypeBox 0.34 Cast + Check": [],
        "operations: cast + check": [],
    }
    for _ in range(options.repeats):
        done = subprocess.run(
            [node, HERE / "typebox.mjs", str(options.budget * 1000)],
            input=fixture,
            capture_output=True,
            check=True,
            timeout=60,
        )
        theirs = msgspec.json.decode(done.stdout)
        rates["TypeBox 0.34 Cast + Check"].append(theirs.pop("dirty"))
        rates["operations: cast + check"].append(await rate(cast_and_check, options.budget))
        for name, value in states.items():
            of_states.setdefault(f"{name}, TypeBox 0.34", []).append(theirs[name])
            gc.collect()
            own = await rate(partial(normalise, value), options.budget)
            of_states.setdefault(f"{name}, operations", []).append(own)
    table("output of search", rates, "operations: cast + check")
    table("100 items: Cast + Check", of_states, "valid, operations")

    wide = from_schema(v.WIDE).compile().normaliser("cast")
    found = await interleave(
        {"100 wrong values": lambda: wide(v.WIDE_WRONG, Work())}, options.repeats, options.budget
    )
    table("union of 200 members", found, "100 wrong values")


def registration(count: int = 1000) -> None:
    """Measure the time to register, and the memory of an operation that is never called."""

    async def handler(_input: Any, _context: OperationContext) -> None: ...

    def specs() -> list[Operation]:
        return [
            Operation(
                OperationSpec(
                    name=f"op{index}",
                    namespace="many",
                    type=OperationType.QUERY,
                    input_schema=from_schema(
                        msgspec.json.decode(msgspec.json.encode(v.SEARCH_INPUT))
                    ),
                    output_schema=from_schema(
                        msgspec.json.decode(msgspec.json.encode(v.SEARCH_OUTPUT))
                    ),
                ),
                handler,
            )
            for index in range(count)
        ]

    times = []
    for _ in range(5):
        made = specs()
        began = time.perf_counter()
        OperationRegistry(made)
        times.append(time.perf_counter() - began)
    typed = []
    for _ in range(5):
        registry = OperationRegistry()
        began = time.perf_counter()
        for index in range(count):
            registry.operation(f"many.op{index}")(add)
        typed.append(time.perf_counter() - began)
    tracemalloc.start()
    kept = OperationRegistry(specs())
    size = tracemalloc.get_traced_memory()[0] / len(kept)
    tracemalloc.stop()
    show(
        "1,000 operations",
        {
            "register operations": {"ms": statistics.median(times) * 1e3},
            "decorate and register typed functions": {"ms": statistics.median(typed) * 1e3},
            "memory of an idle operation, with its schemas": {"KB": size / 1024},
        },
    )


def import_time() -> None:
    """Time imports in fresh processes, without the time that Python takes to start."""
    base = _seconds("pass")
    modules = ("operations", "fastmcp", "langchain_core.tools", "pydantic")
    took = {module: (_seconds(f"import {module}") - base) * 1e3 for module in modules}
    rows = {name: {"ms": ms, "x base": ms / took["operations"]} for name, ms in took.items()}
    show("import in a fresh process", rows)


def _seconds(code: str) -> float:
    # With compiled modules, as after an installation.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    times = []
    for _ in range(6):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main(benchmark)
