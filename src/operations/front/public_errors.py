"""Convert errors to the form for external callers: public fields, HTTP status, no secrets.

Rule 1: an unexpected exception becomes its code, a neutral message and the request id; its text and traceback go to
        the log, unless the operator exposes them.
Rule 2: an error of an upstream API is forwarded without headers that contain credentials, up to a size limit.
Rule 3: the status comes from the table `HTTP_STATUS`, from a declared error, or from the request error itself.
Rule 4: a response to a missing or invalid credential has `WWW-Authenticate` (RFC 6750), which names the metadata of the
        resource (RFC 9728) if clients can use OAuth.
Rule 5: a secret is redacted in every encoding (plain, JSON, Python string, URL), and so are its parts, such as a token
        without its scheme.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import msgspec

from operations.base.errors import HTTP_STATUS, CallError, ErrorCode, json_details
from operations.base.text import printable
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.specs import OperationSpec

Header = tuple[bytes, bytes]

CLOSE: Header = (b"connection", b"close")


class RequestError(CallError):
    """A request that fails before an operation is called.

    Attributes:
        status: The status of the response.
        headers: Headers of the response.
    """

    def __init__(
        self, status: int, code: str, message: str, *, headers: Sequence[Header] = ()
    ) -> None:
        super().__init__(code, message)
        self.status = status
        self.headers = tuple(headers)


class ClientDisconnectedError(Exception):
    """The client has disconnected, so no response is sent."""


def malformed(message: str) -> RequestError:
    """Return the error for a request that cannot be read."""
    return RequestError(400, ErrorCode.VALIDATION_ERROR, message)


def too_large(message: str, *, headers: Sequence[Header] = ()) -> RequestError:
    """Return the error for a request that exceeds a size limit."""
    return RequestError(413, ErrorCode.RESOURCE_EXHAUSTED, message, headers=headers)


def slow_body() -> RequestError:
    """Return the error for a body that arrives too slowly."""
    return RequestError(408, ErrorCode.TIMEOUT, "The body took too long to arrive", headers=[CLOSE])


def unsupported(message: str) -> RequestError:
    """Return the error for a body of an unsupported type."""
    return RequestError(415, ErrorCode.VALIDATION_ERROR, message)


def wrong_method(allowed: Sequence[str]) -> RequestError:
    """Return the error for a method that the path does not support."""
    methods = ", ".join(allowed)
    return RequestError(
        405,
        ErrorCode.VALIDATION_ERROR,
        f"Use {methods} here",
        headers=[(b"allow", methods.encode())],
    )


def upgrade_required() -> RequestError:
    """Return the error for a request without a handshake at the path of a WebSocket."""
    return RequestError(
        426,
        ErrorCode.VALIDATION_ERROR,
        "Connect with a WebSocket here. A proxy must use HTTP/1.1 and pass on the headers Upgrade and Connection",
        headers=[(b"upgrade", b"websocket"), (b"connection", b"upgrade")],
    )


def not_found() -> RequestError:
    """Return the error for a path that is not served to this caller."""
    return RequestError(404, ErrorCode.OPERATION_NOT_FOUND, "There is nothing at this path")


logger = logging.getLogger("operations")

MAX_DETAILS: Final = 64 * 1024
"""The largest details of an error, in bytes of JSON."""

_WITHHELD = frozenset({
    "authorization", "cookie", "proxy-authenticate", "proxy-authorization", "set-cookie", "www-authenticate",
})  # fmt: skip

_OUR_FAULT = frozenset({401, 407, 421})
"""Statuses with which an upstream API rejects this server, not its caller."""


def public_error(
    error: CallError, request_id: str, *, expose: bool = False, log: bool = True
) -> CallError:
    """Return the public form of `error`, and log the rest."""
    if error.unexpected:
        if log:
            failed = (printable(request_id), printable(error.operation_id or "the server"))
            logger.error("request %s failed in %s", *failed, exc_info=error.__cause__ or error)
        if not expose:
            return CallError(
                error.code,
                f"The operation failed (request {request_id})",
                {"requestId": request_id},
                retryable=error.retryable,
            )
    if error.details is None:
        return error
    return CallError(
        error.code, error.message, _public_details(error.details), retryable=error.retryable
    )


def public_wire(error: CallError, request_id: str, *, expose: bool = False) -> JSONObject:
    """Return the wire form of a public error: `{code, message, details?, retryable?, requestId}`."""
    wire = public_error(error, request_id, expose=expose).to_wire()
    wire["requestId"] = request_id
    return wire


def _public_details(details: Any) -> Any:
    shown = json_details(details)
    if isinstance(shown, dict):
        fields = cast("JSONObject", shown)
        headers = fields.get("headers")
        if isinstance(headers, dict):
            fields["headers"] = {
                name: value
                for name, value in cast("JSONObject", headers).items()
                if name.lower() not in _WITHHELD
            }
    if len(msgspec.json.encode(shown)) > MAX_DETAILS:
        return {"omitted": f"details were larger than {MAX_DETAILS} bytes"}
    return cast("Any", shown)


def status_of(error: CallError, identity: Identity | None, spec: OperationSpec | None) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    if error.code == ErrorCode.ACCESS_DENIED and identity is None:
        return 401
    relayed = _relayed_status(error)
    for declared in spec.error_schemas if spec is not None else ():
        if declared.code == error.code or (
            relayed is not None and declared.code == f"HTTP_{relayed}"
        ):
            return declared_status(declared.http_status)
    return HTTP_STATUS.get(error.code, 500)


def declared_status(status: int | None) -> int:
    """Return the status of a declared error: its own if it is an error status, otherwise 500."""
    return status if status is not None and 400 <= status <= 599 else 500


def _relayed_status(error: CallError) -> int | None:
    """Return the status of an upstream API if it concerns the caller."""
    details: Any = error.details
    if error.code != ErrorCode.EXECUTION_ERROR or not isinstance(details, dict):
        return None
    status: Any = cast("JSONObject", details).get("statusCode")
    return status if type(status) is int and status not in _OUR_FAULT else None


def _quoted(text: str) -> str:
    """Return text as the content of a quoted string in a header: printable ASCII on one line."""
    printable = "".join(each for each in text if " " <= each <= "~")
    return printable.replace("\\", r"\\").replace('"', r"\"")


METADATA_PATH: Final = "/.well-known/oauth-protected-resource"

RESOURCE_PATHS: Final = ("/mcp",)
"""Paths that are resources of their own: their clients compare the `resource` of the metadata with the address that
they asked (RFC 9728, 3.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """The response to a missing, invalid or insufficient credential.

    Attributes:
        resource: The public address of what was asked, which is also an audience of its tokens.
        authorization_servers: The addresses of the servers that issue tokens; empty if clients cannot use OAuth.
        scopes_supported: The scopes that a client may request.
        path: The path of `resource` below the address of the server; empty for the server itself.
    """

    resource: str = ""
    authorization_servers: Collection[str] = ()
    scopes_supported: Collection[str] = ()
    path: str = ""

    def at(self, path: str) -> "Challenge":
        """Return the challenge of the server for a request at `path`."""
        path = path.rstrip("/")
        if path not in RESOURCE_PATHS or not self.authorization_servers:
            return self
        return replace(self, resource=f"{self.resource}{path}", path=path)

    def header(self, **parameters: str) -> Header:
        """Return `WWW-Authenticate` with these parameters and, for OAuth, the address of the metadata."""
        if self.authorization_servers:
            server = self.resource.removesuffix(self.path)
            parameters["resource_metadata"] = f"{server}{METADATA_PATH}{self.path}"
        text = ", ".join(f'{name}="{_quoted(value)}"' for name, value in parameters.items())
        return b"www-authenticate", f"Bearer {text}".rstrip().encode()

    def metadata(self) -> JSONObject:
        """Return the metadata of the resource, without empty members: `[]` would mean that there are no scopes."""
        members: JSONObject = {
            "resource": self.resource,
            "authorization_servers": list(self.authorization_servers),
            "scopes_supported": sorted(self.scopes_supported),
            "bearer_methods_supported": ["header"],
        }
        return {name: value for name, value in members.items() if value}

    def missing(self) -> RequestError:
        """Return the error for a request without a credential."""
        message = "Sign in first: this server requires a credential"
        return RequestError(401, ErrorCode.ACCESS_DENIED, message, headers=[self.header()])

    def invalid(self, headers: Collection[Header] = (), advice: str = "") -> RequestError:
        """Return the error for a credential that is wrong."""
        return RequestError(
            401,
            ErrorCode.ACCESS_DENIED,
            f"The credential is not valid. {advice}" if advice else "The credential is not valid",
            headers=[self.header(error="invalid_token"), *headers],
        )
