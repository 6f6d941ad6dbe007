"""A small client for the official conformance suite: connects to the URL it is given and calls every tool once.

Run by `scripts/mcp-conformance-client`; the suite names its scenario in the environment.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import (
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.mcp import MCPClient, MCPClientConfig, MCPClientCredentials, connect_mcp

CALLBACK = "http://localhost:3000/callback"
EXAMPLES: dict[str, Any] = {"number": 5, "integer": 5, "string": "text", "boolean": True}


class Storage:
    """Tokens and registrations in memory."""

    def __init__(self, client: OAuthClientInformationFull | None = None) -> None:
        self.tokens: OAuthToken | None = None
        self.client = client

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class Person:
    """A user at a browser who consents to everything: the suite redirects at once."""

    def __init__(self) -> None:
        self.answer: dict[str, list[str]] = {}

    async def visit(self, url: str) -> None:
        async with httpx2.AsyncClient() as browser:
            response = await browser.get(url, follow_redirects=False)
        self.answer = parse_qs(urlsplit(response.headers["location"]).query)

    async def come_back(self) -> AuthorizationCodeResult:
        return AuthorizationCodeResult(**{name: values[0] for name, values in self.answer.items()})


async def issuer_of(url: str) -> str:
    """Return the issuer of tokens for this server, which an operator would configure."""
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}/.well-known/oauth-protected-resource"
    async with httpx2.AsyncClient() as client:
        for address in (base + parts.path, base):
            response = await client.get(address)
            if response.status_code == 200:
                return str(response.json()["authorization_servers"][0])
    raise LookupError("the server names no authorisation server")


async def assertion(context: dict[str, Any], audience: str, resource: str) -> str:
    """Return the assertion of the company's identity provider, with which a client signs in to another server."""
    kinds = "urn:ietf:params:oauth:token-type:"
    async with httpx2.AsyncClient() as client:
        response = await client.post(
            context["idp_token_endpoint"],
            data={
                "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
                "requested_token_type": kinds + "id-jag",
                "subject_token": context["idp_id_token"],
                "subject_token_type": kinds + "id_token",
                "audience": audience,
                "resource": resource,
                "client_id": context["idp_client_id"],
            },
        )
    return str(response.json()["access_token"])


async def authentication(scenario: str, url: str, context: dict[str, Any]) -> Any:
    if not scenario.startswith("auth/"):
        return None
    if scenario == "auth/client-credentials-basic":
        return MCPClientCredentials(
            client_id=context["client_id"],
            client_secret=context["client_secret"],
            issuer=await issuer_of(url),
        )
    if scenario == "auth/client-credentials-jwt":
        signed = SignedJWTParameters(
            issuer=context["client_id"],
            subject=context["client_id"],
            signing_key=context["private_key_pem"],
            signing_algorithm=context["signing_algorithm"],
        )
        return PrivateKeyJWTOAuthProvider(
            server_url=url,
            storage=Storage(),
            client_id=context["client_id"],
            assertion_provider=signed.create_assertion_provider(),
            issuer=await issuer_of(url),
        )
    if scenario in ("auth/cross-app-access-complete-flow", "auth/enterprise-managed-authorization"):
        return IdentityAssertionOAuthProvider(
            server_url=url,
            storage=Storage(),
            client_id=context["client_id"],
            client_secret=context["client_secret"],
            issuer=await issuer_of(url),
            assertion_provider=lambda audience, resource: assertion(context, audience, resource),
            token_endpoint_auth_method="client_secret_basic",
        )
    known = None
    if "client_id" in context:
        known = OAuthClientInformationFull(
            client_id=context["client_id"],
            client_secret=context.get("client_secret"),
            redirect_uris=[CALLBACK],  # type: ignore[list-item]
            token_endpoint_auth_method="client_secret_basic",
        )
    person = Person()
    return OAuthClientProvider(
        server_url=url,
        client_metadata=OAuthClientMetadata(
            client_name="operations conformance client",
            redirect_uris=[CALLBACK],  # type: ignore[list-item]
            grant_types=["authorization_code", "refresh_token"],
            response_types=["code"],
        ),
        storage=Storage(known),
        redirect_handler=person.visit,
        callback_handler=person.come_back,
        client_metadata_url="https://conformance-test.local/client-metadata.json",
    )


async def elicit(request: dict[str, Any]) -> dict[str, Any]:
    """Accept, with the default of every field that has one."""
    properties = request.get("requestedSchema", {}).get("properties", {})
    content = {name: field["default"] for name, field in properties.items() if "default" in field}
    return {"action": "accept", "content": content}


async def main(url: str) -> None:
    scenario = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    settings = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    auth = await authentication(scenario, url, settings)
    # The suite serves its authorization servers on this machine.
    config = MCPClientConfig(
        url=url, auth=auth, elicit=elicit, timeout=20, allowed_hosts=["localhost", "127.0.0.1"]
    )
    async with connect_mcp("suite", config) as client:
        if scenario == "json-schema-ref-no-deref":
            # Its server only lists.
            return
        registry = OperationRegistry(client)
        if scenario.startswith("sep-2640-"):
            await use_skills(registry, loads=scenario != "sep-2640-client-no-prefetch")
            return
        for operation_id, given in inputs(client, settings):
            # As a model calls: null for an absent value is left out.
            context = OperationContext(lenient=True)
            try:
                print(operation_id, (await registry.execute(operation_id, given, context)).data)
            except CallError as error:
                if error.code != ErrorCode.VALIDATION_ERROR:
                    raise


async def use_skills(registry: OperationRegistry, *, loads: bool) -> None:
    """List the skills; load each until a file of it is rejected."""
    for skill in (await registry.execute("suite.skills.list")).data:
        files = [each["uri"] for each in skill["resources"]] if loads else []
        try:
            for uri in files:
                print((await registry.execute("suite.resources.read", {"uri": uri})).data)
        except CallError as error:
            print(error)


def inputs(client: MCPClient, context: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the calls that a scenario names, or a call of every operation."""
    if "toolCalls" in context:
        for call in context["toolCalls"]:
            yield f"suite.{call['name']}", call["arguments"]
        return
    schemas = {each.spec.id: each.spec.input_schema.document for each in client}
    for operation_id, schema in schemas.items():
        properties: dict[str, Any] = schema.get("properties", {})  # type: ignore[union-attr]
        given = {
            name: EXAMPLES.get(field.get("type"), "text") for name, field in properties.items()
        }
        if operation_id == "suite.json_schema_echo":
            given["schema"] = schemas["suite.json_schema_2020_12_tool"]
        yield operation_id, given


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1]))
