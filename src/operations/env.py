"""Nested calls for code outside of handlers."""

from collections.abc import Collection

from operations.context import OperationContext, OperationEnv
from operations.registry import OperationRegistry


def build_env(
    registry: OperationRegistry,
    context: OperationContext,
    allowed_namespaces: Collection[str] | None = None,
) -> OperationEnv:
    """Return all operations of `registry` as functions that run as part of the call of `context`.

    Args:
        registry: Runs the calls.
        context: The parent call, whose identity and deadline they inherit.
        allowed_namespaces: The namespaces that can be called; None allows all.
    """
    return OperationEnv(registry, context, allowed_namespaces)
