// The OAuth client of the TypeScript SDK: `node oauth.mjs URL [CLIENT_ID]` signs in, calls, refreshes its token and prints
// what it saw. With an id it does not register.
import { UnauthorizedError } from "@modelcontextprotocol/sdk/client/auth.js";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const url = new URL(process.argv[2]);
const [, , , id] = process.argv;
const kept = { client: id && { client_id: id } };
const authProvider = {
  redirectUrl: "http://127.0.0.1:1/callback",
  // The scope is requested if the server does not publish any.
  clientMetadata: { client_name: "matrix", redirect_uris: ["http://127.0.0.1:1/callback"], scope: "openid" },
  clientInformation: () => kept.client,
  saveClientInformation: (client) => void (kept.client = client),
  tokens: () => kept.tokens,
  saveTokens: (tokens) => void (kept.tokens = tokens),
  codeVerifier: () => kept.verifier,
  saveCodeVerifier: (verifier) => void (kept.verifier = verifier),
  redirectToAuthorization: async (address) => {
    kept.code = (await browse(address)).searchParams.get("code");
  },
};

/** Follow redirects as a browser does, with cookies, and return the address that leads back to the client. */
async function browse(address) {
  const cookies = new Map();
  for (let next = new URL(address); ; ) {
    const cookie = [...cookies].map((pair) => pair.join("=")).join("; ");
    const response = await fetch(next, { redirect: "manual", headers: { cookie } });
    for (const line of response.headers.getSetCookie()) {
      const [name, ...value] = line.split(";")[0].split("=");
      cookies.set(name, value.join("="));
    }
    if (!response.headers.has("location")) throw new Error(`${next}: ${response.status} ${await response.text()}`);
    next = new URL(response.headers.get("location"), next);
    if (!next.href.startsWith(authProvider.redirectUrl)) continue;
    if (next.searchParams.has("error")) throw new Error(next.search);
    return next;
  }
}

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
