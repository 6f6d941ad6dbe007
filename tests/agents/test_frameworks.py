"""One framework of `scripts/matrix agents`, with a scripted model."""

import asyncio
from typing import Any

import pytest
from tests.agents.frameworks import check, check_images, toolbox


async def test_langchain_runs_every_kind_of_call() -> None:
    pytest.importorskip("langchain_core", reason="the development environment is not complete")
    await check("langchain")


def test_langchain_calls_tools_from_code_that_is_not_asynchronous() -> None:
    pytest.importorskip("langchain_core", reason="the development environment is not complete")

    def called(tools: dict[str, Any]) -> str:
        found: str = tools["shop__total"].invoke({"ids": [1, 2]})
        return found

    async def in_a_loop() -> list[str]:
        tools = {each.name: each for each in toolbox().langchain()}
        # As in a notebook, whose loop runs, and as frameworks do, in a thread of their own.
        return [called(tools), await asyncio.to_thread(called, tools)]

    outside = called({each.name: each for each in toolbox().langchain()})
    inside = asyncio.run(in_a_loop())

    assert {outside, *inside} == {"6"}


@pytest.mark.parametrize(
    ("name", "module"), [("pydantic-ai", "pydantic_ai"), ("openai-agents", "agents")]
)
async def test_a_model_receives_images_of_a_tool(name: str, module: str) -> None:
    pytest.importorskip(module, reason="scripts/matrix agents installs it")
    await check_images(name)
