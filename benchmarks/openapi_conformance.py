"""Count the calls that arrive as the document describes, for this library and others.

usage: openapi_conformance.py [--verbose]

Needs fastmcp, utcp and utcp-http beside this project; libraries that are not installed are skipped. The others are
judged by meaning, not by spelling: percent-encoding may differ. Security schemes are skipped if a library leaves them
to its HTTP client.
"""

import argparse
import asyncio
import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _harness import show
from tests.openapi.conformance import CASES, NOTHING, Case, arguments
from tests.openapi.echo import Echo, running_echo

Call = Callable[[Case, str], Awaitable[None]]


async def ours(case: Case, url: str) -> None:
    from operations import OperationRegistry
    from operations.openapi import HTTPServiceConfig, from_openapi

    config = HTTPServiceConfig(namespace="api", credentials=case.credentials, allowed_hosts=(url,))
    async with OperationRegistry() as registry:
        registry.register_all(from_openapi(case.whole(url), config))
        await registry.execute("api.call", arguments(case))


async def fastmcp(case: Case, url: str) -> None:
    import httpx2
    from fastmcp import FastMCP

    async with httpx2.AsyncClient(base_url=base_of(case, url)) as client:
        server = FastMCP.from_openapi(case.whole(url), client=client)
        (tool,) = await server.list_tools()
        names = tool.parameters.get("properties", {})
        given: dict[str, Any] = {}
        for (place, name), value in case.values.items():
            given[f"{name}__{place}" if f"{name}__{place}" in names else name] = value
        if case.body is not NOTHING:
            if isinstance(case.body, dict) and "body" not in names:
                given |= case.body
            else:
                given["body"] = case.body
        await server.call_tool(tool.name, given)


async def utcp(case: Case, url: str) -> None:
    from utcp.utcp_client import UtcpClient
    from utcp_http.http_call_template import HttpCallTemplate
    from utcp_http.openapi_converter import OpenApiConverter

    manual = OpenApiConverter(case.whole(url), spec_url=f"{url}/openapi.json").convert()
    (tool,) = manual.tools
    tool.name = f"api.{tool.name}"
    client = await UtcpClient.create()
    template = HttpCallTemplate(name="api", url=f"{url}/openapi.json", http_method="GET")
    await client.config.tool_repository.save_manual(template, manual)
    given = {name: value for (_, name), value in case.values.items()}
    if case.body is not NOTHING:
        given[tool.tool_call_template.body_field or "body"] = case.body
    await client.call_tool(tool.name, given)


def base_of(case: Case, url: str) -> str:
    return url + case.document.get("basePath", "")


LIBRARIES: dict[str, tuple[str, Call, frozenset[str]]] = {
    "operations": ("operations", ours, frozenset()),
    "FastMCP": ("fastmcp", fastmcp, frozenset({"security"})),
    "UTCP": ("utcp_http", utcp, frozenset({"security"})),
}


async def arrives(call: Call, case: Case, echo: Echo, *, exact: bool) -> str:
    """Return what was wrong with the request that arrived, or an empty string."""
    echo.seen.clear()
    try:
        await asyncio.wait_for(call(case, echo.url), 20)
    except Exception as error:  # noqa: BLE001 - every error counts
        if not echo.seen:
            return f"{type(error).__name__}: {error}"[:110]
    if len(echo.seen) != 1:
        return f"{len(echo.seen)} requests"
    try:
        case.check(echo.seen[0], exact)
    except Exception as error:  # noqa: BLE001 - a body that cannot even be read counts too
        return f"arrived as {error}"[:110]
    return ""


async def benchmark(*, verbose: bool) -> None:
    logging.disable(logging.CRITICAL)
    groups = Counter(case.group for case in CASES)
    good: dict[str, Counter[str]] = {}
    with running_echo() as echo:
        for name, (module, call, left_out) in LIBRARIES.items():
            good[name] = Counter()
            if importlib.util.find_spec(module) is None:
                continue
            for case in CASES:
                if case.group in left_out:
                    continue
                problem = await arrives(call, case, echo, exact=name == "operations")
                good[name][case.group] += not problem
                if problem and verbose:
                    print(f"{name}: {case.id}: {problem}", file=sys.stderr)
    rows: dict[str, Any] = {}
    for group, count in groups.items():
        rows[group] = {"calls": count}
        for name, (_, _, left_out) in LIBRARIES.items():
            rows[group][name] = "-" if group in left_out or not good[name] else good[name][group]
    if named := [row for row in rows.values() if "-" not in row.values()]:
        rows["together, without security schemes"] = {
            column: sum(row[column] for row in named) for column in named[0]
        }
    show("requests as described", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--verbose", action="store_true")
    asyncio.run(benchmark(verbose=parser.parse_args().verbose))
