"""The options of workers and their callers, each described once: for `serve_calls`, `from_calls` and config files."""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from msgspec import Meta

from operations._text import enforce_lists
from operations.access import AccessControl
from operations.authority.grants import Delegate
from operations.front.front import CredentialResolver, Front
from operations.front.limits import Limits
from operations.specs import OperationSpec, OutputPolicy, enforce_policy
from operations.types import Count, Seconds

AccessRule: TypeAlias = AccessControl | Callable[[OperationSpec], AccessControl]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How `serve_calls` serves a registry."""

    group: str = "operations"
    """The workers that share one queue: each request goes to one of them, so all should serve the same operations."""

    name: str = ""
    """The name of this worker in the view of operators."""

    version: str = ""
    """The version of this worker for operators, for example `1.4.0`; also in the service discovery of NATS."""

    concurrency: Count = 1024
    """Calls that run at a time."""

    queue: Annotated[int, Meta(ge=0)] = Limits().queue
    """Calls that wait for a slot; further calls are rejected with `RESOURCE_EXHAUSTED`."""

    per_principal: Count | None = None
    """Calls of one caller at a time, running and waiting: of one credential, of one identity, and of one mailbox if
    there is neither."""

    front: Front | None = None
    """Limits and rules that are shared with the other entry points of a server."""

    address: str = ""
    """The address of the callers, for these limits."""

    resolve: CredentialResolver | None = None
    """Returns the identity that a `credential` belongs to."""

    heartbeat: Seconds = 1
    """Seconds a request may wait at the broker. An older one of an operation that is not replayable begins only if its
    caller confirms it."""

    patience: Annotated[float, Meta(ge=0)] = 10
    """Seconds that a mutation that has begun goes on while its caller is disconnected from the broker. Queries and
    subscriptions are cancelled at once."""

    grace: Annotated[float, Meta(ge=0)] = 10
    """Seconds that running calls have to finish when the worker stops."""

    expose_errors: bool | None = None
    """Show callers the text of unexpected exceptions; by default on trusted targets only."""

    @property
    def limits(self) -> Limits:
        """The limits of a worker, which lets calls wait instead of rejecting them at once."""
        most = self.concurrency + self.queue
        return Limits(
            calls=self.concurrency,
            queue=self.queue,
            calls_per_caller=most if self.per_principal is None else self.per_principal,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """How `from_calls` imports the operations of workers."""

    group: str = "operations"
    """The workers that share one queue."""

    namespace: str | None = None
    """Put the operations into this namespace, under their whole former id."""

    access: AccessRule | None = None
    """The access rule for local callers, instead of that of the specs."""

    output: OutputPolicy | None = None
    """How results are normalised here; None leaves it to the registry."""

    exclude: Collection[str] | Container[str] = ()
    """Ids that are not imported, for example those of a registry that has them already."""

    credential: str | None = field(default=None, repr=False)
    """A token for the workers' resolver, sent with every call."""

    delegate: Delegate | None = None
    """Returns the credential of each call on behalf of its caller, instead of `credential`: `Grants.delegate`."""

    send_identity: bool | None = None
    """Send the identity of the caller; by default on trusted targets only."""

    timeout: Seconds = 30
    """Seconds a call may take unless its caller sets a deadline."""

    idle_timeout: Seconds | None = 30
    """Seconds a subscription may go without an item; None for no limit."""

    concurrent_calls: Count | None = None
    """Calls that run there at a time; others wait. By default there is no limit."""

    def __post_init__(self) -> None:
        enforce_policy(self.output)
        enforce_lists(exclude=self.exclude)
