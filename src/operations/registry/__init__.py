"""The registry: operations by id, and the one path of every call.

    resolve, adopt a task, identify, validate, invoke, cast, report

Every call takes this path, whether its caller is Python code, an entry point or a nested call.
"""

from operations.registry.registry import OperationRegistry, build_env, subscribe

__all__ = ["OperationRegistry", "build_env", "subscribe"]
