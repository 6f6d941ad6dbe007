"""The connections of one service: where they lead, how many there are, and whether they are worth an attempt.

Rule: what only a third party named must be public; what does not respond is not asked again and again.
"""

from contextlib import AbstractAsyncContextManager
from importlib import import_module
from time import time
from typing import Any, Self, cast

from operations._hosts import Origin, TrustedHosts, enforce_public, origin_of
from operations._upstreams import Bulkhead, CircuitBreaker
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.openapi.config import HTTPServiceConfig
from operations.openapi.transport import HTTPRequest, HTTPResponse, HTTPTransport

_MAX_ORIGINS = 1000


class OpenResponse:
    """Holds the response of the last request that was sent, and closes it."""

    __slots__ = ("_exchange",)

    def __init__(self) -> None:
        self._exchange: AbstractAsyncContextManager[HTTPResponse] | None = None

    async def replace(self, exchange: AbstractAsyncContextManager[HTTPResponse]) -> HTTPResponse:
        """Close the response before, and open another."""
        if self._exchange is not None:
            await self.__aexit__(None, None, None)
        response = await exchange.__aenter__()
        self._exchange = exchange
        return response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.__aexit__(*exc_info)


class Connections:
    """Sends requests by the transport of a service.

    Args:
        config: The operator's settings.
        trusted: The hosts that may be anywhere and may receive credentials.

    Attributes:
        bulkhead: Limits the calls that run at a time.
        closings: How often this was closed; what began before a closing is not sent again after it.
    """

    def __init__(self, config: HTTPServiceConfig, trusted: TrustedHosts) -> None:
        self.bulkhead = Bulkhead(config.namespace, config.concurrency or config.connections)
        self.closings = 0
        self._config = config
        self._trusted = trusted
        self._transport: HTTPTransport | None = config.transport
        self._is_owner = config.transport is None
        self._origins: dict[str, tuple[Origin, bool]] = {}
        self._breakers: dict[Origin, CircuitBreaker] = {}

    async def aclose(self) -> None:
        """Close the transport, if it was made here. Calls that are under way fail; later ones open it again."""
        self.closings += 1
        if self._is_owner and self._transport is not None:
            transport, self._transport = self._transport, None
            await transport.aclose()

    def is_trusted(self, url: str) -> bool:
        """Return whether the host of `url` may receive credentials."""
        try:
            return origin_of(url) in self._trusted
        except ValueError:
            return False

    def enforce_reachable(self, url: str) -> tuple[Origin, bool]:
        """Return where `url` leads, and whether the operator named it.

        Raises:
            CallError: `ACCESS_DENIED` if only a third party named it and it is not public; `EXECUTION_ERROR` if it
                leads nowhere.
        """
        known = self._origins.get(url)
        if known is None:
            try:
                origin = origin_of(url)
            except ValueError as error:
                raise CallError(
                    ErrorCode.EXECUTION_ERROR,
                    f"There is no address to send this to ({error}): set base_url.",
                ) from None
            known = (origin, origin in self._trusted)
            if len(self._origins) > _MAX_ORIGINS:
                self._origins.clear()
            self._origins[url] = known
        if not known[1]:
            enforce_public(known[0].host)
        return known

    async def send(
        self,
        request: HTTPRequest,
        opened: OpenResponse,
        origin: Origin,
        context: OperationContext | None = None,
    ) -> HTTPResponse:
        """Send a request; the response lives as long as `opened`.

        Args:
            request: The request.
            opened: Closes the response.
            origin: Where the request goes.
            context: Of the call that it belongs to.

        Raises:
            CallError: What the transport raises, and `UNAVAILABLE` without an attempt if the last ones failed.
        """
        breaker = self._breaker(origin)
        is_probe = breaker.enter()
        try:
            response = await opened.replace(self.transport.send(request))
        except BaseException as error:
            if _is_failure(error, context):
                breaker.fail(is_probe=is_probe)
            else:
                breaker.abandon(is_probe=is_probe)
            raise
        breaker.succeed()
        return response

    async def enter(self, url: str) -> None:
        """Take a slot of the source for a call to `url`; then `bulkhead.leave` must follow.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if none becomes free, `UNAVAILABLE` if waiting for one would be in vain.
        """
        if not self.bulkhead.try_enter():
            self._breaker(self.enforce_reachable(url)[0]).enforce_closed()
            await self.bulkhead.enter()

    def _breaker(self, origin: Origin) -> CircuitBreaker:
        breaker = self._breakers.get(origin)
        if breaker is None:
            if len(self._breakers) > _MAX_ORIGINS:
                self._breakers.clear()
            breaker = self._breakers[origin] = CircuitBreaker(str(origin))
        return breaker

    @property
    def transport(self) -> HTTPTransport:
        """The transport, which is made when it is first needed."""
        transport = self._transport
        if transport is None:
            # Only now is aiohttp needed, and a missing extra worth an error.
            module = import_module("operations.openapi.exchange.aiohttp_transport")
            config = self._config
            transport = cast(
                "HTTPTransport",
                module.AiohttpTransport(
                    connections=config.connections,
                    proxy=config.proxy,
                    trust_env=config.trust_env,
                    tls=config.tls,
                ),
            )
            self._transport = transport
        return transport


def _is_failure(error: BaseException, context: OperationContext | None) -> bool:
    """Return whether `error` means that the upstream did not respond."""
    if isinstance(error, CallError):
        return error.code in (ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT)
    # Cancelled: at its deadline, or because the caller left.
    deadline = None if context is None else context.deadline
    return deadline is not None and time() * 1000 >= deadline
