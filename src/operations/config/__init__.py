"""`operations.toml`: from a file to a `Config`, or to everything that is wrong with it."""

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from operations.base.files import expanded, modified_at, read_small
from operations.base.json.values import is_list, is_object, object_of, unescape
from operations.base.types import JSONObject
from operations.config.checks import ConfigError, ConfigIssue, KeyLines, Wording, check, written
from operations.config.model import Config, config_class, config_schema, entries_of
from operations.contract.options import (
    ADVANCED,
    Builder,
    KeyPath,
    Secret,
    advanced_keys,
    child,
    keys_of,
    placed,
    secrets_of,
)
from operations.mcp.config import read_servers
from operations.sources.contract import Entry

__all__ = [
    "Config",
    "ConfigError",
    "ConfigFile",
    "ConfigIssue",
    "Secret",
    "config_schema",
    "enforce_trusted",
    "find_config",
    "load_config",
    "parse_config",
]

FILE_NAME = "operations.toml"
MCP_FILES = ("mcp.json", ".mcp.json")
VARIABLE = "OPERATIONS_CONFIG"
TRUST_VARIABLE = "OPERATIONS_TRUST"

_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A config and its file.

    Attributes:
        config: The contents of the file.
        path: The file; None if there is no file and all values are the defaults.
        modified: The modification time of the file just before it was read; None if there is no file.
        program: The Python file that was given instead of a config. The `operations.toml` beside it is the config, if
            there is one.
    """

    config: Config = field(default_factory=config_class())
    path: Path | None = None
    modified: int | None = field(default=None, compare=False)
    program: Path | None = None

    @property
    def origin(self) -> Path | None:
        """The file that was given, from which this config can be read again."""
        return self.program or self.path

    @property
    def folder(self) -> Path:
        """The folder that paths are relative to."""
        return Path.cwd() if self.origin is None else self.origin.parent

    def resolve(self, path: str) -> Path:
        """Return a path of the file as an absolute path."""
        return self.folder / expanded(path)

    def store_url(self, url: str) -> str:
        """Return the address of a store; a `sqlite:` path is relative to this file."""
        scheme, _, path = url.partition(":")
        return f"sqlite:{self.resolve(path)}" if scheme == "sqlite" and path else url

    def secret(self, secret: Secret, key: KeyPath | None = None) -> str:
        """The secret itself; `key` is where the file names it, if that is known.

        Raises:
            ConfigError: If it cannot be read; the message names the place, never the secret.
        """

        def missing(message: str) -> ConfigError:
            named = (path for path, each in self.secrets() if each == secret)
            return self.error(message, next(named, ()) if key is None else key)

        if secret.env is not None:
            found = os.environ.get(secret.env)
            if not found:
                raise missing(f"needs the environment variable {secret.env}, which is not set.")
            return found
        path = self.resolve(secret.file or "")
        try:
            found = read_small(path).decode("utf-8-sig").strip()
        except (OSError, ValueError):
            raise missing(f"needs the secret in {path}, which cannot be read.") from None
        if not found:
            raise missing(f"needs the secret in {path}, which is empty.")
        return found

    def secrets(self) -> list[tuple[KeyPath, Secret]]:
        """Return every secret that the file names, by its key; disabled tables are skipped."""
        found = list(secrets_of(self.config))

        def note(secret: Secret, path: KeyPath) -> str:
            found.append((path, secret))
            return "secret"

        for path, entry in entries_of(self.config):
            if getattr(entry, "enabled", True):
                for cls in entry.classes():
                    Builder(note, self.resolve).fields(cls, entry.of(cls), path)
        return list(dict.fromkeys(found))

    def existing(self, path: str, key: str) -> Path:
        """Return the absolute path of a file that the config names at `key`.

        Raises:
            ConfigError: If there is no such file.
        """
        found = self.resolve(path)
        if not found.is_file():
            raise self.error(f"names no file: there is no {path}.", key)
        return found

    def options(self, cls: Any, entry: Entry, revealed: list[str] | None = None) -> dict[str, Any]:
        """Return the fields of one of the classes that a table is converted to, with their secrets.

        Args:
            cls: The class.
            entry: The table.
            revealed: Receives the secrets.

        Raises:
            ConfigError: If a secret cannot be read.
            ValueError: If a nested class rejects a value.
        """
        paths = (path for path, each in entries_of(self.config) if each is entry)

        def reveal(secret: Secret, key: KeyPath) -> str:
            found = self.secret(secret, key)
            if revealed is not None:
                revealed.append(found)
            return found

        return Builder(reveal, self.resolve).fields(cls, entry.of(cls), next(paths, ()))

    def error(self, message: str, key: str | KeyPath = "") -> ConfigError:
        """Return an error for a file, address or module that this config names and that cannot be used.

        Args:
            message: What is wrong with it.
            key: The key that names it, in dotted form if none of its parts contains a dot.
        """
        path = placed(
            type(self.config), tuple(key.split(".")) if isinstance(key, str) and key else key or ()
        )
        place = _shown(self.path or self.program or Path(FILE_NAME))
        line = self._line(path) if path else None
        return ConfigError([ConfigIssue(place, line, written(path), message)])

    def _line(self, key: KeyPath) -> int | None:
        """Return the line of a key, as far as the file can still be read."""
        if self.path is None:
            return None
        try:
            return KeyLines(_text(self.path)).line(key)
        except ConfigError:
            return None


def find_config(start: Path) -> Path | None:
    """Return the config for the folder `start`: the file that `OPERATIONS_CONFIG` names, or the nearest config file.

    Searches for `operations.toml` in the folder and its parents, then for `mcp.json` or `.mcp.json` in the folder
    itself.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    for folder in (start, *start.parents):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    return next((start / name for name in MCP_FILES if (start / name).is_file()), None)


