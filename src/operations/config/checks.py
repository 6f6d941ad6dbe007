"""Check a config, and explain each error to the person who fixes it.

Rule 1: an error names the place (file, line, key), the expected value, and a suggestion.
Rule 2: no message shows a value, because it may be a misplaced secret.
Rule 3: finding the lines of keys never fails. A key inside an inline table or a long list has the line of its value.
Rule 4: a check covers one table, yields `(path, message)` pairs, and uses no network. A missing file or secret is not
        an error of the config: opening the source reports it.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeAlias

from operations.base.errors import OperationsError, SchemaError
from operations.base.json.references import followed
from operations.base.json.values import is_list, is_object, object_of
from operations.base.text import suggestion
from operations.base.types import JSONObject
from operations.config import model
from operations.contract.options import (
    ADVANCED,
    Builder,
    ConfigKeyError,
    Secret,
    field_of,
    located,
    secrets_of,
)
from operations.contract.options import KeyPath as Path
from operations.schema import ValidationIssue, assert_is_schema
from operations.sources.checks import namespace, split
from operations.sources.contract import Entry, SourceEntry
from operations.tools.settings import is_pattern

# ------------------------------------------------------------ line numbers of keys

_MAY_END = re.compile(r"""(?:[]}]|"{3}|'{3})\s*(?:#.*)?$""")
"""Found in the last line of a value that spans several lines. Trying to parse every line would take long."""


class KeyLines:
    """The line numbers of the keys in a TOML text."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {}
        table: Path = ()
        last_items: dict[Path, int] = {}
        for number, statement, is_header in _statements(text):
            found, path = statement, () if is_header else table
            while is_object(found) and len(found) == 1:
                ((key, found),) = found.items()
                path += (key,)
                if is_header and is_object(found) and found and path in last_items:
                    path += (last_items[path],)
            if is_header and is_list(found):
                last_items[path] = last_items.get(path, -1) + 1
                path += (last_items[path],)
            table = path if is_header else table
            for length in range(1, len(path) + 1):
                self._lines.setdefault(path[:length], number)

    def line(self, path: Path) -> int | None:
        """Return the line of a key, or of the nearest enclosing table with a known line, counted from 1."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path)


def _statements(text: str) -> Iterator[tuple[int, Any, bool]]:
    """Yield the first line number and the value of each statement, and whether it is the header of a table."""
    first, statement = 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        if first < number and not _MAY_END.search(line):
            continue
        with suppress(tomllib.TOMLDecodeError):
            # Otherwise the value continues in the next line.
            yield first, tomllib.loads(statement), statement.lstrip().startswith("[")
            first, statement = number + 1, ""


# ------------------------------------------------------------ explanations

_SECRETS = frozenset({"Secret", "Credential"})
_BY_NAME = '{ env = "NAME" } or { file = "PATH" }'


@dataclass(frozen=True, slots=True)
class ConfigIssue:
    """One error in a config file."""

    file: str

    line: int | None
    """The line number, counted from 1; None if the error has no location."""

    key: str
    """The key in dotted form, such as `serve.port`; empty for the whole file."""

    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key} {self.message}" if self.key else f"{place}: {self.message}"


class ConfigError(OperationsError, ValueError):
    """A config file cannot be used.

    Attributes:
        issues: All errors, in the order of the file.
    """

    def __init__(self, issues: Iterable[ConfigIssue]) -> None:
        self.issues = sorted(issues, key=lambda issue: issue.line or 0)
        super().__init__("\n".join(map(str, self.issues)))


