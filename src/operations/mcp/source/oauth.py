"""Store and refresh the OAuth tokens of MCP servers.

Rule 1: no process opens a browser by itself; without a valid token, it raises an error that explains how to sign in.
Rule 2: only their owner can read token files. They are replaced atomically, so that readers never see a partial file.
"""

import os
import tempfile
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Any, TypeVar, cast

import msgspec
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.shared import auth
from pydantic import AnyUrl, BaseModel, ValidationError

from operations.base.errors import OperationsError
from operations.base.files import state_folder
from operations.base.json.values import object_of
from operations.base.types import JSONObject
from operations.mcp.config import MCPClientConfig, OAuthLogin

Model = TypeVar("Model", bound=BaseModel)

_HOW = "run `operations login NAME`, or call operations.mcp.sign_in"


class SignInRequiredError(OperationsError):
    """Raised if a person must sign in to a server first."""


class TokenStore:
    """The tokens of one server, its client registration and the addresses of its authorization server.

    Args:
        path: The file; None to keep them in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._kept: JSONObject = {}
        self.provider: OAuthClientProvider | None = None
        """Has the metadata of the authorization server, which is stored so that a later process can refresh the
        tokens."""

    def read(self) -> JSONObject:
        """Return the stored values; empty if they are missing or unreadable."""
        try:
            return (
                self._kept
                if self._path is None
                else object_of(msgspec.json.decode(self._path.read_bytes()))
            )
        except (OSError, msgspec.DecodeError):
            return {}

    def clear(self) -> None:
        """Remove everything."""
        self._kept = {}
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self, **changes: Any) -> None:
        self._kept = {**self.read(), **changes}
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # `mkstemp` creates a file that only its owner can read.
        handle, temporary = tempfile.mkstemp(dir=self._path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(self._kept))
            Path(temporary).replace(self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    async def get_tokens(self) -> auth.OAuthToken | None:
        """Return the stored tokens."""
        return _valid(auth.OAuthToken, self.read().get("tokens"))

    async def set_tokens(self, tokens: auth.OAuthToken) -> None:
        """Store new tokens, with the time at which they expire."""
        metadata = None if self.provider is None else self.provider.context.oauth_metadata
        self._write(
            tokens=tokens.model_dump(mode="json", exclude_none=True),
            expires_at=None if tokens.expires_in is None else time() + tokens.expires_in,
            metadata=None
            if metadata is None
            else metadata.model_dump(mode="json", exclude_none=True),
        )

    async def get_client_info(self) -> auth.OAuthClientInformationFull | None:
        """Return the stored registration of this client."""
        return _valid(auth.OAuthClientInformationFull, self.read().get("client"))

    async def set_client_info(self, client_info: auth.OAuthClientInformationFull) -> None:
        """Store the registration of this client."""
        self._write(client=client_info.model_dump(mode="json", exclude_none=True))


def _valid(cls: type[Model], stored: Any) -> Model | None:
    """Return a stored value; None if it is not valid, because an error would show its secrets."""
    try:
        return cls.model_validate(stored)
    except ValidationError:
        return None


def token_path(config: MCPClientConfig, login: OAuthLogin, source: str = "") -> Path:
    """Return the token file of a server. Two sources of a hub have different files, even for the same address."""
    if login.store is not None:
        return Path(login.store)
    digest = sha256(f"{source} {config.url}".strip().encode()).hexdigest()[:32]
    return state_folder() / "tokens" / f"{digest}.json"


def stored_login(config: MCPClientConfig, login: OAuthLogin) -> OAuthClientProvider:
    """Return an auth object that signs requests with stored tokens and refreshes them, without asking a person.

    Raises:
        SignInRequiredError: If no person has signed in yet.
    """
    file = TokenStore(token_path(config, login))
    stored = file.read()
    if _valid(auth.OAuthToken, stored.get("tokens")) is None:
        raise SignInRequiredError(f"{config.target} needs a person to sign in: {_HOW}")
    provider = build_provider(config, login, file, "http://127.0.0.1/", _no_browser, _no_answer)
    # The SDK does not store these values, but needs them to refresh tokens.
    expires_at = stored.get("expires_at")
    provider.context.token_expiry_time = expires_at if isinstance(expires_at, int | float) else None
    provider.context.oauth_metadata = _valid(auth.OAuthMetadata, stored.get("metadata"))
    return provider


async def _no_browser(url: str) -> None:
    raise OAuthFlowError(f"the sign-in is no longer valid: {_HOW}")


async def _no_answer() -> auth.AuthorizationCodeResult:
    # The SDK requires a handler, although no person signs in here.
    raise AssertionError("no person signs in here")


def build_provider(
    config: MCPClientConfig,
    login: OAuthLogin,
    file: TokenStore,
    redirect_uri: str,
    redirect: Callable[[str], Awaitable[None]],
    callback: Callable[[], Awaitable[auth.AuthorizationCodeResult]],
) -> OAuthClientProvider:
    """Return an auth object that signs requests with the tokens in `file`, and requests new ones through `redirect`."""
    metadata = auth.OAuthClientMetadata(
        redirect_uris=[AnyUrl(redirect_uri)], client_name="operations", scope=login.scope
    )
    provider = OAuthClientProvider(
        cast("str", config.url),
        metadata,
        file,
        redirect_handler=redirect,
        callback_handler=callback,
    )
    file.provider = provider
    return provider
