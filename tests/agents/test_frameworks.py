"""One framework of `scripts/matrix agents`, with a scripted model."""

import pytest
from tests.agents.frameworks import check


async def test_langchain_runs_every_kind_of_call() -> None:
    pytest.importorskip("langchain_core", reason="the development environment is not complete")
    await check("langchain")
