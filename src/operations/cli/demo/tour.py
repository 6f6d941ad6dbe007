"""The demo's tour: calls of every kind, with what comes back."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.text import Text

from operations.access import Identity
from operations.cli.render import Screen, encoded, plain
from operations.context import OperationContext
from operations.errors import CallError
from operations.registry import OperationRegistry
from operations.types import JSONObject


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to show."""

    what: str
    operation_id: str
    input: JSONObject
    identity: Identity | None = None
    streams: bool = False


def steps(manager: Identity) -> list[Step]:
    """The tour, in its order."""
    return [
        Step("an HTTP endpoint, called like a function", "shop.get_item", {"id": 2}),
        Step("a tool of an MCP server, called the same way", "money.convert", {"amount": 3.8, "to": "USD"}),
        Step("all three in one call: cafe.quote asks shop and money", "cafe.quote", {"item": 2, "currency": "JPY"}),
        Step("a stream: one envelope per item", "cafe.brew", {"cups": 3}, streams=True),
        Step("access: nobody in particular may not close the café", "cafe.close", {}),
        Step("but the manager may", "cafe.close", {"reason": "holiday"}, manager),
        Step("input that does not fit its schema never reaches anybody", "cafe.quote", {"item": "two", "sugar": 1}),
        Step("an error that a function declares", "cafe.order", {"item": 3}),
        Step("an error of the HTTP API", "shop.get_item", {"id": 99}),
        Step("an error of the MCP tool: a result that says so", "money.convert", {"amount": 1, "to": "XXX"}),
    ]  # fmt: skip


async def run_tour(
    registry: OperationRegistry, screen: Screen, manager: Identity
) -> list[JSONObject]:
    """Take every step and show it; what came back, for scripts."""
    seen: list[JSONObject] = []
    for step in steps(manager):
        if not screen.json:
            _asked(step, screen)
        answers = [answer async for answer in _answers(step, registry)]
        if not screen.json:
            for answer in answers:
                _answered(answer, screen)
        seen.append({"what": step.what, "operation": step.operation_id, "answers": answers})
    return seen


async def _answers(step: Step, registry: OperationRegistry) -> AsyncIterator[JSONObject]:
    context = OperationContext(identity=step.identity)
    try:
        if step.streams:
            async for envelope in registry.subscribe(step.operation_id, step.input, context):
                yield envelope.to_wire()
        else:
            envelope = await registry.execute(step.operation_id, step.input, context)
            yield envelope.to_wire()
    except CallError as error:
        yield {"error": error.to_wire()}


def _asked(step: Step, screen: Screen) -> None:
    screen.show(Text(f"\n# {step.what}", style="dim"))
    who = "" if step.identity is None else f" --as {step.identity.id}"
    given = " ".join(f"{key}={plain(str(value))}" for key, value in step.input.items())
    screen.show(Text(f"> operations call {step.operation_id} {given}{who}".rstrip(), style="cyan"))


def _answered(answer: JSONObject, screen: Screen) -> None:
    failed = "error" in answer or answer.get("meta", {}).get("isError")
    line = Text(f"  {plain(encoded(answer))}", style="red" if failed else "green")
    screen.out.print(line, soft_wrap=True)
