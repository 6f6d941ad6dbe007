"""Servers that misuse extensions: each fault has a defined outcome at the hub in front of them."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.mcp_serving.support import serving

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp
from operations.mcp.shared.skills import digest_of
from operations.runs import Runs

TASKS = "io.modelcontextprotocol/tasks"
SKILLS = "io.modelcontextprotocol/skills"
ADA = OperationContext(identity=Identity("ada", []))


LOST = "lost"
"""Stands for the error of a server that does not know a task."""


class Upstream:
    """A server whose results are texts, so that they may be anything."""

    def __init__(self) -> None:
        self.results: dict[str, Callable[[dict[str, Any]], str]] = {
            "server/discover": lambda _: (
                '{"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "supportedVersions": ["2026-07-28"],'
                ' "serverInfo": {"name": "up", "version": "1"}, "capabilities": {"tools": {}, "resources": {},'
                f' "extensions": {{"{TASKS}": {{}}, "{SKILLS}": {{}}}}}}}}'
            ),
            "tools/list": lambda _: _listed(
                "tools", '[{"name": "t", "inputSchema": {"type": "object"}}]'
            ),
            "resources/list": lambda _: _listed("resources", "[]"),
            "resources/templates/list": lambda _: _listed("resourceTemplates", "[]"),
            "skills/list": lambda _: _listed("skills", "[]"),
            "tools/call": lambda _: task("working", kind="task"),
            "tasks/cancel": lambda _: '{"resultType": "complete"}',
        }
        self.cancelled: list[str] = []
        self.calls = 0

    async def answer(self, request: Request) -> Response:
        message: dict[str, Any] = await request.json()
        method: str = message["method"]
        params: dict[str, Any] = message.get("params", {})
        if method == "tasks/cancel":
            self.cancelled.append(params["taskId"])
        self.calls += method == "tools/call"
        answer = self.results.get(method)
        text = None if answer is None else answer(params)
        body = f'"result": {text}'
        if text is None:
            body = '"error": {"code": -32601, "message": "Method not found"}'
        elif text == LOST:
            body = '"error": {"code": -32602, "message": "Task secret not found"}'
        text = f'{{"jsonrpc": "2.0", "id": {message.get("id", 0)}, {body}}}'
        return Response(text, media_type="application/json")


def _listed(key: str, entries: str) -> str:
    return f'{{"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "{key}": {entries}}}'


def task(status: str, more: str = "", *, kind: str = "complete") -> str:
    """Return the text of a task."""
    moment = '"2026-08-01T00:00:00Z"'
    return (
        f'{{"resultType": "{kind}", "taskId": "\\u0007 same\\n", "status": "{status}", "createdAt": {moment},'
        f' "lastUpdatedAt": {moment}, "ttlMs": null{more}}}'
    )


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@asynccontextmanager
async def hub(upstream: Upstream, folder: Path) -> AsyncGenerator[OperationRegistry]:
    """Yield the registry of a hub with runs in front of a server."""
    app = Starlette(routes=[Route("/mcp", upstream.answer, methods=["POST"])])
    registry = OperationRegistry(runs=Runs(f"sqlite:{folder / 'hub.db'}", grace=0.0))
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(app))
        connection = connect_mcp("up", MCPClientConfig(url=f"{address}/mcp"))
        registry.register_all(await stack.enter_async_context(connection))
        yield await stack.enter_async_context(registry)


@pytest.mark.requirement("R70")
@pytest.mark.parametrize(
    "interval", ["NaN", "Infinity", "-Infinity", "1e999", "-5", "9" * 400, '"soon"', "null"]
)
async def test_a_task_is_polled_whatever_interval_its_server_states(
    upstream: Upstream, tmp_path: Path, interval: str
) -> None:
    polls = iter([task("working", f', "pollIntervalMs": {interval}')])
    done = task("completed", ', "result": {"content": [{"type": "text", "text": "done"}]}')
    upstream.results["tasks/get"] = lambda _: next(polls, done)
    async with hub(upstream, tmp_path) as registry:
        result = await registry.execute("up.t", {}, ADA)

    assert result.data[0]["text"] == "done"


async def test_a_status_message_of_a_task_is_cut(upstream: Upstream, tmp_path: Path) -> None:
    upstream.results["tasks/get"] = lambda _: task(
        "working", f', "statusMessage": "{"x" * 1_000_000}"'
    )
    async with hub(upstream, tmp_path) as registry:
        run = await registry.start("up.t", {}, ADA)
        message = None
        async for state in run.watch():
            message = state.message
            if message:
                break
        await run.cancel()
        async for _ in run.watch():
            pass

    assert message is not None
    assert len(message) <= 1_000
    assert upstream.cancelled


@pytest.mark.parametrize(
    "questions",
    [
        "{"
        + ", ".join(
            f'"q{n}": {{"method": "elicitation/create", "params": {{"message": "?", "requestedSchema": {{}}}}}}'
            for n in range(33)
        )
        + "}",
        '{"q": {"params": {}}}',
        '{"q": {"method": ["roots/list"]}}',
        '{"q": {"method": "elicitation/create", "params": {"message": "' + "x" * 2_000_000 + '"}}}',
    ],
    ids=["many", "no method", "odd method", "large"],
)
async def test_questions_of_a_task_that_the_protocol_does_not_allow_end_it(
    upstream: Upstream, tmp_path: Path, questions: str
) -> None:
    upstream.results["tasks/get"] = lambda _: task(
        "input_required", f', "inputRequests": {questions}'
    )
    async with hub(upstream, tmp_path) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("up.t", {}, ADA)

    assert caught.value.code == "EXECUTION_ERROR"
    assert "question" in caught.value.message or "input" in caught.value.message
    assert upstream.cancelled


@pytest.mark.parametrize(
    "state",
    [
        task("completed"),
        task("completed", ', "result": 7'),
        task("failed"),
        task("finished"),
        "[]",
        "{}",
    ],
)
async def test_a_task_without_a_result_ends_its_run(
    upstream: Upstream, tmp_path: Path, state: str
) -> None:
    upstream.results["tasks/get"] = lambda _: state
    async with hub(upstream, tmp_path) as registry:
        run = await registry.start("up.t", {}, ADA)
        async for _ in run.watch():
            pass

    assert run.status.value in ("failed", "completed")


DONE = task("completed", ', "result": {"content": [{"type": "text", "text": "done"}]}')


@pytest.mark.requirement("R77")
@pytest.mark.parametrize("decision", ["not run", "ran", "ran as the server writes it"])
async def test_a_run_whose_task_is_lost_ends_unknown(
    upstream: Upstream, tmp_path: Path, decision: str
) -> None:
    """A server that keeps its tasks in memory loses them with its process, perhaps after the call had its effect."""
    upstream.results["tasks/get"] = lambda _: LOST
    async with hub(upstream, tmp_path) as registry:
        run = await registry.start("up.t", {}, ADA)
        states = [state async for state in run.watch()]
        with pytest.raises(CallError, match="Find out whether the call ran"):
            await run.retry()
        upstream.results["tasks/get"] = lambda _: DONE
        if decision == "not run":
            await run.retry(not_run=True)
        else:
            block = {"type": "text", "text": "done"}
            await run.retry(ran=[block] if decision == "ran" else {"content": [block]})
        result = await run.result()

    error = states[-1].error
    assert states[-1].status.value == "unknown"
    assert error is not None
    assert error["code"] == "OUTCOME_UNKNOWN"
    assert "up no longer has the task" in error["message"]
    assert "secret" not in str(error)
    assert result.data == [{"type": "text", "text": "done"}]
    assert upstream.calls == (2 if decision == "not run" else 1)


@pytest.mark.parametrize(
    "state", [task("failed", ', "error": {"code": -32603, "message": "x"}'), task("cancelled")]
)
async def test_a_retry_of_a_run_whose_task_failed_makes_the_call_again(
    upstream: Upstream, tmp_path: Path, state: str
) -> None:
    upstream.results["tasks/get"] = lambda _: state
    async with hub(upstream, tmp_path) as registry:
        run = await registry.start("up.t", {}, ADA)
        states = [state async for state in run.watch()]
        upstream.results["tasks/get"] = lambda _: DONE
        await run.retry()
        result = await run.result()

    assert states[-1].status.value == "failed"
    assert result.data[0]["text"] == "done"
    assert upstream.calls == 2


async def test_a_lost_task_of_a_registry_without_runs_has_no_known_outcome(
    upstream: Upstream,
) -> None:
    upstream.results["tasks/get"] = lambda _: LOST
    app = Starlette(routes=[Route("/mcp", upstream.answer, methods=["POST"])])
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(app))
        connection = connect_mcp("up", MCPClientConfig(url=f"{address}/mcp"))
        registry = OperationRegistry(await stack.enter_async_context(connection))
        with pytest.raises(CallError, match="no longer has the task") as caught:
            await registry.execute("up.t", {}, ADA)

    assert caught.value.code == "OUTCOME_UNKNOWN"
    assert not caught.value.retryable


def skill(uri: str, *files: tuple[str, bytes]) -> str:
    """Return the text of the entry of a skill."""
    resources = [{"uri": at, "digest": digest_of(data), "size": len(data)} for at, data in files]
    entry = {"uri": uri, "frontmatter": {"name": "pdf"}, "resources": resources}
    return msgspec.json.encode(entry).decode()


PDF = "skill://pdf/SKILL.md"


@pytest.mark.requirement("R64")
@pytest.mark.parametrize(
    ("uri", "file"),
    [
        (PDF, "skill://pdf/../../.bashrc"),
        (PDF, "skill://pdf/%2e%2e/x"),
        (PDF, "skill://pdf/%252e%252e/x"),
        (PDF, "skill://pdf/%25252e%25252e/x"),
        (PDF, "skill://pdf/%2525252e./x"),
        (PDF, "skill://pdf/a%252f..%252f..%252fx"),
        (PDF, "skill://pdf/a%253ab"),
        (PDF, "skill://pdf/a%255cb"),
        (PDF, "skill://pdf/%2500x"),
        (PDF, "skill://pdf/a%2f..%2f..%2fx"),
        (PDF, "skill://pdf/..\\x"),
        (PDF, "skill://pdf//etc/passwd"),
        (PDF, "skill://pdf/a:b"),
        (PDF, "skill://other/x"),
        (PDF, "file:///etc/passwd"),
        (PDF, ""),
        ("skill://a/../pdf/SKILL.md", "skill://a/../pdf/x"),
        ("skill://SKILL.md", "skill://SKILL.md"),
        ("pdf", "pdf"),
    ],
)
async def test_skills_whose_addresses_leave_their_folder_are_omitted(
    upstream: Upstream, tmp_path: Path, uri: str, file: str
) -> None:
    names = ("a b/c.d-é.md", "100%25.md", "%2525.md", "a%2541")
    good = skill("skill://good/SKILL.md", *((f"skill://good/{each}", b"") for each in names))
    bad = skill(uri, (uri, b""), (file, b""))
    upstream.results["skills/list"] = lambda _: _listed("skills", f"[{bad}, {good}]")
    upstream.results["skills/get"] = lambda _: f'{{"resultType": "complete", "skill": {bad}}}'
    async with hub(upstream, tmp_path) as registry:
        found = (await registry.execute("up.skills.list", {}, ADA)).data
        with pytest.raises(CallError, match="not that of the skill"):
            await registry.execute("up.skills.get", {"uri": uri}, ADA)

    assert [each["uri"] for each in found] == ["skill://good/SKILL.md"]


@pytest.mark.parametrize("listed", [True, False])
async def test_a_skill_with_another_spelling_of_its_scheme_is_read_and_checked(
    upstream: Upstream, tmp_path: Path, listed: bool
) -> None:
    manifest = b"---\nname: pdf\n---\n"
    uri = "SKILL://pdf/SKILL.md"
    entry = skill(uri, (uri, manifest), ("SKILL://pdf/a.md", b"good"))
    upstream.results["skills/list"] = lambda _: _listed("skills", f"[{entry if listed else ''}]")
    upstream.results["skills/get"] = lambda params: (
        f'{{"resultType": "complete", "skill": {entry if params["uri"] == uri else "{}"}}}'
    )
    text = "good"
    upstream.results["resources/read"] = lambda params: _listed(
        "contents", msgspec.json.encode([{"uri": params["uri"], "text": text}]).decode()
    )
    async with hub(upstream, tmp_path) as registry:
        read = await registry.execute("up.resources.read", {"uri": "SKILL://pdf/a.md"}, ADA)
        text = "evil"
        with pytest.raises(CallError, match="another digest"):
            await registry.execute("up.resources.read", {"uri": "SKILL://pdf/a.md"}, ADA)

    assert read.data[0]["text"] == "good"


@pytest.mark.requirement("R67")
async def test_a_list_of_skills_is_bounded(upstream: Upstream, tmp_path: Path) -> None:
    """A server may send one long list after another, or a skill with very many files."""
    asked: list[str] = []

    def page(params: dict[str, Any]) -> str:
        asked.append(params.get("cursor", "0"))
        number = len(asked)
        large = {"uri": f"skill://s{number}/SKILL.md", "frontmatter": {"name": "x" * 4_000_000}}
        entries = [msgspec.json.encode({**large, "resources": []}).decode()]
        entries += [many] if number == 1 else []
        listed = _listed("skills", f"[{','.join(entries)}]")
        return f'{listed[:-1]}, "nextCursor": "{number}"}}'

    upstream.results["skills/list"] = page
    files = [(f"skill://many/{number}", b"") for number in range(10_001)]
    many = skill("skill://many/SKILL.md", *files)
    upstream.results["skills/get"] = lambda _: f'{{"resultType": "complete", "skill": {many}}}'
    async with hub(upstream, tmp_path) as registry:
        found = (await registry.execute("up.skills.list", {}, ADA)).data
        with pytest.raises(CallError, match="more than 10000 files"):
            await registry.execute("up.skills.get", {"uri": "skill://many/SKILL.md"}, ADA)

    assert [each["uri"] for each in found] == [f"skill://s{n}/SKILL.md" for n in range(1, 9)]
    assert len(asked) <= 9


@pytest.mark.parametrize("contents", ["evil", "good evil", "evil good", "blob", "none"])
async def test_every_content_of_a_file_of_a_skill_is_checked_also_if_it_is_not_listed(
    upstream: Upstream, tmp_path: Path, contents: str
) -> None:
    uri = "skill://pdf/a.md"
    entry = skill(PDF, (uri, b"good"))
    sent: list[dict[str, str]] = [
        {"uri": uri, "blob": "*"} if each == "blob" else {"uri": uri, "text": each}
        for each in contents.split()
        if each != "none"
    ]
    text = msgspec.json.encode(sent).decode()
    upstream.results["skills/get"] = lambda params: (
        f'{{"resultType": "complete", "skill": {entry if params["uri"] == PDF else "{}"}}}'
    )
    upstream.results["resources/read"] = lambda _: _listed("contents", text)
    async with hub(upstream, tmp_path) as registry:
        with pytest.raises(CallError, match="a file of a skill that"):
            await registry.execute("up.resources.read", {"uri": uri}, ADA)
        text = '[{"uri": "skill://pdf/a.md", "text": "good"}]'
        good = await registry.execute("up.resources.read", {"uri": uri}, ADA)
        with pytest.raises(CallError, match="leaves its folder"):
            await registry.execute("up.resources.read", {"uri": "skill://pdf/../a.md"}, ADA)

    assert good.data[0]["text"] == "good"
