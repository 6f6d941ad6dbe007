"""What packages register: our own under a fixed name, those of others as entry points.

Rule: a part is imported when it is named, so an installed package cannot add itself.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points


@cache
def _ours(place: str) -> object:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _installed(group: str, name: str) -> object | None:
    for each in entry_points(group=group, name=name):
        try:
            return each.load()  # type: ignore[no-any-return]
        except Exception as error:
            package = each.dist.name if each.dist is not None else each.value
            raise ValueError(f"{name} is in {package}, which fails: {error}") from error
    return None


def registered(name: str, ours: Mapping[str, str], group: str) -> object | None:
    """Return what is registered under a name; None if there is nothing.

    Args:
        name: The name.
        ours: Our own parts by name, as `module:attribute`.
        group: The group of the entry points of other packages.

    Raises:
        ValueError: If a package cannot be imported.
    """
    place = ours.get(name)
    return _installed(group, name) if place is None else _ours(place)