def enforce_trusted(path: Path) -> None:
    """Raise an error if another user owns a config that was found by search, because a config can run any program.

    A config is trusted if it belongs to this user, to root or, for root, to the user who called `sudo`; if
    `OPERATIONS_CONFIG` names it; or if it is at or below a path in `OPERATIONS_TRUST` (separated as in `PATH`).

    Raises:
        ConfigError: If another user owns it; the message explains how to trust it.
    """
    if not hasattr(os, "geteuid") or os.environ.get(VARIABLE):
        return
    allowed = {os.geteuid(), 0}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        allowed.add(int(os.environ["SUDO_UID"]))
    where = path.resolve()
    # The owner of a link or of its folder can also change which file is read.
    places = (path.stat(), path.lstat(), path.parent.stat())
    stranger = next((place.st_uid for place in places if place.st_uid not in allowed), None)
    named = [entry for entry in os.environ.get(TRUST_VARIABLE, "").split(os.pathsep) if entry]
    if stranger is None or any(where.is_relative_to(Path(entry).resolve()) for entry in named):
        return
    raise ConfigFile(path=path).error(
        f"belongs to another user (id {stranger}), and can run programs as you. If you trust it, add"
        f" --trust, or set {TRUST_VARIABLE}={shlex.quote(str(where.parent))}."
    )


def load_config(path: Path) -> ConfigFile:
    """Read a config file: TOML, an `mcp.json`, which contains only MCP servers, or a Python file.

    The config of a Python file is the `operations.toml` beside it, with the file as one of its `modules`.

    Raises:
        ConfigError: With all errors, each with its line and key.
    """
    path = path.absolute()
    if path.suffix == ".py":
        return _load_program(path)
    modified, text = modified_at(path), _text(path)
    if path.suffix == ".json":
        config = config_class()(mcp_json=(path.name,))
        file = ConfigFile(config=config, path=path, modified=modified)
        try:
            read_servers(path)
        except ValueError as error:
            raise file.error(str(error)) from None
        return file
    return ConfigFile(config=parse_config(text, path), path=path, modified=modified)


def _load_program(path: Path) -> ConfigFile:
    """Return the config of a Python file."""
    if not path.is_file():
        raise ConfigFile(path=path).error("there is no such file.")
    beside = path.with_name(FILE_NAME)
    if not beside.is_file():
        return ConfigFile(config=config_class()(modules=(path.name,)), program=path)
    file = load_config(beside)
    listed = (file.resolve(each) for each in file.config.modules)
    if path not in listed:
        config = replace(file.config, modules=(path.name, *file.config.modules))
        file = replace(file, config=config)
    return replace(file, program=path)


