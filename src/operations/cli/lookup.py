"""`operations list` and `operations show`: find operations, and show one."""

import shlex
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter
from rich.padding import Padding
from rich.tree import Tree

from operations.base.errors import OperationsError
from operations.base.text import counted, printable, visible
from operations.base.types import JSONObject
from operations.cli.options import (
    DEFAULTS,
    POSITIVE,
    STYLES,
    Common,
    ExitCode,
    Screen,
    command,
    complete_ids,
    encoded,
    first_line,
    open_session,
    styled,
)
from operations.contract.access import AccessControl
from operations.contract.context import OperationContext
from operations.contract.specs import OperationSpec, OperationType
from operations.front.search import Gateway
from operations.hub import Hub, Source, SourceFilter
from operations.hub.opening import sources_of
from operations.schema.outline import Outline


@command
async def list_operations(
    *words: str,
    namespace: Annotated[str | None, Parameter(alias="-n")] = None,
    tag: Annotated[tuple[str, ...], Parameter(alias="-t", negative="")] = (),
    type: OperationType | None = None,
    source: Annotated[str | None, Parameter(alias="-s")] = None,
    limit: Annotated[int | None, POSITIVE] = None,
    ids: Annotated[bool, Parameter(negative="")] = False,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> int | None:
    """List all operations, or those that match the given words, best match first.

    Args:
        words: Words to search for in names, titles, tags and descriptions.
        namespace: List only operations in this namespace.
        tag: List only operations with this tag; may be repeated.
        type: List only operations of this type.
        source: List only operations of this source: local, openapi, mcp, broker, or the name of a source.
        limit: The largest number of results.
        ids: Print only the ids, one per line.
        as_: List only operations that this caller of [access.keys] may call; `anonymous` for no identity.
        common: Options of every command.
    """
    screen = common.screen()
    wanted = SourceFilter(namespace=namespace, source=source)
    async with open_session(common, screen, wanted) as hub:
        _enforce_known(source, hub)
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
            is_all = not (words or namespace or tag or type or source)
            screen.note("there are no operations yet" if is_all else "nothing matches")
        if wanted.is_all and any(each.kind == "local" for each in hub.absent()):
            # A module that does not exist is an error of the config, which no retry mends.
            return ExitCode.CONFIG
        # The requested source, or a source with the requested namespace, may be absent.
        is_absent = not wanted.is_all and hub.absent(None if source else namespace)
        return ExitCode.UNAVAILABLE if is_absent and not chosen else None


def _enforce_known(source: str | None, hub: Hub) -> None:
    kinds = {"local", *(kind.name for kind in hub.file.config.kinds)}
    if source is not None and not hub.sources and source not in kinds:
        labels = dict.fromkeys(each.label for each in sources_of(hub.file))
        known = ", ".join(labels) or "none"
        raise OperationsError(f"there is no source {source}; the config has: {known}")


async def caller(hub: Hub, name: str | None) -> OperationContext:
    """Return the context for a command: that of the operator (full access), or of a caller in the config."""
    if name is None:
        return OperationContext(trusted=True)
    return OperationContext(identity=await hub.identity(name))


def _is_from(hub: Hub, spec: OperationSpec, wanted: str | None) -> bool:
    source = hub.source_of(spec.id)
    return wanted is None or (source is not None and source.is_called(wanted))


def _show(specs: list[OperationSpec], hub: Hub, screen: Screen, *, ids: bool) -> None:
    rows = [_row(spec, hub.source_of(spec.id)) for spec in specs]
    if screen.json:
        screen.value([row["id"] for row in rows] if ids else rows)
    elif ids:
        for row in rows:
            screen.write(printable(row["id"]))
    else:
        screen.rows(
            ("operation", "type", "source", "description"),
            (
                (
                    *(row[key] for key in ("id", "type", "source")),
                    first_line(row["title"] or row["description"]),
                )
                for row in rows
            ),
            optional=("source",),
        )
        if screen.is_terminal and specs:
            screen.note(counted(len(specs), "operation"))


def _row(spec: OperationSpec, source: Source | None) -> JSONObject:
    return {
        "id": spec.id,
        "type": spec.type.value,
        "source": "setup" if source is None else source.label,
        "title": spec.title,
        "description": spec.description,
        "tags": list(spec.tags),
    }


_DEPTH = 6
"""The number of levels of a schema that are shown."""


@command
async def show(
    operation_id: Annotated[str, Parameter(completer=complete_ids)],
    /,
    *,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> None:
    """Show one operation: its input and output, required access, errors and origin.

    Args:
        operation_id: The id of the operation, `namespace.name`.
        as_: Show the operation as this caller of [access.keys] sees it; `anonymous` for no identity.
        common: Options of every command.
    """
    screen = common.screen()
    async with open_session(common, screen, SourceFilter(operation=operation_id)) as hub:
        hub.spec(operation_id)
        spec = Gateway(hub.registry).spec(operation_id, await caller(hub, as_))
        if screen.json:
            screen.value(spec.to_wire())
        else:
            render(spec, hub.source_of(operation_id), screen, common.hints)


def render(spec: OperationSpec, source: Source | None, screen: Screen, hints: str = "") -> None:
    """Print an operation; `hints` are options that select the config."""
    kind = (f"  {spec.type.value}", STYLES[spec.type])
    screen.line((spec.id, "bold"), kind, (f"  {spec.version}", "dim"))
    for text in dict.fromkeys((spec.title, spec.description)):
        if text:
            screen.show(Padding(visible(text.strip()), (0, 0, 0, 2), expand=False))
    facts = {
        "from": _origin(spec, source),
        "tags": ", ".join(spec.tags),
        "access": access_in_words(spec.access_control),
        "repeats": "may safely be called twice" if spec.idempotent else "",
        "authority": "a grant must name its id: no pattern allows it" if spec.authority else "",
    }
    for name, fact in facts.items():
        if fact:
            screen.line((f"  {name:8}", "dim"), (fact, ""))
    screen.show(_tree("input", Outline.of(spec.input_schema)))
    each = "each item" if spec.type == "subscription" else "output"
    screen.show(_tree(each, Outline.of(spec.output_schema)))
    if spec.error_schemas:
        errors = Tree(styled(("errors", "bold")))
        for error in spec.error_schemas:
            status = "" if error.http_status is None else f" (HTTP {error.http_status})"
            description = f"  {first_line(error.description)}"
            errors.add(styled((error.code, "red"), (status, "dim"), (description, "")))
        screen.show(errors)
    screen.write("")
    screen.line((f"  operations call{hints} {spec.id}{_arguments(spec)}", "cyan"), overflow="keep")


def _arguments(spec: OperationSpec) -> str:
    """Return the required input of a call as arguments, with dots in place of the values."""
    outline = Outline.of(spec.input_schema)
    takes_object = not outline.schema or "object" in outline.types or outline.properties
    names = [f"{name}=..." for name in _required(outline)] if takes_object else ["..."]
    return "".join(f" {shlex.quote(name)}" for name in names)


def _required(outline: Outline) -> Iterator[str]:
    """Yield the required properties; those of a required object with its name and a dot."""
    for name in outline.required:
        inner = outline.properties.get(name, Outline({}))
        if inner.required and not inner.is_recursive:
            yield from (f"{name}.{each}" for each in _required(inner))
        else:
            yield name


def _origin(spec: OperationSpec, source: Source | None) -> str:
    route = " ".join(str(spec.meta[key]) for key in ("method", "path") if key in spec.meta)
    known = [] if source is None else [source.label, source.origin]
    return "  ".join(filter(None, [*known, route]))


def access_in_words(access: AccessControl) -> str:
    """Return the access requirements as text."""
    if access.is_open:
        return "open to all"
    needs: list[str] = []
    scopes = access.required_scopes
    if scopes:
        needs.append(f"{'scope' if len(scopes) == 1 else 'scopes'}: {', '.join(scopes)}")
    if access.required_scopes_any:
        needs.append("one of the scopes: " + ", ".join(access.required_scopes_any))
    if access.resource_type is not None:
        pointer = access.resource_input
        which = "some" if pointer is None else "the"
        place = "" if pointer is None else f" at {pointer} of the input"
        needs.append(f"{access.resource_action} on {which} {access.resource_type}{place}")
    return "requires " + "; ".join(needs)


def _tree(name: str, outline: Outline) -> Tree:
    tree = Tree(styled((name, "bold")))
    if outline.properties:
        _add_properties(tree, outline, _DEPTH)
    elif outline.schema:
        tree.add(styled(*_kind(outline)))
        _add_inner(tree, outline, _DEPTH)
    else:
        tree.add(styled(("anything", "dim")))
    return tree


def _kind(outline: Outline) -> list[tuple[str, str]]:
    """Return the type of a value and its limits, as parts of a line."""
    limits = outline.limits
    return [(outline.kind, "cyan"), (f" ({limits})" if limits else "", "dim")]


def _add_properties(tree: Tree, outline: Outline, depth: int) -> None:
    required = set(outline.required)
    for name, inner in outline.properties.items():
        mark = ("  ", "") if name in required else ("?  ", "dim")
        parts = [(name, "bold" if name in required else ""), mark, *_kind(inner)]
        if "default" in inner.schema:
            parts.append((f" = {encoded(inner.schema['default'])}", "dim"))
        if inner.description:
            parts.append((f"  {first_line(inner.description)}", "dim"))
        branch = tree.add(styled(*parts))
        if inner.is_recursive:
            branch.add(styled(("(as above)", "dim")))
        elif depth > 0:
            _add_inner(branch, inner, depth - 1)


def _add_inner(tree: Tree, outline: Outline, depth: int) -> None:
    """Add the parts of a value to a tree: properties, items, alternatives."""
    if outline.properties:
        _add_properties(tree, outline, depth)
    elif "array" in outline.types and not outline.items.is_recursive and depth > 0:
        _add_inner(tree, outline.items, depth - 1)
    else:
        for member in outline.members:
            if member.properties and not member.is_recursive and depth > 0:
                branch = tree.add(styled((first_line(member.description) or "or", "dim")))
                _add_properties(branch, member, depth - 1)
