/* A subscription as it runs.

   Rule 1: the work of the page does not depend on the rate of items: they are drawn once a frame, and only the last are kept.
   Rule 2: while it is paused, items wait here up to a limit; beyond it, the page stops reading and the server waits, too.
*/

import { el, icon, plain, plainString } from "./dom.js";
import { scalarText, stringify } from "./json.js";
import { amount, duration } from "./result.js";
import { tree } from "./tree.js";

const SHOWN = 200;
const WAITING = 1000;

/** One subscription: draws itself into `element` until it ends or is stopped. */
export class Stream {
  constructor({ ended }) {
    this.abort = new AbortController();
    this.ended = ended;
    this.queue = [];
    this.count = 0;
    this.size = 0;
    this.isPaused = false;
    this.started = performance.now();
    this.chip = el("span", { class: "chip live" }, "live");
    this.facts = el("span", { class: "fact", "aria-live": "off" });
    this.pauseButton = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.pause() }, icon("pause"), el("span", {}, "Pause"));
    this.stopButton = el("button", { type: "button", class: "quiet danger", onclick: () => this.stop() }, icon("stop"), "Stop");
    this.rows = el("ol", { class: "events" });
    this.note = el("div", { role: "status" });
    this.element = el(
      "section",
      { class: "result stream", "aria-label": "Result" },
      el("header", { class: "status" }, this.chip, this.facts, el("span", { class: "grow" }), this.pauseButton, this.stopButton),
      this.note,
      this.rows,
    );
    this.describe();
  }

  /** Read items until the end; draws them as they come. */
  async run(items) {
    try {
      for await (const item of items) {
        this.count += 1;
        this.size += item.size;
        this.queue.push({ ...item, number: this.count, ms: performance.now() - this.started });
        if (!this.isPaused && this.queue.length > SHOWN) this.queue.shift();
        this.draw();
        if (this.isPaused && this.queue.length >= WAITING) await this.resumed();
      }
      this.finish("good", "complete");
    } catch (error) {
      if (this.abort.signal.aborted) this.finish("", "stopped");
      else {
        this.finish("bad", error.code ?? "Error");
        this.ended(error);
        return;
      }
    }
    this.ended(null);
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.isPaused) {
        for (const item of this.queue.splice(0)) this.rows.prepend(rowOf(item));
        while (this.rows.children.length > SHOWN) this.rows.lastElementChild.remove();
      }
      this.describe();
    });
  }

  describe() {
    const waiting = this.isPaused && this.queue.length > 0 ? `, ${this.queue.length} waiting` : "";
    const kept = this.count > SHOWN ? `, last ${SHOWN} shown` : "";
    this.facts.textContent = `${this.count} ${this.count === 1 ? "item" : "items"}, ${amount(this.size)}, ${duration(performance.now() - this.started)}${waiting}${kept}`;
  }

  pause() {
    this.isPaused = !this.isPaused;
    this.pauseButton.setAttribute("aria-pressed", String(this.isPaused));
    this.pauseButton.replaceChildren(icon(this.isPaused ? "play" : "pause"), el("span", {}, this.isPaused ? "Resume" : "Pause"));
    this.chip.textContent = this.isPaused ? "paused" : "live";
    if (!this.isPaused) this.wake?.();
    this.draw();
  }

  resumed() {
    return new Promise((resolve) => {
      this.wake = resolve;
      this.abort.signal.addEventListener("abort", resolve, { once: true });
    });
  }

  /** Leave: the server stops its handler. */
  stop() {
    this.abort.abort();
  }

  finish(kind, words) {
    this.isPaused = false;
    this.chip.className = `chip ${kind}`;
    this.chip.textContent = plainString(words);
    this.pauseButton.remove();
    this.stopButton.remove();
    this.draw();
  }
}

function rowOf({ data, number, ms }) {
  const text = typeof data === "object" && data !== null ? stringify(data, 0) : scalarText(data);
  const content = el("div", { class: "content" });
  const details = el(
    "details",
    {},
    el(
      "summary",
      {},
      el("span", { class: "number" }, `#${number}`),
      el("span", { class: "when" }, `+${duration(ms)}`),
      el("span", { class: "preview mono" }, plain(text.slice(0, 300))),
    ),
    content,
  );
  details.addEventListener("toggle", () => {
    if (details.open && !content.firstChild) content.append(tree(data));
  });
  return el("li", {}, details);
}
