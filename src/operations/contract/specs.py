"""An operation: the spec is the contract, the handler is the runtime.

Rule 1: a spec is data. It is frozen, hashable, and survives encoding to JSON unchanged.
Rule 2: an id is `namespace.name`, split at the first dot: a name may contain dots, a namespace may not.
"""

import logging
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    cast,
    get_args,
)

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from operations.base.errors import SchemaError
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_DOCUMENT_DEPTH,
    MAX_DOCUMENT_VALUES,
    JSONValueError,
    canonical,
    is_object,
    object_of,
    to_json,
)
from operations.base.text import enforce_lists, printable, suggestion
from operations.base.types import TABLE, JSONObject, JSONSchema, Seconds
from operations.base.work import InlineWork, Work
from operations.contract.access import OPEN, AccessControl
from operations.contract.context import OperationContext
from operations.contract.grant import Complete
from operations.schema import CheckedInput, Schema, Signature, from_schema, schema_for
from operations.schema.work import CountedSchema
from operations.schema.work import Work as CheckWork

_logger = logging.getLogger("operations")

OperationHandler: TypeAlias = Callable[[Any, OperationContext], Any | Awaitable[Any]]
"""Runs a query or mutation: returns a value, or an awaitable of it."""

SubscriptionHandler: TypeAlias = Callable[[Any, OperationContext], AsyncIterator[Any]]
"""Runs a subscription: returns an async iterator of values."""

OutputPolicy: TypeAlias = Literal["cast", "keep", "create", "warn", "strict", "off"]
"""How results are normalised:

- `cast` (the default): strip undeclared properties, fill declared defaults, convert without loss; never invent
- `keep`: as `cast`, without stripping
- `create`: as `cast`, then force the result to match by creating and replacing values
- `warn`: change nothing and report mismatches
- `strict`: change nothing and raise `EXECUTION_ERROR` on a mismatch
- `off`: change and check nothing
"""

InputPolicy: TypeAlias = Literal["strict", "convert", "off"]
"""How input that does not match its schema is handled, for every caller:

- `strict`: reject it
- `convert`: convert it if nothing is lost, such as `"5"` to 5, and report it in `meta.changes`; reject other input
- `off`: accept it; only data that is not JSON is rejected
"""

_OUTPUT: tuple[str, ...] = get_args(OutputPolicy)
_INPUT: tuple[str, ...] = get_args(InputPolicy)

Descriptions: TypeAlias = Literal["full", "short"]
"""How much of the descriptions of operations and arguments a list of tools has: everything, or the first sentences."""


def enforce_policy(output: OutputPolicy | None, input: InputPolicy | None = None) -> None:
    """Raise an error for an unknown policy; None stands for the default.

    Raises:
        ValueError: If it is unknown; the message lists the policies.
    """
    for key, policy, known in (("output", output, _OUTPUT), ("input", input, _INPUT)):
        if policy is not None and policy not in known:
            hint = suggestion(str(policy), known)
            raise ValueError(f"{key} must be one of {', '.join(known)}, not {policy!r}.{hint}")


def enforce_descriptions(descriptions: Descriptions | None) -> None:
    """Raise an error for an unknown setting of descriptions.

    Raises:
        ValueError: If it is unknown.
    """
    if descriptions not in (None, *get_args(Descriptions)):
        raise ValueError(f"descriptions must be full or short, not {descriptions!r}")


UNKNOWN = Schema({})
"""Accepts every value."""

NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,128}")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class OperationType(StrEnum):
    """The kind of an operation."""

    QUERY = "query"
    """Reads. May be repeated."""

    MUTATION = "mutation"
    """Changes something. Never repeated automatically."""

    SUBSCRIPTION = "subscription"
    """Returns many results over time."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"type must be one of {', '.join(cls)}, not {value!r}")


class ErrorDefinition(msgspec.Struct, frozen=True, rename="camel"):
    """An error that an operation declares; its code is part of the contract."""

    code: str
    description: str = ""

    schema: Schema = UNKNOWN
    """The schema of the error's `details`."""

    http_status: int | None = None

    def __post_init__(self) -> None:
        _coerce(self, "schema")

    def to_wire(self) -> JSONObject:
        """Return JSON builtins with the names of the wire. The schema in them is not copied."""
        wire: JSONObject = {
            "code": self.code,
            "description": self.description,
            "schema": self.schema.document,
        }
        if self.http_status is not None:
            wire["httpStatus"] = self.http_status
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> Self:
        """Return the error that `to_wire` wrote.

        Raises:
            ValueError: If a part is not valid; the message names its path.
        """
        return msgspec.convert(wire, cls, dec_hook=_schema_from_wire)


class OperationSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The contract of an operation, without its handler."""

    name: str
    namespace: str
    version: str = "1.0.0"
    type: OperationType
    title: str | None = None
    description: str = ""
    tags: tuple[str, ...] = ()
    input_schema: Schema = UNKNOWN

    output_schema: Schema = UNKNOWN
    """The schema of the envelope's `data`; for a subscription, of each item."""

    error_schemas: tuple[ErrorDefinition, ...] = ()
    access_control: AccessControl = OPEN

    idempotent: bool = False
    """Whether running it twice has the same effect as running it once."""

    keyed: bool = False
    """Whether running it twice with the same `context.key` has the same effect as running it once."""

    authority: bool = False
    """Whether it administers authority, or the hub. Then no pattern allows it, only its exact id in a grant or in the
    `calls` of an operation."""

    converts_input: bool = False
    """Whether the handler may receive other values than those of the input, as the objects of a typed function. If
    another process forwards a call, its rules then ask for the checked form of the input."""

    meta: JSONObject = msgspec.field(default_factory=dict[str, Any], name="_meta")
    """Data of the adapter, such as the origin; not part of the contract. `_meta` on the wire."""

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.namespace):
            raise ValueError(
                f"{self.namespace!r} is not a namespace: use 1 to 128 letters, digits, '_' and '-'"
            )
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not a name: use 1 to 256 letters, digits, '_', '-' and '.'"
            )
        # Skip the conversions below if none is needed: importers create thousands of specs.
        if type(self.input_schema) is not Schema:
            _coerce(self, "input_schema")
        if type(self.output_schema) is not Schema:
            _coerce(self, "output_schema")
        if type(self.type) is not OperationType:
            force_setattr(self, "type", OperationType(self.type))
        if type(self.tags) is not tuple:
            enforce_lists(tags=self.tags)
            force_setattr(self, "tags", tuple(self.tags))
        if type(self.error_schemas) is not tuple:
            force_setattr(self, "error_schemas", tuple(self.error_schemas))
        _enforce_types(
            ("version", self.version, str),
            ("title", self.title or "", str),
            ("description", self.description, str),
            ("meta", self.meta, dict),
            ("authority", self.authority, bool),
            ("converts_input", self.converts_input, bool),
            ("the access rule", self.access_control, AccessControl),
            *(("a tag", tag, str) for tag in self.tags),
            *(("an error", error, ErrorDefinition) for error in self.error_schemas),
        )

    def __hash__(self) -> int:
        return hash((self.namespace, self.name, self.version))

    @property
    def id(self) -> str:
        """`namespace.name`."""
        return f"{self.namespace}.{self.name}"

    @property
    def problem(self) -> str | None:
        """The reason why a schema of the application cannot be built; None if all can. Others are not built."""
        errors = (error.schema for error in self.error_schemas)
        try:
            for schema in (self.input_schema, self.output_schema, *errors):
                schema.enforce_document()
        except SchemaError as error:
            return ": ".join([str(error), *getattr(error, "__notes__", [])])
        return None

    @property
    def replayable(self) -> bool:
        """Whether a call that may have run can safely be run again."""
        return self.idempotent or self.type is OperationType.QUERY

    def completed(self, value: Any, work: Work | None = None) -> Any:
        """Return a valid input with the declared defaults of the parameters and properties that it omits.

        Args:
            value: The input.
            work: The budget; by default that of the event loop.

        Raises:
            BudgetSpentError: If the budget does not suffice. An input without its defaults could evade a rule.
        """
        try:
            normalise = self.input_schema.compile().normaliser("keep")
            filled, _ = normalise(value, work or InlineWork())
        except JSONValueError:
            # An input with files.
            filled = value
        parameters = object_of(object_of(self.input_schema.document).get("properties"))
        declared = {name: object_of(each) for name, each in parameters.items()}
        # The cast omits a default that does not match its type.
        defaults = {name: each["default"] for name, each in declared.items() if "default" in each}
        return {**defaults, **filled} if is_object(filled) else filled

    @property
    def digest(self) -> str:
        """SHA-256 of the contract: everything but `tags` and `meta`, independent of the order of keys."""
        wire = self.shared_wire()
        wire.pop("tags", None)
        wire.pop("_meta", None)
        return sha256(canonical(wire)).hexdigest()

    def to_wire(self) -> JSONObject:
        """Return new JSON builtins with the names of the wire; empty optional fields are omitted."""
        return cast("JSONObject", msgspec.to_builtins(self.shared_wire()))

    def shared_wire(self) -> JSONObject:
        """Return `to_wire`, but with the spec's own schema documents instead of copies."""
        wire: JSONObject = {
            "name": self.name,
            "namespace": self.namespace,
            "version": self.version,
            "type": self.type.value,
            "description": self.description,
            "inputSchema": self.input_schema.document,
            "outputSchema": self.output_schema.document,
            "accessControl": {
                "requiredScopes": list(self.access_control.required_scopes),
                **to_json(self.access_control),
            },
        }
        if self.title is not None:
            wire["title"] = self.title
        if self.tags:
            wire["tags"] = list(self.tags)
        if self.error_schemas:
            wire["errorSchemas"] = [error.to_wire() for error in self.error_schemas]
        if self.idempotent:
            wire["idempotent"] = True
        if self.keyed:
            wire["keyed"] = True
        if self.authority:
            wire["authority"] = True
        if self.converts_input:
            wire["convertsInput"] = True
        if self.meta:
            wire["_meta"] = self.meta
        return wire

    def enforce_json(self) -> None:
        """Raise an error unless the spec can be encoded. Schemas that are built when first needed are not built.

        Raises:
            JSONValueError: With the path of the part that is not JSON.
        """
        try:
            _ENCODER.encode(self)
        except (TypeError, ValueError, RecursionError) as error:
            to_json(self.shared_wire(), MAX_DOCUMENT_DEPTH)
            raise JSONValueError(f"is not JSON: {error}") from None

    def encode(self) -> bytes:
        """Return the JSON of `to_wire`."""
        return msgspec.json.encode(self.shared_wire())

    @classmethod
    def from_wire(cls, wire: Any) -> Self:
        """Return the spec that `to_wire` wrote.

        Raises:
            ValueError: If a part is not valid; the message names its path.
        """
        return msgspec.convert(wire, cls, dec_hook=_schema_from_wire)

    @classmethod
    def decode(cls, text: bytes | str) -> Self:
        """Return the spec in a JSON text.

        Raises:
            ValueError: If a part is not valid; the message names its path.
        """
        return cls.from_wire(
            decode_json(text, max_values=MAX_DOCUMENT_VALUES, max_depth=MAX_DOCUMENT_DEPTH)
        )


