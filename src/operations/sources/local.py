"""Find operations in a folder or package of Python modules.

Scanning imports code, so scan only modules that the operator trusts. A broken module is skipped and reported; it does
not prevent the others from being found.
"""

import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import count
from os import PathLike
from pathlib import Path, PurePath, PurePosixPath
from traceback import StackSummary, TracebackException
from types import ModuleType
from typing import Any, TypeAlias, cast

from msgspec.structs import replace

from operations.base.errors import RegistrationError
from operations.contract.context import OperationContext
from operations.contract.functions import operation_of
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.registry.registry import OperationRegistry
from operations.sources.contract import Skipped

logger = logging.getLogger("operations")

Read: TypeAlias = Callable[[str], bytes | str | Iterable[str]]
"""Returns the source of a file, or the names in a folder, where names of folders end in `/`.

Raises `OSError` or `LookupError` for a path that does not exist.
"""

_LIBRARY = __name__.partition(".")[0]
_FOLDER = str(Path(__file__).parent.parent)
_SPEC_KEYS = frozenset({"name", "namespace", "type"})
"""A mapping with these keys is treated as a spec, under any name."""


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The result of a scan. Iterate it for the operations to pass to `registry.register_all`."""

    operations: list[Operation] = field(default_factory=list[Operation])

    specs: list[OperationSpec] = field(default_factory=list[OperationSpec])
    """Contracts without a handler."""

    skipped: list[Skipped] = field(default_factory=list[Skipped])

    registries: list[OperationRegistry] = field(default_factory=list[OperationRegistry])
    """The registries in the modules, whose operations are among these."""

    def __iter__(self) -> Iterator[Operation | OperationSpec]:
        yield from self.operations
        yield from self.specs

    def __len__(self) -> int:
        return len(self.operations) + len(self.specs)


def scan_operations(
    source: str | PathLike[str] | ModuleType, *, read: Read | None = None
) -> ScanResult:
    """Import every module of `source` and collect the operations in it.

    A module offers operations as functions marked by `@operation`, as `Operation` objects, in an `OperationRegistry`,
    or as specs (an `OperationSpec`, or its JSON) under any public name. The handler of a spec is the function
    `<name>_handler`; or `handler`, if the spec is called `operation` or is the only spec of its module; or the value of
    `handler` in a mapping.

    Args:
        source: A folder, a Python file, the name of a package, or a package.
        read: Reads files and folders instead of the file system; see `Read`. `source` is then a path that it accepts.

    Raises:
        FileNotFoundError: If `source` is neither a path nor a package that can be found, or is this library.
    """
    found = find_operations(source, read)
    for skipped in found.skipped:
        logger.warning("skipped %s: %s", skipped.where, skipped.reason)
    return found


def find_operations(
    source: str | PathLike[str] | ModuleType, read: Read | None = None
) -> ScanResult:
    """As `scan_operations`, without logging what was skipped."""
    scan = _Scan()
    if not isinstance(source, ModuleType) and not str(source):
        raise FileNotFoundError("name a folder, a Python file or a package; '.' is this folder")
    if read is not None:
        scan.files(str(source), read)
    elif isinstance(source, ModuleType):
        scan.package(source.__name__)
    elif Path(source).exists():
        scan.folder(Path(source).resolve())
    elif source == _LIBRARY:
        raise FileNotFoundError(
            "operations is the name of this library: rename your own module, or give its path, such as 'operations.py'"
        )
    elif isinstance(source, str) and _can_be_found(source):
        scan.package(source)
    else:
        raise FileNotFoundError(f"{source!s} is neither a file, a folder nor a package")
    return scan.result


def _can_be_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001 - finding a module imports its parents, which may fail in any way
        return False


def _is_spec(name: str, value: object) -> bool:
    if isinstance(value, OperationSpec):
        return not name.startswith("_")
    return isinstance(value, Mapping) and (
        name == "operation" or (not name.startswith("_") and value.keys() >= _SPEC_KEYS)
    )


def _hint(error: BaseException, file: Path) -> str:
    """Return advice for a module that imports a sibling module by its bare name."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or file.suffix != ".py":
        return ""
    wanted = error.name.partition(".")[0]
    beside = file.parent / wanted
    if not beside.is_dir() and not beside.with_suffix(".py").is_file():
        return ""
    return (
        f"; {wanted} lies beside it: write `from . import {wanted}` (or `from .{wanted} import ...`), "
        "or put the folder on sys.path"
    )


