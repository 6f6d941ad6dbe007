"""The steps of every HTTP request, also of MCP: identify, place, admit, read, run, respond.

    identify   who asks; a wrong credential is kept as the `problem`
    place      what is asked, as far as path and headers tell: `EntryPoint.place`; it may hide that the path exists
    admit      the rate, the context with its deadline, and the slot
    read       the body: `EntryPoint.read`
    run        the call, until its deadline and as long as its client is there: `EntryPoint.run`
    respond    the response; the slot is released afterwards

Rule 1: only this module takes steps, so no entry point can take them in another order.
Rule 2: an entry point returns a `Reply`, or sends its response itself and returns None, or raises an error. Only this
        module turns errors into responses.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from operations.base.errors import CallError, map_error
from operations.contract.access import Identity, with_check
from operations.front.config import ASGIApp
from operations.front.credentials import (
    Credential,
    InvalidCredentialError,
    Resolve,
    credentials_in,
)
from operations.front.front import Front
from operations.front.limits import client_address
from operations.front.messages import REQUEST_ID, Reply
from operations.front.public_errors import ClientDisconnectedError
from operations.front.request import (
    CREDENTIAL,
    IDENTITY,
    OPEN,
    RESOURCE,
    STATE,
    RequestState,
    Slots,
    Target,
    challenge_of,
)
from operations.front.timing import Receive, Scope, Send

logger = logging.getLogger("operations.server")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Says that another application serves a request."""

    app: ASGIApp


class EntryPoint(Protocol):
    """What one path of a server does in each step."""

    def place(self, state: RequestState, /) -> Target | Elsewhere:
        """Return what an identified request asks for.

        If it has a `problem`, the request is rejected unless it is served elsewhere.

        Raises:
            CallError: If the caller may not know more.
        """
        ...

    async def read(self, state: RequestState, /) -> Any:
        """Return what an admitted request asks, from its query or its body.

        Raises:
            CallError: If it cannot be read.
        """
        ...

    async def run(self, state: RequestState, asked: Any, /) -> Reply | None:
        """Serve the request; return the response unless it has been sent.

        Raises:
            CallError: If it fails.
        """
        ...


class RequestPipeline:
    """Serves HTTP requests for one front.

    Args:
        front: The shared limits and rules.
        resolve: Returns the identity of a scope; None if clients cannot authenticate.
    """

    def __init__(self, front: Front, resolve: Resolve | None = None) -> None:
        self.front = front
        self.resolve = resolve

    async def serve(self, scope: Scope, receive: Receive, send: Send, entry: EntryPoint) -> None:
        """Take all steps for one request, and send its response."""
        state = RequestState(self.front, scope, receive, send)
        timeout = state.timeout
        try:
            try:
                reply = await self._take_steps(state, entry)
            except CallError as error:
                reply = state.failure(error)
            except ClientDisconnectedError:
                reply = None
            except asyncio.CancelledError:
                if not (timeout.timed_out or timeout.disconnected):
                    if (stopped := state.stopped()) is None:
                        raise
                    reply = state.failure(stopped)
                elif timeout.stop():
                    raise
                else:
                    reply = state.cancelled()
            except Exception as error:  # noqa: BLE001 - the caller gets a response in any case
                unexpected = map_error(error)
                unexpected.__cause__ = error
                reply = state.failure(unexpected)
            timeout.stop()
            if reply is not None and not state.is_answered:
                scope[REQUEST_ID] = state.context.request_id
                await state.respond(reply)
        finally:
            state.close()

    async def _take_steps(self, state: RequestState, entry: EntryPoint) -> Reply | None:
        if self.resolve is None and self.front.credentials.admits_anonymous:
            # Clients cannot authenticate.
            state.scope.setdefault(IDENTITY, None)
        await state.identify(self.authenticate)
        target = entry.place(state)
        if isinstance(target, Elsewhere):
            await target.app(state.scope, state.receive, state.send)
            return None
        if state.problem is not None:
            raise state.problem
        state.admit(target)
        asked = await entry.read(state)
        if target.is_watched:
            # A stream itself finds that its client has disconnected.
            state.timeout.stop() if target.slots is Slots.STREAMS else state.start_work()
        return await entry.run(state, asked)

    async def authenticate(self, scope: Scope) -> Identity | None:
        """Return the identity of a request, and store its credential in the scope.

        Raises:
            RequestError: 401 if the credential is wrong, or if the server requires one and the request has none.
            CallError: `UNAVAILABLE` if the credential could not be checked, `RESOURCE_EXHAUSTED` if a limit is
                exceeded.
        """
        resolve = self.resolve
        if resolve is None:
            self._enforce_known(scope, None)
            return None
        shown = credentials_in(scope["headers"])
        scope[RESOURCE] = challenge_of(scope, self.front).resource
        try:
            identity = await self.front.auth.authenticate(
                client_address(scope), shown, lambda: resolve(scope)
            )
        except InvalidCredentialError as error:
            logger.info("rejected a credential: %s", error)
            logger.debug("rejected a credential", exc_info=error.reason)
            challenge = challenge_of(scope, self.front)
            raise challenge.invalid(error.headers, error.advice) from error.reason
        self._enforce_known(scope, identity)
        if identity is None:
            return None
        credential: Credential | None = scope.get(CREDENTIAL)
        if credential is None:
            key = (identity.account, hash(shown) if shown else id(scope))
            # A copy, so that the credential and the scope do not refer to each other.
            asked = {name: value for name, value in scope.items() if name != STATE}
            credential = Credential(identity, lambda: resolve(asked), key)
            scope[CREDENTIAL] = credential
        return with_check(identity, credential.is_valid)

    def _enforce_known(self, scope: Scope, identity: Identity | None) -> None:
        if identity is None and not self.front.credentials.admits_anonymous and OPEN not in scope:
            raise challenge_of(scope, self.front).missing()