def describable(specs: Iterable[OperationSpec]) -> Iterator[OperationSpec]:
    """Yield the specs whose schemas can be built, and log the others: one operation must not cost a whole listing."""
    return filter(is_describable, specs)


def is_describable(spec: OperationSpec) -> bool:
    """Return whether the schemas of a spec can be built; if not, log the reason."""
    problem = spec.problem
    if problem is not None and _logger.isEnabledFor(logging.WARNING):
        _log_unusable(spec.id, problem)
    return problem is None


@lru_cache(maxsize=10_000)
def _log_unusable(operation_id: str, reason: str) -> None:
    """Log an operation that is not listed, once."""
    _logger.warning(
        "%s is not listed, because a schema cannot be used: %s", operation_id, printable(reason)
    )


def _own_schema(value: object) -> JSONSchema | None:
    if isinstance(value, Schema):
        return value.own
    raise TypeError(f"it contains {value!r}")


_ENCODER = msgspec.json.Encoder(enc_hook=_own_schema)


def _schema_from_wire(kind: type, value: Any) -> Any:
    if kind is Schema and isinstance(value, (dict, bool)):
        # Specs of third parties may have invalid schemas; keep the rest of the spec.
        return from_schema(cast("JSONSchema", value), lenient=True)
    raise ValueError(f"expected a JSON Schema, got {type(value).__name__}")


