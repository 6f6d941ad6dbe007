// The clients of the TypeScript SDK: `node typescript.mjs PACKAGE URL` prints what each cell saw, as one JSON object.
const [, , version, url] = process.argv;
const client = await connected();

async function connected() {
  if (version === "1") {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
    const client = new Client({ name: "matrix", version: "1" });
    await client.connect(new StreamableHTTPClientTransport(new URL(url)));
    return client;
  }
  const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
  const client = new Client({ name: "matrix", version: "1" });
  await client.connect(new StreamableHTTPClientTransport(new URL(url)));
  return client;
}

const call = (name, args, options) =>
  version === "1"
    ? client.callTool({ name, arguments: args }, undefined, options)
    : client.callTool({ name, arguments: args }, options);
const structured = async (name, args) => (await call(name, args)).structuredContent;

const cells = {
  list: async () => (await client.listTools()).tools.map((tool) => tool.name).sort(),
  call: () => structured("matrix__add", { a: 1, b: 2 }),
  error: async () => {
    const result = await call("matrix__fail", {});
    return [result.isError, result.content[0].text];
  },
  mismatch: async () => {
    const result = await call("matrix__mismatch", {});
    return [result.isError, result.content[0].text];
  },
  typed: async () => {
    const { properties } = (await client.listTools()).tools.find(({ name }) => name === "matrix__task").outputSchema;
    return Object.fromEntries(Object.entries(properties).map(([name, { type }]) => [name, type]));
  },
  progress: async () => {
    const steps = [];
    await call("matrix__steps", {}, { onprogress: ({ progress }) => steps.push(progress) });
    return steps;
  },
  structured: () => structured("matrix__task", { id: "t7" }),
  items: () => structured("matrix__tasks", {}),
  prompt: async () =>
    (await client.getPrompt({ name: "matrix__greet", arguments: { name: "Ann" } })).messages[0].content.text,
  resource: async () => (await client.readResource({ uri: "matrix://motd" })).contents[0].text,
};
const seen = {};
for (const [cell, look] of Object.entries(cells)) {
  try {
    seen[cell] = await look();
  } catch (error) {
    seen[cell] = `${error.name}: ${error.message}`;
  }
}
console.log(JSON.stringify(seen));
await client.close();
process.exit(0);
