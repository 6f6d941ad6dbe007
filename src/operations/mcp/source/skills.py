"""The skills of a server (`io.modelcontextprotocol/skills`): their entries, and the check of their files.

Rule 1: no file is read before a caller reads it.
Rule 2: a file that is not what the entry of its skill states is rejected, once the entry was read again.
Rule 3: an entry whose addresses leave the folder of its skill is omitted: clients may write the files to disk.
"""

import asyncio
import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import is_object, list_of, object_of, text_of
from operations.base.text import printable
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.mcp.shared.skills import (
    DYNAMIC,
    MANIFEST,
    fault_of,
    folder_of,
    is_inside,
    misplaced,
)

logger = logging.getLogger("operations.mcp")

_MAX_PAGES: Final = 100
_MAX_BYTES: Final = 32 * 1024 * 1024
"""The largest size of all entries of a server, as JSON."""

_MAX_FILES: Final = 10_000
"""The largest number of files of a skill."""

_MAX_UNLISTED: Final = 1_000
"""The largest number of remembered entries that the server does not list."""

_MAX_FOLDERS: Final = 4
"""The largest number of folders of a file that are tried for an unlisted skill."""

_SCHEME: Final = "skill://"


class SkillEntries:
    """The entries of the skills of one server, as they were read last.

    Args:
        server: The name of the server.
        request: Sends a request, with `(method, params, context, replayable=...)`.
    """

    def __init__(self, server: str, request: Callable[..., Awaitable[JSONObject]]) -> None:
        self._server, self._request = server, request
        self._listed: dict[str, JSONObject] | None = None
        self._unlisted: dict[str, JSONObject] = {}

    async def read_all(self, context: OperationContext) -> list[JSONObject]:
        """Return the entries that the server lists.

        Raises:
            CallError: If there is no result.
        """
        found: dict[str, JSONObject] = {}
        omitted: list[str] = []
        room = _MAX_BYTES
        params: JSONObject = {}
        for _ in range(_MAX_PAGES):
            page = await self._request("skills/list", params, context, replayable=True)
            for entry in filter(is_object, list_of(page.get("skills"))):
                fault = _entry_fault(entry)
                room -= len(msgspec.json.encode(entry))
                if room < 0:
                    fault = f"the list has more than {_MAX_BYTES // 1024**2} MiB"
                if fault is None:
                    found[entry["uri"]] = entry
                else:
                    omitted.append(fault)
                # A check may take a while.
                await asyncio.sleep(0)
            params = {"cursor": page.get("nextCursor")}
            if not params["cursor"] or room < 0:
                break
        if omitted:
            reason = printable(omitted[0])
            logger.warning("%s: %d skills are omitted: %s", self._server, len(omitted), reason)
        self._listed = found
        return [*found.values()]

    async def get(self, uri: str, context: OperationContext) -> JSONObject:
        """Return the entry of one skill.

        Raises:
            CallError: If there is no such skill.
        """
        result = await self._request("skills/get", {"uri": uri}, context, replayable=True)
        entry = object_of(result.get("skill"))
        fault = "it has another address" if entry.get("uri") != uri else _entry_fault(entry)
        if fault is not None:
            message = f"{self._server} sent an entry that is not that of the skill {uri}: {fault}"
            raise CallError(ErrorCode.EXECUTION_ERROR, message, retryable=False)
        listed = self._listed or {}
        if uri in listed:
            listed[uri] = entry
        else:
            self._unlisted[uri] = entry
            while len(self._unlisted) > _MAX_UNLISTED:
                del self._unlisted[next(iter(self._unlisted))]
        return entry

    async def check(self, uri: str, result: JSONObject, context: OperationContext) -> None:
        """Check the contents of a read file.

        Raises:
            CallError: `EXECUTION_ERROR` if it is not what the entry of its skill states.
        """
        if uri[: len(_SCHEME)].lower() != _SCHEME:
            return
        if not is_inside(uri, uri[: len(_SCHEME) - 1]):
            raise self._rejected(uri, "leaves its folder")
        if self._listed is None:
            await self.read_all(context)
        entry = self._find(uri)
        if entry is None:
            entry, is_new = await self._find_unlisted(uri, context), True
        else:
            is_new = False
        fault = None if entry is None else _fault(uri, result, entry)
        if entry is None or fault is None:
            return
        if not is_new:
            # The skill may have changed.
            fault = _fault(uri, result, await self.get(text_of(entry.get("uri")), context))
        if fault is not None:
            raise self._rejected(uri, fault)

    def _rejected(self, uri: str, fault: str) -> CallError:
        message = f"{self._server} sent a file of a skill that {fault}: {uri}"
        return CallError(ErrorCode.EXECUTION_ERROR, message, retryable=False)

    async def _find_unlisted(self, uri: str, context: OperationContext) -> JSONObject | None:
        """Return the entry of a skill that the server does not list, or did not when it was asked."""
        folder = uri
        for _ in range(_MAX_FOLDERS):
            folder = folder.rpartition("/")[0]
            if len(folder) < len(_SCHEME):
                break
            try:
                return await self.get(f"{folder}/{MANIFEST}", context)
            except CallError as error:
                # There is no such skill.
                if error.code != ErrorCode.EXECUTION_ERROR:
                    raise
        return None

    def _find(self, uri: str) -> JSONObject | None:
        """Return the entry of the skill that a file belongs to."""
        known = {**self._unlisted, **(self._listed or {})}
        owners = [each for each in known if uri.startswith(f"{folder_of(each)}/")]
        return known[max(owners, key=len)] if owners else None


def _entry_fault(entry: JSONObject) -> str | None:
    """Return why the entry of a skill is omitted; None if it is not."""
    if len(list_of(entry.get("resources"))) > _MAX_FILES:
        return f"it has more than {_MAX_FILES} files"
    address = misplaced(entry)
    return None if address is None else f"an address leaves its folder: {address[:200]}"


def _fault(uri: str, result: JSONObject, entry: JSONObject) -> str | None:
    """Return why the contents of a file are not what the entry states; None if they are."""
    contents = [object_of(each) for each in list_of(result.get("contents"))]
    for content in contents:
        blob = content.get("blob")
        try:
            data = (
                b64decode(blob) if isinstance(blob, str) else text_of(content.get("text")).encode()
            )
        except ValueError:
            return "is not base64"
        fault = fault_of(data, text_of(content.get("uri")), entry)
        if fault is not None:
            return fault
    is_there = any(content.get("uri") == uri for content in contents)
    return None if is_there or entry.get("resources") == DYNAMIC else "is empty"
