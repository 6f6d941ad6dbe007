// The OAuth client of the TypeScript SDK: `node oauth.mjs URL` signs in, calls, refreshes its token and prints what it saw.
import { UnauthorizedError } from "@modelcontextprotocol/sdk/client/auth.js";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const url = new URL(process.argv[2]);
const kept = {};
const authProvider = {
  redirectUrl: "http://127.0.0.1:1/callback",
  clientMetadata: { client_name: "matrix", redirect_uris: ["http://127.0.0.1:1/callback"] },
  clientInformation: () => kept.client,
  saveClientInformation: (client) => void (kept.client = client),
  tokens: () => kept.tokens,
  saveTokens: (tokens) => void (kept.tokens = tokens),
  codeVerifier: () => kept.verifier,
  saveCodeVerifier: (verifier) => void (kept.verifier = verifier),
  redirectToAuthorization: async (address) => {
    const response = await fetch(address, { redirect: "manual" });
    kept.code = new URL(response.headers.get("location")).searchParams.get("code");
  },
};

async function connect() {
  const transport = new StreamableHTTPClientTransport(url, { authProvider });
  const client = new Client({ name: "matrix", version: "1" });
  try {
    await client.connect(transport);
  } catch (error) {
    if (!(error instanceof UnauthorizedError) || kept.code === undefined) throw error;
    await transport.finishAuth(kept.code);
    delete kept.code;
    return connect();
  }
  return client;
}

async function look() {
  const client = await connect();
  const { tools } = await client.listTools();
  const called = await client.callTool({ name: tools.find(({ name }) => name.includes("mine")).name, arguments: {} });
  await client.close();
  return called.content[0].text;
}

const first = await look();
// A token that has expired in the meantime.
kept.tokens = { ...kept.tokens, access_token: "expired" };
console.log(JSON.stringify({ first, again: await look(), isRefreshed: kept.tokens.access_token !== "expired" }));
process.exit(0);
