/* The same call with other tools: curl, Python, MCP. Keys are named, never shown. */

import { stringify, typeOf } from "./json.js";

const KEY = "OPERATIONS_KEY";

function addressOf(spec) {
  return new URL(`${spec.namespace}/${spec.name}`, document.baseURI).href;
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** For a shell. */
export function curl(spec, inputText, needsKey) {
  const lines = [
    `curl -sS${spec.type === "subscription" ? "N" : ""} ${quoted(addressOf(spec))}`,
    `-H 'Content-Type: application/json'`,
    ...(needsKey ? [`-H "Authorization: Bearer $${KEY}"`] : []),
    `-d ${quoted(inputText)}`,
  ];
  return lines.join(" \\\n  ");
}

/** For Python, with nothing to install. */
export function python(spec, input, needsKey) {
  const isStream = spec.type === "subscription";
  return [
    "import json",
    ...(needsKey ? ["import os"] : []),
    "import urllib.request",
    "",
    "request = urllib.request.Request(",
    `    ${pythonText(addressOf(spec))},`,
    `    data=json.dumps(${pythonLiteral(input, 4)}).encode(),`,
    "    headers={",
    '        "Content-Type": "application/json",',
    ...(needsKey ? [`        "Authorization": "Bearer " + os.environ["${KEY}"],`] : []),
    "    },",
    ")",
    "with urllib.request.urlopen(request) as response:",
    ...(isStream
      ? ["    for line in response:", '        if line.startswith(b"data: "):', "            print(json.loads(line[6:]))"]
      : ["    print(json.load(response))"]),
  ].join("\n");
}

/** The request an agent sends to `/mcp`. */
export function mcp(spec, input) {
  const name = typeof spec.meta?.mcp?.name === "string" ? spec.meta.mcp.name : `${spec.namespace}.${spec.name}`;
  return stringify({ jsonrpc: "2.0", id: 1, method: "tools/call", params: { name, arguments: input } });
}

function pythonLiteral(value, indent) {
  const inner = " ".repeat(indent + 4);
  const outer = " ".repeat(indent);
  const lines = (open, parts, close) =>
    parts.length === 0 ? open + close : `${open}\n${parts.map((part) => `${inner}${part},`).join("\n")}\n${outer}${close}`;
  switch (typeOf(value)) {
    case "null": return "None";
    case "undefined": return "None";
    case "boolean": return value ? "True" : "False";
    case "string": return pythonText(value);
    case "array": return lines("[", value.map((one) => pythonLiteral(one, indent + 4)), "]");
    case "object":
      return lines("{", Object.entries(value).map(([name, one]) => `${pythonText(name)}: ${pythonLiteral(one, indent + 4)}`), "}");
    default: return JSON.stringify(value);
  }
}

/** Python has the escapes of JSON, except that characters beyond 16 bit are written unescaped. */
const pythonText = (text) => JSON.stringify(text).replace(/[\u007f-\u009f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g,
  (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
