/* Runs: the list with filters, and one run with its state live, its steps, and what can be done with it. */

import * as api from "./api.js";
import { copyButton, el, fill, plain, plainString } from "./dom.js";
import { Form } from "./form.js";
import { isObject, parse, stringify } from "./json.js";
import { duration } from "./result.js";
import { tree } from "./tree.js";

const EVERY = 2000;
const LONGEST_SECONDS = 30;
const STATUSES = ["queued", "working", "input_required", "completed", "failed", "cancelled", "unknown"];
const FINAL = new Set(["completed", "failed", "cancelled", "unknown"]);
const WORDS = { input_required: "waits" };
const KINDS = { completed: "good", failed: "bad", unknown: "bad" };

const chip = (status) => el("span", { class: `chip ${KINDS[status] ?? ""}`, "data-status": status }, WORDS[status] ?? plainString(status));
const moment = (time) => new Date(time).toLocaleString();
const linkOf = (id) => `#/~runs/${encodeURIComponent(id)}`;
const quiet = (words, onclick) => el("button", { type: "button", class: "quiet", onclick }, words);

/** The runs of the caller, or all of them, refreshed while the page is visible. */
export class RunsPage {
  constructor() {
    this.abort = new AbortController();
    this.query = { status: "", operation: "", after: "" };
    this.before = [];
    this.body = el("tbody");
    this.empty = el("p", { class: "hint" }, "Loading…");
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    const status = el(
      "select",
      { "aria-label": "Status", onchange: () => this.filter({ status: status.value }) },
      el("option", { value: "" }, "All states"),
      STATUSES.map((value) => el("option", { value }, WORDS[value] ?? value)),
    );
    const operation = el("input", {
      type: "search", placeholder: "Operation", "aria-label": "Operation", autocomplete: "off", spellcheck: "false",
      onchange: () => this.filter({ operation: operation.value.trim() }),
    });
    this.back = quiet("Previous page", () => this.turn(this.before.pop()));
    this.forth = quiet("Next page", () => this.turn(this.following, this.before.push(this.query.after)));
    this.table = el(
      "div",
      { class: "sources" },
      el(
        "table",
        {},
        el("caption", { class: "away" }, "Runs"),
        el("thead", {}, el("tr", {}, ["Operation and owner", "State", "Started"].map((name) => el("th", { scope: "col" }, name)))),
        this.body,
      ),
    );
    this.element = el(
      "article",
      { class: "operation" },
      el("header", { class: "title" }, el("h1", { tabIndex: -1 }, "Runs"), el("p", { class: "description" }, "Calls that outlive their request and their process, the newest first.")),
      el("div", { class: "filters", role: "search", "aria-label": "Filter runs" }, status, operation),
      this.empty,
      this.table,
      el("div", { class: "actions pages" }, this.back, this.forth),
      this.error,
    );
    this.look();
    this.timer = setInterval(() => document.hidden || this.look(), EVERY);
  }

  filter(change) {
    this.query = { ...this.query, ...change, after: "" };
    this.before = [];
    this.look();
  }

  turn(after) {
    this.query.after = after;
    this.look();
    this.element.querySelector("h1").focus();
  }

  async look() {
    const asked = stringify(this.query);
    try {
      const page = await api.runs(this.query, this.abort.signal);
      // The filter may have changed meanwhile.
      if (stringify(this.query) === asked) this.show(page);
      this.error.hidden = true;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.isLost = error.isLost;
      fill(this.error, plainString(error.message)).hidden = false;
    }
  }

  show({ runs, next }) {
    this.isLost = false;
    const text = stringify(runs);
    if (text !== this.shown) {
      this.shown = text;
      // The keyboard focus stays on the same run.
      const focused = this.body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      fill(this.body, runs.map(row));
      if (focused !== null) (this.body.querySelector(`a[href="${focused}"]`) ?? this.element.querySelector("h1")).focus();
    }
    this.following = next;
    this.table.hidden = runs.length === 0;
    this.empty.hidden = runs.length > 0;
    this.empty.textContent = this.query.status || this.query.operation ? "No run matches." : "No runs yet.";
    this.back.hidden = this.before.length === 0;
    this.forth.hidden = !next;
  }

  leave() {
    clearInterval(this.timer);
    this.abort.abort();
  }
}

function row({ id, operation, status, created, owner, message }) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, el("a", { href: linkOf(id) }, plain(operation)), owner ? el("div", { class: "hint" }, plain(owner)) : null),
    el("td", {}, chip(status), message ? el("div", { class: "hint" }, plain(message)) : null),
    el("td", { class: "count" }, moment(created)),
  );
}

