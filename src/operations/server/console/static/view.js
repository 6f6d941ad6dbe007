/* The view of an app (MCP Apps): a page of an MCP server in a frame, which calls tools of that server.

   Rule 1: the frame has scripts and an opaque origin, and reaches only the addresses that the app names (`frame.py`).
   Rule 2: a view reaches only tools and resources of its own server, as the caller; the person confirms each mutation.
   Rule 3: the page of the view is sent once. A frame that was replaced, by the view itself, gets nothing.
   Rule 4: a view has one open question and a few calls at a time, so that it cannot wear the person down.
*/

import * as api from "./api.js";
import { el, fill, plain, plainString } from "./dom.js";
import { isObject, stringify } from "./json.js";

const VERSION = "2026-01-26";
const TYPE = "text/html;profile=mcp-app";
const READY = "alkdev.operations/frame-ready";
const MAX_CALLS = 8;
const MAX_HEIGHT = 800;
const MAX_DENIED = 3;
const PAUSE = 500;
const CSP = { connectDomains: "connect", resourceDomains: "resource", frameDomains: "frame", baseUriDomains: "base" };
const PERMISSIONS = { camera: "camera", microphone: "microphone", geolocation: "geolocation", clipboardWrite: "clipboard-write" };
const INVALID = -32602;
const UNKNOWN = -32601;
const FAILED = -32603;

/** The meta that the server of a tool has sent. */
const metaOf = (spec) => (isObject(spec._meta?._meta) ? spec._meta._meta : {});

/** The address of the view of an operation, at its server; null if it has none. */
export function viewAddress(spec) {
  const meta = metaOf(spec);
  const uri = isObject(meta.ui) ? meta.ui.resourceUri : meta["ui/resourceUri"];
  return spec._meta?.source === "mcp" && typeof uri === "string" && /^ui:\/\//i.test(uri) ? uri : null;
}

/** Plain JSON, without the exact numbers of `json.js`, which cannot be sent to a frame. */
const clone = (value) => JSON.parse(stringify(value ?? null));

const operationName = (tool) => tool.replace(/[^A-Za-z0-9_.-]/g, "_");

class Refusal extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** The view of one call. */
export class View {
  constructor(spec, input, envelope) {
    this.spec = spec;
    this.input = input;
    this.envelope = envelope;
    this.abort = new AbortController();
    this.html = null;
    this.running = 0;
    this.denied = 0;
    this.question = null;
    this.note = el("p", { class: "hint", role: "status" }, "Reading the view.");
    this.place = el("div", { class: "frame" });
    this.asked = el("div", {});
    this.element = el("section", { class: "view", "aria-label": "View" }, this.note, this.asked, this.place);
  }

  /** Read the page of the view, and show it. */
  async open() {
    let content;
    try {
      content = await this.read();
    } catch (error) {
      if (error.name !== "AbortError") fill(this.note, "The view cannot be shown: ", plain(error.message));
      return;
    }
    if (this.abort.signal.aborted) return;
    this.html = content.html;
    const allow = Object.keys(PERMISSIONS).filter((name) => isObject(content.ui.permissions?.[name]));
    this.frame = el("iframe", {
      sandbox: "allow-scripts",
      src: `~console/frame?${policy(content.ui.csp)}`,
      allow: allow.map((name) => PERMISSIONS[name]).join("; "),
      referrerpolicy: "no-referrer",
      title: plainString(`The view of ${this.spec.namespace}.${this.spec.name}`),
    });
    addEventListener("message", (event) => this.hear(event), { signal: this.abort.signal });
    fill(this.note).hidden = true;
    fill(this.place, this.frame);
  }

  async read() {
    const uri = viewAddress(this.spec);
    const { envelope } = await api.call(`${this.spec.namespace}.resources.read`, stringify({ uri }), this.abort.signal);
    const content = (Array.isArray(envelope.data) ? envelope.data : []).find((each) => isObject(each));
    const type = String(content?.mimeType ?? "").replaceAll(" ", "").toLowerCase();
    if (type !== TYPE) throw new Error(`${uri} is not the page of a view.`);
    const bytes = typeof content.blob === "string" ? Uint8Array.from(atob(content.blob), (one) => one.charCodeAt(0)) : null;
    const html = bytes === null ? String(content.text ?? "") : new TextDecoder().decode(bytes);
    return { html, ui: isObject(content._meta?.ui) ? content._meta.ui : {} };
  }

  /** End the view and its calls. */
  close() {
    this.abort.abort();
    this.question?.(false);
    fill(this.place);
  }

  send(message) {
    this.frame.contentWindow?.postMessage({ jsonrpc: "2.0", ...message }, "*");
  }

  hear({ source, data }) {
    if (!this.frame || source !== this.frame.contentWindow || !isObject(data)) return;
    if (data.method === READY) {
      if (this.html !== null) this.send({ html: this.html });
      this.html = null;
    } else if (this.html === null && typeof data.method === "string") {
      const params = isObject(data.params) ? data.params : {};
      const isRequest = typeof data.id === "string" || typeof data.id === "number";
      if (isRequest) this.answer(data.id, data.method, params);
      else this.notice(data.method, params);
    }
  }