def _traceback(error: BaseException) -> str:
    """Return the traceback of an import that failed, without the lines of this library and of Python's import."""
    found = TracebackException.from_exception(error, compact=True)
    for each in (found, found.__cause__, found.__context__):
        if each is not None:
            own = [frame for frame in each.stack if not _is_internal(frame.filename)]
            each.stack = StackSummary.from_list(own)
    return "".join(found.format()).strip()


def _is_internal(file: str) -> bool:
    return file.startswith(("<frozen importlib", _FOLDER)) or file == importlib.__file__


class _Reader(MetaPathFinder, InspectLoader):
    """Imports the modules of a synthetic package through `read`."""

    def __init__(self, package: str, root: str, read: Read) -> None:
        self._package = package
        self._root = root
        self._read = read
        _make_package(package, root)
        sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{self._package}."):
            return None
        found = self._find(fullname)
        return found and importlib.util.spec_from_loader(fullname, self, origin=found[0])

    def is_package(self, fullname: str) -> bool:
        found = self._find(fullname)
        return found is not None and found[2]

    def get_source(self, fullname: str) -> str | None:
        found = self._find(fullname)
        return found and found[1]

    def _find(self, fullname: str) -> tuple[str, str, bool] | None:
        """Return the file of a module, its source, and whether it is a package."""
        path = PurePosixPath(self._root, *fullname.split(".")[1:])
        # A folder without `__init__.py` is a package too.
        for file, is_package in (
            (f"{path}/__init__.py", True),
            (f"{path}.py", False),
            (str(path), True),
        ):
            with suppress(OSError, LookupError):
                found = self._read(file)
                text = importlib.util.decode_source(found) if isinstance(found, bytes) else found
                return file, text if isinstance(text, str) else "", is_package
        return None


_scans = count()
_importing = ContextVar("_importing", default=False)


def is_importing() -> bool:
    """Return whether this code runs because a scan imports its module."""
    return _importing.get()


def _make_package(name: str, root: str) -> None:
    """Let modules below `root` be imported as modules of a package called `name`."""
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [root]


def _walk(folder: PurePath, read: Read) -> Iterator[PurePath]:
    """Yield the Python files below `folder`, sorted."""
    for name in sorted(cast("Iterable[str]", read(str(folder)))):
        if name.endswith("/"):
            yield from _walk(folder / name, read)
        elif name.endswith(".py"):
            yield folder / name


def _of_registry(known: Operation, registry: OperationRegistry) -> Operation:
    """Return an operation that can be called in another registry as in its own."""
    if known.output is None and registry.output != "cast":
        known = replace(known, output=registry.output)
    if known.calls is None and registry.calls:
        known = replace(known, calls=registry.calls)
    operation_id, is_plain = known.spec.id, not (registry.observed or registry.has_remote)
    if known.spec.type is OperationType.SUBSCRIPTION:
        if is_plain and not registry.stream_middleware:
            return known

        async def subscribe(input: Any, context: OperationContext) -> AsyncIterator[Any]:
            async with aclosing(registry.subscribe(operation_id, input, context)) as items:
                async for item in items:
                    yield item

        return replace(known, handler=subscribe, blocking=None, reader=None)
    if is_plain and not registry.middleware:
        return known

    async def execute(input: Any, context: OperationContext) -> Any:
        return await registry.execute(operation_id, input, context)

    return replace(known, handler=execute, blocking=None, reader=None)


