/* A view of JSON data: a tree whose branches are created when they are opened. */

import { el, plain, plainString } from "./dom.js";
import { scalarText, typeOf } from "./json.js";

const PAGE = 100;
const LONG = 400;
const OPEN = 60;

/** A value of any size. A value that fits on a screen is open at first. */
export function tree(value) {
  const element = el("div", { class: "tree mono", tabIndex: 0, role: "group", "aria-label": "Value" });
  const type = typeOf(value);
  const isBranch = (type === "object" || type === "array") && entriesOf(value).length > 0;
  if (isBranch) grower(element, entriesOf(value), weight(value) <= OPEN)();
  else element.append(node(null, value, false));
  return element;
}

const entriesOf = (value) => (Array.isArray(value) ? value.map((one, at) => [at, one]) : Object.entries(value));

/** The number of lines of a value, counted up to a limit. */
function weight(value, most = OPEN + 1) {
  if (value === null || typeof value !== "object") return 1;
  let lines = 1;
  for (const one of Object.values(value)) {
    lines += weight(one, most - lines);
    if (lines >= most) return lines;
  }
  return lines;
}

function node(key, value, isOpen) {
  const type = typeOf(value);
  if (type !== "object" && type !== "array") return leaf(key, value, type);
  const entries = entriesOf(value);
  if (entries.length === 0) return line(key, el("span", { class: "brace" }, type === "array" ? "[]" : "{}"));
  return branch(key, entries, type, isOpen);
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

function branch(key, entries, type, isOpen) {
  const size = type === "array" ? `${entries.length} ${entries.length === 1 ? "item" : "items"}` : preview(entries);
  const content = el("div", { class: "content" });
  const grow = grower(content, entries, isOpen);
  const details = el("details", { class: "branch" }, el("summary", {}, keyNodes(key), el("span", { class: "size" }, plainString(size))), content);
  details.addEventListener("toggle", () => {
    if (details.open && !content.firstChild) grow();
  });
  if (isOpen) {
    details.open = true;
    grow();
  }
  return details;
}

/** A function that adds the next entries, and a button for the rest. */
function grower(place, entries, isOpen) {
  let made = 0;
  const more = el("button", { type: "button", class: "quiet", onclick: grow });
  function grow() {
    const next = entries.slice(made, made + PAGE);
    made += next.length;
    more.remove();
    place.append(...next.map(([name, value]) => node(name, value, isOpen)));
    if (made === entries.length) return;
    more.textContent = `${entries.length - made} more`;
    place.append(more);
  }
  return grow;
}

const preview = (entries) => {
  const names = entries.slice(0, 4).map(([name]) => name).join(", ");
  return `{ ${names.slice(0, 60)}${entries.length > 4 ? ", …" : ""} }`;
};
