"""Measure code mode: what is sent to a model over whole conversations, and what scripts cost.

    tokens        ten tasks of eleven calls over GitHub's and Stripe's documents: a direct list of tools, search tools,
                  the CodeMode of FastMCP (if it is installed), and code mode
    time          the calls of a task in a script, and the same calls in Python
    many          1,000 calls in one script, and 100 scripts at once
    durable       a script whose calls are recorded in a SQLite file

usage: code_mode.py [--documents FOLDER] [--repeats N]

A token is four characters. In each turn, the model gets the tools and the conversation so far. The scripted model makes
no mistakes; it makes calls that do not depend on each other in one turn. Results come from handlers in this process,
made from the schemas, with ten items in each list.
"""

import argparse
import asyncio
import json
import logging
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from _harness import show
from openapi_first_use import sample

from operations import OperationContext, OperationRegistry, operation
from operations.agents import Toolbox
from operations.code import Code, CodeLimits
from operations.code.names import Names, parameters_of
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.runs import Runs

try:
    import httpx
    from fastmcp import Client, FastMCP
    from fastmcp.experimental.transforms.code_mode import CodeMode
except ImportError:
    CodeMode = None  # type: ignore[misc, assignment]

DOCUMENTS = {
    "github": "octokit__api.github.com.json",
    "stripe": "stripe__spec3-2021-06-07.json",
}
OPERATOR = OperationContext(trusted=True)
PROMPT = 400
"""Characters of the instructions and of the task, and of each text of the model."""

DETAILS = 10
"""The number of calls that follow the first one."""


class Task(NamedTuple):
    """A list, and one call for each of its items."""

    query: str
    first: str
    each: str


TASKS = [
    Task("list and get issues of a repository", "github.issues_list-for-repo", "github.issues_get"),
    Task("list and get pull requests", "github.pulls_list", "github.pulls_get"),
    Task("list and get repositories", "github.repos_list-for-org", "github.repos_get"),
    Task("list and get commits", "github.repos_list-commits", "github.repos_get-commit"),
    Task("list issues create issue comment", "github.issues_list-for-repo", "github.issues_create-comment"),
    Task("list and retrieve customers", "stripe.GetCustomers", "stripe.GetCustomersCustomer"),
    Task("list and retrieve invoices", "stripe.GetInvoices", "stripe.GetInvoicesInvoice"),
    Task("list and retrieve charges", "stripe.GetCharges", "stripe.GetChargesCharge"),
    Task("list charges create refund", "stripe.GetCharges", "stripe.PostRefunds"),
    Task("list invoices send invoice", "stripe.GetInvoices", "stripe.PostInvoicesInvoiceSend"),
]  # fmt: skip


def size(value: Any) -> int:
    """Return the number of characters of a value as JSON."""
    return len(value if isinstance(value, str) else msgspec.json.encode(value))


class Conversation:
    """Counts what a model gets over all turns."""

    def __init__(self, tools: Any) -> None:
        self._tools = size(tools)
        self._history = PROMPT
        self.characters = 0

    def turn(self, *said: Any) -> None:
        """The model gets everything so far, and answers; then there are results."""
        self.characters += self._tools + self._history
        self._history += sum(map(size, said))

    @property
    def tokens(self) -> int:
        """What the model has got, in tokens."""
        return self.characters // 4


