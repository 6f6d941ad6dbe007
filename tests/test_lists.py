"""No list of strings in the public API takes a single string, which would be read letter by letter."""

import asyncio
import importlib
import inspect
import types
import typing
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from functools import partial
from typing import Any, cast

import anyio
import pytest

from operations import (
    AccessControl,
    Identity,
    MCPAnnotations,
    Operation,
    OperationContext,
    OperationEnv,
    OperationRegistry,
    OperationSpec,
    OperationType,
    build_env,
    operation,
)
from operations.calls import RemoteConfig, from_calls
from operations.front.search import Gateway
from operations.mcp import MCPApp, MCPClientConfig, MCPServerSettings, to_mcp
from operations.openapi import (
    ClientCredentials,
    HTTPServiceConfig,
    OperationOutline,
    PasswordCredentials,
    RefreshToken,
    Select,
    to_openapi,
)
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.redis import RedisConfig, connect_redis
from operations.pubsub.websocket import serve_websocket
from operations.server import JWTConfig, ListenConfig, ServerConfig, create_app
from operations.server.http11.running import build_server, running
from operations.server.signin.tokens import JWTs
from operations.telemetry import CallMetrics
from operations.tools import ToolConfig

MODULES = [
    "operations", "operations.calls", "operations.calls.socket", "operations.front.search", "operations.mcp",
    "operations.openapi", "operations.pubsub", "operations.pubsub.memory", "operations.pubsub.nats",
    "operations.pubsub.redis", "operations.pubsub.websocket", "operations.server", "operations.server.http11.running",
    "operations.server.signin.tokens", "operations.server.console", "operations.telemetry",
    "operations.tools", "operations.telemetry.otel", "operations.telemetry.otlp",
]  # fmt: skip

LISTS = (Collection, Container, Sequence, Iterable, Set, list, set, frozenset, tuple)
REGISTRY = OperationRegistry()


SPEC = OperationSpec(name="b", namespace="a", type=OperationType.QUERY)


async def function() -> None: ...


def accept(**options: Any) -> None:
    async def run() -> None:
        async with serve_websocket(cast("Any", None), **options):
            pass

    anyio.run(run)


async def _leave_out(**options: Any) -> None:
    from_calls(MemoryTarget()).leave_out(**options)


CALLS: dict[str, Callable[..., Any]] = {
    "operations.AccessControl": AccessControl,
    "operations.Identity": partial(Identity, "ann"),
    "operations.MCPAnnotations": MCPAnnotations,
    "operations.Operation": partial(Operation, SPEC, cast("Any", function)),
    "operations.OperationEnv": partial(OperationEnv, REGISTRY, OperationContext()),
    "operations.OperationRegistry": OperationRegistry,
    "operations.OperationRegistry.operation": lambda **options: REGISTRY.operation("a.b", **options)(function),
    "operations.OperationSpec": partial(OperationSpec, name="b", namespace="a", type=OperationType.QUERY),
    "operations.build_env": partial(build_env, REGISTRY, OperationContext()),
    "operations.operation": lambda **options: operation("a.b", **options)(function),
    "operations.calls.RemoteConfig": RemoteConfig,
    "operations.calls.RemoteService.leave_out": lambda **options: asyncio.run(_leave_out(**options)),
    "operations.calls.from_calls": partial(from_calls, MemoryTarget()),
    "operations.front.search.Gateway.search": lambda **options: asyncio.run(
        Gateway(REGISTRY).search("", OperationContext(), **options)
    ),
    "operations.mcp.MCPClientConfig": partial(MCPClientConfig, command="server"),
    "operations.mcp.MCPApp": partial(MCPApp, *cast("Any", (None, None, None))),
    "operations.mcp.MCPServerSettings": MCPServerSettings,
    "operations.mcp.to_mcp": partial(to_mcp, REGISTRY),
    "operations.mcp.RegistryServer.asgi_app": to_mcp(REGISTRY).asgi_app,
    "operations.openapi.ClientCredentials": partial(ClientCredentials, client_id="a", client_secret="b"),
    "operations.openapi.HTTPServiceConfig": partial(HTTPServiceConfig, "a"),
    "operations.openapi.OperationOutline": partial(
        OperationOutline, method="GET", path="/", name="a", deprecated=False
    ),
    "operations.openapi.PasswordCredentials": partial(PasswordCredentials, username="a", password="b"),
    "operations.openapi.RefreshToken": partial(RefreshToken, refresh_token="a"),
    "operations.openapi.Select": Select,
    "operations.openapi.to_openapi": partial(to_openapi, REGISTRY),
    "operations.pubsub.redis.RedisConfig": partial(RedisConfig, "redis://localhost"),
    "operations.pubsub.redis.connect_redis": partial(connect_redis, "redis://localhost"),
    "operations.pubsub.websocket.serve_websocket": accept,
    "operations.server.JWTConfig": partial(JWTConfig, issuer="a", audience="b", secret="c"),
    "operations.server.ListenConfig": ListenConfig,
    "operations.server.ServerConfig": ServerConfig,
    "operations.server.create_app": partial(create_app, REGISTRY),
    "operations.server.http11.running.build_server": partial(build_server, create_app(REGISTRY)),
    "operations.server.http11.running.running": partial(running, create_app(REGISTRY)),
    "operations.server.signin.tokens.JWTs": partial(JWTs, issuer="a", audience="b", public_key="c"),
    "operations.tools.ToolConfig": ToolConfig,
    "operations.telemetry.CallMetrics.collect": lambda **options: asyncio.run(
        CallMetrics(REGISTRY).collect(**options)
    ),
    "operations.telemetry.CallMetrics.render": CallMetrics(REGISTRY).render,
}  # fmt: skip
"""How to call everything that has a list of strings, with all other arguments in place."""

