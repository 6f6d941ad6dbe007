/* An app server made with the official SDK: `node server.mjs PLACE`. */

import { registerAppResource, registerAppTool, RESOURCE_MIME_TYPE } from "@modelcontextprotocol/ext-apps/server";
import { McpServer } from "@modelcontextprotocol/server";
import { StdioServerTransport } from "@modelcontextprotocol/server/stdio";
import { z } from "zod";

const place = process.argv[2];
const uri = "ui://clock/view.html";
const server = new McpServer({ name: "clock", version: "1.0.0" });

registerAppTool(
  server,
  "show-time",
  {
    description: "Show the time.",
    inputSchema: z.object({ city: z.string() }),
    outputSchema: z.object({ view: z.string(), place: z.string() }),
    _meta: { ui: { resourceUri: uri } },
  },
  async ({ city }) => ({ content: [{ type: "text", text: city }, { type: "resource_link", uri, name: "view" }], structuredContent: { view: uri, place } }),
);
registerAppTool(
  server,
  "echo",
  { description: "For the view.", inputSchema: z.object({ view: z.string() }), _meta: { ui: { resourceUri: uri, visibility: ["app"] } } },
  async ({ view }) => ({ content: [{ type: "text", text: `${place} ${view}` }] }),
);
registerAppResource(server, "view", uri, { mimeType: RESOURCE_MIME_TYPE }, async () => ({
  contents: [{ uri, mimeType: RESOURCE_MIME_TYPE, text: `<!doctype html><title>${place}</title>` }],
}));
await server.connect(new StdioServerTransport());