/** One run. */
export class RunPage {
  constructor(id, { may }) {
    this.id = id;
    this.may = may;
    this.abort = new AbortController();
    this.head = el("header", { class: "title" }, el("h1", { tabIndex: -1 }, "Run"), el("p", { class: "description" }, el("code", {}, plain(id)), " ", copyButton(() => id)));
    this.facts = el("dl", { class: "facts" });
    this.asked = el("div", { class: "cards" });
    this.actions = el("div", { class: "actions" });
    this.steps = el("div", {});
    this.outcome = el("div", {});
    this.news = el("p", { class: "hint", "aria-live": "polite" }, "Connecting…");
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.questions = new Map();
    this.element = el("article", { class: "operation run" }, this.head, this.facts, this.asked, this.actions, this.news, this.error, this.outcome, this.steps);
    this.follow();
  }

  /** Show each state, and reconnect if the stream ends early. */
  async follow() {
    let pause = 1;
    for (;;) {
      try {
        for await (const state of api.runStates(this.id, this.abort.signal)) {
          pause = 1;
          this.news.textContent = "";
          this.isLost = false;
          await this.show(state);
        }
        if (FINAL.has(this.state?.status)) return;
      } catch (error) {
        if (this.abort.signal.aborted) return;
        this.isLost = error.isLost;
        this.news.textContent = "";
        this.fail(error);
        if (error.status === 404) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
      if (this.abort.signal.aborted) return;
      pause = Math.min(2 * pause, LONGEST_SECONDS);
    }
  }

  async show(state) {
    this.state = state;
    const { operation, status, created, updated, expires, attempt, owner, message, progress } = state;
    const isFinal = FINAL.has(status);
    this.head.querySelector("h1").replaceChildren(...plain(operation));
    const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, value.flat(2)));
    fill(
      this.facts,
      fact("State", chip(status), message ? [" ", plain(message)] : null, progress ? [" ", plain(stringify(progress, 0))] : null),
      fact("Owner", plain(owner ?? "the operator, or a caller without identity")),
      fact("Started", moment(created)),
      fact(isFinal ? "Ended" : "Changed", `${moment(updated)}, after ${duration(updated - created)}`),
      fact("Attempts", String(attempt)),
      expires ? fact("Kept until", moment(expires)) : null,
    );
    this.ask(state.waiting ?? []);
    if (!isFinal) fill(this.actions, quiet("Cancel the run", () => this.change("cancel")));
    fill(this.outcome, outcomeOf(state));
    await this.look();
  }

  /** Show the questions that are outstanding; what was entered stays. */
  ask(waiting) {
    const keys = new Set(waiting.map(({ key }) => key));
    for (const [key, card] of this.questions) {
      if (keys.has(key)) continue;
      if (card.contains(document.activeElement)) this.head.querySelector("h1").focus();
      card.remove();
      this.questions.delete(key);
    }
    for (const question of waiting) {
      if (this.questions.has(question.key)) continue;
      const card = this.card(question);
      this.questions.set(question.key, card);
      this.asked.append(card);
    }
  }

  card({ key, kind, request }) {
    const parts = { elicit: () => this.elicit(key, request), signal: () => this.signal(request.name), approval: () => this.approval(request) };
    const other = () => [el("p", {}, `Waits for ${plainString(kind)}.`)];
    return el("form", { class: "card", onsubmit: (event) => event.preventDefault(), "aria-label": `Waits for ${plainString(kind)}` }, (parts[kind] ?? other)());
  }

  elicit(key, { message, schema }) {
    const form = new Form(isObject(schema) ? schema : { type: "object" }, () => {});
    const send = (action) => this.change(`answers/${encodeURIComponent(key)}`, action === "accept" ? { action, content: form.read() ?? {} } : { action });
    return [
      el("h2", {}, "Question"),
      el("p", { dir: "auto" }, plain(message ?? "")),
      form.element,
      el("div", { class: "actions" }, el("button", { type: "button", class: "primary", onclick: () => send("accept") }, "Answer"), quiet("Decline", () => send("decline"))),
    ];
  }

  signal(name) {
    const input = el("textarea", { rows: "1", class: "line mono", spellcheck: "false", placeholder: "JSON", "aria-label": "Value of the signal" });
    return [
      el("h2", {}, "Waits for the signal ", el("code", {}, plain(name))),
      input,
      el("div", { class: "actions" }, el("button", { type: "button", class: "primary", onclick: () => this.change(`signals/${encodeURIComponent(name)}`, value(input.value)) }, "Send")),
    ];
  }

  approval({ approval }) {
    return [
      el("h2", {}, "Waits for approval"),
      el("p", {}, "Request ", el("code", {}, plain(approval ?? "")), ". Another person answers it."),
      this.may("approvals.watch") ? el("p", {}, el("a", { href: "#/~approvals" }, "Open the approvals")) : null,
    ];
  }

  /** What can be done with a run that has ended; a call that may run only once and was interrupted needs a decision. */
  buttons({ status, error }, steps) {
    if (status === "completed") return [];
    const open = steps.find((step) => step.once && isOpen(step));
    if (status !== "unknown" && !open) return [quiet("Retry", () => this.change("retry", {}))];
    const input = el("textarea", { rows: "2", class: "line mono", spellcheck: "false", placeholder: "Its result as JSON", "aria-label": "Result of the call as JSON" });
    const begun = open?.operation ?? error?.details?.operation;
    return [
      el(
        "form",
        { class: "card", onsubmit: (event) => event.preventDefault(), "aria-label": "Decide" },
        el("h2", {}, "Decide"),
        el("p", {}, "It is not known whether ", begun ? el("code", {}, plain(begun)) : "a call", " ran. Find out before you decide: the run then continues."),
        input,
        el(
          "div",
          { class: "actions" },
          quiet("It ran, with this result", () => this.change("retry", { ran: value(input.value) ?? null })),
          quiet("It did not run", () => this.change("retry", { notRun: true })),
        ),
      ),
    ];
  }

  async look() {
    try {
      const { steps } = await api.runSteps(this.id, this.abort.signal);
      fill(this.steps, stepsView(steps, this.state));
      if (FINAL.has(this.state.status)) fill(this.actions, this.buttons(this.state, steps));
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    }
  }

  async change(path, body) {
    this.error.hidden = true;
    const wasFinal = FINAL.has(this.state.status);
    try {
      await api.changeRun(this.id, path, stringify(body ?? null), this.abort.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
      return;
    }
    this.news.textContent = "Sent.";
    // The stream of a run ends with it.
    if (wasFinal) this.follow();
  }

  fail(error) {
    fill(this.error, plainString(error.message)).hidden = false;
  }

  leave() {
    this.abort.abort();
  }
}

