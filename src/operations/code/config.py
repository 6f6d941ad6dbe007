"""The limits of scripts: the table `[code]` of `operations.toml`."""

from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Final

from operations.base.types import Count, Seconds
from operations.contract.access import AccessControl

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLimits:
    """The limits of scripts. A script that exceeds one ends, and its error names the limit."""

    calls: Count = 1_000
    """The largest number of calls of one script."""

    concurrent: Count = 10
    """The number of calls of one script that run at the same time; further calls wait."""

    cpu: Seconds = 10.0
    """Seconds for which a script itself may compute."""

    wall: Seconds = 300.0
    """Seconds that a script may take, not counting the time for which its run waits for people or sleeps."""

    memory: Count = 64 * MIB
    """The memory of a script in bytes."""

    output: Count = MIB
    """The largest size of the result and of the printed text of a script together, in bytes."""

    script: Count = 64 * 1024
    """The largest script in bytes."""

    per_caller: Count = 8
    """The number of scripts of one caller that run at the same time; further ones are rejected."""

    processes: Count = 16
    """The number of scripts that run at the same time; further ones wait."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"{each.name} must be a positive number, not {value!r}")


def digest_of(script: str) -> str:
    """Return the digest that names a version of a script."""
    return sha256(script.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedScript:
    """A script that an operator has reviewed, as an operation.

    Its input is the variable `arguments`. Each of its calls is checked as a call of its caller.
    """

    id: str
    """The id of the operation."""

    script: str
    """The source."""

    description: str = ""
    access: AccessControl = field(default_factory=AccessControl)
    """Who may call it."""
