"""Tools as objects of agent frameworks. Each framework is an extra, and is imported when its tools are requested."""

from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any

from operations.agents.providers import Definition
from operations.agents.tool_calls import Outcome
from operations.errors import MissingExtraError

Run = Callable[[str, Any], Awaitable[Outcome]]
"""Runs a tool by its name, with arguments as an object or as JSON text."""


def langchain_tools(tools: Sequence[Definition], run: Run) -> list[Any]:
    """Return `StructuredTool`s. An error of an operation becomes a `ToolMessage` with status `error`."""
    core = _framework("langchain_core.tools", "langchain")

    def build(tool: Definition) -> Any:
        async def invoke(**arguments: Any) -> str:
            outcome = await run(tool.name, arguments)
            if outcome.error is not None:
                raise core.ToolException(outcome.text)
            return outcome.text

        return core.StructuredTool(
            name=tool.name,
            description=tool.description,
            args_schema=tool.schema,
            coroutine=invoke,
            handle_tool_error=True,
        )

    return [build(tool) for tool in tools]


def pydantic_ai_tools(tools: Sequence[Definition], run: Run) -> list[Any]:
    """Return `Tool`s. An error of an operation is the result of the tool."""
    pydantic_ai = _framework("pydantic_ai", "pydantic-ai")

    def build(tool: Definition) -> Any:
        async def invoke(**arguments: Any) -> str:
            return (await run(tool.name, arguments)).text

        return pydantic_ai.Tool.from_schema(
            invoke, name=tool.name, description=tool.description, json_schema=tool.schema
        )

    return [build(tool) for tool in tools]


def openai_agents_tools(tools: Sequence[Definition], run: Run) -> list[Any]:
    """Return `FunctionTool`s. An error of an operation is the result of the tool."""
    agents = _framework("agents", "openai-agents")

    def build(tool: Definition) -> Any:
        async def invoke(_context: Any, arguments: str) -> str:
            return (await run(tool.name, arguments)).text

        return agents.FunctionTool(
            name=tool.name,
            description=tool.description,
            params_json_schema=tool.schema,
            on_invoke_tool=invoke,
            # The strict mode of OpenAI knows a small part of JSON Schema.
            strict_json_schema=False,
        )

    return [build(tool) for tool in tools]


def _framework(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"Toolbox.{extra.replace('-', '_')}()", extra=extra) from error
