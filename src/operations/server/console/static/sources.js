/* The sources of a hub and their states, for operators: each can be retried, disabled and enabled.

   Rule 1: a row is changed in place, so that the keyboard focus stays where it is.
*/

import * as api from "./api.js";
import { el, fill, plain, plainString } from "./dom.js";
import { stringify } from "./json.js";

const LONGEST_SECONDS = 30;
const LOOKS = { connected: "good", disconnected: "bad", connecting: "live" };

/** A page that follows a subscription until it is left. `may(id)` is whether the caller may call an operation. */
export class LivePage {
  constructor(watched, { may }) {
    this.watched = watched;
    this.may = may;
    this.news = el("p", { class: "hint", "aria-live": "polite" }, "Connecting…");
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.abort = new AbortController();
  }

  /** Show what the hub reports, and connect again if the stream ends. */
  async follow() {
    let pause = 1;
    while (!this.abort.signal.aborted) {
      try {
        for await (const { data } of api.subscribe(this.watched, "{}", this.abort.signal)) {
          if (this.isLost !== false) this.news.textContent = "";
          this.isLost = false;
          pause = 1;
          this.show(data);
        }
      } catch (error) {
        if (this.abort.signal.aborted) return;
        this.isLost = true;
        this.news.textContent = `This may be old: ${plainString(error.message)}`;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
      pause = Math.min(2 * pause, LONGEST_SECONDS);
    }
  }

  /** Call an operation of the hub; announce how it ended. */
  async run(id, input, done) {
    this.error.hidden = true;
    this.news.textContent = "…";
    try {
      const { envelope } = await api.call(id, stringify(input), this.abort.signal);
      this.news.textContent = plainString(done(envelope.data));
    } catch (error) {
      if (error.name === "AbortError") return;
      this.news.textContent = "";
      fill(this.error, plainString(error.message)).hidden = false;
    }
  }

  leave() {
    this.abort.abort();
  }
}

/** The page of sources. */
export class SourcesPage extends LivePage {
  constructor({ may }) {
    super("hub.watch", { may });
    this.rows = new Map();
    this.body = el("tbody");
    this.element = el(
      "article",
      { class: "operation" },
      el(
        "header",
        { class: "title" },
        el("h1", { tabIndex: -1 }, "Sources"),
        el("p", { class: "description" }, "Where the operations come from. A source that is not connected is retried until it is."),
      ),
      el(
        "div",
        { class: "sources" },
        el(
          "table",
          {},
          el("caption", { class: "away" }, "Sources and their states"),
          el("thead", {}, el("tr", {}, ["Source", "State", "Operations", "Actions"].map((name) => el("th", { scope: "col" }, name)))),
          this.body,
        ),
      ),
      el("div", { class: "actions" }, may("hub.reload") ? button("Reload the file", () => this.run("hub.reload", {}, () => "The file was read again.")) : null, this.news),
      this.error,
    );
    this.follow();
  }

  show(sources) {
    const shown = new Set();
    for (const source of sources) {
      const key = `${source.kind}:${source.name}`;
      const row = this.rows.get(key) ?? new Row(key, this);
      this.rows.set(key, row);
      row.show(source);
      shown.add(key);
      if (row.element.parentNode === null) this.body.append(row.element);
    }
    for (const [key, row] of this.rows) {
      if (shown.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
  }
}

class Row {
  constructor(key, page) {
    const act = (id) => () => page.run(id, { source: key }, ({ name, state }) => `${name} is ${state}.`);
    this.state = el("span", { class: "chip" });
    this.problem = el("p", { class: "problem" });
    this.next = el("p", { class: "hint" });
    this.count = el("td", { class: "count" });
    this.retry = page.may("hub.retry") ? button("Retry", act("hub.retry"), key) : null;
    this.disable = page.may("hub.disable") ? button("Disable", act("hub.disable"), key) : null;
    this.enable = page.may("hub.enable") ? button("Enable", act("hub.enable"), key) : null;
    this.element = el(
      "tr",
      {},
      el("th", { scope: "row" }, plain(key.startsWith("local:") ? "local" : key)),
      el("td", {}, this.state, this.problem, this.next),
      this.count,
      el("td", { class: "controls" }, this.retry, this.disable, this.enable),
    );
  }

  show(source) {
    if (stringify(source) === stringify(this.source ?? null)) return;
    this.source = source;
    const isDisabled = source.state === "disabled";
    const isRetried = source.state === "disconnected";
    fill(this.state, isRetried ? "retrying" : source.state).className = `chip ${LOOKS[source.state] ?? ""}`;
    fill(this.problem, isRetried ? plain(source.problem ?? "") : null).hidden = !isRetried;
    const at = source.nextAttempt ?? null;
    fill(this.next, at === null ? null : `Next attempt at ${new Date(at).toLocaleTimeString()}`).hidden = at === null;
    this.count.textContent = source.operations.toLocaleString();
    const had = this.element.contains(document.activeElement) ? document.activeElement : null;
    for (const [control, isShown] of [[this.retry, !isDisabled], [this.disable, !isDisabled], [this.enable, isDisabled]]) if (control) control.hidden = !isShown;
    // Whoever disabled a source with the keyboard can enable it there.
    if (had?.hidden) (isDisabled ? this.enable : this.disable)?.focus();
  }
}

export const button = (words, onclick, about) =>
  el("button", { type: "button", class: "quiet", onclick, "aria-label": about === undefined ? null : `${words} ${plainString(about)}` }, words);
