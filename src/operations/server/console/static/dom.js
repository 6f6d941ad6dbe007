/* Functions that create elements.

   Rule 1: third-party text becomes only the content of a text node or the value of a harmless attribute; no code of
           the console turns a string into markup.
*/

const PROPERTIES = new Set(["value", "checked", "disabled", "readOnly", "tabIndex", "hidden", "open", "selected"]);

/** An element with attributes, listeners (`onclick: ...`) and children; strings become text. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

/** Replace all children of a node. */
export function fill(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

const present = (children) => children.flat().filter((child) => child !== null && child !== undefined && child !== false);

let lastId = 0;

/** A unique element id. */
export const freshId = (prefix) => `${prefix}-${++lastId}`;

/** Characters without a picture: control, format, unassigned and ignorable ones, except the selectors of emoji. */
const HIDDEN = /(?![\t\n])[\p{C}\p{Zl}\p{Zp}\u2800]|(?!\ufe0f)\p{Default_Ignorable_Code_Point}|(?<!\p{Extended_Pictographic})\ufe0f/gu;

/** Third-party text, with invisible characters shown: control, zero-width and direction characters. */
export function plain(text) {
  const nodes = [];
  let from = 0;
  for (const match of String(text).matchAll(HIDDEN)) {
    if (match.index > from) nodes.push(text.slice(from, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("span", { class: "unseen", title: "an invisible character" }, `U+${code}`));
    from = match.index + match[0].length;
  }
  nodes.push(String(text).slice(from));
  return nodes;
}

/** The same as a string. */
export const plainString = (text) =>
  String(text).replace(HIDDEN, (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

const PATHS = {
  search: "M7 12.5a5.5 5.5 0 1 0 0-11 5.5 5.5 0 0 0 0 11Zm4-1.5 3.5 3.5",
  back: "M10 2.5 4.5 8l5.5 5.5",
  chevron: "m6 3.5 4.5 4.5L6 12.5",
  copy: "M5.5 5.5v-3h8v8h-3m-8-5h8v8h-8z",
  play: "M4.5 2.5v11l9-5.5z",
  pause: "M5 3v10m6-10v10",
  stop: "M4 4h8v8H4z",
  plus: "M8 3v10M3 8h10",
  cross: "m4 4 8 8m0-8-8 8",
  sun: "M8 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6Zm0-10v1.5m0 11V15M1 8h1.5m11 0H15M3 3l1.1 1.1m7.8 7.8L13 13M3 13l1.1-1.1m7.8-7.8L13 3",
  moon: "M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7Z",
  auto: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12Zm0 0V2",
  key: "M10 9.5a3.75 3.75 0 1 0-3.5-2.4L2 11.5V14h2.5v-1.5H6V11l1.6-1.9c.7.3 1.5.4 2.4.4Zm1-4.5h.01",
  person: "M8 8a2.75 2.75 0 1 0 0-5.5A2.75 2.75 0 0 0 8 8Zm-5 6c.4-2.7 2.4-4 5-4s4.600 1.300 5 4",
  activity: "M1.500 8h3l2-5 3 10 2-5h3",
  file: "M4 1.500h5l3.500 3.500v9.500H4zM9 1.500V5h3.500",
};

/** An icon that is hidden from screen readers. */
export function icon(name) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(namespace, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** Tabs: the names in order, each with its panel. Returns the element and `show(name)`. */
export function tabs(label, panels, shown = () => {}) {
  const names = Object.keys(panels);
  const buttons = new Map();
  const list = el("div", { role: "tablist", "aria-label": label, class: "tabs" });
  for (const name of names) {
    const panel = panels[name];
    panel.id ||= freshId("panel");
    panel.setAttribute("role", "tabpanel");
    const button = el(
      "button",
      { type: "button", role: "tab", id: freshId("tab"), "aria-controls": panel.id, onclick: () => show(name) },
      name,
    );
    panel.setAttribute("aria-labelledby", button.id);
    buttons.set(name, button);
    list.append(button);
  }
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = names.findIndex((name) => buttons.get(name) === document.activeElement);
    const next = names[(at + step + names.length) % names.length];
    show(next);
    buttons.get(next).focus();
  });
  function show(wanted) {
    for (const name of names) {
      const isShown = name === wanted;
      buttons.get(name).setAttribute("aria-selected", String(isShown));
      buttons.get(name).tabIndex = isShown ? 0 : -1;
      panels[name].hidden = !isShown;
    }
    shown(wanted);
  }
  show(names[0]);
  return { list, show };
}

/** A button that copies the result of `text()` and confirms it briefly. */
export function copyButton(text, label = "Copy") {
  const words = el("span", {}, label);
  const button = el("button", { type: "button", class: "quiet", onclick: copy }, icon("copy"), words);
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      words.textContent = "Copied";
    } catch {
      // The clipboard is available only to local pages and over https.
      words.textContent = "Not allowed here";
    }
    setTimeout(() => (words.textContent = label), 1500);
  }
  return button;
}
