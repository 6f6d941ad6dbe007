"""Derive the keys of a config file from the library's own config classes, and build these classes from mappings.

Rule 1: a field of a config class is a key of the file, unless its values can only be functions or objects. The type,
        default and description of the key come from the class.
Rule 2: a field that `repr` omits is secret: the file names the environment variable or file with the secret. The secret
        itself may only be written in a table of strings, such as headers, or in a field with the metadata `WRITTEN`.
Rule 3: a path is relative to the folder of the config file.
Rule 4: the keys that a class lists as `advanced` are in the table `advanced` inside its table. Only the file has this
        level: everything that reads a config finds them beside the others.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from keyword import iskeyword
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
)

import msgspec
from msgspec import NODEFAULT

from operations.base.text import suggestion
from operations.base.types import TABLE, WRITTEN
from operations.schema.python.annotations import hints_of, is_class, parse_docstring, peel

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and positions that lead to a value of a file."""

_SEQUENCES = frozenset({Collection, Sequence, Iterable, Set, list, set, frozenset, tuple})
_MAPPINGS = frozenset({Mapping, dict})
MISSING: Final = dataclasses.MISSING

NAMED: Final = "is named"
"""Annotates the values of a table of secrets: the file must name them, not contain them."""

ELSEWHERE: Final = "set elsewhere"
"""Metadata key for a field that is not a key of the file; the value gives the reason."""

_ANNOTATED: Any = Annotated
_LITERAL: Any = Literal
_UNION: Any = Union
"""Typed as Any because this module builds annotations at run time, which type checkers do not support."""

