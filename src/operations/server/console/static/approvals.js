/* The calls that wait for approval, live: a card for each, which can be approved or denied.

   Rule 1: Approve works only while the whole exact input is on the page: it is read, and no part of it is folded.
   Rule 2: when cards move, no answer works for a moment, so that a click meant for one card does not answer another.
*/

import * as api from "./api.js";
import { el, fill, plain, plainString } from "./dom.js";
import { ExactInput } from "./exact.js";
import { stringify } from "./json.js";
import { LivePage } from "./live.js";
import { amount } from "./result.js";

const STILL_MS = 700;

/** The page of approvals. */
export class ApprovalsPage extends LivePage {
  constructor({ may }) {
    super("approvals.watch", { may });
    this.cards = new Map();
    this.before = [];
    this.empty = el("p", { class: "hint" }, "No call waits for approval.");
    this.list = el("div", { class: "cards" });
    this.where = el("span", { class: "hint" });
    this.back = el("button", { type: "button", class: "quiet", onclick: () => this.turn(this.before.pop()) }, "Previous page");
    this.forth = el("button", { type: "button", class: "quiet", onclick: () => this.turn(this.following, this.before.push(this.input)) }, "Next page");
    this.element = el(
      "article",
      { class: "operation" },
      el(
        "header",
        { class: "title" },
        el("h1", { tabIndex: -1 }, "Approvals"),
        el("p", { class: "description" }, "Calls that wait for a person. An approval is used once, by the same caller with the same input."),
      ),
      this.empty,
      this.list,
      el("div", { class: "actions pages" }, this.where, this.back, this.forth),
      el("div", { class: "actions" }, this.news),
      this.error,
    );
    this.follow();
  }

  /** Show another page. */
  turn(input) {
    this.restart(input);
    this.element.querySelector("h1").focus();
  }

  show({ approvals, total, next }) {
    const shown = new Set(approvals.map(({ id }) => id));
    let hasMoved = false;
    for (const [id, card] of this.cards) {
      if (shown.has(id)) continue;
      // The keyboard focus stays on the page when the focused card is removed.
      if (card.element.contains(document.activeElement)) this.element.querySelector("h1").focus();
      card.element.remove();
      this.cards.delete(id);
      hasMoved = true;
    }
    approvals.forEach((approval, at) => {
      if (this.cards.has(approval.id)) return;
      const card = new Card(approval, this);
      hasMoved ||= at < this.list.children.length;
      this.cards.set(approval.id, card);
      this.list.insertBefore(card.element, this.list.children[at] ?? null);
    });
    if (hasMoved) this.hold();
    // The requests of this page may have been answered or expired.
    if (approvals.length === 0 && total > 0 && this.before.length > 0) {
      this.before = [];
      this.turn({});
      return;
    }
    this.following = next ? { after: next } : null;
    this.empty.hidden = total > 0;
    this.back.hidden = this.before.length === 0;
    this.forth.hidden = !next;
    this.where.hidden = this.back.hidden && this.forth.hidden;
    this.where.textContent = `${approvals.length} of ${total.toLocaleString("en")} requests`;
  }

  /** Let no answer work for a moment. */
  hold() {
    clearTimeout(this.held);
    this.held = setTimeout(() => this.release(), STILL_MS);
    for (const card of this.cards.values()) card.draw();
  }

  release() {
    this.held = undefined;
    for (const card of this.cards.values()) card.draw();
  }
}

/** One request. */
class Card {
  constructor(approval, page) {
    this.approval = approval;
    this.page = page;
    const { id, operation, caller, issuer, isOperator, acting, until, size } = approval;
    const who = isOperator ? "the operator" : (caller ?? "an unknown caller");
    this.body = el("div", {});
    this.cue = el("p", { class: "hint", id: `cue-${id}` });
    this.answers = page.may("approvals.answer") ? { approve: this.button("Approve", true), deny: this.button("Deny", false) } : {};
    const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, value.flat(2)));
    this.element = el(
      "div",
      { class: "card", role: "group", "aria-label": `${plainString(operation)} for ${plainString(who)}`, "data-id": id },
      el("h2", {}, plain(operation)),
      el(
        "dl",
        { class: "facts" },
        fact("Asked by", plain(who), issuer ? [" of ", plain(issuer)] : null, acting?.length ? [" through ", plain(acting.join(", "))] : null),
        fact("Until", new Date(until).toLocaleString()),
        fact("Request", plain(id)),
      ),
      approval.claim ? claimView(approval.claim) : null,
      el("h3", {}, "Input", el("span", { class: "hint" }, ` ${amount(size)}`)),
      this.body,
      this.cue,
      el("div", { class: "answers" }, this.answers.approve, this.answers.deny),
    );
    if (approval.input === undefined) this.offer();
    else this.open(approval);
  }

  button(words, approve) {
    const { id, operation } = this.approval;
    return el(
      "button",
      { type: "button", class: "answer", "aria-label": `${words} ${plainString(operation)}`, "aria-describedby": `cue-${id}`, onclick: () => this.answer(approve) },
      words,
    );
  }

  /** Offer to read an input that the list does not contain. */
  offer() {
    const opener = el("button", { type: "button", class: "quiet", onclick: () => this.read(opener) }, `Open the input, ${amount(this.approval.size)}`);
    fill(this.body, opener);
    this.draw();
  }

  async read(opener) {
    opener.disabled = true;
    try {
      const { envelope } = await api.call("approvals.get", stringify({ id: this.approval.id }), this.page.abort.signal);
      this.open(envelope.data);
      this.body.querySelector("summary")?.focus();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.page.fail(error);
      opener.disabled = false;
    }
  }

  open({ input, generated }) {
    this.exact = new ExactInput(input, generated ?? [], () => this.draw());
    fill(this.body, this.exact.element);
    this.draw();
  }

  /** Whether the whole input is on the page. */
  get isShown() {
    return this.exact !== undefined && this.exact.folded === 0;
  }

  draw() {
    const folded = this.exact?.folded ?? 1;
    this.cue.hidden = this.isShown || this.answers.approve === undefined;
    this.cue.textContent = this.exact === undefined ? "Open the input to approve it." : `Open ${folded === 1 ? "the folded part" : `the ${folded} folded parts`} to approve the input.`;
    if (this.answers.approve === undefined) return;
    const isHeld = this.page.held !== undefined;
    this.answers.approve.setAttribute("aria-disabled", String(isHeld || !this.isShown));
    this.answers.deny.setAttribute("aria-disabled", String(isHeld));
  }

  answer(approve) {
    if (this.page.held !== undefined || (approve && !this.isShown)) return;
    const { id, operation } = this.approval;
    this.page.run("approvals.answer", { id, approve }, ({ state }) => `${operation}: ${state}.`);
  }
}

/** What the author of a call claims about it: the line of a script, and the calls before it. */
function claimView({ by, line, code, before }) {
  const row = (at, ...parts) => el("li", {}, el("span", { class: "hint" }, `line ${at ?? "?"} `), parts.filter(Boolean).map((part) => [el("bdi", {}, plain(part)), " "]).flat());
  return el(
    "section",
    { class: "claim", "aria-label": "Claim" },
    el("h3", {}, `Claimed by the ${plainString(by ?? "caller")}`, el("span", { class: "hint" }, ", not part of what you approve")),
    el("ul", {}, row(line, code), (before ?? []).map((call) => row(call.line, call.operation, call.outcome, call.result)).reverse()),
  );
}
