"""Serve skills (`io.modelcontextprotocol/skills`): those of folders, and those of imported servers.

    [serve.mcp]
    skills = ["skills"]          skills/pdf/SKILL.md -> skill://pdf/SKILL.md

Rule 1: a folder is read once. What clients read is what its digests describe, also if a file changes meanwhile.
Rule 2: the addresses of imported skills have the namespace of their server as first segment; nothing else changes.
Rule 3: operations that a skill names are disclosed when its `SKILL.md` is read, if the caller may call them.
"""

import asyncio
import logging
import mimetypes
import re
from base64 import b64encode
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import mcp_types as types
from mcp import MCPError

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import list_of, object_of, text_of
from operations.base.types import JSONObject
from operations.contract.context import OperationContext
from operations.contract.specs import OperationSpec
from operations.mcp.serving.caller import MCPCaller
from operations.mcp.shared.addresses import scoped, unscoped
from operations.mcp.shared.codec import is_imported
from operations.mcp.shared.skills import (
    DYNAMIC,
    MANIFEST,
    digest_of,
    encoded,
    front_matter,
    with_usual_encoding,
)
from operations.registry.registry import OperationRegistry

logger = logging.getLogger("operations.mcp")

LIST: Final = "skills.list"
GET: Final = "skills.get"
"""The operations of an imported server with skills."""

TOOLS_KEY: Final = "alkdev.operations/tools"
"""The key in the `_meta` of a read `SKILL.md` for the tools that the skill uses."""

