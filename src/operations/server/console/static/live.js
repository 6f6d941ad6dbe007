/* A page with a table that a subscription keeps up to date. */

import * as api from "./api.js";
import { el, fill, plainString } from "./dom.js";
import { stringify } from "./json.js";

const LONGEST_SECONDS = 30;

/** A page that follows a subscription while it is open. `may(id)` returns whether the caller may call an operation. */
export class LivePage {
  constructor(watched, { may }) {
    this.watched = watched;
    this.may = may;
    this.news = el("p", { class: "hint", "aria-live": "polite" }, "Connecting…");
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.abort = new AbortController();
    this.input = {};
  }

  /** Follow the subscription with another input. */
  restart(input) {
    this.input = input;
    this.stream?.abort();
  }

  /** Show the hub's reports, and reconnect if the stream ends. */
  async follow() {
    let pause = 1;
    while (!this.abort.signal.aborted) {
      const stream = new AbortController();
      this.stream = stream;
      const signal = AbortSignal.any([this.abort.signal, stream.signal]);
      try {
        for await (const { data } of api.subscribe(this.watched, stringify(this.input), signal)) {
          if (signal.aborted) break;
          if (!this.isCurrent) this.news.textContent = "";
          this.isCurrent = true;
          this.isLost = false;
          pause = 1;
          this.show(data);
        }
      } catch (error) {
        if (this.abort.signal.aborted) return;
        if (stream.signal.aborted) continue;
        this.isCurrent = false;
        this.isLost = error.isLost;
        this.news.textContent = `This may be out of date: ${plainString(error.message)}`;
      }
      if (stream.signal.aborted) continue;
      await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
      pause = Math.min(2 * pause, LONGEST_SECONDS);
    }
  }

  /** Call an operation of the hub and announce the outcome. */
  async run(id, input, done) {
    this.error.hidden = true;
    this.news.textContent = "…";
    try {
      const { envelope } = await api.call(id, stringify(input), this.abort.signal);
      this.news.textContent = plainString(done(envelope.data));
    } catch (error) {
      if (error.name === "AbortError") return;
      this.fail(error);
    }
  }

  /** Show why something failed. */
  fail(error) {
    this.news.textContent = "";
    fill(this.error, plainString(error.message)).hidden = false;
  }

  leave() {
    this.abort.abort();
  }

  /** The element of the page: a table of rows, with `parts` below it. */
  table(title, description, caption, columns, ...parts) {
    this.body = el("tbody");
    return el(
      "article",
      { class: "operation" },
      el("header", { class: "title" }, el("h1", { tabIndex: -1 }, title), el("p", { class: "description" }, description)),
      el(
        "div",
        { class: "sources" },
        el(
          "table",
          {},
          el("caption", { class: "away" }, caption),
          el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
          this.body,
        ),
      ),
      ...parts,
      this.error,
    );
  }
}

export const button = (words, onclick, about) =>
  el("button", { type: "button", class: "quiet", onclick, "aria-label": about === undefined ? null : `${words} ${plainString(about)}` }, words);
