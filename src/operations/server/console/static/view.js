/* The view of an app (MCP Apps): a page of an MCP server in a frame, which calls tools of that server.

   Rule 1: the frame has scripts and an opaque origin, and reaches only the addresses that the app names (`frame.py`).
   Rule 2: a view reaches only tools and resources of its own server, as the caller; the person confirms each mutation.
   Rule 3: the page of the view is sent once. A frame that was replaced, by the view itself, gets nothing.
   Rule 4: a view has one open question and a few calls at a time, so that it cannot wear the person down.
   Rule 5: this host has no model. What a view sends to one is shown to the person, and only announced as far as that is true.
*/

import * as api from "./api.js";
import { el, fill, plain, plainString } from "./dom.js";
import { isObject, stringify } from "./json.js";

const VERSION = "2026-01-26";
const MODE = "inline";
const TYPE = "text/html;profile=mcp-app";
const READY = "alkdev.operations/frame-ready";
const MAX_CALLS = 8;
const MAX_HEIGHT = 800;
const MAX_DENIED = 3;
const PAUSE = 500;
const TEARDOWN = "teardown";
const TEARDOWN_TIME = 1000;
const MAX_MESSAGES = 5;
const MAX_SHOWN = 5000;
const MAX_LINK = 2000;
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
    // A renamed operation may have left the namespace of its server.
    this.namespace = spec._meta.namespace ?? spec.namespace;
    this.tools = new Map();
    this.tag = null;
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
    this.messages = el("ul", {});
    this.context = el("div", {});
    this.said = el("div", { class: "said", role: "log", "aria-label": "Messages of the view", hidden: true }, this.messages, this.context);
    this.element = el("section", { class: "view", "aria-label": "View" }, this.note, this.asked, this.place, this.said);
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
    const { envelope } = await api.call(`${this.namespace}.resources.read`, stringify({ uri }), this.abort.signal);
    const content = (Array.isArray(envelope.data) ? envelope.data : []).find((each) => isObject(each));
    const type = String(content?.mimeType ?? "").replaceAll(" ", "").toLowerCase();
    if (type !== TYPE) throw new Error(`${uri} is not the page of a view.`);
    const bytes = typeof content.blob === "string" ? Uint8Array.from(atob(content.blob), (one) => one.charCodeAt(0)) : null;
    const html = bytes === null ? String(content.text ?? "") : new TextDecoder().decode(bytes);
    return { html, ui: isObject(content._meta?.ui) ? content._meta.ui : await this.listedMeta(uri) };
  }

  /** What the list of resources has about the view; a page need not repeat it. */
  async listedMeta(uri) {
    const { envelope } = await api.call(`${this.namespace}.resources.list`, "{}", this.abort.signal).catch(() => ({ envelope: {} }));
    const listed = (Array.isArray(envelope.data) ? envelope.data : []).find((each) => each?.uri === uri);
    return isObject(listed?._meta?.ui) ? listed._meta.ui : {};
  }

  /** Let the view finish its work for a moment, then end it and its calls. */
  async close() {
    if (this.isInitialized && !this.abort.signal.aborted) {
      await new Promise((resolve) => {
        this.tornDown = resolve;
        setTimeout(resolve, TEARDOWN_TIME);
        this.send({ id: TEARDOWN, method: "ui/resource-teardown", params: {} });
      });
    }
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
    } else if (this.html === null && data.id === TEARDOWN) {
      this.tornDown?.();
    }
  }

  notice(method, params) {
    if (method === "ui/notifications/initialized") {
      this.isInitialized = true;
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
    if (method === "ui/open-link") return this.openLink(params);
    if (method === "ui/message") return this.message(params);
    if (method === "ui/update-model-context") return this.update(params);
    if (method === "ui/request-display-mode") return { mode: MODE };
    throw new Refusal(UNKNOWN, `${method} is not supported`);
  }

  hello() {
    const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    return {
      protocolVersion: VERSION,
      hostInfo: { name: "operations", version: "1" },
      hostCapabilities: { serverTools: {}, serverResources: {}, openLinks: {}, message: { text: {} } },
      hostContext: { theme, displayMode: MODE, availableDisplayModes: [MODE], platform: "web" },
    };
  }

  async resource({ uri }) {
    if (typeof uri !== "string") throw new Refusal(INVALID, "uri is missing");
    const { envelope } = await api.call(`${this.namespace}.resources.read`, stringify({ uri }), this.abort.signal);
    return { contents: clone(envelope.data) };
  }

  async call({ name, arguments: input = {} }) {
    const spec = await this.find(name);
    const id = `${spec.namespace}.${spec.name}`;
    const question = ["The view calls ", el("code", {}, plainString(id)), " with:"];
    if (spec.type !== "query" && !(await this.confirm("The view calls an operation", question, stringify(input), "Allow")))
      throw new Refusal(FAILED, "The person has denied the call.");
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
      spec = await api.schema(await this.idOf(tool));
    } catch {
      throw unknown;
    }
    const { source, namespace, tool: name } = spec._meta ?? {};
    const isOwn = source === "mcp" && namespace === this.namespace && name === tool;
    const visibility = metaOf(spec).ui?.visibility;
    if (!isOwn || spec.type === "subscription" || (Array.isArray(visibility) && !visibility.includes("app"))) throw unknown;
    return spec;
  }

  /** The id of a tool's operation, which the operator may have renamed. */
  async idOf(tool) {
    if (!this.tools.has(tool)) {
      const found = await api.overview(this.tag);
      if (found) {
        const own = found.operations.filter((each) => each.tool?.namespace === this.namespace);
        this.tools = new Map(own.map((each) => [each.tool.name, each.id]));
        this.tag = found.tag;
      }
    }
    return this.tools.get(tool);
  }

  /** Open a page of the web in a new tab, if the person agrees. */
  async openLink({ url }) {
    const link = webAddress(url);
    if (link === null) return { isError: true };
    const question = ["The view opens a page of ", el("strong", {}, plainString(link.host)), " in a new tab:"];
    if (!(await this.confirm("The view opens a page", question, link.href, "Open"))) return { isError: true };
    // Without access to this window, and without its address.
    open(link.href, "_blank", "noopener,noreferrer");
    return {};
  }

  /** Show a message that the view sends to a conversation. */
  message({ role, content }) {
    if (role !== "user" || !Array.isArray(content)) throw new Refusal(INVALID, "a message needs the role user and a list as content");
    this.messages.append(el("li", {}, "The view says: ", el("span", { class: "text" }, plain(textOf(content)))));
    while (this.messages.childElementCount > MAX_MESSAGES) this.messages.firstElementChild.remove();
    this.said.hidden = false;
    return {};
  }

  /** Show what the view wants a model to know; each update replaces the one before. */
  update({ content, structuredContent }) {
    const isValid = (content === undefined || Array.isArray(content)) && (structuredContent === undefined || isObject(structuredContent));
    if (!isValid) throw new Refusal(INVALID, "the content is not a list, or the structured content not an object");
    const parts = [textOf(content ?? []), structuredContent === undefined ? "" : cut(stringify(structuredContent))];
    const text = parts.filter(Boolean).join("\n");
    const hint = el("p", { class: "hint" }, "For a model, which the console does not have:");
    const label = "What the view tells a model";
    fill(this.context, ...(text ? [hint, el("pre", { class: "mono", tabIndex: 0, "aria-label": label }, plain(text))] : []));
    this.said.hidden = this.messages.childElementCount === 0 && !text;
    return {};
  }

  /** Ask the person; false if they deny it, or another question is open. */
  async confirm(label, question, text, verb) {
    if (this.question || this.denied >= MAX_DENIED) return false;
    const isAllowed = await new Promise((resolve) => {
      this.question = resolve;
      const allow = el("button", { type: "button", class: "primary", disabled: true, onclick: () => resolve(true) }, verb);
      // The question may appear below the pointer of a person who clicks.
      setTimeout(() => (allow.disabled = false), PAUSE);
      fill(
        this.asked,
        el(
          "div",
          { class: "ask", role: "alertdialog", "aria-label": label },
          el("p", {}, question),
          el("pre", { class: "mono", tabIndex: 0, "aria-label": "What it sends" }, plain(text)),
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

/** A URL that may be opened: http or https, without credentials, which could look like the host; null for others. */
function webAddress(text) {
  if (typeof text !== "string" || text.length > MAX_LINK || !URL.canParse(text)) return null;
  const url = new URL(text);
  return /^https?:$/.test(url.protocol) && url.username === "" && url.password === "" ? url : null;
}

const cut = (text) => (text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)} …` : text);

/** Blocks of content as text; blocks of other types as JSON. */
function textOf(blocks) {
  const texts = blocks.slice(0, 20).map((block) => (block?.type === "text" ? String(block.text ?? "") : cut(stringify(block ?? null))));
  return cut(texts.join("\n"));
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