def parse_config(text: str, path: Path) -> Config:
    """Return the config in `text`, as if it were in the file `path`.

    Raises:
        ConfigError: As `load_config`.
    """
    file = _shown(path)
    try:
        # Dates become texts, so that a revision of a protocol needs no quotes.
        document = msgspec.to_builtins(tomllib.loads(text, parse_float=_number))
    except (ValueError, RecursionError) as error:
        raise ConfigError([_no_toml(file, text, error)]) from None
    try:
        sinks = object_of(document.get("record"))
        cls, schema = config_class(document, sinks), config_schema(document, sinks)
    except ValueError as error:
        raise ConfigError([ConfigIssue(file, None, "", f"{error}.")]) from error
    wording = Wording(dict(schema.document))  # type: ignore[arg-type]
    wrong: list[tuple[KeyPath, str]] = []
    for each in schema.errors(document):
        where, value = _located(each.path, document)
        wrong.append((where, wording.message(where, value, each)))
    known = {where for where, _ in wrong}
    wrong += [each for each in _unusable(document) if each[0] not in known]
    tables = {"tools", "record", *(kind.table for kind in cls().kinds)}
    sound = _without(document, [where for where, _ in wrong], tables)
    config = cls()
    try:
        config = msgspec.convert(_with_options(sound, cls), cls)
    except msgspec.ValidationError as error:
        wrong.append(((), f"{error}."))
    else:
        found = check(config, path.parent, is_whole=not wrong)
        wrong += [(placed(cls, where), message) for where, message in found]
    if wrong:
        lines = KeyLines(text)
        raise ConfigError(
            ConfigIssue(file, lines.line(where), written(where), message)
            for where, message in wrong
        )
    return config


def _number(text: str) -> int | float:
    """Return a whole number as an integer, because JSON Schema does not distinguish 1.0 from 1."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _unusable(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the keys whose texts and numbers no setting can hold, with messages."""
    if isinstance(value, str) and "\0" in value:
        yield path, "contains NUL."
    elif isinstance(value, int) and abs(value) > sys.float_info.max:
        yield path, "is out of range."
    elif is_object(value) or is_list(value):
        for key, each in value.items() if is_object(value) else enumerate(value):
            yield from _unusable(each, (*path, key))


def _without(
    document: JSONObject, wrong: Collection[KeyPath], tables: Collection[str]
) -> JSONObject:
    """Return the document without the tables that have errors: `mcp.a` for `mcp.a.url`, `serve` for `serve.port`.

    Each entry of `tables`, which contain tables, is checked on its own.
    """
    removed = {where[: 2 if where[0] in tables else 1] for where in wrong if where}
    sound = {key: value for key, value in document.items() if (key,) not in removed}
    for key in tables & sound.keys():
        sound[key] = {name: each for name, each in sound[key].items() if (key, name) not in removed}
    return sound


def _flat(table: JSONObject, cls: Any) -> JSONObject:
    """Return a table with the keys of its table `advanced` beside the others."""
    if not advanced_keys(cls):
        return table
    rest = {key: value for key, value in table.items() if key != ADVANCED}
    return {**rest, **object_of(table.get(ADVANCED))}


def _with_options(table: Any, cls: Any) -> Any:
    """Return a table with the keys of library classes moved to `options`, also in nested tables."""
    result: JSONObject = {}
    for key, value in _flat(table, cls).items():
        kind = keys_of(cls)[key].annotation if key in cls.__dataclass_fields__ else None
        inner = next(
            (each for each in (kind, *get_args(kind)) if hasattr(each, "__dataclass_fields__")),
            None,
        )
        if kind is None:
            # The table of a class of the library, such as `serve.mcp`.
            if is_object(value) and ADVANCED in value and advanced_keys(inner := child(cls, key)):
                value = _flat(value, inner)  # noqa: PLW2901
            result.setdefault("options", {})[key] = value
        elif inner is None or inner is Secret:
            result[key] = value
        elif get_origin(kind) is dict:
            result[key] = {name: _with_options(each, inner) for name, each in value.items()}
        else:
            result[key] = _with_options(value, inner)
    return result


def _text(path: Path) -> str:
    reason = ""
    try:
        return read_small(path).decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        reason = "there is no such file. `operations init` writes one; `operations dev FILE.py` needs none."
    except UnicodeDecodeError:
        reason = "is not UTF-8 text."
    except OSError as error:
        reason = f"cannot be read: {error.strerror}."
    raise ConfigFile(path=path).error(reason)


def _no_toml(file: str, text: str, error: ValueError | RecursionError) -> ConfigIssue:
    message = str(error)
    position = _POSITION.search(message)
    if position is None:
        return ConfigIssue(file, None, "", f"this is not TOML: {message}.")
    line = int(position[1] or len(text.splitlines()) or 1)
    return ConfigIssue(file, line, "", f"this is not TOML: {message[: position.start()]}.")


def _located(pointer: str, document: JSONObject) -> tuple[KeyPath, Any]:
    """Return a JSON pointer as keys and list positions, and the value there; None if there is none."""
    path: list[str | int] = []
    value: Any = document
    for token in pointer.split("/")[1:]:
        if is_list(value):
            path.append(int(token))
            value = value[int(token)]
        else:
            path.append(unescape(token))
            value = object_of(value).get(unescape(token))
    return tuple(path), value


def _shown(path: Path) -> str:
    """Return a path in its shortest form: relative to the current folder if that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
