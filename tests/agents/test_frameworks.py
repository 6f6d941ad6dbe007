"""One framework of `scripts/matrix agents`, with a scripted model."""

import pytest
from tests.agents.frameworks import check, check_images


async def test_langchain_runs_every_kind_of_call() -> None:
    pytest.importorskip("langchain_core", reason="the development environment is not complete")
    await check("langchain")


@pytest.mark.parametrize(
    ("name", "module"), [("pydantic-ai", "pydantic_ai"), ("openai-agents", "agents")]
)
async def test_a_model_receives_images_of_a_tool(name: str, module: str) -> None:
    pytest.importorskip(module, reason="scripts/matrix agents installs it")
    await check_images(name)
