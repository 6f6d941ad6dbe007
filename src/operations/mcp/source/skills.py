"""The skills of a server (`io.modelcontextprotocol/skills`): their entries, and the check of their files.

Rule 1: no file is read before a caller reads it.
Rule 2: a file that is not what the entry of its skill states is rejected, once the entry was read again.
"""

from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Any, Final

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import is_object, list_of, object_of, text_of
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.mcp.shared.skills import DYNAMIC, fault_of, folder_of

_MAX_PAGES: Final = 100


class SkillEntries:
    """The entries of the skills of one server, as they were read last.

    Args:
        server: The name of the server.
        request: Sends a request, with `(method, params, context, replayable=...)`.
    """

    def __init__(self, server: str, request: Callable[..., Awaitable[JSONObject]]) -> None:
        self._server, self._request = server, request
        self._known: dict[str, JSONObject] = {}
        self._has_listed = False

    async def read_all(self, context: OperationContext) -> list[JSONObject]:
        """Return the entries that the server lists.

        Raises:
            CallError: If there is no result.
        """
        found: list[JSONObject] = []
        cursor: Any = None
        for _ in range(_MAX_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            page = await self._request("skills/list", params, context, replayable=True)
            found += [each for each in list_of(page.get("skills")) if is_object(each)]
            cursor = page.get("nextCursor")
            if not cursor:
                break
        self._known |= {text_of(each.get("uri")): each for each in found}
        self._has_listed = True
        return found

    async def get(self, uri: str, context: OperationContext) -> JSONObject:
        """Return the entry of one skill.

        Raises:
            CallError: If there is no such skill.
        """
        result = await self._request("skills/get", {"uri": uri}, context, replayable=True)
        entry = self._known[uri] = object_of(result.get("skill"))
        return entry

    async def check(self, uri: str, result: JSONObject, context: OperationContext) -> None:
        """Check the contents of a read file.

        Raises:
            CallError: `EXECUTION_ERROR` if it is not what the entry of its skill states.
        """
        if not uri.startswith("skill://"):
            return
        if not self._has_listed:
            await self.read_all(context)
        entry = self._find(uri)
        fault = None if entry is None else _fault(uri, result, entry)
        if entry is None or fault is None:
            return
        # The skill may have changed.
        fault = _fault(uri, result, await self.get(text_of(entry.get("uri")), context))
        if fault is not None:
            message = f"{self._server} sent a file of a skill that {fault}: {uri}"
            raise CallError(ErrorCode.EXECUTION_ERROR, message, retryable=False)

    def _find(self, uri: str) -> JSONObject | None:
        """Return the entry of the skill that a file belongs to."""
        owners = [known for known in self._known if uri.startswith(f"{folder_of(known)}/")]
        return self._known[max(owners, key=len)] if owners else None


def _fault(uri: str, result: JSONObject, entry: JSONObject) -> str | None:
    """Return why the contents of a file are not what the entry states; None if they are."""
    for content in map(object_of, list_of(result.get("contents"))):
        if content.get("uri") != uri:
            continue
        blob = content.get("blob")
        data = b64decode(blob) if isinstance(blob, str) else text_of(content.get("text")).encode()
        return fault_of(data, uri, entry)
    return None if entry.get("resources") == DYNAMIC else "is empty"