def written(path: Path) -> str:
    """Return a path as a TOML key."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part.replace("-", "").replace("_", "").isalnum() and part.isascii()
            text += ("." if text else "") + (part if plain else f'"{part}"')
    return text


class Wording:
    """Explains why a document does not match the schema of the file."""

    def __init__(self, schema: JSONObject) -> None:
        self._schema = schema

    def message(self, path: Path, value: Any, issue: ValidationIssue) -> str:
        """Return the explanation of one failure at `path`, where the document has `value`."""
        match issue.keyword:
            case "additionalProperties":
                return self._unknown(path)
            case "required":
                about = self._at(path).get("description", "")
                return f"is missing. {about}" if about else "is missing."
            case "enum":
                near = suggestion(str(value), self._at(path).get("enum", ()))
                return f"{issue.message}.{near}"
            case "pattern" if path[-1] == "sha256":
                return "must be the 64 hexadecimal digits of a SHA-256."
            case "type" | "anyOf":
                return self._wrong_type(path, value, issue)
            case _:
                return f"{issue.message}."

    def _unknown(self, path: Path) -> str:
        key, options = str(path[-1]), self._options(self._at(path[:-1]))
        known = [name for option in options for name in option.get("properties", ())]
        table = path[:-1]
        rare = self._known((*table, ADVANCED)) if ADVANCED in known else []
        if key in rare:
            return f"is an advanced key: write it into [{written((*table, ADVANCED))}]."
        if table and table[-1] == ADVANCED and key in self._known(table[:-1]):
            return f"is not an advanced key: write it into [{written(table[:-1])}]."
        if near := suggestion(key, known):
            return f"is not a known key.{near}"
        if near := suggestion(key, rare):
            return "is not a known key." + near.replace('"', f'"{ADVANCED}.', 1)
        if homes := [home for home in self._homes(key) if home != written(path)]:
            return f'is not a known key here. Did you mean "{homes[0]}"?'
        return f"is not a known key. Known keys: {', '.join(known)}."

    def _known(self, table: Path) -> list[str]:
        """Return the keys of a table."""
        options = self._options(self._at(table))
        return [name for option in options for name in option.get("properties", ())]

    def _homes(self, key: str) -> Iterator[str]:
        """Yield the tables one level below that have a key of this name."""
        for name in self._schema["properties"]:
            known = self._known((name,))
            if key in known and key != ADVANCED:
                yield f"{name}.{key}"
            if ADVANCED in known and key in self._known((name, ADVANCED)):
                yield f"{name}.{ADVANCED}.{key}"

    def _wrong_type(self, path: Path, value: Any, issue: ValidationIssue) -> str:
        expected = self._at(path)
        options = self._options(expected) if "anyOf" in expected else []
        titles = {option.get("title") for option in options}
        if expected.get("title") in _SECRETS and isinstance(value, str):
            return f"must be {_BY_NAME}: secrets do not belong in this file."
        if titles & _SECRETS:
            words = [f'"{word}"' for option in options for word in option.get("enum", ())]
            return f"must be {' or '.join(words) or 'a string'}, or {_BY_NAME}."
        # TOML has other names for these types.
        message = issue.message.replace("an object", "a table").replace("an array", "a list")
        if expected.get("type") == "object":
            return f"{message}. Write it as [{written(path)}]."
        if expected.get("type") == "array":
            return f"{message}. Put it in brackets: [ ... ]."
        return f"{message}."

    def _options(self, schema: JSONObject) -> list[JSONObject]:
        """Return the alternatives of a schema; the schema itself if it has none."""
        return [followed(each, self._schema)[0] for each in schema.get("anyOf", (schema,))]

    def _at(self, path: Path) -> JSONObject:
        """Return the schema of the value at `path`; empty if there is none."""
        schema = self._schema
        for part in path:
            found = [inner for each in self._options(schema) if (inner := _inside(each, part))]
            schema = followed(found[0], self._schema)[0] if found else {}
        return schema


def _inside(schema: JSONObject, part: str | int) -> JSONObject:
    """Return the schema of one item or property; empty if it has none."""
    rest: Any = schema.get("items" if isinstance(part, int) else "additionalProperties")
    found: JSONObject = schema.get("properties", {}).get(part, rest or {})
    return found


# ------------------------------------------------------------ rules that a schema cannot express

Found: TypeAlias = Iterator[tuple[Path, str]]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check(config: model.Config, folder: FilePath, *, is_whole: bool) -> Found:
    """Yield all errors of `config`; its paths are relative to `folder`.

    Unless the config is the whole file, rules that connect several tables are not checked.
    """
    for number, module in enumerate(config.modules):
        if not module:
            yield ("modules", number), "is empty. Name a package, a folder or a file."
    for path, secret in secrets_of(config):
        yield from _secret(secret, path)
    if is_whole:
        yield from _stores(config)
    for path, entry in model.entries_of(config):
        if not is_whole and isinstance(entry, model.ServeEntry):
            continue
        issues = list(_entry(entry, path, config, folder))
        yield from issues or _rejected(entry, path, folder)


def _stores(config: model.Config) -> Found:
    """Check that every process can use the stores of grants and approvals, and the ledger."""
    state, ledger = config.state, config.record.ledger
    is_kept = config.access.grants is not None or any(
        each.options.get("approve") for each in config.tools.values()
    )
    if config.serve.processes > 1:
        if is_kept and not state.is_shared:
            yield (
                ("serve", "processes"),
                "needs a store that processes share for grants and approvals: add [state] url.",
            )
        if ledger is not None and "{pid}" not in ledger.file:
            yield (
                ("record", "ledger", "file"),
                "must contain {pid}: each process needs a file of its own.",
            )
    if ledger is not None and "{pid}" in ledger.file and "{pid}" not in (ledger.head or "{pid}"):
        yield (
            ("record", "ledger", "head"),
            "must contain {pid}, like file: each process needs a head of its own.",
        )
    for kind in config.kinds:
        for name, source in config.tables(kind.table).items():
            if source.delegates and config.access.grants is None:
                yield (kind.table, name, source.delegates), "needs [access.grants]."
    if state.broker is not None and state.broker not in config.tables("brokers"):
        yield ("state", "broker"), "is not a broker of this file."
    if config.runs is not None and config.runs.url is None and not _keeps_runs(state.url):
        yield ("runs",), "lacks url: [state] url is neither SQLite nor PostgreSQL."
    mcp = config.serve.options.get("mcp")
    if config.code is None and is_object(mcp) and mcp.get("disclosure") == "code":
        yield ("serve", "mcp", "disclosure"), "needs the table [code]."
    if state.broker is not None and state.url is not None:
        yield ("state", "url"), "cannot be used together with broker."
    if state.key is not None and not state.is_shared:
        yield ("state", "key"), "needs url or broker: without them, nothing is stored."


def _keeps_runs(url: str | None) -> bool:
    return url is not None and url.startswith(("sqlite:", "postgresql:", "postgres:"))


def _entry(entry: Entry, path: Path, config: model.Config, folder: FilePath) -> Found:
    """Check one table, also for conflicts with other tables."""
    match entry:
        case SourceEntry():
            yield from _source(entry, path, config, folder)
        case model.ToolEntry():
            yield from _tool(entry, path)
        case model.KeyEntry():
            yield from _key(entry, path)
        case model.ServeEntry():
            yield from _serve(entry, config)
        case _:
            pass


def _source(entry: SourceEntry, path: Path, config: model.Config, folder: FilePath) -> Found:
    """Check the table of a source: what its kind requires, and that no other source has its namespace."""
    for short, key in entry.short.items():
        if getattr(entry, short, None) and key in entry.options:
            yield (*path, key), f"cannot be used together with {short}, which sets the same value."
    table, name = str(path[0]), str(path[1])
    owners = [each for each in config.kinds if each.owns_namespace]
    kind = next(each for each in config.kinds if each.table == table)
    if kind in owners:
        yield from namespace(name, path)
        for other in owners[: owners.index(kind)]:
            if name in config.tables(other.table):
                yield path, f"has the same namespace as [{other.table}.{name}]. Rename one of them."
    yield from kind.check(entry, path, folder)
    own = entry.options.get("namespace")
    if kind not in owners and any(own in config.tables(each.table) for each in owners):
        yield (*path, "namespace"), f"has a namespace that is already in use: {own}."


def _rejected(entry: Entry, path: Path, folder: FilePath) -> Found:
    """Report errors of the library's config class, built with a placeholder for every secret."""
    secrets: set[str | int] = set()

    def reveal(secret: Secret, where: Path) -> str:
        for wrong, message in _secret(secret, where):
            raise ConfigKeyError(wrong, message)
        secrets.add(where[len(path)])
        return "secret"

    for cls in entry.classes():
        field = entry.derived.named
        named = {} if field is None else {field: path[-1]}
        try:
            cls(**Builder(reveal, folder.joinpath).fields(cls, entry.of(cls), path), **named)
        except ConfigKeyError as error:
            yield error.path, str(error)
        except ValueError as error:
            if not isinstance(error.__context__, OSError) and not secrets & {field_of(error)}:
                # A missing file is reported when the source is opened, and a secret is checked when it is read.
                found = located(error, path, entry.options)
                yield found.path, str(found)


