"""Why a server did not start, for whoever has to repair it.

Rule: the operator sees what was run, where, how it ended, what it said and what to do next (`str` of the error);
      whoever else the error reaches sees its message and details, which hold nothing of that.
"""

from pathlib import Path
from typing import Any

from operations._mcp_config import MCPClientConfig
from operations.errors import CallError, ErrorCode
from operations.front.public_errors import Redactor
from operations.mcp.config_secrets import command_line
from operations.mcp.stdio import Child
from operations.types import JSONObject

_SIGN_IN = (
    "it wants to know who asks: give it a token that is still good, as token or headers in operations.toml, "
    "headers in an mcp.json, auth or headers in Python"
)
_STATUS_ADVICE = {
    401: _SIGN_IN,
    403: _SIGN_IN,
    404: "see that the path is right: it often ends in /mcp, and servers of 2024 need transport sse",
    405: 'a server of 2024 needs transport "sse", and often the path /sse',
}
_RUN_BY_HAND = "run the command by hand in that folder: it should wait in silence for what is typed"


class StartError(CallError):
    """A server could not be used at all.

    Attributes:
        report: What was tried, what came of it and what to do next, in lines; without secrets, but not for callers.
    """

    def __init__(self, message: str, details: Any, report: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message, details)
        self.report = report

    def __str__(self) -> str:
        return f"{self.message}\n{self.report}" if self.report else self.message


def start_error(
    failure: CallError, config: MCPClientConfig, child: Child, redactor: Redactor, advice: str
) -> StartError:
    """`failure` with everything that helps to repair it.

    Args:
        failure: What callers may see.
        config: Of the server.
        child: Its process, where it is one.
        redactor: Of the same configuration.
        advice: What to do next; empty for what usually helps.
    """
    if config.kind == "memory":
        return StartError(failure.message, failure.details, "")
    facts: list[tuple[str, str]] = []
    if config.kind == "stdio":
        facts.append(("command", command_line(config, redactor)))
        facts.append(("folder", str(Path(config.cwd or ".").absolute())))
        if child.exit_code is not None:
            facts.append(("exit code", str(child.exit_code)))
        facts += [("printed", line) for line in child.stray]
        facts += [("said", line) for line in child.stderr]
        advice = advice or _RUN_BY_HAND
    else:
        facts.append(("address", config.target))
        told: JSONObject = failure.details or {}
        elsewhere = "see that the server runs and can be reached from here"
        advice = advice or _STATUS_ADVICE.get(told.get("statusCode", 0), elsewhere)
    facts.append(("next", advice))
    return StartError(failure.message, failure.details, _lines(facts))


def _lines(facts: list[tuple[str, str]]) -> str:
    """The facts one below the other; a name that repeats is written once."""
    lines, before = list[str](), ""
    for name, fact in facts:
        label = f"{name}:" if name != before else ""
        lines.append(f"  {label:<11}{fact}")
        before = name
    return "\n".join(lines)
