"""Read annotations (wrappers, metadata, type variables, forward references) and Google-style docstrings.

Rule 1: this module does not depend on JSON; it reads the type of an annotation and its metadata.
Rule 2: a docstring in another style becomes the description as a whole, and is never an error.
"""

import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar
from inspect import get_annotations
from types import SimpleNamespace
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import msgspec

from operations.base.errors import SchemaError

_QUALIFIERS = frozenset({ClassVar, Final, NotRequired, Required})
_READ_ONLY = frozenset({"typing.ReadOnly", "typing_extensions.ReadOnly"})
_UNPACK = frozenset({"typing.Unpack", "typing_extensions.Unpack"})
"""Compared by name, because `typing_extensions` has its own before Python 3.13 and 3.12."""

_CONSTRAINTS: dict[str, type | tuple[type, ...]] = {
    "ge": (int, float),
    "gt": (int, float),
    "le": (int, float),
    "lt": (int, float),
    "multiple_of": (int, float),
    "min_length": int,
    "max_length": int,
    "pattern": str,
    "tz": bool,
}
_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of")
_WORDS: dict[str, type | tuple[type, ...]] = {"title": str, "description": str, "examples": list}


class Notes:
    """The metadata of `Annotated`, in the terms of msgspec and of JSON Schema.

    Metadata is read by attribute names, so `msgspec.Meta`, `annotated_types` and pydantic's `Field` all work. A plain
    string is a description. Later metadata overrides earlier metadata.

    Attributes:
        constraints: Those that JSON Schema has keywords for.
        bounds: Those of values that are not JSON numbers, such as dates.
        predicates: Functions that return whether a value is valid.
        words: Keywords that annotate.
    """

    __slots__ = ("bounds", "constraints", "predicates", "words")

    def __init__(self, metadata: Iterable[Any] = ()) -> None:
        self.constraints: dict[str, Any] = {}
        self.bounds: dict[str, Any] = {}
        self.predicates: list[Callable[[Any], Any]] = []
        self.words: dict[str, Any] = {}
        for note in metadata:
            self._take(note)

    def _take(self, note: Any) -> None:
        if isinstance(note, str):
            self.words["description"] = note
            return
        if isinstance(note, type):
            return
        # pydantic's Field has its constraints in a separate list.
        nested = getattr(note, "metadata", ())
        for inner in nested if isinstance(nested, list) else ():  # pyright: ignore[reportUnknownVariableType]
            self._take(inner)
        self._take_constraints(note)
        self._take_words(note)

    def _take_constraints(self, note: Any) -> None:
        for name, expected in _CONSTRAINTS.items():
            value: Any = getattr(note, name, None)
            if name == "pattern":
                value = getattr(value, "pattern", value)  # it may be compiled
            if isinstance(value, expected):
                self.constraints[name] = value
            elif name in _BOUNDS and value is not None and not callable(value):
                self.bounds[name] = value
        if type(note).__name__ == "Predicate":
            self.predicates.append(note.func)

    def _take_words(self, note: Any) -> None:
        for name, expected in _WORDS.items():
            value = getattr(note, name, None)
            if isinstance(value, expected):
                self.words[name] = value
        documentation = getattr(note, "documentation", None)
        if isinstance(documentation, str):
            self.words["description"] = documentation
        if isinstance(note, msgspec.Meta) and note.extra_json_schema:
            self.words.update(note.extra_json_schema)

    @property
    def checks(self) -> bool:
        """Whether typed values must be checked."""
        return bool(self.bounds or self.predicates)

    def compare_typed_values(self) -> None:
        """Check the bounds of typed values, because their JSON form is text."""
        for name in _BOUNDS:
            if name in self.constraints:
                self.bounds[name] = self.constraints.pop(name)

    def constrained(self, annotation: Any) -> Any:
        """Return `annotation` with the constraints in the form of msgspec."""
        if not self.constraints:
            return annotation
        return Annotated[annotation, msgspec.Meta(**self.constraints)]


