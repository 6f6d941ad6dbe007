"""The code of an operator's modules, which a development server imports again when a file changes.

    changed? -> take the modules out of sys.modules -> import -> keep the new ones, or put the previous ones back

Rule 1: a new version is used only if all of its modules can be imported. Otherwise the previous one stays.
Rule 2: only code of the operator is imported again: no installed package, and nothing that was imported before.
"""

import importlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from operations.base.files import modified_at
from operations.base.json.objects import forget_classes
from operations.sources.local import ScanResult, find_operations

_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_IGNORED = frozenset({"__pycache__", "node_modules", "site-packages"})


class Code:
    """The code of some modules, and why its current version cannot be used.

    Attributes:
        problem: The error of the version in the files, with its place; None if that version is in use.
        is_new: Whether an imported version is not in use yet; the user of this class resets it.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.is_new = False
        self._others = frozenset(sys.modules)
        self._sources: tuple[str | Path, ...] = ()
        self._files: dict[Path, int | None] = {}

    @property
    def has_changed(self) -> bool:
        """Whether a file was written, added or removed since the last import."""
        return self.times() != self._files

    def load(self, sources: Iterable[str | Path]) -> bool:
        """Import the current version of all modules; return whether it can be used.

        Args:
            sources: Files, folders and packages, as for `scan_operations`.
        """
        self._sources = tuple(sources)
        # Before the import, so that a file that is written meanwhile is noticed.
        before = self._times(with_neighbours=True)
        previous = self._take_out()
        writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        importlib.invalidate_caches()
        try:
            problems = list(self._broken())
        except BaseException:
            self._put_back(previous)
            raise
        finally:
            # Bytecode is only compared by second and size: a file that is saved twice in a second would not be read.
            sys.dont_write_bytecode = writes
        self.problem = "\n".join(problems) or None
        if not problems:
            # Files that only an earlier version has imported.
            self._files = {}
        # Files that only a version that cannot be used needs are watched too.
        now = self.times()
        self._files = {path: before.get(path, time) for path, time in now.items()}
        if problems:
            self._put_back(previous)
        self.is_new = self.is_new or not problems
        forget_classes()
        return not problems

    def _broken(self) -> Iterator[str]:
        """Import all modules, and yield what is wrong with those that cannot be imported."""
        for source in self._sources:
            try:
                found: ScanResult = find_operations(source)
            except FileNotFoundError as error:
                yield str(error)
                continue
            for skipped in found.skipped:
                if skipped.traceback:
                    yield skipped.traceback

    def _take_out(self) -> dict[str, ModuleType]:
        """Remove the operator's modules from `sys.modules`, and return them."""
        found = {
            name: module
            for name, module in list(sys.modules.items())
            if name not in self._others and _is_own(module)
        }
        for name in found:
            del sys.modules[name]
        return found

    def _put_back(self, previous: dict[str, ModuleType]) -> None:
        self._take_out()
        sys.modules.update(previous)

    def times(self) -> dict[Path, int | None]:
        """Return the modification times of the files of the code.

        If its version cannot be used, it may lack a module: then those of all modules beside it.
        """
        return self._times(with_neighbours=self.problem is not None)

    def _times(self, *, with_neighbours: bool) -> dict[Path, int | None]:
        paths = set(self._files)
        for name, module in list(sys.modules.items()):
            if name not in self._others and _is_own(module):
                paths.add(Path(str(module.__file__)))
        for source in self._sources:
            path = Path(source)
            paths |= set(_python_files(path)) if path.is_dir() else {path}
            if with_neighbours and isinstance(source, Path):
                paths |= set((path if path.is_dir() else path.parent).glob("*.py"))
        times = {path: modified_at(path) for path in paths}
        return {path: time for path, time in times.items() if time is not None}


def _is_own(module: ModuleType) -> bool:
    """Return whether a module belongs to the operator: it has a file that is not installed."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__.partition(".")[0] == "operations":
        return False
    path = Path(file)
    return not _IGNORED.intersection(path.parts) and not any(
        path.is_relative_to(each) for each in _INSTALLED
    )


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in _IGNORED or path.name.startswith("."):
            continue
        if path.suffix == ".py":
            yield path
        elif path.is_dir():
            yield from _python_files(path)
