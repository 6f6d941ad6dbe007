/* A host made with the official SDK: `node host.mjs URL` prints what it finds as JSON. */

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { getToolUiResourceUri } from "@modelcontextprotocol/ext-apps/app-bridge";
import { RESOURCE_MIME_TYPE } from "@modelcontextprotocol/ext-apps";

const extensions = { "io.modelcontextprotocol/ui": { mimeTypes: [RESOURCE_MIME_TYPE] } };
const client = new Client({ name: "host", version: "1" }, { capabilities: { extensions } });
await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2])));
const { tools } = await client.listTools();
const found = {};
for (const tool of tools.filter((each) => each.name.endsWith("show-time"))) {
  const shown = await client.callTool({ name: tool.name, arguments: { city: "Bergen" } });
  const view = shown.structuredContent.view;
  const page = (await client.readResource({ uri: view })).contents[0];
  // A view sends the address that it was given.
  const echo = await client.callTool({ name: tool.name.replace("show-time", "echo"), arguments: { view } });
  found[tool.name] = {
    named: getToolUiResourceUri(tool),
    shown: view,
    linked: shown.content[1].uri,
    read: page.uri,
    title: page.text.slice(page.text.indexOf("<title>")),
    echo: echo.content[0].text,
  };
}
await client.close();
console.log(JSON.stringify(found));