def _enforce_types(*values: tuple[str, object, type]) -> None:
    """Raise an error for a value of another type, because one such spec would break every list of operations."""
    for name, value, kind in values:
        if not isinstance(value, kind):
            problem = f"{name} must be of type {kind.__name__}, not {value!r}"
            raise ValueError(problem)  # noqa: TRY004 - the registry adds the id to a ValueError


def _coerce(struct: msgspec.Struct, field: str) -> None:
    """Return a `Schema` for a JSON Schema document or a Python type."""
    value: Any = getattr(struct, field)
    if type(value) is Schema:
        return
    schema = (
        from_schema(cast("JSONSchema", value))
        if isinstance(value, (dict, bool))
        else schema_for(value)
    )
    force_setattr(struct, field, schema)


class Held(Protocol):
    """An input whose files were replaced."""

    @property
    def value(self) -> Any:
        """The input, with a text in place of each file."""
        ...

    def restore(self, value: Any) -> Any:
        """Put the files back into `value`, which was derived from the input without files."""
        ...


class FileArguments(Protocol):
    """Handles file arguments (content, paths and open files), which only code in this process can pass."""

    @property
    def save_to(self) -> str:
        """The argument that names the file to save the result to."""
        ...

    @property
    def takes_files(self) -> bool:
        """Whether arguments may be files."""
        ...

    @property
    def returns_files(self) -> bool:
        """Whether the result may be a file."""
        ...

    def hold(self, value: Any) -> Held | None:
        """Replace the files in an input, so that the rest can be validated; return None if it has no files."""
        ...