_NAME: Final = re.compile(r"(?!.*--)[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_MAX_FILES: Final = 512
_MAX_BYTES: Final = 16 * 1024 * 1024
"""The largest number of files of a skill, and of their bytes."""

_DIRECTORY: Final = "inode/directory"


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill of a folder."""

    entry: JSONObject
    files: dict[str, bytes]
    """The content of each file, by its address."""

    operations: tuple[str, ...]
    """Patterns of the operations that the skill uses, from `operations` in the `metadata` of its front matter."""


def read_skills(folders: Iterable[str | Path]) -> dict[str, Skill]:
    """Return the skills in folders by the address of their `SKILL.md`.

    Raises:
        ValueError: If a folder is missing, or a skill does not follow the rules.
    """
    found: dict[str, Skill] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"the folder of skills {folder} does not exist")
        is_skill = (folder / MANIFEST).is_file()
        for each in [folder] if is_skill else sorted(folder.iterdir()):
            if (each / MANIFEST).is_file():
                skill = _read(each)
                found[skill.entry["uri"]] = skill
    return found


def _read(folder: Path) -> Skill:
    try:
        frontmatter = front_matter((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"the front matter of {folder / MANIFEST} {error}") from error
    name = None if frontmatter is None else frontmatter.get("name")
    if frontmatter is None or not text_of(frontmatter.get("description")):
        raise ValueError(f"{folder / MANIFEST} needs front matter with name and description")
    if name != folder.resolve().name or not _NAME.fullmatch(str(name)):
        raise ValueError(
            f"the name of {folder / MANIFEST} must be that of its folder: small letters, digits and hyphens"
        )
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link out of its skill")
        files[f"skill://{name}/{encoded(inside.as_posix())}"] = path.read_bytes()
    size = sum(map(len, files.values()))
    if len(files) > _MAX_FILES or size > _MAX_BYTES:
        raise ValueError(f"the skill {folder} has more than {_MAX_FILES} files, or 16 MiB")
    entry: JSONObject = {
        "uri": f"skill://{name}/{MANIFEST}",
        "frontmatter": frontmatter,
        "resources": [
            {"uri": uri, "digest": digest_of(content), "size": len(content)}
            for uri, content in files.items()
        ],
    }
    named = object_of(frontmatter.get("metadata")).get("operations")
    patterns = named.split() if isinstance(named, str) else map(str, list_of(named))
    return Skill(entry, files, tuple(patterns))


class Skills:
    """The skills of a server.

    Args:
        registry: Has the operations of imported servers.
        folders: The folders of skills.
        is_allowed: Whether the extension is offered.
    """

    def __init__(
        self, registry: OperationRegistry, folders: Collection[str], *, is_allowed: bool = True
    ) -> None:
        self._registry = registry
        self._is_allowed = is_allowed
        self._own = read_skills(folders) if is_allowed else {}

    def sources(self) -> list[OperationSpec]:
        """Return the operations that list the skills of imported servers."""
        return [spec for spec in self._registry.specs() if spec.name == LIST and is_imported(spec)]

    @property
    def is_offered(self) -> bool:
        """Whether there are skills."""
        return self._is_allowed and bool(self._own or self.sources())

    # ------------------------------------------------------------ the methods

    async def page(self, caller: MCPCaller) -> JSONObject:
        """Serve `skills/list`."""
        self._enforce_offered()
        return caller.settled({"skills": await self._entries(caller)}, freshness=(0, False))

    async def get(self, caller: MCPCaller, uri: str) -> JSONObject:
        """Serve `skills/get`.

        Raises:
            MCPError: `INVALID_PARAMS` if there is no such skill that the caller may read.
        """
        self._enforce_offered()
        own, place = self._own.get(uri), unscoped(uri)
        entry: JSONObject | None = None if own is None else own.entry
        if entry is None and place is not None:
            spec = self._registry.get_spec(f"{place[0]}.{GET}")
            if spec is not None and is_imported(spec) and caller.sees(spec):
                found = await self._call(caller, spec, {"uri": place[1]})
                entry = None if found is None else _published(object_of(found), place[0])
        if entry is None:
            raise MCPError(types.INVALID_PARAMS, "Unknown skill", {"uri": uri})
        return caller.settled({"skill": entry}, freshness=(0, False))

    async def directory(self, caller: MCPCaller, uri: str) -> JSONObject:
        """Serve `resources/directory/read`: the direct children of a folder of a skill.

        Raises:
            MCPError: `INVALID_PARAMS` if there is no such folder.
        """
        self._enforce_offered()
        folder, children = uri.rstrip("/"), dict[str, JSONObject]()
        for entry in await self._entries(caller):
            resources = entry.get("resources")
            listed = [] if resources == DYNAMIC else list_of(resources)
            for each in map(object_of, listed):
                path = text_of(each.get("uri"))
                if not path.startswith(f"{folder}/"):
                    continue
                segment, slash, _ = path.removeprefix(f"{folder}/").partition("/")
                child, name = f"{folder}/{segment}", unquote(segment)
                children[child] = {"uri": child, "name": name, "mimeType": _mime_type(name)}
                if slash:
                    children[child]["mimeType"] = _DIRECTORY
                else:
                    children[child]["size"] = each.get("size")
        if not children:
            raise MCPError(types.INVALID_PARAMS, "Not a directory", {"uri": uri})
        return caller.settled({"resources": [*children.values()]}, freshness=(0, False))

    def _enforce_offered(self) -> None:
        if not self.is_offered:
            raise MCPError(types.METHOD_NOT_FOUND, "Method not found")

    # ------------------------------------------------------------ own files

    def listed(self) -> list[JSONObject]:
        """Return the entries of the own skills in `resources/list`: their `SKILL.md`."""
        return [
            {
                "uri": skill.entry["uri"],
                "name": skill.entry["frontmatter"]["name"],
                "description": skill.entry["frontmatter"]["description"],
                "mimeType": "text/markdown",
                "size": len(skill.files[skill.entry["uri"]]),
            }
            for skill in self._own.values()
        ]

    def read(self, uri: str) -> tuple[JSONObject, tuple[str, ...]] | None:
        """Return a file of an own skill as the content of a resource, and the operations that the skill uses."""
        listed = with_usual_encoding(uri) if self._own else uri
        for skill in self._own.values():
            content = skill.files.get(listed)
            if content is None:
                continue
            found: JSONObject = {"uri": uri, "mimeType": _mime_type(_name(uri))}
            try:
                found["text"] = content.decode()
            except UnicodeDecodeError:
                found["blob"] = b64encode(content).decode()
            return found, skill.operations if uri == skill.entry["uri"] else ()
        return None

    # ------------------------------------------------------------ entries

    async def _entries(self, caller: MCPCaller) -> list[JSONObject]:
        """Return the entries of all skills; a server that does not respond is skipped."""
        sources = [spec for spec in self.sources() if caller.sees(spec)]
        answers = await asyncio.gather(*(self._call(caller, spec, {}) for spec in sources))
        found = [skill.entry for skill in self._own.values()]
        for spec, answer in zip(sources, answers, strict=True):
            found += [_published(object_of(each), spec.namespace) for each in list_of(answer)]
        return found

    async def _call(self, caller: MCPCaller, spec: OperationSpec, value: JSONObject) -> Any:
        context = OperationContext(identity=caller.identity, metadata=caller.metadata)
        try:
            timeout = caller.front.timeout
            return (await self._registry.execute(spec.id, value, context, timeout=timeout)).data
        except CallError as error:
            if error.code != ErrorCode.EXECUTION_ERROR:
                logger.warning("the skills of %s cannot be read: %s", spec.namespace, error)
            return None


def _published(entry: JSONObject, namespace: str) -> JSONObject:
    """Return the entry of an imported skill with the addresses that clients use."""
    resources = entry.get("resources")
    if resources != DYNAMIC:
        resources = [
            {**each, "uri": scoped(namespace, text_of(each.get("uri"))) or each.get("uri")}
            for each in map(object_of, list_of(resources))
        ]
    uri = text_of(entry.get("uri"))
    return {**entry, "uri": scoped(namespace, uri) or uri, "resources": resources}


def uses(patterns: Collection[str], operation_id: str) -> bool:
    """Return whether a skill uses an operation."""
    return any(fnmatchcase(operation_id, pattern) for pattern in patterns)


def _name(uri: str) -> str:
    """Return the name of a file by its address."""
    return unquote(uri.rpartition("/")[2])


def _mime_type(name: str) -> str:
    if name.endswith(".md"):
        return "text/markdown"
    return mimetypes.guess_type(name)[0] or "text/plain"
