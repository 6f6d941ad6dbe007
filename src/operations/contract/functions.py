"""Functions as operations: mark them, read their signatures, call them with types.

Rule 1: a marked function stays callable as before.
Rule 2: a method becomes an operation when its object is registered.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import (
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from operations.base.errors import RegistrationError
from operations.base.json.values import JSONValueError
from operations.base.text import enforce_lists, suggestion
from operations.base.types import JSONObject
from operations.contract.access import AccessControl
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import (
    ErrorDefinition,
    InputPolicy,
    Operation,
    OperationSpec,
    OperationType,
    OutputPolicy,
)
from operations.schema import Signature, signature_of

logger = logging.getLogger("operations")

Function = TypeVar("Function", bound=Callable[..., Any])


class OperationOptions(TypedDict, total=False):
    """The options of an operation, besides its id."""

    type: OperationType | Literal["query", "mutation", "subscription"]
    """`query` for a function that only reads; by default `mutation`, and `subscription` for an async generator."""

    version: str
    """The version of the contract; by default `1.0.0`."""

    title: str
    """A short name for people."""

    description: str
    """The description, instead of the docstring."""

    tags: Iterable[str]
    """Tags for search and filters."""

    scopes: Collection[str]
    """Scopes that a caller needs, all of them."""

    scopes_any: Collection[str]
    """Scopes of which a caller needs at least one."""

    access: AccessControl
    """The complete access rule, instead of `scopes` and `scopes_any`."""

    errors: Iterable[ErrorDefinition]
    """The declared errors."""

    idempotent: bool
    """Whether running it twice has the same effect as running it once."""

    keyed: bool
    """Whether running it twice with the same `context.key` has the same effect as running it once: the function sends
    the key to a system that runs requests with the same key once. A run then makes a call again whose outcome is
    unknown."""

    output: OutputPolicy
    """The output policy: how results are normalised."""

    input: InputPolicy
    """The input policy: how input that does not match its schema is handled."""

    timeout: float
    """Seconds that a query or mutation may take. A caller can set a shorter limit, but not a longer one. Replaces the
    default of entry points."""

    calls: Collection[str]
    """Patterns of the operations, such as `price.*`, that the function may call on the operation's own authority; every
    other nested call is checked as its caller."""

    durable: bool | Literal["required"]
    """Whether a call is a run with a life of its own, if the registry keeps runs: nested calls are then recorded steps,
    which are not repeated after a crash. `required`: callers that cannot hold a run are rejected."""

    lane_limit: int
    """The number of its runs that work at a time, in all processes together."""

    authority: bool
    """Whether it administers authority, or the hub: then no pattern of a grant or of `calls` allows it, only its exact
    id."""

    meta: JSONObject
    """Additional data of the spec."""


def operation(
    operation_id: str, **options: Unpack[OperationOptions]
) -> Callable[[Function], Function]:
    """Mark a typed function as an operation, for `scan_operations` or `registry.register`.

    The function stays callable as before. Its parameters become the input schema, its return annotation the output
    schema, its docstring the description; a parameter annotated `OperationContext` receives the context. An
    `async def` runs on the event loop, a `def` in a thread; an async generator is a subscription.

    Args:
        operation_id: `namespace.name`.
        options: See `OperationOptions`.

    Raises:
        RegistrationError: If the function cannot be an operation; the message gives the reason.
        TypeError: If there is no id, or an unknown option.
    """
    if callable(operation_id) or not operation_id:
        raise TypeError('name the operation: @operation("namespace.name")')
    for option in options.keys() - OperationOptions.__optional_keys__:
        options_list = ", ".join(sorted(OperationOptions.__optional_keys__))
        near = suggestion(option, OperationOptions.__optional_keys__)
        raise TypeError(
            f"{operation_id}: there is no option {option!r}.{near or f' Options are {options_list}.'}"
        )

    def mark(function: Function) -> Function:
        if isinstance(cast("object", function), (classmethod, staticmethod)):
            mark(cast("Any", function).__func__)
            return function
        if _is_in_class(function):
            function.__operation__ = _MarkedMethod(operation_id, options)  # type: ignore[attr-defined]
            return function
        found = _operation_from(function, operation_id, options)
        try:
            function.__operation__ = found  # type: ignore[attr-defined]
        except AttributeError:
            # Bound methods, builtins and objects with slots accept no attributes.
            function = cast("Function", partial(function))
            function.__operation__ = found  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, slots=True)
class _MarkedMethod:
    """The id and the options of a method that was marked in its class."""

    operation_id: str
    options: OperationOptions

    def bind(self, method: Callable[..., Any]) -> Operation:
        return _operation_from(method, self.operation_id, self.options)


def _is_in_class(function: Callable[..., Any]) -> bool:
    """Return whether `function` is a method in the body of a class: its first parameter is `self` or `cls`."""
    if inspect.ismethod(function) or isinstance(function, partial):
        return False
    wrapped = inspect.unwrap(function)
    code = getattr(wrapped, "__code__", None)
    if code is None or not code.co_argcount:
        return False
    first = code.co_varnames[0]
    return first in {"self", "cls"} and first not in wrapped.__annotations__


def _operation_from(
    function: Callable[..., Any], operation_id: str, options: OperationOptions
) -> Operation:
    try:
        return _read_operation(function, operation_id, options)
    except ValueError as error:
        raise RegistrationError(f"{operation_id}: {error}") from error


def _read_operation(
    function: Callable[..., Any], operation_id: str, options: OperationOptions
) -> Operation:
    signature = signature_of(
        function, context_type=OperationContext, envelope_type=ResponseEnvelope
    )
    namespace, dot, name = operation_id.partition(".")
    if not dot:
        raise RegistrationError("an id has the form namespace.name")
    reader = signature.reader(f"input of {operation_id}")
    tags = options.get("tags", ())
    enforce_lists(tags=tags, scopes=options.get("scopes"), scopes_any=options.get("scopes_any"))
    spec = OperationSpec(
        name=name,
        namespace=namespace,
        version=options.get("version", "1.0.0"),
        type=_type_of(signature.kind, options.get("type")),
        title=options.get("title"),
        description=options.get("description", signature.description),
        tags=tuple(tags),
        input_schema=signature.input_schema,
        output_schema=signature.output_schema,
        error_schemas=tuple(options.get("errors", ())),
        access_control=_access_of(options),
        idempotent=options.get("idempotent", False),
        keyed=options.get("keyed", False),
        authority=options.get("authority", False),
        converts_input=reader.is_typed,
        meta=options.get("meta", {}),
    )
    return Operation(
        spec,
        signature.bind_reader(function, reader),
        options.get("output"),
        signature.kind == "sync",
        timeout=options.get("timeout"),
        calls=options.get("calls"),
        signature=signature,
        reader=reader if reader.is_typed else None,
        input=options.get("input"),
        durable=options.get("durable", False),
        lane_limit=options.get("lane_limit"),
    )


def _type_of(kind: str, asked: str | None) -> OperationType:
    if kind == "stream":
        if asked not in {None, OperationType.SUBSCRIPTION}:
            raise RegistrationError(
                f"an async generator is a subscription, not a {asked}: omit type"
            )
        return OperationType.SUBSCRIPTION
    if asked == OperationType.SUBSCRIPTION:
        raise RegistrationError(
            "a subscription must be an async generator: `async def` with `yield`"
        )
    return OperationType(asked or OperationType.MUTATION)


def _access_of(options: OperationOptions) -> AccessControl:
    if "access" in options:
        if "scopes" in options or "scopes_any" in options:
            raise RegistrationError("give either access or scopes, not both")
        return options["access"]
    return AccessControl(options.get("scopes", ()), options.get("scopes_any"))


def operation_of(value: object) -> Operation | None:
    """Return `value` if it is an operation, the operation of a marked function, or None.

    Raises:
        RegistrationError: If `value` is a marked method of a class instead of an object.
    """
    if isinstance(value, Operation):
        return value
    marked = getattr(value, "__operation__", None)
    if isinstance(marked, _MarkedMethod):
        if inspect.ismethod(value):
            return marked.bind(value)
        raise RegistrationError(
            f"{marked.operation_id} is a method: create the object and call registry.register_object(it)"
        )
    return marked if isinstance(marked, Operation) else None


def _is_marked(attribute: object) -> bool:
    """Return whether an attribute of a class is marked.

    It is read from the class, because properties would run code.
    """
    return hasattr(getattr(attribute, "__func__", attribute), "__operation__")


def operations_of(service: object) -> list[Operation]:
    """Return the operations of an object: its methods that are marked with `@operation`.

    Raises:
        RegistrationError: If no method is marked, or one cannot be an operation.
    """
    names = dict.fromkeys(name for cls in type(service).__mro__ for name in vars(cls))
    marked = (
        getattr(service, name)
        for name in names
        if _is_marked(inspect.getattr_static(service, name))
    )
    found = [known for method in marked if (known := operation_of(method))]
    if isinstance(service, ModuleType):
        raise RegistrationError(
            f'{service.__name__} is a module: use register_all(scan_operations("{service.__name__}"))'
        )
    if not found:
        raise RegistrationError(
            f"{type(service).__qualname__} has no operations: mark methods with @operation(...)"
        )
    return found


def typed_function(function: object) -> tuple[str, Signature]:
    """Return the operation id and the signature of a marked function.

    Raises:
        TypeError: If `function` is not a marked function that returns one result.
    """
    known = operation_of(function)
    if known is None or known.signature is None:
        hint = "; use execute for an id" if isinstance(function, str) else ""
        raise TypeError(f"{function!r} is not a function marked with @operation{hint}")
    if known.signature.kind == "stream":
        raise TypeError(f'{known.spec.id} is a subscription: use subscribe("{known.spec.id}", ...)')
    return known.spec.id, known.signature


def validate_operation(candidate: object) -> Operation:
    """Return `candidate` as a valid operation.

    Raises:
        RegistrationError: If it is not valid; the message gives the reason.
    """
    ready = operation_of(candidate)
    if ready is None:
        raise RegistrationError(
            f"{candidate!r} is not an operation: pass an Operation, or a function marked with @operation"
        )
    spec, handler = ready.spec, ready.handler
    if not isinstance(cast("object", spec), OperationSpec):
        raise RegistrationError(f"{spec!r} is not an OperationSpec")
    if not callable(handler):
        raise RegistrationError(f"{spec.id}: its handler cannot be called: {handler!r}")
    is_generator, is_async_generator = _generator_kinds(handler)
    if spec.type is OperationType.SUBSCRIPTION:
        if is_generator:
            raise RegistrationError(f"{spec.id}: make its handler an async generator (async def)")
        if not is_async_generator and not _may_return_stream(handler):
            raise RegistrationError(
                f"{spec.id} is a subscription, but its handler returns no async iterator: make it an async generator"
                " (`async def` with `yield`), or annotate what it returns"
            )
    elif is_async_generator or is_generator:
        raise RegistrationError(f"{spec.id} is a {spec.type}, but its handler is a generator")
    try:
        spec.enforce_json()
    except JSONValueError as error:
        raise RegistrationError(f"{spec.id}: the spec is not JSON: {error}") from None
    return ready


def warn_of_unchecked_input(operation: Operation) -> None:
    """Log that the rules of an operation reject inputs, because a part of them has no checked form."""
    reads_input = operation.approve is not None or operation.spec.access_control.resource_input
    if operation.reader is None or not reads_input:
        return
    for problem in dict.fromkeys(operation.reader.problems):
        logger.warning(
            "%s: its rules read the input, but a part of it cannot be checked, so that calls are denied: %s",
            operation.spec.id,
            problem,
        )


def _may_return_stream(handler: Callable[..., Any]) -> bool:
    """Return whether the handler of a subscription may return an async iterator, by its annotation.

    A coroutine function without one does not: `yield` would have made it an async generator.
    """
    code: Any = handler
    while isinstance(code, partial):
        code = code.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    code = inspect.unwrap(code)
    if not inspect.isroutine(code):
        code = type(code).__call__
    try:
        result = get_type_hints(code).get("return")
    except Exception:  # noqa: BLE001 - an annotation is code and may raise anything
        return True
    if result is None:
        return not inspect.iscoroutinefunction(code)
    origin: Any = get_origin(result) or result
    returned: Any = origin
    if inspect.isclass(origin) and issubclass(origin, Awaitable) and get_args(result):
        returned = get_args(result)[-1]
        returned = get_origin(returned) or returned
    return (
        returned in {Any, object} or not inspect.isclass(returned) or hasattr(returned, "__aiter__")
    )


def _generator_kinds(handler: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether `handler` is a generator function, and whether it is an async generator function."""
    code = getattr(handler, "__code__", None)
    if code is None:
        return inspect.isgeneratorfunction(handler), inspect.isasyncgenfunction(handler)
    # Read the flags directly, which is faster than `inspect`: importers register thousands of handlers.
    flags: int = code.co_flags
    return bool(flags & inspect.CO_GENERATOR), bool(flags & inspect.CO_ASYNC_GENERATOR)
