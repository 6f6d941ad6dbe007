/* The outcome of a call: its data and meta side by side, or the error with advice. */

import { copyButton, el, plain, plainString, tabs } from "./dom.js";
import { isObject, stringify } from "./json.js";
import { tree } from "./tree.js";

const MAX_TEXT = 500_000;
const PICTURES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);

/** Format milliseconds. */
export function duration(ms) {
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** Format a number of bytes. */
export const amount = (bytes) =>
  bytes < 1024 ? `${bytes} B` : bytes < 1024 * 1024 ? `${(bytes / 1024).toFixed(1)} KB` : `${(bytes / 1024 / 1024).toFixed(1)} MB`;

const fact = (name, value) => (value ? el("span", { class: "fact" }, el("span", { class: "away" }, `${name}: `), plainString(value)) : null);

/** The beginning of a request id: enough to find it in a log. */
const request = (id) => (id ? el("span", { class: "fact mono", title: plainString(`request ${id}`) }, plainString(id.slice(0, 8))) : null);

/** The result of a query or mutation. */
export function success({ envelope, size, requestId }, ms) {
  const isFailed = envelope.meta.source === "mcp" && envelope.meta.isError === true;
  return el(
    "section",
    { class: "result", "aria-label": "Result" },
    el(
      "header",
      { class: "status" },
      el("span", { class: isFailed ? "chip bad" : "chip good" }, isFailed ? "tool error" : "success"),
      fact("time", duration(ms)),
      fact("size", amount(size)),
      request(requestId),
    ),
    el("div", { class: "sides" }, dataSide(envelope), metaSide(envelope.meta)),
  );
}

function dataSide(envelope) {
  const { data } = envelope;
  const text = stringify(data);
  const panels = { Data: el("div", {}, pictures(envelope), tree(data)), JSON: el("div", {}) };
  const shown = (name) => {
    if (name !== "JSON" || panels.JSON.firstChild) return;
    const isCut = text.length > MAX_TEXT;
    panels.JSON.append(
      el("pre", { class: "mono", tabIndex: 0, "aria-label": "JSON" }, plain(text.slice(0, MAX_TEXT))),
      isCut ? el("p", { class: "hint" }, `${text.length - MAX_TEXT} more characters: copy to see them.`) : "",
    );
  };
  const { list } = tabs("Data", panels, shown);
  return el(
    "div",
    { class: "side data" },
    el("div", { class: "bar" }, list, save(envelope), copyButton(() => text)),
    panels.Data,
    panels.JSON,
  );
}

function metaSide(meta) {
  return el(
    "div",
    { class: "side meta" },
    el("div", { class: "bar" }, el("h3", {}, "Meta"), copyButton(() => stringify(meta))),
    tree(meta),
  );
}

/** Images in a result, of formats that cannot contain scripts. */
function pictures({ data, encoding, meta }) {
  const found = [];
  const take = (type, base64) => {
    const kind = String(type ?? "").split(";", 1)[0].trim().toLowerCase();
    if (PICTURES.has(kind) && typeof base64 === "string") found.push(`data:${kind};base64,${base64}`);
  };
  if (encoding === "base64") take(meta.contentType, data);
  for (const block of meta.source === "mcp" ? (meta.content ?? []) : []) {
    if (isObject(block) && block.type === "image") take(block.mimeType, block.data);
  }
  return found.map((src) => el("img", { class: "picture", src, alt: "A picture in the result" }));
}

/** A link that saves bytes as a file. */
function save({ data, encoding }) {
  if (encoding !== "base64") return null;
  const bytes = () => Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const onclick = () => {
    const href = URL.createObjectURL(new Blob([bytes()], { type: "application/octet-stream" }));
    el("a", { href, download: "result.bin" }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  };
  return el("button", { type: "button", class: "quiet", onclick }, "Save");
}

/** An error; offers `signIn` if that could help. */
export function failure(error, ms, { signIn }) {
  const needsKey = error.status === 401 || error.code === "ACCESS_DENIED";
  return el(
    "section",
    { class: "result failed", "aria-label": "Result", role: "alert" },
    el(
      "header",
      { class: "status" },
      el("span", { class: "chip bad" }, plainString(error.code ?? "Error")),
      fact("status", error.status ? `HTTP ${error.status}` : ""),
      ms === undefined ? null : fact("time", duration(ms)),
      request(error.requestId),
    ),
    el("p", { class: "message", dir: "auto" }, plain(error.message)),
    needsKey ? el("button", { type: "button", class: "primary", onclick: signIn }, "Sign in") : null,
    error.retryable ? el("p", { class: "hint" }, "This error may be temporary: call again.") : null,
    error.details === undefined || error.details === null ? null : el("div", { class: "details" }, el("h3", {}, "Details"), tree(error.details)),
  );
}

/** The view before the first call. */
export const waiting = (words) => el("section", { class: "result empty", "aria-label": "Result" }, el("p", {}, words));
