/* Code mode: a script, the stubs of the operations that it can call, its result and its calls.

   Rule 1: the page calls `code.search` and `code.run` as any client does; only the server checks scripts.
*/

import * as api from "./api.js";
import { callTree } from "./calls.js";
import { copyButton, el, fill, icon, plain, plainString } from "./dom.js";
import { stringify } from "./json.js";
import { failure, success, waiting } from "./result.js";

const EXAMPLE = "items = await shop.items(limit=4)\nreturn len(items)";

/** The script and the search since the page was loaded. */
const entered = { script: "", query: "" };

/** Forget the script. */
export const forgetScript = () => Object.assign(entered, { script: "", query: "" });

/** The page of scripts. `leave` ends a running script. */
export class CodePage {
  constructor({ may, hasCalls, signIn }) {
    this.hasCalls = hasCalls;
    this.signIn = signIn;
    this.abort = new AbortController();
    this.running = null;
    this.outcome = el("div", { class: "outcome" }, waiting("Run the script to see its result here."));
    this.element = el(
      "article",
      { class: "operation" },
      el(
        "header",
        { class: "title" },
        el("h1", { tabIndex: -1 }, "Code"),
        el("p", { class: "description" }, "Write a Python script that calls operations. It runs in a sandbox, and each call obeys the same rules as a call of yours."),
      ),
      el("div", { class: "work code" }, this.editor(), may("code.search") ? this.stubs() : null),
      this.outcome,
    );
    if (entered.query !== "" && this.query) this.search();
  }