  notice(method, params) {
    if (method === "ui/notifications/initialized") {
      this.send({ method: "ui/notifications/tool-input", params: { arguments: clone(this.input ?? {}) } });
      this.send({ method: "ui/notifications/tool-result", params: resultOf(this.envelope) });
    } else if (method === "ui/notifications/size-changed" && Number.isFinite(params.height)) {
      this.frame.style.height = `${Math.min(Math.max(params.height, 40), MAX_HEIGHT)}px`;
    }
  }

  async answer(id, method, params) {
    if (this.running >= MAX_CALLS) {
      this.send({ id, error: { code: FAILED, message: `more than ${MAX_CALLS} requests at a time` } });
      return;
    }
    this.running += 1;
    try {
      this.send({ id, result: await this.respond(method, params) });
    } catch (error) {
      const code = error instanceof Refusal ? error.code : FAILED;
      if (!this.abort.signal.aborted) this.send({ id, error: { code, message: error.message } });
    } finally {
      this.running -= 1;
    }
  }

  async respond(method, params) {
    if (method === "ui/initialize") return this.hello();
    if (method === "ping") return {};
    if (method === "tools/call") return this.call(params);
    if (method === "resources/read") return this.resource(params);
    throw new Refusal(UNKNOWN, `${method} is not supported`);
  }

  hello() {
    const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    return {
      protocolVersion: VERSION,
      hostInfo: { name: "operations", version: "1" },
      hostCapabilities: { serverTools: {}, serverResources: {} },
      hostContext: { theme, displayMode: "inline", availableDisplayModes: ["inline"], platform: "web" },
    };
  }

  async resource({ uri }) {
    if (typeof uri !== "string") throw new Refusal(INVALID, "uri is missing");
    const { envelope } = await api.call(`${this.spec.namespace}.resources.read`, stringify({ uri }), this.abort.signal);
    return { contents: clone(envelope.data) };
  }

  async call({ name, arguments: input = {} }) {
    const spec = await this.find(name);
    const id = `${spec.namespace}.${spec.name}`;
    if (spec.type !== "query" && !(await this.confirm(id, input))) throw new Refusal(FAILED, "The person has denied the call.");
    try {
      const { envelope } = await api.call(id, stringify(input), this.abort.signal);
      return resultOf(envelope);
    } catch (error) {
      if (!(error instanceof api.Failure)) throw error;
      return { content: [{ type: "text", text: `${error.code}: ${error.message}` }], isError: true };
    }
  }

  /** The contract of a tool of the view's own server that views may call. */
  async find(tool) {
    const unknown = new Refusal(INVALID, `Unknown tool: ${tool}`);
    if (typeof tool !== "string") throw unknown;
    let spec;
    try {
      spec = await api.schema(`${this.spec.namespace}.${operationName(tool)}`);
    } catch {
      throw unknown;
    }
    const { source, server, tool: name } = spec._meta ?? {};
    const isOwn = source === "mcp" && server === this.spec._meta.server && spec.namespace === this.spec.namespace && name === tool;
    const visibility = metaOf(spec).ui?.visibility;
    if (!isOwn || spec.type === "subscription" || (Array.isArray(visibility) && !visibility.includes("app"))) throw unknown;
    return spec;
  }

  /** Ask the person; false if they deny it, or another question is open. */
  async confirm(id, input) {
    if (this.question || this.denied >= MAX_DENIED) return false;
    const text = stringify(input);
    const isAllowed = await new Promise((resolve) => {
      this.question = resolve;
      const allow = el("button", { type: "button", class: "primary", disabled: true, onclick: () => resolve(true) }, "Allow");
      // The question may appear below the pointer of a person who clicks.
      setTimeout(() => (allow.disabled = false), PAUSE);
      fill(
        this.asked,
        el(
          "div",
          { class: "ask", role: "alertdialog", "aria-label": "The view calls an operation" },
          el("p", {}, "The view calls ", el("code", {}, plainString(id)), " with:"),
          el("pre", { class: "mono", tabIndex: 0, "aria-label": "Input of the call" }, plain(text)),
          el(
            "div",
            { class: "actions" },
            allow,
            el("button", { type: "button", class: "quiet", onclick: () => resolve(false) }, "Deny"),
          ),
        ),
      );
    });
    this.question = null;
    fill(this.asked);
    if (!isAllowed) this.denied += 1;
    return isAllowed && !this.abort.signal.aborted;
  }
}

/** An envelope as the result of a tool. */
function resultOf(envelope) {
  const meta = isObject(envelope.meta) ? envelope.meta : {};
  if (meta.source !== "mcp") {
    const text = stringify(envelope.meta === undefined ? envelope : (envelope.data ?? null));
    return { content: [{ type: "text", text }] };
  }
  const result = { content: clone(meta.content ?? []), isError: meta.isError === true };
  if (isObject(meta.structuredContent)) result.structuredContent = clone(meta.structuredContent);
  if (isObject(meta._meta)) result._meta = clone(meta._meta);
  return result;
}

/** The addresses that an app names, as the query of the frame. */
function policy(csp) {
  const query = new URLSearchParams();
  for (const [key, kind] of Object.entries(CSP)) {
    const named = isObject(csp) && Array.isArray(csp[key]) ? csp[key] : [];
    for (const address of named.slice(0, 64)) query.append(kind, String(address));
  }
  return query;
}
