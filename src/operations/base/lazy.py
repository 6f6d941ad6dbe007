"""Public names of a package that are imported when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules


def lazily(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package whose names lie in slow modules, or need an extra.

    Args:
        package: The package.
        names: The names in each module, separated by spaces.
    """
    homes = {name: module for module, some in names.items() for name in some.split()}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(homes[name]), name)
        vars(modules[package])[name] = found
        return found

    return find