  editor() {
    this.script = el("textarea", {
      class: "script mono", rows: "14", spellcheck: "false", autocapitalize: "off", autocomplete: "off",
      "aria-label": "Script", placeholder: EXAMPLE, value: entered.script, oninput: () => (entered.script = this.script.value),
    });
    this.runButton = el("button", { type: "submit", class: "primary" }, icon("play"), "Run");
    this.checkButton = el("button", { type: "button", class: "quiet", onclick: () => this.send(true) }, "Check");
    this.cancelButton = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.running?.abort() }, "Cancel");
    const form = el(
      "form",
      { class: "input", "aria-label": "Script" },
      el("div", { class: "bar" }, el("h2", {}, "Script")),
      this.script,
      el("div", { class: "actions" }, this.runButton, this.checkButton, this.cancelButton, el("span", { class: "hint keys" }, "Ctrl + Enter")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(false);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    return form;
  }

  stubs() {
    this.query = el("input", {
      type: "search", placeholder: "Find operations", "aria-label": "Find operations", autocomplete: "off", spellcheck: "false", maxlength: "1000",
      value: entered.query, oninput: () => (entered.query = this.query.value),
    });
    this.found = el("pre", { class: "mono", tabIndex: 0, "aria-label": "Stubs" });
    this.copy = copyButton(() => this.found.textContent);
    this.listing = el("div", { class: "snippet", hidden: true }, this.copy, this.found);
    this.news = el("p", { class: "hint", role: "status" }, "Search to see what a script can call.");
    this.more = el("div", { class: "more" });
    const form = el("form", { role: "search", "aria-label": "Stubs", class: "joined" }, this.query, el("button", { type: "submit", class: "quiet" }, "Search"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.search();
    });
    return el("section", { class: "input stubs", "aria-label": "Operations" }, el("div", { class: "bar" }, el("h2", {}, "Operations")), form, this.news, this.listing, this.more);
  }

  async search(query = this.query.value) {
    // Only the latest search is shown.
    this.searching?.abort();
    const searching = new AbortController();
    this.searching = searching;
    this.news.textContent = "…";
    try {
      const signal = AbortSignal.any([this.abort.signal, searching.signal]);
      const { envelope } = await api.call("code.search", stringify({ query }), signal);
      const { stubs, more } = envelope.data;
      fill(this.found, plain(stubs));
      this.listing.hidden = stubs === "";
      this.news.textContent = stubs === "" ? "No operation found." : "";
      fill(this.more, (more ?? []).map((name) => el("button", { type: "button", class: "quiet", onclick: () => this.open(name) }, plain(name))));
    } catch (error) {
      if (error.name !== "AbortError") this.news.textContent = plainString(error.message);
    }
  }

  /** Search for an operation that the stubs had no room for. */
  open(name) {
    this.query.value = entered.query = name;
    this.query.focus();
    this.search();
  }

  async send(checkOnly) {
    if (this.running) return;
    const running = new AbortController();
    this.setRunning(running);
    fill(this.outcome, waiting(checkOnly ? "Checking…" : "Running…"));
    const began = performance.now();
    try {
      const answer = await api.call("code.run", stringify({ script: this.script.value, check_only: checkOnly }), running.signal);
      const ms = performance.now() - began;
      // A server that keeps runs does not wait for long ones.
      if (answer.envelope.meta === undefined) fill(this.outcome, started(answer.envelope));
      else if (checkOnly) fill(this.outcome, checked());
      else fill(this.outcome, done(answer, ms), await this.calls(answer.requestId, answer.envelope.data.calls));
    } catch (error) {
      const ms = performance.now() - began;
      if (error.name === "AbortError") fill(this.outcome, waiting("Cancelled."));
      else if (error.code === "SCRIPT_REJECTED" && Array.isArray(error.details?.diagnostics)) fill(this.outcome, this.rejected(error.details.diagnostics));
      else fill(this.outcome, failure(error, ms, { signIn: this.signIn }), await this.calls(error.requestId));
    } finally {
      this.setRunning(null);
    }
  }

  setRunning(running) {
    this.running = running;
    const isBusy = running !== null;
    this.runButton.disabled = isBusy;
    this.checkButton.disabled = isBusy;
    this.cancelButton.hidden = !isBusy;
    this.element.classList.toggle("busy", isBusy);
  }

  /** The errors of the type check; each leads to its line. */
  rejected(diagnostics) {
    const problem = ({ line, message, hint }) =>
      el("li", {}, el("button", { type: "button", class: "quiet", onclick: () => this.select(line) }, `line ${line}`), el("div", {}, el("p", { dir: "auto" }, plain(message)), hint ? el("p", { class: "hint" }, plain(hint)) : null));
    return el(
      "section",
      { class: "result failed", "aria-label": "Result", role: "alert" },
      el("header", { class: "status" }, el("span", { class: "chip bad" }, "SCRIPT_REJECTED"), el("span", { class: "fact" }, "Nothing has run.")),
      el("ul", { class: "diagnostics" }, diagnostics.map(problem)),
    );
  }

  /** Select a line of the script. */
  select(line) {
    const lines = this.script.value.split("\n");
    const from = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    this.script.focus();
    this.script.setSelectionRange(from, from + (lines[line - 1] ?? "").length);
  }

  /** The calls of a script, as a list; only their number if the server records no calls. */
  async calls(requestId, count) {
    let list = null;
    if (this.hasCalls && requestId) {
      try {
        list = callTree(await api.recentCalls(this.abort.signal), requestId);
      } catch (error) {
        if (error.name === "AbortError") return null;
      }
    }
    if (list === null && count === undefined) return null;
    return el("section", { class: "made", "aria-label": "Calls" }, el("h2", {}, count === undefined ? "Calls" : `Calls: ${count.toLocaleString("en")}`), list);
  }

  /** Stop the running script. */
  leave() {
    this.abort.abort();
    this.running?.abort();
  }
}

const checked = () =>
  el(
    "section",
    { class: "result", "aria-label": "Result" },
    el("header", { class: "status" }, el("span", { class: "chip good" }, "correct"), el("span", { class: "fact" }, "The types are correct. Nothing has run.")),
  );

const started = ({ id }) =>
  el(
    "section",
    { class: "result", "aria-label": "Result" },
    el("header", { class: "status" }, el("span", { class: "chip" }, "run")),
    el("p", {}, "The script continues as a run, whose page shows its state, result and steps. ", el("a", { href: `#/~runs/${encodeURIComponent(id)}` }, "Open the run")),
  );

function done(answer, ms) {
  const { result, printed, warnings } = answer.envelope.data;
  const section = success({ ...answer, envelope: { ...answer.envelope, data: result ?? null } }, ms);
  if (printed) section.append(el("div", { class: "details" }, el("h3", {}, "Printed"), el("pre", { class: "mono", tabIndex: 0, "aria-label": "Printed" }, plain(printed))));
  for (const warning of warnings ?? []) section.append(el("p", { class: "warning" }, plain(warning)));
  return section;
}
