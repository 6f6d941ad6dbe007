"""`operations list`: what there is, searched and filtered."""

from typing import Annotated

from cyclopts import Parameter

from operations._text import counted
from operations.cli.options import DEFAULTS, Common, ExitCode, command
from operations.cli.render import STYLES, Screen, first_line
from operations.cli.session import open_session
from operations.context import OperationContext
from operations.front.search import Gateway
from operations.hub.hub import Hub, SourceFilter
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject


@command
async def list_operations(
    *words: str,
    namespace: Annotated[str | None, Parameter(alias="-n")] = None,
    tag: Annotated[tuple[str, ...], Parameter(alias="-t", negative="")] = (),
    type: OperationType | None = None,
    source: Annotated[str | None, Parameter(alias="-s")] = None,
    limit: int | None = None,
    ids: Annotated[bool, Parameter(negative="")] = False,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> int | None:
    """List operations; with words, those that match, best first.

    Args:
        words: To search for in names, titles, tags and descriptions.
        namespace: Only in this namespace.
        tag: Only with this tag; may be repeated.
        type: Only of this type.
        source: Only from this source: local, openapi, mcp, broker, or the name of one.
        limit: How many at most.
        ids: Print the ids alone, one per line.
        as_: See what this caller of [access.keys] sees; `anonymous` for nobody.
        common: What every command takes.
    """
    screen = common.screen()
    wanted = SourceFilter(namespace=namespace, source=source)
    async with open_session(common, screen, wanted) as hub:
        context = await caller(hub, as_)
        found = await Gateway(hub.registry).search(
            " ".join(words),
            context,
            limit=len(hub.registry),
            namespace=namespace,
            tags=tag,
            type=type,
        )
        specs = [hub.spec(each.id) for each in found]
        matching = [spec for spec in specs if _is_from(hub, spec, source)]
        chosen = matching[:limit]
        _show(chosen, hub, screen, ids=ids)
        if len(chosen) < len(matching):
            screen.note(f"... and {len(matching) - len(chosen)} more")
        elif not chosen and screen.is_terminal:
            screen.note("nothing matches" if len(hub.registry) else "there are no operations yet")
        return None if chosen or not _is_absent(hub, wanted) else ExitCode.UNAVAILABLE


def _is_absent(hub: Hub, wanted: SourceFilter) -> bool:
    """Whether what was asked for by its name is not there."""
    if wanted.source is not None:
        return bool(hub.absent())
    return wanted.namespace is not None and bool(hub.absent(wanted.namespace))


async def caller(hub: Hub, name: str | None) -> OperationContext:
    """Who works at the command line: the operator, who may do everything, or somebody in the config."""
    if name is None:
        return OperationContext(trusted=True)
    return OperationContext(identity=await hub.identity(name))


def _is_from(hub: Hub, spec: OperationSpec, wanted: str | None) -> bool:
    source = hub.source_of(spec.id)
    return wanted is None or (source is not None and source.is_called(wanted))


def _show(specs: list[OperationSpec], hub: Hub, screen: Screen, *, ids: bool) -> None:
    if screen.json:
        screen.value([spec.id for spec in specs] if ids else [_row(spec, hub) for spec in specs])
    elif ids:
        for spec in specs:
            screen.write(spec.id)
    else:
        screen.rows(
            ("operation", "type", "source", "what it does"),
            (
                (
                    spec.id,
                    spec.type.value,
                    _label(hub, spec),
                    first_line(spec.title or spec.description),
                )
                for spec in specs
            ),
            {(1, kind): style for kind, style in STYLES.items()},
        )
        if screen.is_terminal and specs:
            screen.note(counted(len(specs), "operation"))


def _label(hub: Hub, spec: OperationSpec) -> str:
    source = hub.source_of(spec.id)
    return source.label if source is not None else ""


def _row(spec: OperationSpec, hub: Hub) -> JSONObject:
    return {
        "id": spec.id,
        "type": spec.type.value,
        "source": _label(hub, spec),
        "title": spec.title,
        "description": spec.description,
        "tags": list(spec.tags),
    }