class Upstream:
    """A document as a registry, whose handlers respond with examples."""

    def __init__(self, name: str, document: Any) -> None:
        self.document = document
        self.results: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        config = HTTPServiceConfig(namespace=name)
        operations = [self._served(each) for each in from_openapi(document, config)]
        self.registry = OperationRegistry(operations)
        self.registry.register_all(Code(self.registry, limits=CodeLimits(processes=16)))
        self.names = Names(self.registry.specs())

    def _served(self, operation: Any) -> Any:
        spec = operation.spec

        async def handler(_input: Any, _context: OperationContext) -> Any:
            return self.result(spec)

        return msgspec.structs.replace(operation, handler=handler)

    def result(self, spec: Any) -> Any:
        """Return an example of a result, with ten items in its list."""
        if spec.id not in self.results:
            schema = spec.output_schema.document
            found = sample(schema, schema.get("$defs", {}))
            if isinstance(found, list):
                found = found * 10
            elif isinstance(found, dict) and isinstance(found.get("data"), list):
                found["data"] = found["data"] * 10
            self.results[spec.id] = found
        return self.results[spec.id]

    def input(self, operation_id: str) -> Any:
        """Return an example of an input, with the required properties."""
        if operation_id not in self.inputs:
            schema = self.registry.get_spec(operation_id).input_schema.document  # type: ignore[union-attr]
            self.inputs[operation_id] = sample(schema, schema.get("$defs", {}), whole=False)
        return self.inputs[operation_id]

    def spec(self, operation_id: str) -> Any:
        """Return the contract of an operation."""
        return self.registry.get_spec(operation_id)

    def call(self, operation_id: str) -> str:
        """Return a call in Python."""
        parameters = parameters_of(self.spec(operation_id)).properties
        names = {value: key for key, value in parameters.items()}
        arguments = ", ".join(
            f"{names[key]}={value!r}" for key, value in self.input(operation_id).items()
        )
        return f"{self.names.python(operation_id)}({arguments})"

    def script(self, task: Task) -> str:
        """Return a task as a script."""
        return (
            "import asyncio\n"
            f"found = await {self.call(task.first)}\n"
            f"done = await asyncio.gather(*({self.call(task.each)} for _ in range({DETAILS})))\n"
            "return [len(found), len(done)]\n"
        )

    def single(self, operation_id: str) -> tuple[Any, Any]:
        """Return a call as a tool call, and its result."""
        call = {"id": "call_1", "name": operation_id, "input": self.input(operation_id)}
        return call, self.result(self.spec(operation_id))


def direct(upstream: Upstream, task: Task) -> int:
    tools = Toolbox(upstream.registry, max_tools=100_000).anthropic()
    talk = Conversation([each for each in tools if not each["name"].startswith("code__")])
    talk.turn(*upstream.single(task.first))
    talk.turn(*(part for _ in range(DETAILS) for part in upstream.single(task.each)))
    talk.turn()
    return talk.tokens


async def searching(upstream: Upstream, task: Task) -> int:
    box = Toolbox(upstream.registry, max_tools=1)
    talk = Conversation(box.anthropic())

    async def use(name: str, **given: Any) -> tuple[Any, Any]:
        call = {"type": "tool_use", "id": "call_1", "name": name, "input": given}
        return call, (await box.run(call))["content"]

    talk.turn(*await use("tools__search", query=task.query))
    described = [await use("tools__describe", operation=each) for each in (task.first, task.each)]
    talk.turn(*(part for pair in described for part in pair))
    for operation_id, count in ((task.first, 1), (task.each, DETAILS)):
        call, result = upstream.single(operation_id)
        wrapped = {
            **call,
            "name": "tools__call",
            "input": {"operation": operation_id, "input": call["input"]},
        }
        talk.turn(*(part for _ in range(count) for part in (wrapped, result)))
    talk.turn()
    return talk.tokens


async def coding(upstream: Upstream, task: Task) -> int:
    box = Toolbox(upstream.registry, disclosure="code")
    talk = Conversation(box.anthropic())
    for name, given in (
        ("code__search", {"query": task.query}),
        ("code__run", {"script": upstream.script(task)}),
    ):
        call = {"type": "tool_use", "id": "call_1", "name": name, "input": given}
        message = await box.run(call)
        if message.get("is_error"):
            raise RuntimeError(f"{task}: {message['content'][:500]}")
        talk.turn(call, message["content"])
    talk.turn()
    return talk.tokens


class FastMCPCode:
    """The CodeMode of FastMCP over the same document."""

    def __init__(self, upstream: Upstream) -> None:
        client = httpx.AsyncClient(base_url="http://127.0.0.1:1")
        self._plain = FastMCP.from_openapi(upstream.document, client=client)
        self._names: dict[str, str] = {}
        self._server = FastMCP.from_openapi(
            upstream.document, client=client, transforms=[CodeMode()]
        )
        self._upstream = upstream

    async def tokens(self, task: Task) -> int:
        """Return the tokens of a conversation; the script is the same, its calls in their form."""
        async with Client(self._server) as client:
            tools = [
                {
                    "name": each.name,
                    "description": each.description,
                    "input_schema": each.input_schema,
                }
                for each in await client.list_tools()
            ]
            known = {each["name"] for each in tools}
            talk = Conversation(tools)
            found = await client.call_tool("search", {"query": task.query})
            talk.turn({"name": "search", "input": {"query": task.query}}, found.content[0].text)
            if "get_schema" in known:
                wanted = [await self._name(each) for each in (task.first, task.each)]
                schemas = await client.call_tool("get_schema", {"tools": wanted})
                text = schemas.content[0].text
                if "not found" in text.lower()[:2_000] and len(text) < 500:
                    raise RuntimeError(text)
                talk.turn({"name": "get_schema", "input": {"tools": wanted}}, text)
            talk.turn(
                {"name": "execute", "input": {"code": self._upstream.script(task)}}, "[10, 10]"
            )
            talk.turn()
            return talk.tokens

    async def _name(self, operation_id: str) -> str:
        """Return the name of an operation in FastMCP."""
        if not self._names:
            async with Client(self._plain) as client:
                self._names = {
                    _squashed(each.name): each.name for each in await client.list_tools()
                }
        return self._names[_squashed(operation_id.partition(".")[2])]


