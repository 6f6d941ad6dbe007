"""Results of runs that are larger than a run stores: with `max_bytes`, their pages are kept with the run."""

from typing import Any

import pytest
from tests.runs.conftest import OpenRegistry
from tests.runs.test_runs import ADA, BEN, OPERATOR, durable, ended
from tests.test_result_pages import joined

from operations import (
    CallError,
    OperationContext,
    OperationRegistry,
    TextContent,
    mcp_envelope,
    operation,
)
from operations.runs import Limits
from operations.tools import ToolConfig, configure_tools
from operations.tools.pages import NEXT

LIMITS = Limits(result_bytes=20_000)
ROWS = [{"id": number, "text": 'n"' * 30} for number in range(1_000)]
PAGED = {"shop.*": ToolConfig(max_bytes=3_000)}


@operation("shop.rows", type="query")
async def rows() -> list[Any]:
    return ROWS


async def order(context: OperationContext) -> list[Any]:
    first: list[Any] = await context.step("rows", lambda: ROWS[:10])
    return first + ROWS[10:]


@operation("shop.content", type="query")
async def content() -> Any:
    return mcp_envelope(ROWS, content=[TextContent(text="x" * 50_000)])


def opened(registries: OpenRegistry, tools: dict[str, ToolConfig] = PAGED) -> OperationRegistry:
    registry = registries(rows, durable(order), content, limits=LIMITS, keep_steps=True)
    configure_tools(registry, tools)
    return registry


async def pages(
    registry: OperationRegistry, page: dict[str, Any], caller: OperationContext
) -> list[tuple[str, Any]]:
    """Return the path and the value of each page."""
    found = [(page["path"], page["value"])]
    while "cursor" in page:
        page = (await registry.execute(NEXT, {"cursor": page["cursor"]}, caller)).data
        found.append((page["path"], page["value"]))
    return found


@pytest.mark.parametrize("name", ["shop.rows", "shop.order"])
async def test_a_large_result_has_pages_that_every_process_can_read(
    registries: OpenRegistry, name: str
) -> None:
    first = opened(registries)
    run = await first.start(name, {}, ADA)
    page = (await run.result(10)).data
    here = await pages(first, page, ADA)
    steps = [step.name for step in await run.steps()]
    await first.aclose()
    second = opened(registries)
    again = (await (await second.run(run.id, ADA)).result(10)).data

    assert again == page
    assert here == await pages(second, again, ADA)
    assert joined(here) == ROWS
    assert len(here) > 20
    assert not any(each.startswith("page") for each in steps)


async def test_only_those_who_may_see_the_run_read_its_pages(registries: OpenRegistry) -> None:
    registry = opened(registries)
    run = await registry.start("shop.rows", {}, ADA)
    cursor = (await run.result(10)).data["cursor"]

    assert (await registry.execute(NEXT, {"cursor": cursor}, OPERATOR)).data["value"]
    for wrong in (cursor, f"run:{run.id}.999", f"run:{run.id}.0", "run:.1", "run:\ud800.1"):
        with pytest.raises(CallError) as caught:
            await registry.execute(NEXT, {"cursor": wrong}, BEN if wrong == cursor else ADA)
        assert caught.value.code == "VALIDATION_ERROR"


async def test_an_mcp_result_has_pages_as_well(registries: OpenRegistry) -> None:
    registry = opened(registries, {"shop.*": ToolConfig(max_bytes=18_000)})
    run = await registry.start("shop.content", {}, ADA)
    found = await pages(registry, (await run.result(10)).data, ADA)

    assert joined(found) == ROWS


async def test_a_caller_of_whole_results_has_pages_only_if_the_run_could_not_be_stored(
    registries: OpenRegistry,
) -> None:
    registry = opened(registries)
    small = operation("shop.small", type="query")(lambda: ROWS[:100])
    registry.register(small)
    whole = OPERATOR.changed(whole=True)

    assert (await (await registry.start("shop.small", {}, whole)).result(10)).data == ROWS[:100]
    page = (await (await registry.start("shop.rows", {}, whole)).result(10)).data
    assert joined(await pages(registry, page, whole)) == ROWS


async def test_the_pages_are_removed_with_the_run(registries: OpenRegistry) -> None:
    registry = opened(registries)
    store: Any = registry.run_store
    run = await registry.start("shop.rows", {}, ADA)
    await run.result(10)
    await store.write(lambda db: db.count("UPDATE runs SET expires = 1"))
    await store.write(store.journal.remove_expired)

    assert await store.read(lambda db: db.rows("SELECT name FROM steps")) == []


async def test_without_pages_the_error_says_what_to_do(registries: OpenRegistry) -> None:
    state = await ended(await opened(registries, {}).start("shop.rows", {}, ADA))

    assert state.error["code"] == "EXECUTION_ERROR"
    assert "20000" in state.error["message"]
    assert "max_bytes" in state.error["message"]


async def test_a_step_that_is_too_large_fails(registries: OpenRegistry) -> None:
    async def nested(context: OperationContext) -> Any:
        return len((await context.env.shop.rows()).data)

    registry = registries(rows, durable(nested), limits=LIMITS)
    configure_tools(registry, PAGED)
    state = await ended(await registry.start("shop.order", {}, ADA))

    assert state.error["code"] == "EXECUTION_ERROR"
    assert "max_bytes" not in state.error["message"]
