"""MCP Apps (`io.modelcontextprotocol/ui`) of imported servers: their views call tools by the names at their server.

A host forwards the calls of a view to the server that it is connected to, which is this one, where the tools have other
names. A view of a server therefore gets a script before its own, which writes the names and addresses of this server
into its messages.

Rule 1: a view reaches only the tools of its own server: the script knows no others, and a call is checked as any other.
Rule 2: without the script (another kind of client), a name that only one server with views has stands for its tool.
"""

import re
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from operations.base.json.values import object_of, text_of
from operations.base.types import JSONObject
from operations.mcp.serving.tools import Tool
from operations.mcp.shared.addresses import SCOPED
from operations.mcp.shared.extensions import VIEW

_PROLOGUE: Final = ("!doctype", "html", "head")
"""The tags before the content of a page, in their order."""

_SPACE: Final = re.compile(r"\ufeff?[\s]*")
_COMMENT_END: Final = re.compile(r"--!?>")
_TAG: Final = re.compile(r"""<(!?[a-z]+)(?=[\s/>])(?:[^"'>]|"[^"]*"|'[^']*')*+>""", re.IGNORECASE)

_SCRIPT: Final = """<script>(() => {
  const host = window.parent, names = %s, scopes = %s, namespace = %s;
  if (host === window) return;
  const begins = (text, scheme) => text.slice(0, scheme.length).toLowerCase() === scheme;
  const scoped = (uri) => {
    const scheme = scopes.find((each) => typeof uri === "string" && begins(uri, each));
    if (!scheme || uri.startsWith(scheme + namespace + "/")) return uri;
    const rest = uri.slice(scheme.length);
    return scheme + namespace + "/" + (uri.startsWith(scheme) && !begins(rest, scheme) ? rest : uri);
  };
  const renamed = (message) => {
    const params = message && message.params;
    if (!params) return message;
    if (message.method === "tools/call" && Object.hasOwn(names, params.name))
      return { ...message, params: { ...params, name: names[params.name] } };
    if (message.method === "resources/read")
      return { ...message, params: { ...params, uri: scoped(params.uri) } };
    return message;
  };
  const postMessage = (message, ...rest) => host.postMessage(renamed(message), ...rest);
  const facade = new Proxy({}, { get: (_, key) => key === "postMessage" ? postMessage : host[key] });
  Object.defineProperty(window, "parent", { value: facade, configurable: true });
  const source = Object.getOwnPropertyDescriptor(MessageEvent.prototype, "source");
  Object.defineProperty(MessageEvent.prototype, "source", {
    ...source,
    get() { const from = source.get.call(this); return from === host ? facade : from; },
  });
})();</script>"""


def views_of(tools: Iterable[Tool]) -> dict[str, dict[str, Tool]]:
    """Return the tools of each imported server that has views, by namespace and by their names at the server."""
    found = defaultdict[str, dict[str, Tool]](dict)
    with_views: set[str] = set()
    for tool in tools:
        name = tool.spec.meta.get("tool")
        if tool.source is not None and isinstance(name, str):
            found[tool.source][name] = tool
            if has_view(tool.spec.meta):
                with_views.add(tool.source)
    return {namespace: found[namespace] for namespace in with_views}


def view_of(meta: Mapping[str, Any]) -> str:
    """Return the address of the view of a tool at its server, by the meta of its operation; empty if it has none."""
    of_server = object_of(meta.get("_meta"))
    named = object_of(of_server.get("ui")).get("resourceUri", of_server.get("ui/resourceUri"))
    return text_of(named)


def has_view(meta: Mapping[str, Any]) -> bool:
    """Return whether a tool belongs to an app, by the meta of its operation."""
    of_server = object_of(meta.get("_meta"))
    return bool(object_of(of_server.get("ui"))) or "ui/resourceUri" in of_server


def bridge(result: JSONObject, namespace: str, names: Mapping[str, str]) -> None:
    """Add the script to the views in a `resources/read` result of a server.

    Args:
        result: The result, which is modified.
        namespace: The namespace of the server.
        names: The names of its tools here, by their names at the server.
    """
    for content in result["contents"]:
        if str(content.get("mimeType", "")).replace(" ", "").lower() != VIEW:
            continue
        if isinstance(content.get("text"), str):
            content["text"] = _with_script(content["text"], namespace, names)
        elif isinstance(content.get("blob"), str):
            try:
                text = b64decode(content["blob"]).decode(errors="replace")
            except ValueError:
                # The host reports it.
                continue
            content["blob"] = b64encode(_with_script(text, namespace, names).encode()).decode()


def _with_script(html: str, namespace: str, names: Mapping[str, str]) -> str:
    values = (dict(names), list(SCOPED), namespace)
    script = _SCRIPT % tuple(_literal(each) for each in values)
    place = _script_place(html)
    return html[:place] + script + html[place:]


def _script_place(html: str) -> int:
    """Return the place in a page after the tags that must precede a script, in one pass over the text.

    A parser of HTML creates the tags that are missing, so every earlier place is valid too.
    """
    at, place, following = 0, 0, 0
    while following < len(_PROLOGUE):
        at = _end(_SPACE.match(html, at), at)
        if html.startswith("<!--", at):
            # "<!-->" is a whole comment.
            end = _COMMENT_END.search(html, at + 2)
            if end is None:
                break
            at = end.end()
            continue
        tag = _TAG.match(html, at)
        if tag is None or tag[1].lower() not in _PROLOGUE[following:]:
            break
        following = _PROLOGUE.index(tag[1].lower()) + 1
        at = place = tag.end()
    return place


def _end(found: re.Match[str] | None, otherwise: int) -> int:
    return otherwise if found is None else found.end()


def _literal(value: Any) -> str:
    """Return a value as a literal of a script in a page."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")
