"""Remember the definitions that a server listed first, so that a change does not go unnoticed.

Rule 1: a definition is all that a person or a model decides by: name, title, description, schemas, annotations; and
        what an export of ours adds, which decides what is sent twice.
Rule 2: with `strict`, the first listing is accepted as a whole, or compared with the pins of an earlier run. Later,
        tools, prompts and templates that are new or changed, and changed resources, wait until they are accepted.
        So do the server's instructions.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from operations._json import canonical
from operations._mcp_config import PinPolicy
from operations.mcp.exported import META_KEY
from operations.mcp.listing import Listing
from operations.types import JSONObject

_DEFINING = (
    "name", "title", "description", "inputSchema", "outputSchema", "annotations", "arguments", "uri", "uriTemplate",
    "mimeType",
)  # fmt: skip
PIN_FIELDS = {"prompts": "name", "templates": "uriTemplate", "resources": "uri"}
"""The field that tells the entries of a list apart."""

INSTRUCTIONS = "server/instructions"
"""The key of the server's instructions."""


def digest(tool: JSONObject, target: str) -> str:
    """SHA-256 over the definition of `tool` and where it lives, in any order of keys."""
    definition = {key: tool[key] for key in _DEFINING if key in tool}
    meta: Any = tool.get("_meta")
    if isinstance(meta, dict) and META_KEY in meta:
        definition[META_KEY] = meta[META_KEY]
    return sha256(canonical([target, definition])).hexdigest()


def pin_key(kind: str, entry: JSONObject) -> str:
    """Return the key of a prompt, template or resource among the pins; a tool's key is its name."""
    return f"{kind}/{entry[PIN_FIELDS[kind]]}"


class Pins:
    """Accepted digests by key, and those that wait to be accepted."""

    def __init__(self, policy: PinPolicy, accepted: dict[str, str], target: str) -> None:
        self.accepted = accepted
        self.waiting: dict[str, str] = {}
        self._policy = policy
        self._target = target
        self._is_first = not accepted

    def check(self, listing: Listing) -> list[str]:
        """Take note of a whole listing; return the keys of definitions that are not the accepted ones."""
        self.waiting.clear()
        found: dict[str, JSONObject] = {}
        for key, entry in self._entries(listing):
            found.setdefault(key, entry)
        different = [key for key, entry in found.items() if self.is_different(key, entry)]
        self._is_first = False
        return different

    def _entries(self, listing: Listing) -> Iterator[tuple[str, JSONObject]]:
        if listing.instructions:
            yield INSTRUCTIONS, {"description": listing.instructions}
        yield from ((tool["name"], tool) for tool in listing.tools)
        yield from ((pin_key("prompts", prompt), prompt) for prompt in listing.prompts)
        yield from ((pin_key("templates", template), template) for template in listing.templates)
        if self._policy == "strict":
            yield from ((pin_key("resources", each), each) for each in listing.resources)

    def is_different(self, key: str, entry: JSONObject) -> bool:
        """Take note of one definition; return whether it is not the accepted one."""
        found = digest(entry, self._target)
        known = self.accepted.get(key)
        is_strict = self._policy == "strict"
        # Servers add and remove resources all the time, and a model does not choose by them.
        is_held_if_new = is_strict and not self._is_first and not key.startswith("resources/")
        if known is None and not is_held_if_new:
            self.accepted[key] = found
        elif known != found and is_strict:
            self.waiting[key] = found
        elif known != found and self._policy == "warn":
            self.accepted[key] = found
        else:
            return False
        return known is not None or is_held_if_new

    def accept(self, key: str) -> None:
        """Accept the definition that waits under `key`.

        Raises:
            KeyError: If none waits.
        """
        self.accepted[key] = self.waiting.pop(key)
