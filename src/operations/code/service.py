"""The operations `code.search` and `code.run`.

Rule 1: a script needs no access of its own: each of its calls is checked as a call of the caller.
Rule 2: a script is checked against the stubs of the operations that it names before its first call.
Rule 3: where a registry keeps runs, every script is a run.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import object_of
from operations.base.slots import Bulkhead
from operations.base.types import JSONObject
from operations.code.config import CodeLimits, SavedScript, digest_of
from operations.code.diagnostics import Diagnostic, diagnostics_of
from operations.code.names import NAMESPACE, Names, NameTable
from operations.code.nesting import MAX_LEVELS, Nesting, Tree, calling
from operations.code.sandbox import CrashedError, RejectedError, Sandbox, SandboxError
from operations.code.script import ARGUMENTS, Execution, LimitError, Script, may_be_scripted
from operations.code.stubs import PRELUDE, Stubs
from operations.code.unsupported import unsupported
from operations.code.view import View, words_of
from operations.contract.access import UNGRANTED, AccessControl
from operations.contract.context import OperationContext, may_call
from operations.contract.functions import operation, operations_of
from operations.contract.specs import (
    ErrorDefinition,
    Operation,
    OperationSpec,
    OperationType,
    is_describable,
)
from operations.front.search import Gateway
from operations.registry.registry import OperationRegistry
from operations.schema import from_schema

T = TypeVar("T")


SEARCH: Final = "code.search"
RUN: Final = "code.run"

REJECTED: Final = "SCRIPT_REJECTED"
"""The code of a script that the type check has rejected: nothing has run."""

FAILED: Final = "SCRIPT_FAILED"
"""The code of a script that has raised an exception, or whose sandbox has ended."""

_TOKEN: Final = 4
"""Characters per token, on average."""

_MAX_FOUND: Final = 50
"""The largest number of operations that a search returns."""

_MAX_TRACE: Final = 3_000

_DEPTHS: Final = (None, 4, 3, 2, 1)
"""How deeply the types of found operations are nested: as deep as the budget allows."""

_MAX_SOURCES: Final = 64
"""The largest number of stubs that are kept for later checks."""

_PATIENCE: Final = 5.0
"""Seconds for which entry points wait longer than a script may take."""

_ERRORS: Final = (
    ErrorDefinition(REJECTED, "The type check has found errors; nothing has run.", http_status=422),
    ErrorDefinition(FAILED, "The script has raised an exception.", http_status=422),
)


class FoundStubs(msgspec.Struct, frozen=True, kw_only=True):
    """The operations that a search has found."""

    stubs: str
    """Typed Python stubs, best match first."""

    more: list[str] = []
    """Further operations, which the budget has no room for: search for their names."""


class CallMade(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of a script."""

    operation: str
    outcome: str
    """`success`, the code of an error, `begun` or `not awaited`."""

    line: int | None = None


class ScriptResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a script."""

    result: Any = None
    """The value of `return`, or of the last expression."""

    printed: str = ""
    """What the script has printed."""

    calls: int = 0
    """The number of calls that it has made."""

    warnings: list[str] = []


class Code:
    """Code mode for a registry: `registry.register_all(Code(registry))`.

    Iterate over it for its operations. The registry closes it.

    Args:
        registry: The operations that scripts may call.
        limits: The limits of scripts.
        access: Who may search and run scripts; by default everyone. Each call of a script is checked in any case.
        checks: Whether the types of scripts are checked before they run.
        saved: Scripts that are operations.

    Raises:
        MissingExtraError: If the extra `code` is not installed.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        limits: CodeLimits | None = None,
        access: AccessControl | None = None,
        checks: bool = True,
        saved: Iterable[SavedScript] = (),
    ) -> None:
        self.limits = limits or CodeLimits()
        self._registry, self._checks = registry, checks
        self._names = NameTable(registry)
        self._gateway = Gateway(registry, shows=self._shows, describes=self._shows)
        self._sandbox = Sandbox(self.limits.processes * MAX_LEVELS)
        self._slots = [self._bulkhead(self.limits.processes) for _ in range(MAX_LEVELS)]
        self._running = Counter[str]()
        self._nested: dict[tuple[str, int], Bulkhead] = {}
        """The places of each caller for saved scripts that its scripts call."""
        self._sources: dict[tuple[str, ...], str] = {}
        """Stubs for the check of scripts that name the same operations."""
        self._cached_for: Names | None = None
        # A grant need not cover a script, because it must cover each of its calls.
        self._operations = [
            replace(
                each,
                needs_grant=False,
                # A script has no authority but that of its caller.
                calls=(),
                # Entry points wait this long; the operation itself has no limit, because a run may wait for days.
                source_timeout=self.limits.wall + _PATIENCE if each.spec.id == RUN else None,
                spec=replace(each.spec, access_control=access or UNGRANTED),
            )
            for each in operations_of(self)
        ]
        self._operations += [
            replace(self._saved(each), calls=(), source_timeout=self.limits.wall + _PATIENCE)
            for each in saved
        ]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    def __len__(self) -> int:
        return len(self._operations)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the sandboxes."""
        await self._sandbox.aclose()

    # ------------------------------------------------------------ operations

    @operation(SEARCH, type="query")
    async def search(  # noqa: D417
        self,
        query: Annotated[str, Meta(max_length=1_000)],
        context: OperationContext,
        tokens: Annotated[int, Meta(ge=100, le=20_000)] = 2_000,
    ) -> FoundStubs:
        """Find operations by keywords; return them as typed Python stubs for a script.

        Then write one script that makes all calls, with code.run.

        Args:
            query: A few words, such as `close an issue`; or names of operations.
            tokens: The largest size of the stubs, in tokens.
        """
        names = self._names.current()
        found = await self._gateway.search(query, context, limit=_MAX_FOUND)
        specs = [self._gateway.spec(each.id, context) for each in found]
        parts: list[str] = []
        left = tokens * _TOKEN
        for spec in specs:
            part = _fitting(names, spec, left if parts else left // 2)
            if parts and len(part) > left:
                break
            parts.append(part)
            left -= len(part)
        chosen, depths = specs[: len(parts)], (*_DEPTHS, 0)
        wholes = (Stubs(names, chosen, depth=depth).source for depth in depths)
        most = tokens * _TOKEN
        stubs = next((each for each in wholes if len(each) <= most), "\n".join(parts))
        more = [names.python(spec.id) for spec in specs[len(chosen) :]]
        return FoundStubs(stubs=stubs if chosen else "", more=more[:20])

    @operation(RUN, durable=True, errors=_ERRORS)
    async def run(  # noqa: D417
        self, script: str, context: OperationContext, check_only: bool = False
    ) -> ScriptResult:
        """Run a Python script that calls operations, such as `items = await shop.items(limit=4)`.

        Top-level await and return work. Return only what you need. `asyncio.gather` runs calls at the same time.
        Declared errors are exceptions: `except CallError as e: error_of(e)["code"]`. There are no classes that inherit,
        generators, `del`, files or network. The types are checked before the first call.

        Args:
            script: The script.
            check_only: Only check the types, and run nothing.
        """
        return await self._run(script, context, check_only=check_only)

    async def check(self, script: str, context: OperationContext) -> ScriptResult:
        """Check the types of a script, and run nothing: as `code.run` with `check_only`, but never as a run.

        Raises:
            CallError: `SCRIPT_REJECTED` with diagnostics.
        """
        return await self._run(script, context, check_only=True)

    def used_by(self, script: str, context: OperationContext) -> list[OperationSpec]:
        """Return the operations whose names are in a script, and that the caller may call."""
        return self._view(context).operations(words_of(script))

    def _saved(self, saved: SavedScript) -> Operation:
        """Return a saved script as an operation."""

        async def run(value: Any, context: OperationContext) -> Any:
            done = await self._run(saved.script, context, arguments=value)
            return done.result

        namespace, _, name = saved.id.partition(".")
        digest = digest_of(saved.script)
        spec = OperationSpec(
            namespace=namespace,
            name=name,
            version=digest,
            type=OperationType.MUTATION,
            description=saved.description,
            input_schema=from_schema({"type": "object"}),
            output_schema=from_schema(True),
            access_control=saved.access,
            error_schemas=_ERRORS,
            meta={"script": digest},
        )
        return Operation(spec, run, durable=True)

    async def _run(
        self,
        script: str,
        context: OperationContext,
        *,
        check_only: bool = False,
        arguments: JSONObject | None = None,
    ) -> ScriptResult:
        nesting = self._nesting(context, is_saved=arguments is not None)
        if len(script.encode("utf-8", "surrogatepass")) > self.limits.script:
            raise LimitError("script", f"A script has at most {self.limits.script} bytes")
        view = self._view(context)
        execution = Execution(
            Script(script), context, self._registry, view, self.limits, nesting, arguments
        )
        # A later attempt of a run must not be rejected after calls of the first one.
        is_first = context.run is None or context.run.state.attempt <= 1
        checks = check_only or (self._checks and is_first)
        source = self._source(script, view) if checks else None
        if source is not None and (arguments is not None or check_only):
            source = f"{source}{ARGUMENTS}: dict[str, Any]\n"
        if checks and (findings := unsupported(script, view.namespaces(words_of(script)))):
            raise _rejected(diagnostics_of(findings, view.names, ()))
        async with self._place(context, nesting.level):
            try:
                if check_only:
                    await execution.check(self._sandbox, source or "")
                    return ScriptResult()
                work = execution.run(self._sandbox, source)
                value = await _within(self.limits.wall, context, work)
            except RejectedError as error:
                moved = 1 if check_only else 0
                visible = self._visible(context)
                raise _rejected(
                    diagnostics_of(error.findings, view.names, visible, moved=moved)
                ) from None
            except SandboxError as error:
                raise _failed(error, execution) from None
            except CrashedError as error:
                raise self._crashed(error, execution) from None
            except CallError as error:
                raise _with_calls(error, execution) from None
        return ScriptResult(
            result=value,
            printed=execution.printed,
            calls=len(execution.calls),
            warnings=execution.warnings,
        )

    # ------------------------------------------------------------ parts

    def _nesting(self, context: OperationContext, *, is_saved: bool) -> Nesting:
        """Return the place of a script among those that call each other.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if a script runs a script that is not saved, or they are nested too deeply.
        """
        if context.claim is None:
            return Nesting(Tree(self.limits), 0)
        outer = calling.get()
        if not is_saved or outer is None:
            raise LimitError("scripts", "A script cannot run scripts, except saved ones")
        found = outer.inner()
        if found is None:
            raise LimitError("depth", f"More than {MAX_LEVELS} scripts are nested in each other")
        return found

    def _bulkhead(self, limit: int) -> Bulkhead:
        return Bulkhead("scripts", limit, patience=self.limits.wall)

    def _shows(self, spec: OperationSpec, context: OperationContext) -> bool:
        """Return whether a caller may call an operation in a script."""
        is_own = spec.namespace == NAMESPACE
        return not is_own and may_be_scripted(spec) and may_call(spec, context)

    def _visible(self, context: OperationContext) -> Iterator[OperationSpec]:
        return (
            spec
            for spec in self._registry.specs()
            if self._shows(spec, context) and is_describable(spec)
        )

    def _source(self, script: str, view: View) -> str:
        """Return the stubs for the check of a script."""
        names, words = view.names, words_of(script)
        specs, namespaces = view.operations(words), view.namespaces(words)
        errors = view.errors(words)
        key = (*(spec.id for spec in specs), "", *namespaces, "", *errors)
        if self._cached_for is not names:
            self._cached_for = names
            self._sources.clear()
        source = self._sources.get(key)
        if source is None:
            if len(self._sources) >= _MAX_SOURCES:
                del self._sources[next(iter(self._sources))]
            source = self._sources[key] = PRELUDE + Stubs(names, specs, errors, namespaces).source
        return source

    def _view(self, context: OperationContext) -> View:
        return View(self._names.current(), lambda each: self._sees(each, context))

    def _sees(self, operation_id: str, context: OperationContext) -> OperationSpec | None:
        """Return an operation if the caller may call it in a script."""
        spec = self._registry.get_spec(operation_id)
        return (
            spec
            if spec is not None and self._shows(spec, context) and is_describable(spec)
            else None
        )

    @asynccontextmanager
    async def _place(self, context: OperationContext, level: int) -> AsyncGenerator[None]:
        """Hold one of the places for scripts of a level."""
        key = "" if context.identity is None else context.identity.limit_key
        own = self._nested_place(key, level) if level else self._first_place(key, context)
        async with own, self._slots[level]:
            yield

    @asynccontextmanager
    async def _first_place(self, key: str, context: OperationContext) -> AsyncGenerator[None]:
        """Hold one of the places of a caller; reject the script if there is none."""
        if context.identity is not None and self._running[key] >= self.limits.per_caller:
            message = f"{self.limits.per_caller} scripts of this caller are running"
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED, message, {"limit": "per_caller"}, begun=False
            )
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    @asynccontextmanager
    async def _nested_place(self, key: str, level: int) -> AsyncGenerator[None]:
        """Hold one of the places of a caller for saved scripts; wait for it, because the outer script waits as well."""
        bulkhead = self._nested.get((key, level))
        if bulkhead is None:
            bulkhead = self._nested[key, level] = self._bulkhead(self.limits.per_caller)
        try:
            async with bulkhead:
                yield
        finally:
            if not bulkhead.calls:
                self._nested.pop((key, level), None)

    def _crashed(self, error: CrashedError, execution: Execution) -> CallError:
        if error.timed_out:
            return _with_calls(
                LimitError("cpu", f"The script computes for more than {self.limits.cpu:g} s"),
                execution,
            )
        return _with_calls(CallError(FAILED, "The sandbox of the script has ended"), execution)


def _fitting(names: Names, spec: OperationSpec, room: int) -> str:
    """Return the stubs of an operation, with types as deep as fit into the room."""
    found = ""
    for depth in (*_DEPTHS, 0):
        found = Stubs(names, [spec], depth=depth).source
        if len(found) <= room:
            break
    return found


def _rejected(found: list[Diagnostic]) -> CallError:
    lines = [
        f"line {each.line}: {each.message}" + (f" ({each.hint})" if each.hint else "")
        for each in found
    ]
    message = "The script was not run. " + "; ".join(lines)
    return CallError(REJECTED, message[:_MAX_TRACE], {"diagnostics": msgspec.to_builtins(found)})


def _failed(error: SandboxError, execution: Execution) -> CallError:
    where = "" if error.line is None else f" in line {error.line}"
    details: JSONObject = {"error": error.kind, "line": error.line}
    if error.trace.count("\n  File ") > 1:
        details["trace"] = error.trace[-_MAX_TRACE:]
    if execution.printed:
        details["printed"] = execution.printed[-_MAX_TRACE:]
    if error.cause is not None:
        details["cause"] = {"code": error.cause.code, "details": error.cause.details}
    message = f"{error.kind}{where}: {error.message}"[:_MAX_TRACE]
    return _with_calls(CallError(FAILED, message, details), execution)


def _with_calls(error: CallError, execution: Execution) -> CallError:
    """Return an error with the mutations that were begun, which a repetition would make again."""
    made = [
        CallMade(operation=each.operation_id, outcome=each.outcome, line=each.line)
        for each in execution.calls
        if each.is_mutation and each.outcome in ("success", "begun")
    ]
    if not made:
        return error
    details = dict(object_of(error.details))
    details["ran"] = msgspec.to_builtins(made[-50:])
    return CallError(error.code, error.message, details, retryable=error.retryable)


async def _within(seconds: float, context: OperationContext, work: Coroutine[Any, Any, T]) -> T:
    """Await a script for at most this time, not counting the time for which its run waits.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` if it takes longer.
    """
    task = asyncio.Task(work)
    started, scope = monotonic(), context.scope
    try:
        while not task.done():
            waited = 0.0 if scope is None else scope.waited
            left = seconds - (monotonic() - started - waited)
            if left <= 0:
                raise LimitError("wall", f"The script takes more than {seconds:g} s")
            # While the run waits, its time does not go on.
            await asyncio.wait({task}, timeout=max(left, _LEAST_WAIT))
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


_LEAST_WAIT: Final = 0.05
