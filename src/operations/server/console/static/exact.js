/* The exact input of a call, as a person must see it before an answer.

   Rule 1: nothing is cut off. A part is either shown as a whole, or folded, with its length on the fold.
   Rule 2: every value has a line of its own, so that its characters cannot change the order of others.
*/

import { el, plain, plainString } from "./dom.js";
import { isObject, stringify } from "./json.js";

const SHORT = 160;
const MOST = 50;

/** More marks than this are written as text, because that many elements would stop the browser. */
const MARKS = 2_000;

const SPACES = / {9,}/g;
const VALUE = /"(?:[^"\\]|\\.)*"/g;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

const signs = (text) => `${text.length.toLocaleString("en")} ${text.length === 1 ? "character" : "characters"}`;

/** An input: its short fields, then the long ones, folded. `changed` is called when one is opened or folded. */
export class ExactInput {
  constructor(input, generated, changed) {
    const entries = isObject(input) ? Object.entries(input) : [[null, input]];
    const rows = entries.map(([name, value]) => ({ name, value, text: textOf(value) }));
    const short = rows.filter(({ name, text }) => text.length <= SHORT && (name ?? "").length <= SHORT);
    const long = rows.filter((row) => !short.includes(row));
    const rest = short.splice(MOST);
    if (long.length > MOST) rest.push(...long.splice(MOST));
    this.folds = [];
    this.element = el(
      "div",
      { class: "exact" },
      entries.length === 0 ? el("div", {}, "{}") : null,
      short.map(({ name, text }) => el("div", {}, label(name), el("span", { class: "content" }, exact(text)))),
      long.map((row) => this.fold(row, changed)),
      rest.length === 0
        ? null
        : this.fold({ name: `${rest.length.toLocaleString("en")} more fields`, text: stringify(Object.fromEntries(rest.map(({ name, value }) => [name, value])), 2) }, changed),
      this.generated(generated.join("\n"), changed),
    );
  }

  /** The number of folded parts. */
  get folded() {
    return this.folds.filter((fold) => !fold.open).length;
  }

  /** The places of values that are set when the call runs. */
  generated(text, changed) {
    const title = "Set when the call runs:";
    if (text === "") return null;
    return text.length > SHORT
      ? this.fold({ name: title, text }, changed)
      : el("div", {}, el("span", { class: "hint" }, title), el("span", { class: "content" }, exact(text)));
  }

  fold({ name, text }, changed) {
    const isLongName = (name ?? "").length > SHORT;
    const title = isLongName ? `a field whose name has ${signs(name)}` : (name ?? "input");
    const whole = isLongName ? `${stringify(name)}: ${text}` : text;
    const content = el("div", { class: "content" });
    const fold = el("details", {}, el("summary", {}, el("span", { class: "name" }, plain(title)), " ", el("span", { class: "hint" }, signs(whole))), content);
    fold.addEventListener("toggle", () => {
      if (fold.open && !content.firstChild) content.append(...exact(whole));
      changed();
    });
    this.folds.push(fold);
    return fold;
  }
}

/** A value as JSON text: on one line if it is short. */
function textOf(value) {
  const line = stringify(value, 0);
  return line.length <= SHORT ? line : stringify(value, 2);
}

const label = (name) => (name === null ? null : el("span", { class: "name" }, plain(name)));

/** JSON text without a character that hides others: marks for invisible ones and for many spaces. */
function exact(text) {
  const counted = (run) => `⟨${run.length.toLocaleString("en")} spaces⟩`;
  if ((plainString(text).match(/⟨U\+/g)?.length ?? 0) > MARKS) return [plainString(text).replace(SPACES, counted)];
  if (RIGHT_TO_LEFT.test(text)) return isolated(text);
  return spaced(text);
}

function spaced(text) {
  const nodes = [];
  let from = 0;
  for (const { 0: run, index } of text.matchAll(SPACES)) {
    nodes.push(...plain(text.slice(from, index)), el("span", { class: "unseen" }, `${run.length.toLocaleString("en")} spaces`));
    from = index + run.length;
  }
  nodes.push(...plain(text.slice(from)));
  return nodes;
}

/** Texts of other writing directions, each by itself. */
function isolated(text) {
  const nodes = [];
  let from = 0;
  for (const { 0: one, index } of text.matchAll(VALUE)) {
    nodes.push(...spaced(text.slice(from, index)), el("bdi", {}, spaced(one)));
    from = index + one.length;
  }
  nodes.push(...spaced(text.slice(from)));
  return nodes;
}