class InputReader(Protocol):
    """Builds what a handler receives from an input, for the rules that read the input."""

    @property
    def problems(self) -> list[str]:
        """The reasons why some inputs have no checked form."""
        ...

    def read(self, input: Any, context: OperationContext) -> CheckedInput | Awaitable[CheckedInput]:
        """Build what the handler receives, and write its checked form.

        The handler receives exactly that if `context.checked` has the result.

        Raises:
            CallError: `VALIDATION_ERROR` if a value is not valid for its type.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRule:
    """Defines the calls of an operation that a person must approve, and the scope to approve them."""

    when: Annotated[Mapping[str, Any], TABLE] | None = None
    """A JSON Schema: only calls whose input satisfies it need approval; by default all calls."""

    scope: str = "approvals:answer"
    """The scope required to answer."""

    hold: Annotated[float, Meta(ge=0)] = 0
    """Seconds that a call waits for the answer before it ends with `APPROVAL_REQUIRED`."""

    seconds: Seconds = 3600
    """Seconds after which a request for approval, or an unused approval, expires."""

    ask_caller: bool = False
    """Ask the caller itself to confirm the call, if the entry point can (MCP elicitation, terminal). This is a
    confirmation, not an approval by another person."""

    def applies(self, value: Any, complete: Complete, work: CheckWork | None = None) -> bool:
        """Return whether a call with this input needs approval; True if the check fails or needs too much work.

        Args:
            value: The input.
            complete: Returns the input with its defaults.
            work: The budget of all checks of one call.
        """
        if self.when is None:
            return True
        try:
            schema, work = _compiled(msgspec.json.encode(self.when)), work or CheckWork()
            if schema.accepts(value, work):
                return True
            filled = complete(value)
            return filled is not value and schema.accepts(filled, work)
        except Exception:  # noqa: BLE001 - fail closed
            return True


@lru_cache(maxsize=256)
def _compiled(schema: bytes) -> CountedSchema:
    return CountedSchema(msgspec.json.decode(schema))


class SourceInfo(msgspec.Struct, frozen=True):
    """The self-description of the MCP server of imported operations."""

    instructions: str = ""
    """Its instructions for models."""

    server: JSONObject = {}
    """Its `serverInfo`: name, version, and optionally title, description, website and icons."""

    freshness: Mapping[str, tuple[int, bool]] = {}
    """For how many milliseconds clients may cache each of its lists, by their keys in results, and whether a cache may
    show a list to other callers; lists without such a statement are missing."""

    offers: JSONObject = {}
    """The `extensions` and `experimental` capabilities that it offers, with their settings."""


class Operation(msgspec.Struct, frozen=True):
    """A spec with its handler. A struct, because creating a frozen dataclass takes ten times as long."""

    spec: OperationSpec
    handler: OperationHandler | SubscriptionHandler

    output: OutputPolicy | None = None
    """The output policy: how results are normalised; None for the registry's default."""

    blocking: bool | None = None
    """Whether the handler blocks and must run in a thread; None: a `def` runs in a thread, an `async def` does not."""

    files: FileArguments | None = None
    """Handles file arguments; None if the operation accepts JSON only."""

    resources: Sequence[JSONObject] = ()
    """The resources of another MCP server that the operation reads, as that server lists them."""

    timeout: float | None = None
    """Seconds that a query or mutation may take. A caller can set a shorter limit, but not a longer one. Replaces the
    default of entry points."""

    calls: Collection[str] | None = None
    """Patterns of the operations that the handler may call on the operation's own authority; None for the default of
    the registry. Every other nested call is checked as its caller. Not part of the contract, and never sent to other
    processes."""

    approve: ApprovalRule | None = None
    """The calls that a person must approve; None if no call needs approval."""

    needs_grant: bool = True
    """Whether a grant must cover the operation; False for operations that only list others or continue results."""

    source_timeout: float | None = None
    """The time limit of the source of an imported operation, in seconds; entry points use at least this limit."""

    signature: Signature | None = None
    """The signature of the function, for typed calls; None if the handler is not a typed function."""

    reader: InputReader | None = None
    """Builds what the handler receives, if that may differ from the input as it was sent."""

    forwards: bool = False
    """Whether the handler only forwards the call, once. Then an error of the remote with `begun=False` means that this
    operation has not begun either."""

    source_info: SourceInfo | None = None
    """How the server of an imported operation describes itself; None for any other operation."""

    input: InputPolicy | None = None
    """The input policy; None: `convert` for callers that are models (MCP, toolboxes), `strict` for all others."""

    exact_schemas: bool | None = None
    """Whether MCP clients see the output schema itself, so that a result which does not match it is an error there;
    None: unless the operation was imported from an OpenAPI document."""

    descriptions: Descriptions | None = None
    """The descriptions in lists of MCP tools; None: all of their text."""

    durable: bool | Literal["required"] = False
    """Whether a call is a run if the registry keeps runs, and nested calls are its steps; `required`: callers that
    cannot hold a run are rejected. Not part of the contract."""

    keyed: bool = False
    """Whether the service of an imported operation runs requests with the same key once, as `keyed` of a spec; by its
    config, so that it is not part of the contract."""

    needs_token: bool = False
    """Whether the source of an imported operation needs the token that the caller sent, which no run has."""

    result_schema: Schema | None = None
    """The schema of the result of the handler, if settings change the form of the result; else that of the spec."""

    lane_limit: int | None = None
    """The number of runs of one lane that work at a time, in all processes together; None for no limit."""

    def __post_init__(self) -> None:
        # Skip the checks below if none is needed: importers create thousands of operations.
        if self.output is not None or self.input is not None:
            enforce_policy(self.output, self.input)
        if self.calls is not None:
            enforce_lists(calls=self.calls)
        limit = cast("object", self.timeout)
        if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
            raise ValueError(f"timeout must be a positive number, not {self.timeout!r}")
        lanes = cast("object", self.lane_limit)
        if lanes is not None and not (type(lanes) is int and lanes > 0):
            raise ValueError(f"lane_limit must be a positive integer, not {self.lane_limit!r}")


