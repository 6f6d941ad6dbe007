"""The nested call surface, for code that is no handler but calls as part of one."""

from collections.abc import Collection

from operations.context import OperationContext, OperationEnv
from operations.registry import OperationRegistry


def build_env(
    registry: OperationRegistry,
    context: OperationContext,
    allowed_namespaces: Collection[str] | None = None,
) -> OperationEnv:
    """Every operation of `registry` as a function that runs as part of `context`'s call.

    Args:
        registry: Where the calls go.
        context: The call they are part of: its id becomes their parent, its identity and deadline theirs.
        allowed_namespaces: Only these can be called; None allows all.
    """
    return OperationEnv(registry, context, allowed_namespaces)