def peel(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type inside wrappers such as `Annotated`, `NewType` and `Final`, and their metadata."""
    metadata: tuple[Any, ...] = ()
    while type(annotation) is not type:
        origin = get_origin(annotation)
        if origin is Annotated:
            metadata = (*annotation.__metadata__, *metadata)
            annotation = annotation.__origin__
        elif origin in _QUALIFIERS or is_read_only(origin):
            (annotation,) = get_args(annotation)
        elif isinstance(annotation, InitVar):
            annotation = _inside(annotation)
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = _meaning(annotation)
        else:
            break
    return annotation, metadata


def is_typed_dict(cls: Any) -> bool:
    """Return whether `cls` is a TypedDict, also one of `typing_extensions`, which `typing` does not recognise."""
    return is_typeddict(cls) or type(cls).__name__ == "_TypedDictMeta"


def is_read_only(origin: Any) -> bool:
    """Return whether `origin` is the qualifier `ReadOnly`."""
    return repr(origin) in _READ_ONLY


def is_unpack(origin: Any) -> bool:
    """Return whether `origin` is `Unpack`."""
    return repr(origin) in _UNPACK


def is_class(annotation: Any) -> bool:
    """Return whether `annotation` is a class, without narrowing it to `type[Unknown]`."""
    return isinstance(annotation, type)


def _inside(annotation: Any) -> Any:
    """Return the type inside `InitVar`."""
    return annotation.type


def origin_of(annotation: Any) -> Any:
    """Return the class of `list[int]` and the like; a type without arguments is its own origin."""
    # Test for plain classes first, because most annotations are, and `get_origin` is slow.
    return annotation if type(annotation) is type else get_origin(annotation) or annotation


def _meaning(variable: TypeVar) -> Any:
    """Return the type for a free type variable."""
    if variable.__constraints__:
        return Union[variable.__constraints__]  # noqa: UP007 - they are a tuple
    return Any if variable.__bound__ is None else variable.__bound__


def is_alias(annotation: Any) -> bool:
    """Return whether `annotation` is a `type Name = ...` alias, or its backport."""
    return type(annotation).__name__ == "TypeAliasType"


def alias_value(annotation: Any) -> Any:
    """Return the type of a type alias, with its parameters substituted.

    Raises:
        SchemaError: If it cannot be resolved.
    """
    alias = get_origin(annotation) or annotation
    own = {each.__name__: each for each in alias.__type_params__}
    names = {**own, alias.__name__: alias}
    known = vars(sys.modules.get(alias.__module__, builtins))
    try:
        quoted = SimpleNamespace(__annotations__={"value": alias.__value__})
        value = get_type_hints(quoted, known, names, include_extras=True)["value"]
    except Exception as error:
        message = f"the type alias {alias.__name__} cannot be resolved: {error}"
        raise SchemaError(message) from error
    return substitute(value, dict(zip(alias.__type_params__, get_args(annotation), strict=False)))


def substitute(annotation: Any, arguments: Mapping[Any, Any]) -> Any:
    """Return `annotation` with its type variables replaced."""
    if isinstance(annotation, TypeVar):
        return arguments.get(annotation, annotation)
    if isinstance(annotation, InitVar):
        return InitVar(substitute(_inside(annotation), arguments))
    parameters: tuple[Any, ...] = getattr(annotation, "__parameters__", ())
    if not parameters or isinstance(annotation, type):
        return annotation
    return annotation[tuple(arguments.get(parameter, parameter) for parameter in parameters)]


def hints_of(annotation: Any) -> dict[str, Any]:
    """Return the annotations of a class and its bases, base first, with type variables substituted.

    Raises:
        NameError: If an annotation uses an unknown name.
    """
    cls = origin_of(annotation)
    if is_typed_dict(cls):
        return _typed_dict_hints(annotation)
    arguments = _arguments(annotation)
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = get_annotations(base)
        if names:
            resolved, own = _resolve(base), arguments.get(base, {})
            hints.update({name: substitute(resolved[name], own) for name in names})
    return hints


def _typed_dict_hints(annotation: Any) -> dict[str, Any]:
    """Return the annotations of a TypedDict, which has no bases at run time: it has their annotations itself."""
    cls = origin_of(annotation)
    own, names = _own_arguments(annotation), get_annotations(cls)
    hints = {name: substitute(hint, own) for name, hint in _resolve(cls).items()}
    for base in cls.__dict__.get("__orig_bases__", ()):
        if is_typed_dict(origin_of(base)):
            inherited = get_annotations(origin_of(base))
            found = hints_of(substitute(base, own))
            hints |= {name: found[name] for name in found if inherited[name] == names[name]}
    return hints


def _resolve(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls, include_extras=True)
    except NameError:
        # A class that is defined inside a function is not in its module, but may refer to itself.
        return get_type_hints(cls, localns={cls.__name__: cls}, include_extras=True)


def _arguments(annotation: Any) -> dict[Any, dict[Any, Any]]:
    """Return the arguments for the type variables of a class and of its generic bases."""
    cls = origin_of(annotation)
    own = _own_arguments(annotation)
    found: dict[Any, dict[Any, Any]] = {cls: own}
    bases: tuple[Any, ...] = cls.__dict__.get("__orig_bases__", cls.__bases__)
    for base in bases:
        origin = origin_of(base)
        if isinstance(origin, type) and origin not in {object, Generic}:
            for inner, arguments in _arguments(base).items():
                filled = {name: substitute(value, own) for name, value in arguments.items()}
                found.setdefault(inner, filled)
    return found


def _own_arguments(annotation: Any) -> dict[Any, Any]:
    """Return the arguments for the type variables of a class; a missing argument is the default of its variable."""
    parameters: tuple[Any, ...] = getattr(origin_of(annotation), "__parameters__", ())
    defaults = {each: each.__default__ for each in parameters if _has_default(each)}
    return defaults | dict(zip(parameters, get_args(annotation), strict=False))


def _has_default(variable: Any) -> bool:
    """Return whether a type variable has a default, which `typing` supports since Python 3.13."""
    has_default = getattr(variable, "has_default", None)
    return has_default is not None and has_default()


_SECTION = re.compile(r"(?P<title>[A-Z][A-Za-z ]*):\s*$")
_NAMES = frozenset(
    {"Args", "Arguments", "Attributes", "Keyword Args", "Keyword Arguments", "Parameters"}
)
_ENDS = _NAMES | {"Raises", "Return", "Returns", "Yield", "Yields"}
_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")


class Docstring(NamedTuple):
    """A parsed docstring."""

    description: str
    """The text before the first section about arguments, results or exceptions."""

    names: dict[str, str]
    """The description of each argument or attribute, on one line."""


def parse_docstring(text: str | None) -> Docstring:
    """Parse a docstring; without a docstring, the description is empty."""
    if not text:
        return Docstring("", {})
    description: list[str] = []
    names: dict[str, str] = {}
    section: list[str] | None = description
    entries: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        found = _SECTION.match(line)
        if found is not None and found["title"] in _ENDS:
            section = entries if found["title"] in _NAMES else None
        elif section is entries and line and not line[0].isspace():
            # Unindented text ends a section of parameters.
            section = None
        elif section is not None:
            section.append(line)
    names.update(_entries(entries))
    return Docstring("\n".join(description).strip(), names)


def _entries(lines: list[str]) -> dict[str, str]:
    """Return `name: text` entries whose continuation lines are indented further than the name."""
    margin = min((_indent(line) for line in lines if line.strip()), default=0)
    found: dict[str, list[str]] = {}
    texts: list[str] | None = None
    for line in lines:
        entry = _ENTRY.match(line.strip()) if _indent(line) == margin else None
        if entry is not None:
            texts = found.setdefault(entry["name"], [])
            texts.append(entry["text"])
        elif texts is not None:
            texts.append(line.strip())
    return {name: " ".join(filter(None, texts)) for name, texts in found.items()}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
