"""The demo's tour: calls of every kind, with what comes back."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.text import Text

from operations.access import Identity
from operations.cli.render import Screen, encoded, plain
from operations.cli.samples import as_typed
from operations.context import OperationContext
from operations.errors import CallError
from operations.registry import OperationRegistry
from operations.schema.outline import Outline
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
            screen.show(Text(f"\n# {step.what}", style="dim"))
            screen.out.print(Text(f"> {command_of(step, registry)}", style="cyan"), soft_wrap=True)
        answers = [answer async for answer in answers_of(step, registry)]
        if not screen.json:
            for answer in answers:
                _answered(answer, screen)
        seen.append({"what": step.what, "operation": step.operation_id, "answers": answers})
    return seen


async def answers_of(step: Step, registry: OperationRegistry) -> AsyncIterator[JSONObject]:
    """What comes back, for scripts: envelopes, or one error."""
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


def command_of(step: Step, registry: OperationRegistry) -> str:
    """The command that does the same: it prints the whole envelope, and calls as who calls here."""
    spec = registry.get_spec(step.operation_id)
    outline = Outline({}) if spec is None else Outline.of(spec.input_schema)
    who = "anonymous" if step.identity is None else step.identity.id
    typed = as_typed(step.input, outline) if step.input else ""
    words = ["operations call", step.operation_id, typed, f"--as {who} --envelope"]
    return plain(" ".join(word for word in words if word))


def _answered(answer: JSONObject, screen: Screen) -> None:
    failed = "error" in answer or answer.get("meta", {}).get("isError")
    line = Text(f"  {plain(encoded(answer))}", style="red" if failed else "green")
    screen.out.print(line, soft_wrap=True)
