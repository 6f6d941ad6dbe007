"""Derive the keys of a config file from the library's own config classes, and build those classes from a file.

Rule 1: a field of a config class is a key of the file, unless its values can only be functions or objects. Nothing is
        written twice: type, default and description come from the class.
Rule 2: a field that `repr` leaves out is secret: the file names where the secret is kept. Only in a table of strings,
        such as headers, and in a field with the metadata `WRITTEN` may a value be written out.
Rule 3: where a class takes a path, a relative one starts at the file.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from os.path import commonprefix
from pathlib import Path as FilePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from operations.config.places import Path
from operations.schema.python.annotations import hints_of, is_class, peel
from operations.schema.python.docstrings import parse_docstring

_SEQUENCES = frozenset({Collection, Sequence, Iterable, Set, list, set, frozenset, tuple})
_MAPPINGS = frozenset({Mapping, dict})
MISSING: Final = dataclasses.MISSING

WRITTEN: Final = "may be written"
"""Metadata of a field that `repr` leaves out although it is not always secret, such as an address."""

_ANNOTATED: Any = Annotated
_LITERAL: Any = Literal
_UNION: Any = Union
"""Annotations are made here from values, which type checkers do not follow."""

_PLAIN = frozenset({bool, float, int, str, NoneType})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret, by where it is kept: one of the two.

    Attributes:
        env: The environment variable that holds it.
        file: The file that holds it, relative to this one; white space around it is dropped.
    """

    env: str | None = None
    file: str | None = None