def _squashed(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


async def timed(work: Any) -> float:
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1000


async def in_python(upstream: Upstream, task: Task) -> None:
    execute = upstream.registry.execute
    await execute(task.first, upstream.input(task.first), OPERATOR)
    given = upstream.input(task.each)
    await asyncio.gather(*(execute(task.each, given, OPERATOR) for _ in range(DETAILS)))


async def in_script(registry: OperationRegistry, script: str) -> Any:
    return (await registry.execute("code.run", {"script": script}, OPERATOR)).data["result"]


async def durable(calls: int) -> float:
    """Return the milliseconds of a script whose calls are recorded."""

    @operation("bench.add")
    async def add(number: int) -> int:
        return number + 1

    with tempfile.TemporaryDirectory() as folder:
        registry = OperationRegistry([add], runs=Runs(f"sqlite:{folder}/runs.db"))
        registry.register_all(Code(registry))
        script = f"x = 0\nfor n in range({calls}):\n    x = await bench.add(number=n)\nreturn x"
        async with registry:
            await in_script(registry, "return 1")
            return await timed(in_script(registry, script))


async def main(folder: Path, repeats: int) -> None:
    logging.disable(logging.CRITICAL)
    upstreams = {
        name: Upstream(name, json.loads((folder / file).read_bytes()))
        for name, file in DOCUMENTS.items()
    }
    fast: dict[str, Any] = {}
    if CodeMode is None:
        print("without FastMCP, which is not installed")
    else:
        fast = {name: FastMCPCode(upstream) for name, upstream in upstreams.items()}
    tokens: dict[str, list[int]] = {}
    for task in TASKS:
        name = task.first.partition(".")[0]
        upstream = upstreams[name]
        tokens.setdefault("direct list", []).append(direct(upstream, task))
        tokens.setdefault("search tools", []).append(await searching(upstream, task))
        if name in fast:
            tokens.setdefault("FastMCP CodeMode", []).append(await fast[name].tokens(task))
        tokens.setdefault("code mode", []).append(await coding(upstream, task))
    whole = sum(tokens["direct list"])
    show(
        "tokens over ten conversations",
        {
            name: {"in total": sum(found), "of the direct list": f"1/{whole / sum(found):.0f}"}
            for name, found in tokens.items()
        },
    )
    ratios, more, scripts = [], [], []
    for _ in range(repeats):
        for task in TASKS:
            upstream = upstreams[task.first.partition(".")[0]]
            python = await timed(in_python(upstream, task))
            script = await timed(in_script(upstream.registry, upstream.script(task)))
            scripts.append(script)
            more.append(script - 1.2 * python)
            ratios.append(python)
    stripe = upstreams["stripe"].registry
    balance = upstreams["stripe"].names.python("stripe.GetBalance")
    script = f"for n in range(1000):\n    await {balance}()\nreturn n"
    one = await timed(in_script(stripe, script))
    hundred = await timed(asyncio.gather(*(in_script(stripe, f"return {n}") for n in range(100))))
    show(
        "time of a script",
        {
            "eleven calls": {
                "python ms": statistics.median(ratios),
                "script ms": statistics.median(scripts),
                "more than 1.2 x python, ms": statistics.median(more),
                "the worst": max(more),
            },
            "1,000 calls in one script": {"script ms": one},
            "100 scripts at once": {"script ms": hundred},
            "10 recorded calls": {"script ms": await durable(10)},
            "1,000 recorded calls": {"script ms": await durable(1_000)},
        },
    )
    for upstream in upstreams.values():
        await upstream.registry.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    shared = Path(__file__).parents[2] / "shared" / "openapi"
    parser.add_argument("--documents", type=Path, default=shared)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    asyncio.run(main(options.documents, options.repeats))
