"""Types for JSON, numbers and options that every other module uses. Imports no module of this package."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import (
    Annotated,
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    TypeAlias,
    TypeVar,
    overload,
)

from msgspec import Meta

P = ParamSpec("P")
C = TypeVar("C")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")

JSON: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None
"""A value made of JSON builtins. A recursive alias would be slower to check and harder to read."""

JSONObject: TypeAlias = dict[str, Any]
"""A JSON object, as decoded: string keys, JSON values."""

TABLE: Final = "is a table"
"""Annotates a mapping of any JSON values that a config file contains as a table."""

WRITTEN: Final = "may be written"
"""Metadata of a field of a config class that `repr` omits but that is not always secret, such as an address."""

JSONSchema: TypeAlias = JSONObject | bool
"""A JSON Schema document: an object, or true or false."""

ReadOnlyJSON: TypeAlias = (
    Mapping[str, "ReadOnlyJSON"] | Sequence["ReadOnlyJSON"] | str | int | float | bool | None
)
"""JSON that a function does not modify."""

Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
"""A positive duration in seconds; checked in files and on command lines."""

Count: TypeAlias = Annotated[int, Meta(ge=1)]
"""A number of at least 1; checked in files and on command lines."""

Names: TypeAlias = tuple[str, ...]

FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")]
"""A function to import, `module:function`; checked in files."""


class options_of(Generic[P, C]):  # noqa: N801 - a decorator
    """Return a decorator that lets a function accept the fields of its config class as keyword arguments.

        @options_of(ServerConfig)
        def create_app(config: ServerConfig, registry: OperationRegistry) -> Starlette: ...

        create_app(registry, title="Shop")

    Each option is described once, in the class. Type checkers and `inspect.signature` see the fields.
    """

    def __init__(self, config: Callable[P, C]) -> None:
        self._config = config

    @overload
    def __call__(self, function: Callable[[C], R]) -> Callable[P, R]: ...

    @overload
    def __call__(self, function: Callable[[C, A], R]) -> Callable[Concatenate[A, P], R]: ...

    @overload
    def __call__(self, function: Callable[[C, A, B], R]) -> Callable[Concatenate[A, B, P], R]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes the fields as keywords instead of the first parameter of `function`."""
        config = self._config
        own = inspect.signature(function)
        before = list(own.parameters.values())[1:]
        fields = inspect.signature(config).parameters.values()

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            given = len(before)
            for name in (each.name for each in before[len(args) :]):
                args = (*args, options.pop(name)) if name in options else args
            return function(config(*args[given:], **options), *args[:given])

        call.__signature__ = own.replace(parameters=[*before, *fields])  # type: ignore[attr-defined]
        call.__annotations__ = {
            **{each.name: each.annotation for each in (*before, *fields)},
            "return": own.return_annotation,
        }
        return call
