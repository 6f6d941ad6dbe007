"""Packages that a feature needs, and the extra that installs them."""

from importlib.util import find_spec

from operations.base.errors import MissingExtraError


def enforce_installed(feature: str, *packages: str, extra: str) -> None:
    """Raise `MissingExtraError` if one of `packages` is not installed."""
    if any(find_spec(each) is None for each in packages):
        raise MissingExtraError(feature, extra=extra)