def is_for_models(spec: OperationSpec) -> bool:
    """Return whether models may see an operation; False for a tool of an MCP server that only its views call."""
    of_server = spec.meta.get("_meta")
    ui = of_server.get("ui") if is_object(of_server) else None
    visibility = ui.get("visibility") if is_object(ui) else None
    return not (isinstance(visibility, list) and visibility and "model" not in visibility)


SOURCE_NAMESPACE = "namespace"
"""The key in the meta of an imported operation for the namespace of its source, which a renamed one may have left."""


def source_of(spec: OperationSpec) -> str:
    """Return the kind of source of an operation: `local`, `openapi`, `mcp` or `remote`."""
    noted = spec.meta.get("source")
    if noted in ("mcp", "remote"):
        return str(noted)
    return "openapi" if "method" in spec.meta and "path" in spec.meta else "local"


Changes: TypeAlias = dict[str, tuple[Any, Any]]
"""Old and new values by the names of fields."""


def restrictions(known: Operation, current: Operation) -> Changes:
    """Return what an application has changed in an imported operation: its access rule, approval and time limit.

    An operation that administered authority once does so until it is imported anew, whatever its source declares later.

    Args:
        known: The operation as it was imported.
        current: The operation as it is registered.
    """
    pairs = {
        "access_control": (known.spec.access_control, current.spec.access_control),
        "approve": (known.approve, current.approve),
        "timeout": (known.timeout, current.timeout),
    }
    changes: Changes = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if current.spec.authority:
        changes["authority"] = known.spec.authority, True
    return changes


def restricted(new: Operation, changes: Changes) -> Operation:
    """Return an imported operation with the changes that an application has made in its predecessor.

    If the new operation has a rule of its own, which the application has not seen, both rules apply.
    """
    fields: dict[str, Any] = {}
    spec = new.spec
    if "authority" in changes and not spec.authority:
        fields["spec"] = spec = msgspec.structs.replace(spec, authority=True)
    for key, (before, now) in changes.items():
        if key == "authority":
            continue
        own = new.spec.access_control if key == "access_control" else getattr(new, key)
        fields[key] = now if own == before else _stricter(own, now)
    if "access_control" in fields:
        access = fields.pop("access_control")
        fields["spec"] = msgspec.structs.replace(spec, access_control=access)
    return msgspec.structs.replace(new, **fields) if fields else new


def _stricter(own: Any, added: Any) -> Any:
    """Return a rule that is at least as strict as `own`."""
    if not isinstance(own, AccessControl):
        return added if own is None else own
    scopes = {*own.required_scopes, *added.required_scopes}
    if own.required_scopes_any and added.required_scopes_any:
        # A rule has one list of alternatives only.
        scopes |= {*added.required_scopes_any}
    changes: dict[str, Any] = {
        "required_scopes": sorted(scopes),
        "required_scopes_any": own.required_scopes_any or added.required_scopes_any,
    }
    if own.resource_type is None:
        for name in ("resource_type", "resource_action", "resource_input"):
            changes[name] = getattr(added, name)
    return msgspec.structs.replace(own, **changes)