class Derived(NamedTuple):
    """The config class, or function, that a table of the file is read into, beside the keys of its own."""

    target: str
    """`module:class`, or a function; imported when a file has such a table."""

    without: Mapping[str, str]
    """Fields that are no keys, each with the reason."""

    def load(self) -> Any:
        """Import the class."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


class Key(NamedTuple):
    """A field of a class, as a key of the file."""

    annotation: Any

    default: Any
    """`MISSING` if the key is required."""

    is_secret: bool

    may_be_written: bool
    """Whether a secret may also stand in the file, because it is one only now and then."""

    description: str

    @property
    def type(self) -> Any:
        """What the file can say, as an annotation; None if that is nothing."""
        found = file_type(self.annotation, is_secret=self.is_secret)
        return _UNION[str, found] if self.may_be_written else found


class KeyFaultError(ValueError):
    """A table that fits no config class.

    Attributes:
        path: The key that is wrong.
    """

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


# ------------------------------------------------------------ what a file can say


@cache
def keys_of(cls: Any) -> dict[str, Key]:
    """Return every field of a dataclass or struct, or parameter of a function, as a key of the file."""
    described = _descriptions(cls)
    hints = hints_of(cls) if is_class(cls) else get_type_hints(cls, include_extras=True)
    return {
        name: Key(hints[name], default, *secrecy, described.get(name, ""))
        for name, default, secrecy in _fields(cls)
    }


def _fields(cls: Any) -> Iterator[tuple[str, Any, tuple[bool, bool]]]:
    """Yield the name and default of each field, whether it is secret, and whether it may be written all the same."""
    if not is_class(cls):
        for parameter in inspect.signature(cls).parameters.values():
            is_required = parameter.default is parameter.empty
            yield parameter.name, MISSING if is_required else parameter.default, (False, False)
        return
    if issubclass(cls, msgspec.Struct):
        for each in msgspec.structs.fields(cls):
            yield each.name, MISSING if each.required else each.default, (False, False)
        return
    for field in dataclasses.fields(cls):
        make: Any = field.default_factory
        default = field.default if make is MISSING else make()
        yield field.name, default, (not field.repr, field.metadata.get(WRITTEN, False))


def file_type(annotation: Any, *, is_secret: bool = False) -> Any:
    """Return what a file can say for an annotation, as an annotation; None if that is nothing."""
    options = list(_options(annotation))
    classes = tuple(each for each, _ in options if _is_class(each))
    has_secret = is_secret and (str, ()) in options
    is_merged = len(classes) + has_secret > 1 and bool(classes)
    found: list[Any] = [_merged(classes, has_secret)] if is_merged else []
    for each, metadata in options:
        kind = _file_type(each, is_secret)
        if kind is not None and not (is_merged and (each in classes or kind is Secret)):
            found.append(_ANNOTATED[kind, *metadata] if metadata else kind)
    return None if not found or found == [NoneType] else _UNION[tuple(found)]


def _file_type(annotation: Any, is_secret: bool) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is str and is_secret:
        return Secret
    if annotation in _PLAIN or origin is Literal:
        return annotation
    if annotation is FilePath:
        return str
    if origin in _SEQUENCES and (origin is not tuple or arguments[1:] == (...,)):
        item = file_type(arguments[0], is_secret=is_secret)
        return None if item is None else tuple.__class_getitem__((item, ...))
    if origin in _MAPPINGS:
        plain = [each for each, _ in _options(arguments[1]) if _file_type(each, False) is not None]
        is_table = is_secret and plain == [str]
        item = str | Secret if is_table else file_type(arguments[1], is_secret=is_secret)
        return None if item is None else dict.__class_getitem__((str, item))
    return file_class(annotation) if _is_class(annotation) else None


@cache
def file_class(cls: Any, tables: frozenset[str] | None = None) -> Any:
    """Return a dataclass with the keys of a class, and of the one it is read into.

    Args:
        cls: The class.
        tables: The keys that matter; of the others, those that need an import take any table. None for all.
    """
    if cls is Secret:
        return cls
    keys = dict(keys_of(cls))
    if tables is not None:
        keys = {name: _deferred(key) if name not in tables else key for name, key in keys.items()}
    derived: Derived | None = getattr(cls, "derived", None)
    if derived is not None:
        for name, key in keys_of(derived.load()).items():
            if name not in derived.without:
                keys.setdefault(name, key)
    fields = {name: (key.type, key.default, key.description) for name, key in keys.items()}
    return _made(cls.__name__, fields, parse_docstring(cls.__doc__).description)


def _deferred(key: Key) -> Key:
    arguments = get_args(key.annotation)
    is_derived = hasattr(arguments[-1] if arguments else None, "derived")
    return key._replace(annotation=dict[str, str]) if is_derived else key


def _made(name: str, keys: Mapping[str, tuple[Any, Any, str]], description: str) -> Any:
    fields: list[Any] = []
    for key, (kind, default, words) in keys.items():
        if kind is None:
            continue
        annotation = _ANNOTATED[kind, msgspec.Meta(description=words)]
        # A dataclass rejects defaults that can change; the default of a table is an empty one.
        make = cast("Any", type(default))
        if make.__hash__ is None or hasattr(make, "__dataclass_fields__"):
            default = dataclasses.field(default_factory=make)  # noqa: PLW2901
        fields.append((key, annotation) if default is MISSING else (key, annotation, default))
    made = dataclasses.make_dataclass(name, fields, kw_only=True)
    made.__doc__ = description
    return made


@cache
def _merged(classes: tuple[Any, ...], has_secret: bool) -> Any:
    """Return one table for several classes: `kind` names the one that is meant, unless its keys tell."""
    keys: dict[str, tuple[Any, Any, str]] = {}
    if has_secret:
        keys = {name: (key.type, None, key.description) for name, key in keys_of(Secret).items()}
    else:
        kinds = _LITERAL[tuple(kinds_of(classes))]
        keys["kind"] = (kinds, MISSING, "Which of them it is.")
    for cls in classes:
        for name, key in keys_of(cls).items():
            if key.type is not None and name not in keys:
                keys[name] = (_UNION[key.type, None], None, key.description)
    title = "Credential" if has_secret else _ending(classes) or "Choice"
    return _made(title, keys, "; ".join(_summary(cls) for cls in classes))


def kinds_of(classes: Sequence[Any]) -> dict[str, Any]:
    """Return classes by what is different in their names: `page` and `link` for `PagePaging` and `LinkPaging`."""
    ending = _ending(classes)
    return {cls.__name__.removesuffix(ending).lower(): cls for cls in classes}


def _ending(classes: Sequence[Any]) -> str:
    ending: str = commonprefix([cls.__name__[::-1] for cls in classes])[::-1]  # noqa: RUF071 - no paths
    return ending


def _options(
    annotation: Any, metadata: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the alternatives of a union, flattened, each with its metadata."""
    inner, notes = peel(annotation)
    if get_origin(inner) not in (Union, UnionType):
        yield inner, (*notes, *metadata)
        return
    for each in get_args(inner):
        yield from _options(each, (*notes, *metadata))


def _is_class(annotation: Any) -> bool:
    return is_class(annotation) and (
        dataclasses.is_dataclass(annotation) or issubclass(annotation, msgspec.Struct)
    )


