"""Register, adapt, remove and look up operations by id.

Rule 1: a registration that fails leaves nothing behind.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, TypeAlias, Unpack

from msgspec.structs import replace as with_fields

from operations.authority import Authority
from operations.base.errors import CallError, ErrorCode, RegistrationError, operation_not_found
from operations.base.text import counted, suggestion
from operations.contract.context import OperationContext, may_call
from operations.contract.events import Observer, RegistryChanged, notify
from operations.contract.functions import (
    Function,
    OperationOptions,
    operation,
    operations_of,
    validate_operation,
    warn_of_unchecked_input,
)
from operations.contract.specs import (
    Changes,
    Operation,
    OperationHandler,
    OperationSpec,
    OutputPolicy,
    SubscriptionHandler,
    restricted,
    restrictions,
)
from operations.registry.remotes import Remote, forward
from operations.registry.services import PipelineHost

Registrable: TypeAlias = Operation | OperationSpec | Callable[..., Any]
"""An operation, a spec whose handler runs remotely or is registered later, or a function marked with `@operation`."""


class Registrations(PipelineHost):
    """The operations of a registry, each by its id."""

    def __init__(
        self,
        remote: Remote | None,
        *,
        output: OutputPolicy | None,
        max_threads: int,
        calls: Collection[str],
        authority: Authority | None,
    ) -> None:
        super().__init__(output=output, max_threads=max_threads, calls=calls, authority=authority)
        self.revision = 0
        """The number of changes so far."""
        self._remote = remote
        self._operations: dict[str, Operation] = {}
        self._elsewhere: set[str] = set()
        self._adapters: list[Callable[[Operation], Operation]] = []
        self._given: dict[str, tuple[Operation, str]] = {}
        """The original operation and current id of each operation that an adapter changed, by original id."""
        self._original_ids: dict[str, str] = {}
        """The original id of each of these operations, by current id."""
        self._restrictions: dict[str, Changes] = {}
        """What the application has changed in imported operations, by id; also in those that are removed now."""
        self.is_absent: Callable[[str], object] = lambda _namespace: False
        """Returns whether the source of a namespace is not connected, so that its operations may be missing."""
        self.awaits_sources: Callable[[], bool] = lambda: False
        """Returns whether any source is not connected, so that more operations may follow."""
        self._services: list[Any] = []
        self._watchers: list[Observer] = []

    def register(self, operation: Registrable, replace: bool = False) -> Operation:
        """Add an operation, a function marked with `@operation`, or a spec without a handler.

        Raises:
            RegistrationError: If its id is taken and `replace` is not set, or the operation is not valid.
        """
        return self.register_all([operation], replace=replace)[0]

    def register_all(
        self,
        operations: Iterable[Registrable],
        *,
        replace: bool = False,
    ) -> list[Operation]:
        """Add every operation, or none of them.

        The registry closes a service (the result of `from_openapi` or `connect_mcp`) when it is closed itself. A
        service whose operations change has a method `attach(registry)`, which keeps the registry up to date.

        Raises:
            RegistrationError: As `register`; then nothing was added.
        """
        added: dict[str, Operation] = {}
        originals: list[tuple[Operation, Operation]] = []
        elsewhere: set[str] = set()
        for candidate in operations:
            # Check the exact type first, for speed: importers register thousands of operations.
            if type(candidate) is not Operation and isinstance(candidate, OperationSpec):
                elsewhere.add(candidate.id)
                candidate = forward(candidate, self._remote)  # noqa: PLW2901
            given = validate_operation(candidate)
            ready = given
            if self._adapters and (ready := self._adapted(given)) is not given:
                originals.append((given, ready))
            warn_of_unchecked_input(ready)
            operation_id = ready.spec.id
            is_taken = operation_id in self._operations and not (
                replace and operation_id in (given.spec.id, self.current_id(given.spec.id))
            )
            if operation_id in added or is_taken:
                raise RegistrationError(
                    f"{operation_id} is already registered: rename it, or pass replace=True"
                )
            added[operation_id] = ready
        attach = getattr(operations, "attach", None)
        if attach is not None:
            attach(self)
        self._put(added)
        for operation_id in added:
            self._forget_original(operation_id)
        for given, ready in originals:
            self._given[given.spec.id] = given, ready.spec.id
            self._original_ids[ready.spec.id] = given.spec.id
        self._elsewhere |= set(map(self.current_id, elsewhere))
        if hasattr(operations, "aclose") or hasattr(operations, "__aexit__"):
            self._services.append(operations)
        return list(added.values())

    def register_object(self, service: object, *, replace: bool = False) -> list[Operation]:
        """Add every method of `service` that is marked with `@operation`, or none of them.

        Raises:
            RegistrationError: As `register`, and if no method is marked.
        """
        return self.register_all(operations_of(service), replace=replace)

    def register_spec(self, spec: OperationSpec, *, replace: bool = False) -> Operation:
        """Add a spec whose handler is registered later or runs remotely.

        Raises:
            RegistrationError: If its id is taken and `replace` is not set.
        """
        return self.register(spec, replace=replace)

    def register_handler(
        self,
        operation_id: str,
        handler: OperationHandler | SubscriptionHandler,
        *,
        replace: bool = False,
    ) -> Operation:
        """Set the handler of a registered spec.

        Raises:
            RegistrationError: If there is no such spec, or it has a handler and `replace` is not set.
        """
        known = self.registered(operation_id)
        if known is None:
            raise RegistrationError(f"{operation_id} has no spec: call register_spec first")
        if self.current_id(operation_id) not in self._elsewhere and not replace:
            raise RegistrationError(f"{operation_id} has a handler already: pass replace=True")
        return self.register(
            with_fields(known, handler=handler, blocking=None, reader=None),
            replace=True,
        )

    def unregister(self, operation_id: str) -> Operation:
        """Remove an operation. Running calls continue.

        Raises:
            KeyError: If there is no such operation.
        """
        operation_id = self.current_id(operation_id)
        removed = self._operations.pop(operation_id)
        self._forget_original(operation_id)
        self._forget([operation_id])
        self._tell(RegistryChanged(operation_id=operation_id, change="removed"))
        return removed

    def _forget_original(self, operation_id: str) -> None:
        original_id = self._original_ids.pop(operation_id, operation_id)
        if self.current_id(original_id) == operation_id:
            self._given.pop(original_id, None)

    def operation(
        self, operation_id: str, **options: Unpack[OperationOptions]
    ) -> Callable[[Function], Function]:
        """Register a typed function: `@registry.operation("task.create", scopes=["task:write"])`.

        It takes the arguments of the module-level `operation`, and raises the exceptions of both.
        """
        mark = operation(operation_id, **options)

        def register(function: Function) -> Function:
            marked = mark(function)
            self.register(marked)
            return marked

        return register

    def adapt(self, adapter: Callable[[Operation], Operation]) -> None:
        """Apply `adapter`, which may change and rename an operation, to all current and future operations."""
        self._adapters.append(adapter)
        self.adapt_all()

    def adapt_all(self) -> None:
        """Apply the adapters again after one has changed.

        If this raises `RegistrationError`, the registry is unchanged.
        """
        given = {**self._operations, **{here: each for each, here in self._given.values()}}
        ready = {key: self._adapted(each) for key, each in given.items()}
        last = {each.spec.id: key for key, each in ready.items()}
        for twice in (each.spec.id for key, each in ready.items() if last[each.spec.id] != key):
            raise RegistrationError(f"two operations would have the id {twice}: rename one of them")
        changed = [key for key, each in ready.items() if each is not self._operations[key]]
        candidates = [given[key].spec if key in self._elsewhere else given[key] for key in changed]
        for key in changed:
            self.unregister(key)
        self.register_all(candidates)

    def _adapted(self, operation: Operation) -> Operation:
        for adapter in self._adapters:
            adapted = adapter(operation)
            if operation.spec.authority and not adapted.spec.authority:
                # An adapter that builds its own spec may not know the mark.
                spec = with_fields(adapted.spec, authority=True)
                adapted = with_fields(adapted, spec=spec)
            operation = adapted
        return operation

    # ------------------------------------------------------------ imported operations that change

    def imported(self, known: Operation) -> Operation | None:
        """Return an imported operation as it is registered: the application may have restricted it.

        Returns None if it is not registered, or other code has registered its own operation with this id.
        """
        current = self.registered(known.spec.id)
        return current if current is not None and current.handler is known.handler else None

    def restricted(self, new: Operation, known: Operation | None = None) -> Operation:
        """Return an imported operation with the restrictions that the application added to its predecessor `known`.

        An operation that was removed has them too when it returns, so that a source cannot remove a restriction.
        """
        self._note_restrictions(known)
        return restricted(new, self._restrictions.get(new.spec.id, {}))

    def remove_imported(self, known: Operation) -> None:
        """Unregister an imported operation, unless other code has registered its own operation with this id."""
        if self.imported(known) is not None:
            self._note_restrictions(known)
            self.unregister(known.spec.id)

    def _note_restrictions(self, known: Operation | None) -> None:
        current = None if known is None else self.imported(known)
        if known is None or current is None:
            return
        self._restrictions.pop(known.spec.id, None)
        if found := restrictions(known, current):
            self._restrictions[known.spec.id] = found

    # ------------------------------------------------------------ lookup

    def current_id(self, operation_id: str) -> str:
        """Return the current id of an operation that was registered with this id and may have been renamed."""
        return self._given.get(operation_id, (None, operation_id))[1]

    def registered(self, operation_id: str) -> Operation | None:
        """Return the operation that was registered with this id, without the changes of adapters."""
        found = self._given.get(operation_id)
        return self._operations.get(operation_id) if found is None else found[0]

    def get(self, operation_id: str) -> Operation | None:
        """Return the operation with this id."""
        return self._operations.get(operation_id)

    def output_of(self, operation_id: str) -> OutputPolicy:
        """Return the output policy of this operation."""
        known = self._operations.get(operation_id)
        return self.output if known is None else known.output or self.output

    def get_by_name(self, namespace: str, name: str) -> Operation | None:
        """Return the operation with this name in this namespace."""
        return self._operations.get(f"{namespace}.{name}")

    def get_spec(self, operation_id: str) -> OperationSpec | None:
        """Return the spec of this operation."""
        known = self._operations.get(operation_id)
        return known.spec if known is not None else None

    def get_handler(self, operation_id: str) -> OperationHandler | SubscriptionHandler | None:
        """Return the handler of this operation; None if it has no local handler."""
        known = self._operations.get(operation_id)
        return known.handler if known is not None and operation_id not in self._elsewhere else None

    @property
    def has_services(self) -> bool:
        """Whether closing this registry closes services, such as an imported API."""
        return bool(self._services)

    @property
    def remote(self) -> Remote | None:
        """Runs operations without a local handler."""
        return self._remote

    @property
    def has_remote(self) -> bool:
        """Whether calls of operations without a local handler go to a remote."""
        return self._remote is not None

    def specs(self) -> list[OperationSpec]:
        """Return all specs, in the order of registration."""
        return [known.spec for known in self._operations.values()]

    def not_found(self, operation_id: str, context: OperationContext) -> CallError:
        """Return an `OPERATION_NOT_FOUND` error for an id, or `UNAVAILABLE` if its source is not connected.

        The error suggests a similar id, which is always an operation that the caller may call.
        """
        grant = None if context.identity is None else context.identity.grant
        is_covered = grant is None or grant.covers(operation_id, authority=False)
        if is_covered and self.is_absent(operation_id.partition(".")[0]):
            message = (
                f"{operation_id} is not available now: a source that may have it is not connected"
            )
            return CallError(ErrorCode.UNAVAILABLE, message)
        visible = (
            spec.id for spec in self.specs() if spec.id != operation_id and may_call(spec, context)
        )
        message = f"There is no operation {operation_id!r}.{suggestion(operation_id, visible)}"
        return operation_not_found(operation_id, message.removesuffix("."))

    def __iter__(self) -> Iterator[Operation]:
        return iter(tuple(self._operations.values()))

    def __len__(self) -> int:
        return len(self._operations)

    def __contains__(self, operation_id: object) -> bool:
        return operation_id in self._operations

    def __repr__(self) -> str:
        return f"<OperationRegistry of {counted(len(self), 'operation')}>"

    def watch(self, watcher: Observer) -> Callable[[], None]:
        """Send every `RegistryChanged` event to `watcher`; call the returned function to stop.

        Unlike an observer, a watcher receives no call events and adds no cost to calls.
        """
        self._watchers.append(watcher)

        def stop() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return stop

    def _put(self, added: dict[str, Operation]) -> None:
        replaced = added.keys() & self._operations.keys()
        self._operations |= added
        self._forget(added)
        if self._observers or self._watchers:
            for each in added:
                change: Literal["replaced", "added"] = "replaced" if each in replaced else "added"
                self._tell(RegistryChanged(operation_id=each, change=change))

    def _tell(self, change: RegistryChanged) -> None:
        notify((*self._observers, *self._watchers), change, self._observer_failures)

    def _forget(self, operation_ids: Collection[str]) -> None:
        self.revision += len(operation_ids)
        self._elsewhere.difference_update(operation_ids)