def _secret(secret: Secret, path: Path) -> Found:
    if (secret.env is None) == (secret.file is None):
        yield path, "needs exactly one of env and file."
    elif secret.env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", secret.env):
        yield (*path, "env"), "is not the name of an environment variable. Is it the secret itself?"


def _tool(entry: model.ToolEntry, path: Path) -> Found:
    if "rename" in entry.options and is_pattern(str(path[1])):
        yield (*path, "rename"), "works for one operation, not for a pattern."
    try:
        assert_is_schema(object_of(entry.options.get("approve")).get("when", True))
    except SchemaError as error:
        yield (*path, "approve", "when"), f"is not a JSON Schema: {error}."


def _key(entry: model.KeyEntry, path: Path) -> Found:
    if (entry.key is None) == (entry.sha256 is None):
        yield path, "needs exactly one of key and sha256."
    for resource in entry.options.get("resources", ()):
        if ":" not in resource:
            yield (*path, "resources", resource), 'must be "type:id", or "type:*" for all.'


def _serve(serve: model.ServeEntry, config: model.Config) -> Found:
    options, access = serve.options, config.access
    if serve.processes > 1:
        yield from _shared(config)
    origins: list[str] = options.get("allowed_origins", [])
    # The function may add an authentication method, which is checked before the server listens.
    guarded = access.keys or access.jwt is not None or config.setup or options.get("public")
    host: str = options.get("host", _LOOPBACK[0])
    if host not in _LOOPBACK and not guarded:
        yield (
            ("serve", "host"),
            "accepts requests of other machines without authentication: add [access.keys.NAME], or public = true.",
        )
    if access.authorization_servers and not options.get("public_url"):
        message = "needs serve.public_url: tokens are issued for this address."
        yield ("access", "authorization_servers"), message
    for number, origin in enumerate(origins):
        parts = split(origin)
        if origin == "*" or parts.scheme not in {"http", "https"} or parts.path or not parts.netloc:
            yield (
                ("serve", "allowed_origins", number),
                "must be an origin such as https://example.com, without a path.",
            )


def _shared(config: model.Config) -> Found:
    """Report settings that need shared state and therefore do not work with several processes."""
    only = "can be used only with serve.processes = 1:"
    if config.serve.options.get("console"):
        yield ("serve", "console"), f"{only} a session exists in one process only."
    for name, tool in config.tools.items():
        if "max_bytes" in tool.options:
            yield ("tools", name, "max_bytes"), f"{only} a cursor exists in one process only."