class _Scan:
    """The state of one scan: the operations found so far, by id."""

    def __init__(self) -> None:
        self.result = ScanResult()
        self._taken: dict[str, tuple[object, str]] = {}

    def folder(self, path: Path) -> None:
        """Scan the module at `path`, or all modules below it.

        They are imported below a synthetic package, so that relative imports work and names do not clash with installed
        modules.
        """
        root = path if path.is_dir() else path.parent
        package = f"_operations_{sha256(os.fsencode(root)).hexdigest()[:16]}"
        _make_package(package, str(root))
        self._files(package, root, sorted(path.rglob("*.py")) if path.is_dir() else [path])

    def files(self, path: str, read: Read) -> None:
        """Scan the module at `path`, or all modules below it, through `read`.

        Raises:
            FileNotFoundError: If `read` does not find `path`.
        """
        try:
            is_file = isinstance(read(path), (str, bytes))
        except (OSError, LookupError) as error:
            raise FileNotFoundError(f"{path} cannot be read: {error!r}") from error
        source = PurePosixPath(path)
        root = source.parent if is_file else source
        package = f"_operations_read_{next(_scans)}"
        _Reader(package, str(root), read)
        self._files(package, root, [source] if is_file else _walk(root, read))

    def _files(self, package: str, root: PurePath, files: Iterable[PurePath]) -> None:
        for file in files:
            parts = file.relative_to(root).with_suffix("").parts
            if any(part.startswith(".") or part == "__pycache__" for part in parts):
                continue
            if not all(part.isidentifier() for part in parts):
                self._skip(str(file), "its path is not a module name")
                continue
            if parts[-1] == "__main__":
                continue
            names = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
            self._module(".".join((package, *names)), str(file))

    def package(self, name: str) -> None:
        """Scan a package, given by name, and all modules below it."""
        package = self._module(name, name)
        path = getattr(package, "__path__", None)
        if path is not None:
            for found in pkgutil.iter_modules(path, f"{name}."):
                if found.ispkg:
                    self.package(found.name)
                elif not found.name.endswith(".__main__"):
                    self._module(found.name, found.name)

    def _module(self, name: str, where: str) -> ModuleType | None:
        token = _importing.set(True)
        try:
            module = importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a module may fail, or exit, in any way it likes
            reason = f"{type(error).__name__}: {error}{_hint(error, Path(where))}"
            self.result.skipped.append(Skipped(where, reason, _traceback(error)))
            return None
        finally:
            _importing.reset(token)
        self._collect(module, where)
        return module

    def _collect(self, module: ModuleType, where: str) -> None:
        specs: dict[str, Any] = {}
        for value in tuple(vars(module).values()):
            if isinstance(value, OperationRegistry) and value not in self.result.registries:
                self._add_registry(value, where)
        for name, value in tuple(vars(module).items()):
            try:
                found = operation_of(value)
                is_spec = _is_spec(name, value)
            except Exception as error:  # noqa: BLE001 - a proxy may refuse to be looked at
                self._skip(f"{where}: {name}", f"{type(error).__name__}: {error}")
                continue
            if found is not None:
                if not any(
                    each.registered(found.spec.id) is found for each in self.result.registries
                ):
                    self._add(found, found.spec.id, where)
            elif is_spec:
                specs[name] = value
            elif isinstance(value, type) and value.__module__ == module.__name__:
                self._report_methods(value, where)
        for name, value in specs.items():
            handler = vars(module).get(f"{name}_handler")
            if handler is None and (name == "operation" or len(specs) == 1):
                handler = vars(module).get("handler")
            self._add_spec(name, value, handler, where)

    def _add_registry(self, registry: OperationRegistry, where: str) -> None:
        """Add the operations of a registry, so that calls pass what was added to it."""
        self.result.registries.append(registry)
        for known in registry:
            if registry.get_handler(known.spec.id) is None and not registry.has_remote:
                self._add(known.spec, known.spec.id, where)
            else:
                self._add(_of_registry(known, registry), known.spec.id, where)

    def _add_spec(self, name: str, value: Any, handler: Any, where: str) -> None:
        spec = value
        if not isinstance(spec, OperationSpec):
            fields = dict(cast("Mapping[str, Any]", value))
            handler = fields.pop("handler", handler)
            try:
                spec = OperationSpec.from_wire(fields)
            except ValueError as error:
                self._skip(where, f"its `{name}` is not a spec: {error}")
                return
        found = Operation(spec, handler) if callable(handler) else spec
        self._add(found, spec.id, where, origin=value)

    def _report_methods(self, owner: type, where: str) -> None:
        """Report marked methods: without an object they cannot be called."""
        for name, value in tuple(vars(owner).items()):
            reason = ""
            try:
                found = operation_of(getattr(value, "__func__", value))
                if found is not None:
                    reason = f"{found.spec.id} is in a class, and a scan finds functions of a module: move it out"
            except RegistrationError as error:
                reason = str(error)
            except Exception:  # noqa: BLE001, S112 - a descriptor may raise anything when it is read
                continue
            if reason:
                self._skip(f"{where}: {owner.__qualname__}.{name}", reason)

    def _add(
        self,
        found: Operation | OperationSpec,
        operation_id: str,
        where: str,
        origin: object = None,
    ) -> None:
        origin = found if origin is None else origin
        taken = self._taken.get(operation_id)
        if taken is None:
            self._taken[operation_id] = origin, where
            if isinstance(found, OperationSpec):
                self.result.specs.append(found)
            else:
                self.result.operations.append(found)
        elif taken[0] is not origin:
            self._skip(where, f"{operation_id} was found in {taken[1]} already")
        elif isinstance(found, Operation) and found.spec in self.result.specs:
            # A module that imports a spec may be scanned before the module with its handler.
            self.result.specs.remove(found.spec)
            self.result.operations.append(found)

    def _skip(self, where: str, reason: str) -> None:
        self.result.skipped.append(Skipped(where, reason))
