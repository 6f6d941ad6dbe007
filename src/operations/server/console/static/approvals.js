/* The calls that wait for approval, live, with their input and caller; each can be approved or denied. */

import { el, plain } from "./dom.js";
import { stringify } from "./json.js";
import { button, LivePage } from "./live.js";

/** The page of approvals. */
export class ApprovalsPage extends LivePage {
  constructor({ may }) {
    super("approvals.watch", { may });
    this.rows = new Map();
    this.empty = el("p", { class: "hint" }, "No call waits for approval.");
    this.element = this.table(
      "Approvals",
      "Calls that wait for a person. An approval is used once, by the same caller with the same input.",
      "Calls that wait for approval",
      ["Operation", "Input", "Asked by", "Until", "Answer"],
      this.empty,
      el("div", { class: "actions" }, this.news),
    );
    this.follow();
  }

  show(waiting) {
    const shown = new Set(waiting.map(({ id }) => id));
    for (const approval of waiting) {
      if (this.rows.has(approval.id)) continue;
      const row = this.row(approval);
      this.rows.set(approval.id, row);
      this.body.append(row);
    }
    for (const [id, row] of this.rows) {
      if (shown.has(id)) continue;
      // The keyboard focus stays on the page when the focused row is removed.
      if (row.contains(document.activeElement)) this.element.querySelector("h1").focus();
      row.remove();
      this.rows.delete(id);
    }
    this.empty.hidden = waiting.length > 0;
  }

  row({ id, operation, input, caller, isOperator, acting, until }) {
    const who = isOperator ? "the operator" : (caller ?? "an unknown caller");
    const answer = (words, approve) =>
      this.may("approvals.answer")
        ? button(words, () => this.run("approvals.answer", { id, approve }, ({ state }) => `${operation}: ${state}.`), operation)
        : null;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, plain(operation)),
      el("td", {}, el("pre", { tabIndex: 0, "aria-label": "Input" }, plain(stringify(input, 2)))),
      el("td", {}, plain(who), acting?.length ? el("p", { class: "hint" }, "through ", plain(acting.join(", "))) : null),
      el("td", {}, new Date(until).toLocaleTimeString()),
      el("td", { class: "controls" }, answer("Approve", true), answer("Deny", false)),
    );
  }
}
