"""Tell clients how to authenticate: `WWW-Authenticate` (RFC 6750) and the metadata of the resource (RFC 9728)."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from operations.errors import ErrorCode
from operations.front.http_errors import Header, RequestError
from operations.types import JSONObject

METADATA_PATH: Final = "/.well-known/oauth-protected-resource"


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """What a client is told if its credential is missing, invalid or not sufficient.

    Attributes:
        resource: The public address of the server, which is also the audience of its tokens.
        authorization_servers: The addresses of the servers that issue tokens; empty if clients cannot use OAuth.
        scopes_supported: The scopes that a client may request.
    """

    resource: str = ""
    authorization_servers: Collection[str] = ()
    scopes_supported: Collection[str] = ()

    def header(self, **parameters: str) -> Header:
        """Return `WWW-Authenticate` with these parameters and, if clients can use OAuth, where its metadata is."""
        if self.authorization_servers:
            parameters["resource_metadata"] = f"{self.resource}{METADATA_PATH}"
        text = ", ".join(f'{name}="{value}"' for name, value in parameters.items())
        return b"www-authenticate", f"Bearer {text}".rstrip().encode()

    def metadata(self) -> JSONObject:
        """Return the metadata of the server as a protected resource."""
        return {
            "resource": self.resource,
            "authorization_servers": list(self.authorization_servers),
            "scopes_supported": sorted(self.scopes_supported),
            "bearer_methods_supported": ["header"],
        }

    def missing(self) -> RequestError:
        """Return the error for a request without a credential."""
        message = "Sign in first: this server requires a credential"
        return RequestError(401, ErrorCode.ACCESS_DENIED, message, headers=[self.header()])

    def invalid(self, headers: Collection[Header] = ()) -> RequestError:
        """Return the error for a credential that is wrong or could not be checked."""
        return RequestError(
            401,
            ErrorCode.ACCESS_DENIED,
            "The credential is not valid",
            headers=[self.header(error="invalid_token"), *headers],
        )