/** A text as JSON; text that is not JSON is itself. */
function value(text) {
  if (text.trim() === "") return undefined;
  try {
    return parse(text);
  } catch {
    return text;
  }
}

function outcomeOf({ status, result, error }) {
  if (status === "completed") return el("section", { class: "result", "aria-label": "Result" }, el("h2", {}, "Result"), tree(result?.data ?? null));
  if (!error) return null;
  return el(
    "section",
    { class: "result failed", "aria-label": "Result" },
    el("header", { class: "status" }, el("span", { class: "chip bad" }, plainString(error.code))),
    el("p", { class: "message", dir: "auto" }, plain(error.message ?? "")),
    error.details === undefined || error.details === null ? null : el("div", { class: "details" }, el("h3", {}, "Details"), tree(error.details)),
  );
}

/** The steps below those that have made them, each with its time on the scale of the run. */
/** Whether the outcome of a step is not known. */
function isOpen({ ended }) {
  return ended === undefined || ended === null;
}

function stepsView(steps, state) {
  if (steps.length === 0) return state.status === "completed" ? el("p", { class: "hint" }, "The steps of a completed run are removed, unless keep_steps is set.") : null;
  const from = Math.min(state.created, ...steps.map((step) => step.begun));
  const until = Math.max(state.updated, ...steps.map((step) => step.ended ?? step.begun));
  const span = Math.max(1, until - from);
  const below = new Map();
  const names = new Set(steps.map((step) => step.name));
  for (const step of steps) {
    const parent = names.has(step.parent) ? step.parent : "";
    below.set(parent, [...(below.get(parent) ?? []), step]);
  }
  const rows = [];
  const walk = (parent, depth) => {
    for (const step of below.get(parent) ?? []) {
      rows.push(stepRow(step, depth, from, span));
      walk(step.name, depth + 1);
    }
  };
  walk("", 0);
  return el("section", { "aria-label": "Steps" }, el("h2", {}, "Steps"), el("ul", { class: "call-tree" }, rows));
}

function stepRow({ operation, begun, ended, error, once, answeredBy }, depth, from, span) {
  const isPending = isOpen({ ended });
  const kind = isPending ? "pending" : error ? "bad" : "good";
  const bar = el("span", { class: `bar ${kind}` });
  bar.style.insetInlineStart = `${((begun - from) / span) * 100}%`;
  bar.style.inlineSize = isPending ? "100%" : `max(3px, ${Math.min(100, ((ended - begun) / span) * 100)}%)`;
  const indent = el("span", { class: "indent" });
  indent.style.inlineSize = `${depth * 18}px`;
  const words = isPending ? (once ? "begun, not recorded" : "begun") : (error?.code ?? (answeredBy ? `by ${plainString(answeredBy)}` : "recorded"));
  return el(
    "li",
    {},
    el("span", { class: "what" }, indent, el("span", { class: "name" }, plain(operation))),
    el("span", { class: `outcome-word ${isPending ? "" : kind}` }, plainString(words)),
    el("span", { class: "when" }, new Date(begun).toLocaleTimeString()),
    el("span", { class: "took" }, isPending ? "…" : duration(ended - begun)),
    el("span", { class: "track", "aria-hidden": "true" }, bar),
  );
}