_PLAIN = frozenset({bool, float, int, str, NoneType})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret in an environment variable or a file.

    Attributes:
        env: The environment variable that holds it.
        file: The file that holds it, relative to this one; surrounding white space is removed.
    """

    env: str | None = None
    file: str | None = None


class Derived(NamedTuple):
    """The config classes that a table of the file is converted to, in addition to its own keys."""

    load: Callable[[], tuple[Any, ...]]
    """Returns the classes, if a file has such a table. Classes that share a key all receive its value."""

    without: Mapping[str, str]
    """Fields that are not keys, each with the reason."""

    defaults: Mapping[str, Any] = {}
    """Defaults in a file that differ from those of the class."""

    named: str | None = None
    """The field that is the name of the table."""

    def keys(self) -> dict[str, "Key"]:
        """Return the fields that are keys of the table."""
        found: dict[str, Key] = {}
        for cls in self.load():
            for name, key in keys_of(cls).items():
                if name not in self.without:
                    default = self.defaults.get(name, key.default)
                    found.setdefault(name, key._replace(default=default))
        return found


class Key(NamedTuple):
    """A field of a class, as a key of the file."""

    annotation: Any

    default: Any
    """`MISSING` if the key is required."""

    is_secret: bool

    may_be_written: bool
    """Whether the value may also be in the file, because it is not always a secret."""

    description: str

    @property
    def type(self) -> Any:
        """The annotation of the key in the file; None if a file cannot express its values."""
        found = file_type(self.annotation, is_secret=self.is_secret)
        return _UNION[str, found] if self.may_be_written else found


ADVANCED: Final = "advanced"
"""The table inside a table for the keys that few files need."""


def advanced_keys(cls: Any) -> frozenset[str]:
    """Return the keys of a class that are in its table `advanced`."""
    found: frozenset[str] = getattr(cls, "advanced", frozenset())
    return found


def placed(cls: Any, path: KeyPath) -> KeyPath:
    """Return the place of a key in the file, which is below `advanced` for some keys.

    Args:
        cls: The class of the whole file.
        path: The key, with or without `advanced`.
    """
    found: list[str | int] = []
    kind = cls
    for part in path:
        if part == ADVANCED and _is_class(kind):
            continue
        if part in advanced_keys(kind):
            found.append(ADVANCED)
        found.append(part)
        kind = child(kind, part)
    return tuple(found)


def child(annotation: Any, part: str | int) -> Any:
    """Return the class or mapping at a key of a class or mapping; None if there is none."""
    if get_origin(annotation) in _MAPPINGS:
        inner = get_args(annotation)[1]
    elif _is_class(annotation) and isinstance(part, str):
        derived: Derived | None = getattr(annotation, "derived", None)
        keys = keys_of(annotation) if derived is None else derived.keys() | keys_of(annotation)
        inner = keys[part].annotation if part in keys else None
    else:
        return None
    options = [each for each, _ in _options(inner)]
    return next(
        (each for each in options if _is_class(each) or get_origin(each) in _MAPPINGS), None
    )


class ConfigKeyError(ValueError):
    """Raised for a table that does not match a config class.

    Attributes:
        path: The key that is wrong.
    """

    def __init__(self, path: KeyPath, message: str) -> None:
        super().__init__(message)
        self.path = path


def field_of(error: ValueError) -> str:
    """Return the field that a config class rejects: the first word of the error message."""
    return str(error).partition(" ")[0].rstrip(":")


def located(error: ValueError, path: KeyPath, table: Mapping[str, Any]) -> ConfigKeyError:
    """Return an error of a config class with its location: the rejected key, or else the table."""
    key, text = field_of(error), str(error)
    end = "" if text.endswith("?") else "."
    if key in table:
        return ConfigKeyError((*path, key), text.partition(" ")[2] + end)
    return ConfigKeyError(path, f"cannot be used: {text}{end}")


# ------------------------------------------------------------ types of the file


@cache
def keys_of(cls: Any) -> dict[str, Key]:
    """Return every field of a dataclass or struct as a key of the file."""
    described, hints = _descriptions(cls), hints_of(cls)
    return {
        _key_of(name): Key(hints[name], default, *secrecy, described.get(name, ""))
        for name, default, secrecy in _fields(cls)
    }


def _key_of(field: str) -> str:
    """Return the key of a field: `as` for `as_`, because no field can have the name of a keyword."""
    return field.removesuffix("_") if iskeyword(field.removesuffix("_")) else field


def _fields(cls: Any) -> Iterator[tuple[str, Any, tuple[bool, bool]]]:
    """Yield the name and default of each field, whether it is secret, and whether the file may contain its value."""
    if issubclass(cls, msgspec.Struct):
        for each in msgspec.structs.fields(cls):
            factory = each.default_factory
            default = each.default if factory is NODEFAULT else factory()
            yield each.name, MISSING if default is NODEFAULT else default, (False, False)
        return
    for field in dataclasses.fields(cls):
        if not field.init or ELSEWHERE in field.metadata:
            continue
        make: Any = field.default_factory
        default = field.default if make is MISSING else make()
        yield field.name, default, (not field.repr, field.metadata.get(WRITTEN, False))


def file_type(annotation: Any, *, is_secret: bool = False) -> Any:
    """Return the type of a field in the file for an annotation; None if a file cannot express it."""
    options = list(_options(annotation))
    classes = tuple(each for each, _ in options if _is_class(each))
    has_secret = is_secret and (str, ()) in options
    is_merged = len(classes) + has_secret > 1 and bool(classes)
    found: list[Any] = [_merged(classes, has_secret)] if is_merged else []
    for each, metadata in options:
        kind = dict[str, Any] if TABLE in metadata else _file_type(each, is_secret=is_secret)
        if kind is not None and not (is_merged and (each in classes or kind is Secret)):
            found.append(_ANNOTATED[kind, *metadata] if metadata else kind)
    return None if not found or found == [NoneType] else _UNION[tuple(found)]


def _file_type(annotation: Any, *, is_secret: bool) -> Any:
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
        values = list(_options(arguments[1]))
        plain = [each for each, _ in values if _file_type(each, is_secret=False) is not None]
        is_table = is_secret and plain == [str] and all(NAMED not in notes for _, notes in values)
        item = str | Secret if is_table else file_type(arguments[1], is_secret=is_secret)
        return None if item is None else dict.__class_getitem__((str, item))
    return file_class(annotation) if _is_class(annotation) else None


@cache
def file_class(cls: Any, tables: frozenset[str] | None = None) -> Any:
    """Return a dataclass with the keys of a class and of the classes that it is converted to.

    Args:
        cls: The class.
        tables: The tables to check; any other table that needs an import accepts every key. None checks all.
    """
    if cls is Secret:
        return cls
    keys = dict(keys_of(cls))
    if tables is not None:
        # Skip the classes of tables that the file does not have: importing them is slow.
        keys = {
            name: key._replace(annotation=dict[str, str])
            if name not in tables and isinstance(key.default, dict)
            else key
            for name, key in keys.items()
        }
    derived: Derived | None = getattr(cls, "derived", None)
    if derived is not None:
        keys = {**keys, **derived.keys(), **keys}
    fields = {name: (key.type, key.default, key.description) for name, key in keys.items()}
    rare = advanced_keys(cls) & fields.keys()
    if rare:
        inner = {name: field for name, field in fields.items() if name in rare}
        fields = {name: field for name, field in fields.items() if name not in rare}
        made = _made(f"Advanced{cls.__name__}", inner, _ABOUT_ADVANCED)
        fields[ADVANCED] = (_UNION[made, None], None, _ABOUT_ADVANCED)
    return _made(cls.__name__, fields, parse_docstring(cls.__doc__).description)


_ABOUT_ADVANCED = "Keys that few files need."


def _made(name: str, keys: Mapping[str, tuple[Any, Any, str]], description: str) -> Any:
    fields: list[Any] = []
    for key, (kind, default, words) in keys.items():
        if kind is None:
            continue
        annotation = _ANNOTATED[kind, msgspec.Meta(description=words)]
        # A struct rejects mutable defaults; the default of a table is an empty table.
        make = cast("Any", type(default))
        if make.__hash__ is None or hasattr(make, "__dataclass_fields__"):
            default = msgspec.field(default_factory=make)  # noqa: PLW2901
        name_of = f"{key}_" if iskeyword(key) else key
        fields.append(
            (name_of, annotation) if default is MISSING else (name_of, annotation, default)
        )
    made = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True, rename=_key_of)
    made.__doc__ = description
    return made


@cache
def _merged(classes: tuple[Any, ...], has_secret: bool) -> Any:
    """Return one table for several classes: its keys select the class, or `kind` names it."""
    keys: dict[str, tuple[Any, Any, str]] = {}
    if has_secret:
        keys = {name: (key.type, None, key.description) for name, key in keys_of(Secret).items()}
    else:
        kinds = _LITERAL[tuple(kinds_of(classes))]
        keys["kind"] = (kinds, MISSING, "Selects the kind of table.")
    for cls in classes:
        for name, key in keys_of(cls).items():
            if key.type is not None and name not in keys:
                keys[name] = (_UNION[key.type, None], None, key.description)
    title = "Credential" if has_secret else _ending(classes) or "Choice"
    return _made(title, keys, "; ".join(_summary(cls) for cls in classes))


def kinds_of(classes: Sequence[Any]) -> dict[str, Any]:
    """Return classes by the distinct part of their names: `page` and `link` for `PagePaging` and `LinkPaging`."""
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
    """Return the description of each field: the docstring below it, or its entry in the class or function docstring."""
    found = parse_docstring(cls.__doc__).names
    for base in reversed(cls.__mro__[:-1]):
        found |= parse_docstring(base.__dict__.get("__doc__")).names
        for field, text in itertools.pairwise(
            _class_bodies(base.__module__).get(base.__name__, ())
        ):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                words = str(text.value.value).partition("\n\n")[0]
                found[field.target.id] = " ".join(words.split())
    return found


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module; nothing if its source is not available."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {each.name: each.body for each in tree.body if isinstance(each, ast.ClassDef)}


def secrets_of(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Secret]]:
    """Yield each secret in an enabled table with its key path, except those in `options`."""
    if isinstance(value, Secret):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in cast("Mapping[str, Any]", value).items():
            yield from secrets_of(each, (*path, key))
    elif isinstance(value, tuple):
        for number, each in enumerate(cast("Sequence[Any]", value)):
            yield from secrets_of(each, (*path, number))
    elif dataclasses.is_dataclass(value) and getattr(value, "enabled", True):
        for field in dataclasses.fields(value):
            if field.name != "options":
                yield from secrets_of(getattr(value, field.name), (*path, field.name))


# ------------------------------------------------------------ building the classes from a file


Reveal: TypeAlias = Callable[[Secret, KeyPath], str]
"""Returns the value of a secret; the path is the key that names it."""

_CAPITAL = re.compile("(?<=[a-z0-9])[A-Z]")


class Builder(NamedTuple):
    """Builds config classes from the tables of a file, or from mappings in code."""

    reveal: Reveal | None = None
    """None if the values contain the secrets themselves, as in code."""

    resolve: Callable[[str], FilePath] = FilePath

    def fields(self, cls: Any, table: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
        """Return the values for the fields of a class; their names may be written in camelCase.

        Raises:
            ConfigKeyError: If a field is unknown, or a nested table does not match a class.
            ValueError: If a nested class rejects a value.
        """
        keys, found = keys_of(cls), dict[str, Any]()
        for key, value in table.items():
            name = _CAPITAL.sub(lambda match: f"_{match[0].lower()}", key)
            if name not in keys:
                where = ".".join(map(str, path)) or "config"
                message = f"{where}: there is no field {key!r}.{suggestion(name, keys)}"
                raise ConfigKeyError((*path, key), message)
            found[name] = self.value(
                keys[name].annotation, value, (*path, name), is_secret=keys[name].is_secret
            )
        return found

    def value(
        self, annotation: Any, value: Any, path: KeyPath = (), *, is_secret: bool = True
    ) -> Any:
        """Return a value for one field."""
        options = [each for each, notes in _options(annotation) if TABLE not in notes]
        if isinstance(value, str) and FilePath in options:
            return self.resolve(value)
        if isinstance(value, list):
            items = [get_args(each)[0] for each in options if get_origin(each) in _SEQUENCES]
            if not items:
                raise ConfigKeyError(path, f"{'.'.join(map(str, path))} may not be a list.")
            (item,) = items
            return tuple(
                self.value(item, each, (*path, number), is_secret=is_secret)
                for number, each in enumerate(cast("Sequence[Any]", value))
            )
        if isinstance(value, Mapping):
            table = dict(cast("Mapping[str, Any]", value))
            is_plain = options in ([], [NoneType])
            return table if is_plain else self._table(options, table, path, is_secret)
        return value

    def _table(
        self, options: Sequence[Any], table: dict[str, Any], path: KeyPath, is_secret: bool
    ) -> Any:
        classes = [each for each in options if _is_class(each)]
        secret_keys: Sequence[str] = ()
        if is_secret and str in options:
            secret_keys = ("token",) if self.reveal is None else ("env", "file")
            if self.reveal is None and table.keys() == {"token"}:
                return table["token"]
            if self.reveal and table.keys() <= {"env", "file"} and (table or not classes):
                return self.reveal(Secret(**table), path)
        if classes:
            return self._instance(classes, table, path, secret_keys)
        mappings = [each for each in options if get_origin(each) in _MAPPINGS]
        (item,) = (get_args(each)[1] for each in mappings if file_type(each) is not None)
        return {
            key: self.value(item, value, (*path, key), is_secret=is_secret)
            for key, value in table.items()
        }

    def _instance(
        self,
        classes: Sequence[Any],
        table: dict[str, Any],
        path: KeyPath,
        secret_keys: Sequence[str],
    ) -> Any:
        """Return an instance of the class that matches a table."""
        if secret_keys:
            cls = _best_class(classes, table, path, secret_keys)
        elif len(classes) == 1:
            cls = classes[0]
        else:
            kinds = kinds_of(classes)
            cls = kinds.get(str(table.pop("kind", "")))
            if cls is None:
                raise ConfigKeyError((*path, "kind"), f"must be one of {', '.join(kinds)}.")
        fields = self.fields(cls, table, path)
        if missing := [key for key in _required(cls) if key not in fields]:
            raise ConfigKeyError((*path, missing[0]), "is missing.")
        try:
            return cls(**fields)
        except ValueError as error:
            raise (located(error, path, table) if self.reveal else error) from error


def _best_class(
    classes: Sequence[Any], table: dict[str, Any], path: KeyPath, secret_keys: Sequence[str]
) -> Any:
    """Return the class that the keys of a table select.

    Raises:
        ConfigKeyError: If none has all the keys, or some are missing. It also names the keys of a secret.
    """
    fitting = [cls for cls in classes if table.keys() <= keys_of(cls).keys()]
    if not fitting or not table:
        ways = [", ".join(_required(cls) or keys_of(cls)) for cls in classes]
        raise ConfigKeyError(path, f"needs exactly one of: {'; '.join([*secret_keys, *ways])}.")
    missing = {cls: [key for key in _required(cls) if key not in table] for cls in fitting}
    best = min(fitting, key=lambda cls: (len(missing[cls]), -len(_required(cls))))
    if missing[best]:
        partner = next(iter(table))
        others = [keys[0] for cls, keys in missing.items() if cls is not best and len(keys) == 1]
        instead = f" Or give {' or '.join(others)}." if others else ""
        raise ConfigKeyError(
            (*path, missing[best][0]), f"is missing: it is required with {partner}.{instead}"
        )
    return best


def _required(cls: Any) -> list[str]:
    return [name for name, key in keys_of(cls).items() if key.default is MISSING]
