/* Data to look at: a tree that makes its branches when they are opened. */

import { el, plain, plainString } from "./dom.js";
import { scalarText, typeOf } from "./json.js";

const PAGE = 100;
const LONG = 400;
const OPEN_DEPTH = 2;
const OPEN_SIZE = 30;

/** A value of any size. */
export const tree = (value) => el("div", { class: "tree mono" }, node(null, value, 0));

function node(key, value, depth) {
  const type = typeOf(value);
  if (type !== "object" && type !== "array") return leaf(key, value, type);
  const entries = type === "array" ? value : Object.entries(value);
  if (entries.length === 0) return line(key, el("span", { class: "brace" }, type === "array" ? "[]" : "{}"));
  return branch(key, entries, type, depth);
}

const keyNodes = (key) => (key === null ? [] : [el("span", { class: "key" }, plain(String(key))), el("span", { class: "colon" }, ": ")]);
const line = (key, ...content) => el("div", { class: "leaf" }, keyNodes(key), content);

function leaf(key, value, type) {
  const text = type === "string" ? value : scalarText(value);
  if (type !== "string" || text.length <= LONG) return line(key, el("span", { class: `value ${type}` }, plain(text)));
  const shown = el("span", { class: "value string" }, plain(text.slice(0, LONG)));
  const more = el("button", { type: "button", class: "quiet", onclick: whole }, `… ${text.length - LONG} more characters`);
  function whole() {
    shown.replaceChildren(...plain(text));
    more.remove();
  }
  return line(key, shown, more);
}

function branch(key, entries, type, depth) {
  const size = type === "array" ? `${entries.length} ${entries.length === 1 ? "item" : "items"}` : preview(entries);
  const content = el("div", { class: "content" });
  const details = el(
    "details",
    { class: "branch" },
    el("summary", {}, keyNodes(key), el("span", { class: "size" }, plainString(size))),
    content,
  );
  let made = 0;
  const more = el("button", { type: "button", class: "quiet", onclick: grow });
  function grow() {
    const next = entries.slice(made, made + PAGE);
    next.forEach((entry, at) => {
      const [name, value] = type === "array" ? [made + at, entry] : entry;
      content.insertBefore(node(name, value, depth + 1), more.parentNode === content ? more : null);
    });
    made += next.length;
    if (made < entries.length) {
      more.textContent = `${entries.length - made} more`;
      content.append(more);
    } else more.remove();
  }
  details.addEventListener("toggle", () => {
    if (details.open && made === 0) grow();
  });
  if (depth < OPEN_DEPTH && entries.length <= OPEN_SIZE) {
    details.open = true;
    grow();
  }
  return details;
}

const preview = (entries) => {
  const names = entries.slice(0, 4).map(([name]) => name).join(", ");
  return `{ ${names.slice(0, 60)}${entries.length > 4 ? ", …" : ""} }`;
};
