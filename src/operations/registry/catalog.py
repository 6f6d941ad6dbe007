"""Register, adapt, remove and look up operations by id.

Rule 1: a registration that fails leaves nothing behind.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from msgspec.structs import replace as with_fields

from operations.base.errors import CallError, ErrorCode, RegistrationError, operation_not_found
from operations.base.text import suggestion
from operations.contract.context import OperationContext, may_call
from operations.contract.events import Observer, RegistryChanged
from operations.contract.functions import (
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
from operations.registry.services import CallServices, listed

Registrable: TypeAlias = Operation | OperationSpec | Callable[..., Any]
"""An operation, a spec whose handler runs remotely or is registered later, or a function marked with `@operation`."""


@dataclass(frozen=True, slots=True)
class Addition:
    """Operations that were checked, and can be added to the catalog."""

    ready: dict[str, Operation]
    """The operations as they are added, by id."""

    adapted: list[tuple[Operation, Operation]]
    """Those that an adapter has changed: the original, and the operation that is added."""

    elsewhere: set[str]
    """The ids of those that have no local handler, before adapters changed them."""


class Catalog:
    """The operations of a registry, each by its id.

    Args:
        services: What all calls share; its observers receive every change.
        remote: Runs operations without a local handler.
        forget: Receives the ids of operations that were removed or replaced.

    Attributes:
        revision: The number of changes so far.
        remote: Runs operations without a local handler.
    """

    def __init__(
        self,
        services: CallServices,
        remote: Remote | None,
        forget: Callable[[Collection[str]], None],
    ) -> None:
        self.revision = 0
        self.remote = remote
        self._services = services
        self._forget_plans = forget
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
        self._watchers: list[Observer] = []

    def checked(self, operations: Iterable[Registrable], *, replace: bool = False) -> Addition:
        """Adapt and check operations, without adding them.

        Raises:
            RegistrationError: If an id is taken and `replace` is not set, or an operation is not valid.
        """
        ready: dict[str, Operation] = {}
        changed: list[tuple[Operation, Operation]] = []
        elsewhere: set[str] = set()
        for candidate in operations:
            # Check the exact type first, for speed: importers register thousands of operations.
            if type(candidate) is not Operation and isinstance(candidate, OperationSpec):
                elsewhere.add(candidate.id)
                candidate = forward(candidate, self.remote)  # noqa: PLW2901
            given = validate_operation(candidate)
            each = given
            if self._adapters and (each := self._adapted(given)) is not given:
                changed.append((given, each))
            warn_of_unchecked_input(each)
            operation_id = each.spec.id
            is_taken = operation_id in self._operations and not (
                replace and operation_id in (given.spec.id, self.current_id(given.spec.id))
            )
            if operation_id in ready or is_taken:
                raise RegistrationError(
                    f"{operation_id} is already registered: rename it, or pass replace=True"
                )
            ready[operation_id] = each
        return Addition(ready, changed, elsewhere)

    def add(self, addition: Addition) -> list[Operation]:
        """Add operations that were checked; return them."""
        self._put(addition.ready)
        for operation_id in addition.ready:
            self._forget_original(operation_id)
        for given, ready in addition.adapted:
            self._given[given.spec.id] = given, ready.spec.id
            self._original_ids[ready.spec.id] = given.spec.id
        self._elsewhere |= set(map(self.current_id, addition.elsewhere))
        return list(addition.ready.values())

    def with_handler(
        self, operation_id: str, handler: OperationHandler | SubscriptionHandler, *, replace: bool
    ) -> Operation:
        """Return the operation of a registered spec with this handler, without adding it.

        Raises:
            RegistrationError: If there is no such spec, or it has a handler and `replace` is not set.
        """
        known = self.registered(operation_id)
        if known is None:
            raise RegistrationError(f"{operation_id} has no spec: call register_spec first")
        if self.current_id(operation_id) not in self._elsewhere and not replace:
            raise RegistrationError(f"{operation_id} has a handler already: pass replace=True")
        return with_fields(known, handler=handler, blocking=None, reader=None)

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
        self.add(self.checked(candidates))

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

    @property
    def ids(self) -> KeysView[str]:
        """The ids of all operations, also of those that are added later."""
        return self._operations.keys()

    def get(self, operation_id: str) -> Operation | None:
        """Return the operation with this id."""
        return self._operations.get(operation_id)

    def output_of(self, operation_id: str) -> OutputPolicy:
        """Return the output policy of this operation."""
        known = self._operations.get(operation_id)
        default = self._services.output
        return default if known is None else known.output or default

    def get_spec(self, operation_id: str) -> OperationSpec | None:
        """Return the spec of this operation."""
        known = self._operations.get(operation_id)
        return known.spec if known is not None else None

    def get_handler(self, operation_id: str) -> OperationHandler | SubscriptionHandler | None:
        """Return the handler of this operation; None if it has no local handler."""
        known = self._operations.get(operation_id)
        return known.handler if known is not None and operation_id not in self._elsewhere else None

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

    def watch(self, watcher: Observer) -> Callable[[], None]:
        """Send every `RegistryChanged` event to `watcher`; call the returned function to stop.

        Unlike an observer, a watcher receives no call events and adds no cost to calls.
        """
        return listed(self._watchers, watcher)

    def _put(self, added: dict[str, Operation]) -> None:
        replaced = added.keys() & self._operations.keys()
        self._operations |= added
        self._forget(added)
        if self._services.observers or self._watchers:
            for each in added:
                change: Literal["replaced", "added"] = "replaced" if each in replaced else "added"
                self._tell(RegistryChanged(operation_id=each, change=change))

    def _tell(self, change: RegistryChanged) -> None:
        self._services.notify(change, self._watchers)

    def _forget(self, operation_ids: Collection[str]) -> None:
        self.revision += len(operation_ids)
        self._elsewhere.difference_update(operation_ids)
        self._forget_plans(operation_ids)
