/* The sources of a hub and their states, for operators: each can be retried, disabled and enabled.

   Rule 1: a row is changed in place, so that the keyboard focus stays where it is.
*/

import { el, fill, plain } from "./dom.js";
import { stringify } from "./json.js";
import { button, LivePage } from "./live.js";

const LOOKS = { connected: "good", disconnected: "bad", failing: "bad", connecting: "live" };

/** The page of sources. */
export class SourcesPage extends LivePage {
  constructor({ may }) {
    super("hub.watch", { may });
    this.rows = new Map();
    this.element = this.table(
      "Sources",
      "The origins of the operations. The hub connects again to a source that is not connected.",
      "Sources and their states",
      ["Source", "State", "Operations", "Actions"],
      el("div", { class: "actions" }, may("hub.reload") ? button("Reload the file", () => this.run("hub.reload", {}, () => "The file was read again.")) : null, this.news),
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
    const problem = isRetried || source.state === "connected" || source.state === "failing" ? (source.problem ?? null) : null;
    fill(this.problem, problem === null ? null : plain(problem)).hidden = problem === null;
    const at = source.nextAttempt ?? null;
    fill(this.next, at === null ? null : `Next attempt at ${new Date(at).toLocaleTimeString()}`).hidden = at === null;
    this.count.textContent = source.operations.toLocaleString();
    const had = this.element.contains(document.activeElement) ? document.activeElement : null;
    for (const [control, isShown] of [[this.retry, !isDisabled], [this.disable, !isDisabled], [this.enable, isDisabled]]) if (control) control.hidden = !isShown;
    // The keyboard focus moves to the control that takes its place.
    if (had?.hidden) (isDisabled ? this.enable : this.disable)?.focus();
  }
}