NOT_CALLED = {
    "operations.calls.CallRecord": "made by a call graph, not by users",
    "operations.front.search.Found": "made by a search, not by users",
    "operations.front.search.Search": "decoded from a request, not made by users",
    "operations.pubsub.EventTarget.listen": "a protocol without code",
    "operations.pubsub.memory.MemoryTarget.listen": "called by this package only",
    "operations.pubsub.nats.NatsTarget.listen": "called by this package only",
    "operations.pubsub.redis.RedisInteropTarget.listen": "called by this package only",
    "operations.pubsub.redis.RedisTarget.listen": "called by this package only",
    "operations.pubsub.websocket.AcceptedTarget.listen": "called by this package only",
    "operations.pubsub.websocket.WebSocketTarget.listen": "called by this package only",
    "operations.telemetry.AuditRecord": "made by a call, not by users",
}


def has_list(annotation: Any) -> bool:
    """Whether a parameter takes a list of strings, and not a single string as well."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in {typing.Union, types.UnionType}:
        return str not in arguments and any(map(has_list, arguments))
    if origin in {typing.Annotated, typing.NotRequired}:
        return has_list(arguments[0])
    if origin in {Mapping, dict}:
        return has_list(arguments[1])
    if origin is tuple and arguments[1:] != (...,):
        return False
    return origin in LISTS and is_text(arguments[0])


def is_text(annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return is_text(typing.get_args(annotation)[0])
    return annotation is str or typing.get_origin(annotation) is typing.Literal


def parameters_of(function: Any) -> Iterator[tuple[str, Any]]:
    # `server.api_keys` has an alias with a name in quotes, which is evaluated where the alias is used.
    hints = typing.get_type_hints(function, localns={"Awaitable": Awaitable}, include_extras=True)
    for name, annotation in hints.items():
        if typing.get_origin(annotation) is typing.Unpack:
            yield from parameters_of(typing.get_args(annotation)[0])
        elif name != "return":
            yield name, annotation


def callables_of(module: Any) -> Iterator[tuple[str, Any]]:
    here = module.__name__
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == here and name[0] != "_"
    ]
    for name in getattr(module, "__all__", own):
        value = getattr(module, name)
        where = f"{module.__name__}.{name}"
        if inspect.isfunction(value):
            yield where, value
        elif inspect.isclass(value):
            yield where, value if hasattr(value, "__struct_fields__") else value.__init__
            for key, method in inspect.getmembers(value, inspect.isroutine):
                if not key.startswith("_") and hasattr(method, "__annotations__"):
                    yield f"{where}.{key}", method


FOUND = [
    (where, name, annotation)
    for module in map(importlib.import_module, MODULES)
    for where, value in callables_of(module)
    for name, annotation in parameters_of(value)
    if has_list(annotation)
]


def test_every_list_of_strings_in_the_public_api_rejects_a_string() -> None:
    assert {where for where, _, _ in FOUND} == CALLS.keys() | NOT_CALLED.keys()


@pytest.mark.parametrize(
    ("where", "name", "annotation"),
    [found for found in FOUND if found[0] not in NOT_CALLED],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_string_is_not_a_list(where: str, name: str, annotation: Any) -> None:
    is_mapping = "Mapping[" in str(annotation)

    with pytest.raises(ValueError, match=rf"\b{name} must be a list of strings") as caught:
        CALLS[where](**{name: {"task:1": "sesame"} if is_mapping else "sesame"})

    assert "sesame" not in str(caught.value)