def _summary(cls: Any) -> str:
    return parse_docstring(cls.__doc__).description.partition("\n\n")[0].rstrip(".")


def _descriptions(cls: Any) -> dict[str, str]:
    """Return what is written about each field: below it, or in the docstring of the class or function."""
    found = parse_docstring(cls.__doc__).names
    for base in reversed(cls.__mro__[:-1]) if is_class(cls) else ():
        found |= parse_docstring(base.__dict__.get("__doc__")).names
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = cast("ast.ClassDef", tree.body[0]).body
        for field, text in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                words = str(text.value.value).partition("\n\n")[0]
                found[field.target.id] = " ".join(words.split())
    return found


def secrets_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Secret]]:
    """Yield the secrets in tables that are enabled, by their keys; not those in `options`."""
    if isinstance(value, Secret):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in cast("Mapping[str, Any]", value).items():
            yield from secrets_of(each, (*path, key))
    elif dataclasses.is_dataclass(value) and getattr(value, "enabled", True):
        for field in dataclasses.fields(value):
            if field.name != "options":
                yield from secrets_of(getattr(value, field.name), (*path, field.name))


# ------------------------------------------------------------ from a file to the classes


Reveal: TypeAlias = Callable[[Secret, Path], str]
"""Finds a secret; the path is the key that names it."""


class Builder(NamedTuple):
    """Builds config classes from the tables of a file."""

    reveal: Reveal
    resolve: Callable[[str], FilePath]

    def fields(self, cls: Any, table: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Return the values for the fields of a class.

        Raises:
            KeyFaultError: If a table inside fits nothing.
            ValueError: If a class inside rejects a value.
        """
        keys = keys_of(cls)
        return {
            name: self._value(keys[name].annotation, value, (*path, name), keys[name].is_secret)
            for name, value in table.items()
        }

    def _value(self, annotation: Any, value: Any, path: Path, is_secret: bool) -> Any:
        options = [each for each, _ in _options(annotation)]
        if isinstance(value, str) and FilePath in options:
            return self.resolve(value)
        if isinstance(value, list):
            (item,) = (get_args(each)[0] for each in options if get_origin(each) in _SEQUENCES)
            return tuple(
                self._value(item, each, (*path, number), is_secret)
                for number, each in enumerate(cast("Sequence[Any]", value))
            )
        if isinstance(value, dict):
            return self._table(options, cast("dict[str, Any]", value), path, is_secret)
        return value

    def _table(
        self, options: Sequence[Any], table: dict[str, Any], path: Path, is_secret: bool
    ) -> Any:
        is_named = is_secret and str in options and table.keys() <= {"env", "file"}
        if is_named and table:
            return self.reveal(Secret(**table), path)
        classes = [each for each in options if _is_class(each)]
        if classes:
            cls, rest = _chosen(classes, table, path, has_secret=is_secret and str in options)
            return cls(**self.fields(cls, rest, path))
        mappings = [each for each in options if get_origin(each) in _MAPPINGS]
        (item,) = (get_args(each)[1] for each in mappings if file_type(each) is not None)
        return {
            key: self._value(item, value, (*path, key), is_secret) for key, value in table.items()
        }


def _chosen(
    classes: Sequence[Any], table: dict[str, Any], path: Path, *, has_secret: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the class that a table is meant for, and its fields."""
    if len(classes) == 1 and not has_secret:
        return classes[0], table
    if not has_secret:
        return kinds_of(classes)[table["kind"]], {k: v for k, v in table.items() if k != "kind"}
    fitting = [cls for cls in classes if table.keys() <= keys_of(cls).keys()]
    if not fitting or not table:
        ways = "; ".join(", ".join(_required(cls)) for cls in classes)
        raise KeyFaultError(path, f"needs exactly one of: env; file; {ways}.")
    missing = {cls: [key for key in _required(cls) if key not in table] for cls in fitting}
    best = min(fitting, key=lambda cls: (len(missing[cls]), -len(_required(cls))))
    if missing[best]:
        partner = next(iter(table))
        others = [keys[0] for cls, keys in missing.items() if cls is not best and len(keys) == 1]
        instead = f" Or give {' or '.join(others)}." if others else ""
        raise KeyFaultError(
            (*path, missing[best][0]), f"is missing: it goes with {partner}.{instead}"
        )
    return best, table


def _required(cls: Any) -> list[str]:
    return [name for name, key in keys_of(cls).items() if key.default is MISSING]
