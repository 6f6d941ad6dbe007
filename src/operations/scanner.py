"""Find operations in a folder or package of Python modules.

Scanning imports code, so it is for the operator's own modules. What is broken is skipped and told, and never
keeps the rest from being found.
"""

import importlib
import importlib.util
import logging
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from operations.specs import Operation, OperationSpec, operation_of

logger = logging.getLogger("operations")


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that looked like a source of operations, and why it is none."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What a scan found. Iterating gives what `registry.register_all` takes."""

    operations: list[Operation] = field(default_factory=list[Operation])

    specs: list[OperationSpec] = field(default_factory=list[OperationSpec])
    """Contracts without a handler."""

    skipped: list[Skipped] = field(default_factory=list[Skipped])

    def __iter__(self) -> Iterator[Operation | OperationSpec]:
        yield from self.operations
        yield from self.specs

    def __len__(self) -> int:
        return len(self.operations) + len(self.specs)


def scan_operations(source: str | PathLike[str] | ModuleType) -> ScanResult:
    """Import every module of `source` and collect the operations in it.

    A module offers operations as functions marked by `@operation`, as `Operation` objects, or as a spec
    (an `OperationSpec`, or its JSON) called `operation`, with a function called `handler` beside it if it has one.

    Args:
        source: A folder, a Python file, the name of a package, or a package.

    Raises:
        FileNotFoundError: If `source` is neither a path nor a package that can be found.
    """
    scan = _Scan()
    if not isinstance(source, ModuleType) and not str(source):
        raise FileNotFoundError("name a folder, a Python file or a package; '.' is this folder")
    if isinstance(source, ModuleType):
        scan.package(source.__name__)
    elif Path(source).exists():
        scan.folder(Path(source).resolve())
    elif isinstance(source, str) and _can_be_found(source):
        scan.package(source)
    else:
        raise FileNotFoundError(f"{source!s} is neither a file, a folder nor a package")
    for skipped in scan.result.skipped:
        logger.warning("skipped %s: %s", skipped.where, skipped.reason)
    return scan.result


def _can_be_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # noqa: BLE001 - finding a module imports its parents, which may fail in any way
        return False


def _make_package(name: str, root: Path) -> None:
    """Let modules under `root` be imported below a package called `name`."""
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(root)]
        sys.modules[name] = package


def _hint(error: BaseException, file: Path) -> str:
    """What to do where a module looks for one that lies beside it by its bare name."""
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


class _Scan:
    """One scan on its way: what was found, and by which id it is taken."""

    def __init__(self) -> None:
        self.result = ScanResult()
        self._taken: dict[str, tuple[object, str]] = {}

    def folder(self, path: Path) -> None:
        """The modules under `path`, or the one that it is.

        They are imported below a package made up for the folder, so that relative imports work and no name
        clashes with an installed module.
        """
        root = path if path.is_dir() else path.parent
        package = f"_operations_{sha256(str(root).encode()).hexdigest()[:16]}"
        _make_package(package, root)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            parts = file.relative_to(root).with_suffix("").parts
            if any(part.startswith(".") or part == "__pycache__" for part in parts):
                continue
            if not all(part.isidentifier() for part in parts):
                self._skip(str(file), "its path is no module name")
                continue
            if parts[-1] == "__main__":
                continue
            names = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
            self._module(".".join((package, *names)), str(file))

    def package(self, name: str) -> None:
        """A package by its name, with everything below it."""
        package = self._module(name, name)
        path = getattr(package, "__path__", None)
        if path is not None:
            for found in pkgutil.iter_modules(path, f"{name}."):
                if found.ispkg:
                    self.package(found.name)
                elif not found.name.endswith(".__main__"):
                    self._module(found.name, found.name)

    def _module(self, name: str, where: str) -> ModuleType | None:
        try:
            module = importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a module may fail, or exit, in any way it likes
            self._skip(where, f"{type(error).__name__}: {error}{_hint(error, Path(where))}")
            return None
        self._collect(module, where)
        return module

    def _collect(self, module: ModuleType, where: str) -> None:
        for name, value in tuple(vars(module).items()):
            try:
                found = operation_of(value)
            except Exception as error:  # noqa: BLE001 - a proxy may refuse to be looked at
                self._skip(f"{where}: {name}", f"{type(error).__name__}: {error}")
                continue
            if found is not None:
                self._add(found, found.spec.id, where)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                self._tell_methods(value, where)
        declared = vars(module).get("operation")
        if isinstance(declared, Mapping):
            try:
                declared = OperationSpec.from_wire(dict(cast("Mapping[str, Any]", declared)))
            except ValueError as error:
                self._skip(where, f"its `operation` is no spec: {error}")
        if isinstance(declared, OperationSpec):
            handler = vars(module).get("handler")
            self._add(
                Operation(declared, handler) if callable(handler) else declared, declared.id, where
            )

    def _tell_methods(self, owner: type, where: str) -> None:
        """A method has no object to be called on: what marks one is told, so that nobody looks for it in vain."""
        for name, value in tuple(vars(owner).items()):
            found = None
            with suppress(Exception):  # a descriptor may refuse to be looked at
                found = operation_of(getattr(value, "__func__", value))
            if found is not None:
                self._skip(
                    f"{where}: {owner.__qualname__}.{name}",
                    f"{found.spec.id} is a method, and a scan finds functions of a module: move it out of the class",
                )

    def _add(self, found: Operation | OperationSpec, operation_id: str, where: str) -> None:
        taken = self._taken.get(operation_id)
        if taken is None:
            self._taken[operation_id] = found, where
            if isinstance(found, OperationSpec):
                self.result.specs.append(found)
            else:
                self.result.operations.append(found)
        elif taken[0] is not found:
            self._skip(where, f"{operation_id} was found in {taken[1]} already")

    def _skip(self, where: str, reason: str) -> None:
        self.result.skipped.append(Skipped(where, reason))
