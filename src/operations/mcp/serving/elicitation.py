"""Questions to the client since 2026-07-28, when a server may no longer send requests of its own.

A call that has a question ends with `input_required`: its questions, and a token. The client asks again with the
answers and the token, and the call goes on where it stopped: the handler has been waiting all along, so nothing runs
twice.

A question is named by the `$id` of its schema, or by a number.

Rule 1: a token is 128 random bits, good for one answer, and only for whoever began the call, with the same request.
Rule 2: a waiting call has its time limit like any other, which stops while a person answers, up to a maximum. There
        is a limit to how many calls may wait, and one for each caller.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from secrets import token_urlsafe
from typing import Any, Final, TypeAlias, cast

from mcp import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS

from operations._json import object_of
from operations.context import CallerChannel
from operations.errors import CallError, ErrorCode
from operations.mcp.serving.client import Client, client
from operations.types import JSONObject

MAX_WAITING: Final = 1_000
MAX_WAITING_PER_CALLER: Final = 100

Key: TypeAlias = tuple[Any, ...]
"""Who asked for what."""


class Conversations:
    """The calls that wait for answers."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Key, _Conversation]] = {}
        self._per_caller: Counter[str] = Counter()

    async def begin(
        self,
        run: Callable[[CallerChannel], Awaitable[JSONObject]],
        channel: CallerChannel,
        capabilities: Mapping[str, Any],
        answers: Mapping[str, Any],
        key: Key,
        caller: str = "",
    ) -> JSONObject:
        """Run a call to its result, or to its first questions.

        Args:
            run: The call.
            channel: What it can carry back besides questions.
            capabilities: What the client declared; only what it can answer is asked.
            answers: What the client knows will be asked, by the questions' names.
            key: Who asked for what; the answers must come for the same.
            caller: The key by which limits count the caller.

        Raises:
            MCPError: If too many calls wait already. Nothing has run then.
        """
        is_full = len(self._waiting) >= MAX_WAITING
        if is_full or self._per_caller[caller] >= MAX_WAITING_PER_CALLER:
            # Before it begins: what has run cannot be taken back.
            raise MCPError(INTERNAL_ERROR, "too many calls wait for answers")
        conversation = _Conversation(run, channel, capabilities, answers, caller)
        return await self._until_question(conversation, key)

    async def resume(
        self, token: str, answers: Mapping[str, Any], channel: CallerChannel, key: Key
    ) -> JSONObject:
        """Go on with a call, which reports through `channel` from now on.

        Raises:
            MCPError: If nobody waits under `token` for this key.
        """
        known = self._waiting.get(token)
        if known is None or known[0] != key:
            raise MCPError(INVALID_PARAMS, "requestState is unknown or has expired")
        self._leave(token)
        conversation = known[1]
        conversation.channel = channel
        conversation.answer(answers)
        return await self._until_question(conversation, key)

    async def _until_question(self, conversation: "_Conversation", key: Key) -> JSONObject:
        questions = await conversation.proceed()
        if questions is None:
            return conversation.task.result()
        token = token_urlsafe(16)
        self._waiting[token] = (key, conversation)
        self._per_caller[conversation.caller] += 1
        conversation.task.add_done_callback(lambda _: self._leave(token))
        return {"resultType": "input_required", "inputRequests": questions, "requestState": token}

    def _leave(self, token: str) -> None:
        """Count a call as waiting no more."""
        known = self._waiting.pop(token, None)
        if known is not None:
            caller = known[1].caller
            self._per_caller[caller] -= 1
            if not self._per_caller[caller]:
                del self._per_caller[caller]


class _Conversation:
    """One call that may have questions."""

    def __init__(
        self,
        run: Callable[[CallerChannel], Awaitable[JSONObject]],
        channel: CallerChannel,
        capabilities: Mapping[str, Any],
        answers: Mapping[str, Any],
        caller: str = "",
    ) -> None:
        self.caller = caller
        self._known = dict(answers)
        self._open: dict[str, tuple[JSONObject, asyncio.Future[JSONObject]]] = {}
        self._asked = asyncio.Event()
        self._count = 0
        self.channel = channel
        own = CallerChannel(
            progress=self._progress,
            log=self._log if channel.log is not None else None,
            elicit=self._elicit if _has(capabilities, "elicitation") else None,
            sample=self._sample if _has(capabilities, "sampling") else None,
            session=channel.session,
            log_level=channel.log_level,
        )
        can_open = object_of(capabilities.get("elicitation")).get("url") is not None

        async def body() -> JSONObject:
            client.set(
                Client(
                    roots=self._roots if _has(capabilities, "roots") else None,
                    elicit_url=self._elicit_url if can_open else None,
                )
            )
            return await run(own)

        self.task = asyncio.create_task(body())

    async def proceed(self) -> JSONObject | None:
        """Until the call has questions, which are given, or ends."""
        asked = asyncio.create_task(self._asked.wait())
        try:
            if not self._open:
                await asyncio.wait({self.task, asked}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Nobody is there to answer any more.
            self.task.cancel()
            raise
        finally:
            asked.cancel()
        if self.task.done():
            return None
        # Handlers that ask several things at once do so in one turn of the loop.
        await asyncio.sleep(0)
        return {name: request for name, (request, _) in self._open.items()}

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Hand over the answers that are there; what is missing will be asked again."""
        for name, value in answers.items():
            question = self._open.get(name)
            if question is not None and isinstance(value, Mapping):
                del self._open[name]
                if not question[1].done():
                    question[1].set_result(dict(cast("Mapping[str, Any]", value)))
        if not self._open:
            self._asked.clear()

    async def _progress(self, progress: float, total: float | None, message: str | None) -> None:
        if self.channel.progress is not None:
            await self.channel.progress(progress, total, message)

    async def _log(self, level: str, data: Any, logger_name: str | None) -> None:
        if self.channel.log is not None:
            await self.channel.log(level, data, logger_name)

    async def _elicit(self, message: str, schema: JSONObject) -> JSONObject:
        form = {key: value for key, value in schema.items() if key != "$id"}
        params = {"mode": "form", "message": message, "requestedSchema": form}
        return await self._ask("elicitation/create", params, schema.get("$id"))

    async def _elicit_url(self, request: JSONObject) -> JSONObject:
        return await self._ask("elicitation/create", request)

    async def _sample(self, request: JSONObject) -> JSONObject:
        return await self._ask("sampling/createMessage", request)

    async def _roots(self) -> JSONObject:
        return await self._ask("roots/list", {})

    async def _ask(self, method: str, params: JSONObject, name: str | None = None) -> JSONObject:
        self._count += 1
        if name is None or name in self._open:
            name = f"{method.partition('/')[0]}-{self._count}"
        known = self._known.pop(name, None)
        if isinstance(known, Mapping):
            return dict(cast("Mapping[str, Any]", known))
        future: asyncio.Future[JSONObject] = asyncio.get_running_loop().create_future()
        self._open[name] = ({"method": method, "params": params}, future)
        self._asked.set()
        try:
            return await future
        finally:
            self._open.pop(name, None)


def _has(capabilities: Mapping[str, Any], name: str) -> bool:
    return capabilities.get(name) is not None


def can_answer(capabilities: Mapping[str, Any]) -> bool:
    """Whether a client can be asked anything."""
    return any(_has(capabilities, name) for name in ("elicitation", "roots", "sampling"))


def refused(error: MCPError, what: str) -> CallError:
    """What a handler is told when its question came back as an error."""
    details = {"code": error.code, "message": error.message}
    return CallError(ErrorCode.UNAVAILABLE, f"the caller did not {what}", details, retryable=False)
