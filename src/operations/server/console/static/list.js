/* The list of operations. Only the rows in sight exist, so that thousands cost as little as twenty. */

import { el, icon, plainString } from "./dom.js";

const ROW = 46;
const HEAD = 34;
const MARGIN = 300;

/** Rows in groups that can be collapsed. `leaveUp` is called when the arrow goes up from the first. */
export class OperationList {
  constructor({ leaveUp }) {
    this.rows = [];
    this.folded = new Set();
    this.shown = new Map();
    this.current = null;
    this.canvas = el("div", { class: "canvas" });
    this.element = el("div", { class: "list", tabIndex: 0, role: "group", "aria-label": "Operations" }, this.canvas);
    this.leaveUp = leaveUp;
    this.element.addEventListener("scroll", () => this.paint(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.paint()).observe(this.element);
  }

  /** Show entries by namespace, or in the given order if `isRanked`; keep the position if `stay`. */
  show(entries, { isRanked = false, stay = false } = {}) {
    const top = this.element.scrollTop;
    const focused = this.rows[Number(this.shownFocus()?.dataset.at)]?.key;
    this.entries = entries;
    this.isRanked = isRanked;
    this.layOut();
    this.element.scrollTop = stay ? top : 0;
    this.paint();
    if (stay && focused !== undefined) this.focus(this.rows.findIndex((row) => row.key === focused));
  }

  /** The focused row, if any. */
  shownFocus() {
    return this.canvas.contains(document.activeElement) ? document.activeElement : null;
  }

  /** Collapse or expand all groups. */
  fold(names) {
    this.folded = new Set(names);
  }

  layOut() {
    this.rows = [];
    let top = 0;
    let group = null;
    const add = (row) => {
      this.rows.push({ ...row, top });
      top += row.height;
    };
    const counts = new Map();
    for (const { namespace } of this.entries) counts.set(namespace, (counts.get(namespace) ?? 0) + 1);
    for (const entry of this.entries) {
      if (!this.isRanked && entry.namespace !== group) {
        group = entry.namespace;
        add({ key: `group ${group}`, height: HEAD, group, count: counts.get(group) });
      }
      if (this.isRanked || !this.folded.has(entry.namespace)) add({ key: entry.id, height: ROW, entry });
    }
    this.height = top;
    this.canvas.style.height = `${top}px`;
    for (const element of this.shown.values()) element.remove();
    this.shown.clear();
  }

  /** Create visible rows and remove the others, except for the focused one. */
  paint() {
    const from = this.element.scrollTop - MARGIN;
    const to = this.element.scrollTop + this.element.clientHeight + MARGIN;
    const wanted = new Set();
    for (let at = this.firstBelow(from); at < this.rows.length && this.rows[at].top < to; at += 1) {
      const row = this.rows[at];
      wanted.add(row.key);
      if (!this.shown.has(row.key)) this.add(row, at);
    }
    for (const [key, element] of this.shown) {
      if (wanted.has(key) || element === document.activeElement) continue;
      element.remove();
      this.shown.delete(key);
    }
  }

  firstBelow(y) {
    let low = 0;
    let high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].top + this.rows[middle].height < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  add(row, at) {
    const element = row.entry ? this.operationRow(row.entry) : this.groupRow(row);
    element.style.transform = `translateY(${row.top}px)`;
    element.dataset.at = at;
    // In document order, for screen readers.
    this.canvas.insertBefore(element, this.following(at));
    this.shown.set(row.key, element);
  }

  following(at) {
    for (const child of this.canvas.children) if (Number(child.dataset.at) > at) return child;
    return null;
  }

  groupRow({ group, count }) {
    const isOpen = !this.folded.has(group);
    const toggle = () => {
      if (!this.folded.delete(group)) this.folded.add(group);
      const top = this.element.scrollTop;
      this.layOut();
      this.element.scrollTop = top;
      this.paint();
      this.shown.get(`group ${group}`)?.focus();
    };
    return el(
      "button",
      { type: "button", class: "row group", "aria-expanded": String(isOpen), tabIndex: -1, onclick: toggle },
      icon("chevron"),
      el("span", { class: "grow" }, group),
      el("span", { class: "count" }, String(count)),
    );
  }

  operationRow(entry) {
    const words = entry.title || entry.description || "";
    return el(
      "a",
      {
        class: "row operation",
        href: `#/${encodeURIComponent(entry.id)}`,
        tabIndex: -1,
        "aria-current": entry.id === this.current ? "page" : undefined,
        "data-id": entry.id,
      },
      typeMark(entry.type),
      el(
        "span",
        { class: "grow" },
        el("span", { class: "name" }, this.isRanked ? entry.id : entry.name),
        el("span", { class: "words", dir: "auto" }, plainString(words.split("\n", 1)[0])),
      ),
      sourceBadge(entry.source),
    );
  }

  /** Mark the open operation and scroll to it. */
  select(id) {
    this.current = id;
    for (const element of this.shown.values()) {
      if (element.dataset.id === id) element.setAttribute("aria-current", "page");
      else element.removeAttribute("aria-current");
    }
    const at = this.rows.findIndex((row) => row.entry?.id === id);
    if (at >= 0) this.reveal(at);
  }

  reveal(at) {
    const row = this.rows[at];
    const view = this.element;
    if (row.top < view.scrollTop) view.scrollTop = row.top - HEAD;
    else if (row.top + row.height > view.scrollTop + view.clientHeight) view.scrollTop = row.top + row.height - view.clientHeight + HEAD;
    this.paint();
  }

  /** Focus a row. */
  focus(at = 0) {
    if (at < 0 || at >= this.rows.length) return;
    this.reveal(at);
    this.shown.get(this.rows[at].key)?.focus({ preventScroll: true });
  }

  /** The position of the first operation, if any. */
  first() {
    return this.rows.find((row) => row.entry)?.entry ?? null;
  }

  onKey(event) {
    if (event.target === this.element) {
      if (event.key !== "ArrowDown") return;
      event.preventDefault();
      this.focus(Math.max(0, this.rows.findIndex((one) => one.entry?.id === this.current)));
      return;
    }
    const at = Number(event.target.dataset.at);
    const row = this.rows[at];
    const isFolded = this.folded.has(row.group);
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -at, End: this.rows.length - 1 - at };
    if (event.key in steps) {
      event.preventDefault();
      if (event.key === "ArrowUp" && at === 0) this.leaveUp();
      else this.focus(Math.min(Math.max(at + steps[event.key], 0), this.rows.length - 1));
    } else if (row.group && ((event.key === "ArrowLeft" && !isFolded) || (event.key === "ArrowRight" && isFolded))) {
      event.preventDefault();
      event.target.click();
    }
  }
}

const MARKS = { query: "Q", mutation: "M", subscription: "S" };

/** A letter for the type of an operation. */
export const typeMark = (type) => el("span", { class: `mark ${type}`, title: type, role: "img", "aria-label": type }, MARKS[type] ?? "?");

const SOURCES = new Set(["local", "openapi", "mcp", "remote"]);

/** The source of an operation. */
export const sourceBadge = (source) =>
  el("span", { class: `badge source ${SOURCES.has(source) ? source : "other"}` }, plainString(source ?? "local"));
