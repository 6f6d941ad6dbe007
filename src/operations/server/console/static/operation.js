/* One operation: its description, its input form, the call and the result. */

import * as api from "./api.js";
import { copyButton, el, fill, icon, plain, plainString, tabs } from "./dom.js";
import { Form } from "./form.js";
import { parse, pointerSteps, stringify } from "./json.js";
import { sourceBadge } from "./list.js";
import { failure, success, waiting } from "./result.js";
import { schemaView } from "./schema-view.js";
import * as snippets from "./snippets.js";
import { Stream } from "./stream.js";
import { View, viewAddress } from "./view.js";

/** The input of each operation since the page was loaded. */
const entered = new Map();

/** Forget all input. */
export const forget = () => entered.clear();

/** The page of one operation. `leave` ends its running call. */
export class OperationPage {
  constructor(spec, { source, signIn, isSignedIn }) {
    this.spec = spec;
    this.id = `${spec.namespace}.${spec.name}`;
    this.signIn = signIn;
    this.needsKey = isSignedIn || !isOpen(spec.accessControl);
    this.isStream = spec.type === "subscription";
    this.running = null;
    this.outcome = el("div", { class: "outcome" }, waiting(this.isStream ? "Subscribe to see items here." : "Call it to see the result here."));
    this.element = el(
      "article",
      { class: "operation" },
      header(spec, this.id, source),
      el("div", { class: "work" }, this.inputSide(), this.outcome),
      about(spec),
    );
    this.write(entered.get(this.id));
  }

  inputSide() {
    this.form = new Form(this.spec.inputSchema, () => this.onForm());
    this.raw = el("textarea", { class: "raw mono", spellcheck: "false", rows: "10", "aria-label": "Input as JSON", oninput: () => this.onRaw() });
    this.rawError = el("p", { class: "error", role: "status", hidden: true });
    const panels = { Form: el("div", {}, this.form.element), JSON: el("div", {}, this.raw, this.rawError) };
    this.tabs = tabs("Input", panels);
    this.callButton = el("button", { type: "submit", class: "primary" }, icon("play"), this.isStream ? "Subscribe" : "Call");
    this.cancelButton = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.leave() }, "Cancel");
    const reset = el("button", { type: "button", class: "quiet", onclick: () => this.write(undefined) }, "Reset");
    const form = el(
      "form",
      { class: "input", novalidate: true, "aria-label": "Input", onsubmit: (event) => this.submit(event) },
      el("div", { class: "bar" }, el("h2", {}, "Input"), this.tabs.list),
      panels.Form,
      panels.JSON,
      el("div", { class: "actions" }, this.callButton, this.cancelButton, el("span", { class: "hint keys" }, "Ctrl + Enter"), el("span", { class: "grow" }), reset),
      this.elsewhere(),
    );
    form.addEventListener("keydown", (event) => {
      const isPlainEnter = event.target.matches("textarea.line:not(.mono)") && !event.shiftKey && !event.isComposing;
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey || isPlainEnter)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    return form;
  }

  /** The current call as code for other tools. */
  elsewhere() {
    const panels = {};
    this.snippets = {};
    for (const name of ["curl", "Python", "MCP"]) {
      const code = el("pre", { class: "mono", tabIndex: 0, "aria-label": name });
      this.snippets[name] = code;
      panels[name] = el("div", { class: "snippet" }, copyButton(() => code.textContent), code);
    }
    return el("details", { class: "elsewhere" }, el("summary", {}, "Copy as curl, Python or MCP"), tabs("Copy as", panels).list, Object.values(panels));
  }

  write(value) {
    this.form.write(value);
    this.form.blame([]);
    this.onForm();
  }

  onForm() {
    fill(this.rawError).hidden = true;
    this.setText(stringify(this.form.read() ?? null));
    this.raw.value = this.text;
  }

  onRaw() {
    try {
      this.form.write(parse(this.raw.value));
      fill(this.rawError).hidden = true;
    } catch (error) {
      this.isReadable = false;
      fill(this.rawError, `This is not valid JSON: ${error.message}`).hidden = false;
      return;
    }
    this.setText(this.raw.value);
  }

  setText(text) {
    this.text = text;
    this.isReadable = true;
    const input = parse(text);
    entered.set(this.id, input);
    this.snippets.curl.textContent = snippets.curl(this.spec, stringify(input, 0), this.needsKey);
    this.snippets.Python.textContent = snippets.python(this.spec, input, this.needsKey);
    this.snippets.MCP.textContent = snippets.mcp(this.spec, input);
  }

  async submit(event) {
    event.preventDefault();
    if (this.running || !this.isReadable) return;
    this.form.blame([]);
    this.rawError.hidden = true;
    this.setBusy(true);
    await this.view?.close();
    this.view = null;
    const began = performance.now();
    try {
      if (this.isStream) await this.stream();
      else await this.call(began);
    } catch (error) {
      if (error.name === "AbortError") fill(this.outcome, waiting("Cancelled."));
      else this.fail(error, performance.now() - began);
    } finally {
      this.setBusy(false);
    }
  }

  async call(began) {
    this.running = new AbortController();
    const answer = await api.call(this.id, this.text, this.running.signal);
    fill(this.outcome, success(answer, performance.now() - began));
    if (viewAddress(this.spec) && answer.envelope.meta?.source === "mcp") {
      this.view = new View(this.spec, parse(this.text), answer.envelope);
      this.outcome.prepend(this.view.element);
      await this.view.open();
    }
  }

  async stream() {
    let problem = null;
    const stream = new Stream({ ended: (error) => (problem = error) });
    this.running = stream.abort;
    fill(this.outcome, stream.element);
    await stream.run(api.subscribe(this.id, this.text, stream.abort.signal));
    if (problem === null) return;
    if (stream.count === 0) throw problem;
    stream.note.append(failure(problem, undefined, { signIn: this.signIn }));
  }

  fail(error, ms) {
    fill(this.outcome, failure(error, ms, { signIn: this.signIn }));
    const errors = error.code === "VALIDATION_ERROR" && Array.isArray(error.details?.errors) ? error.details.errors : [];
    const placed = errors.map(({ path, message }) => ({ steps: pointerSteps(path ?? ""), message: String(message) }));
    const first = this.form.blame(placed);
    if (placed.length > 0) {
      const lines = placed.map(({ steps, message }) => el("span", {}, plainString(`${steps.join(" › ") || "input"}: ${message}`)));
      fill(this.rawError, lines).hidden = false;
    }
    const focusable = first?.matches("input, textarea, select") ? first : first?.querySelector("input, textarea, select, button");
    focusable?.focus({ preventScroll: true });
    first?.scrollIntoView({ block: "center" });
  }

  setBusy(isBusy) {
    if (!isBusy) this.running = null;
    this.callButton.disabled = isBusy;
    this.cancelButton.hidden = !isBusy || this.isStream;
    this.element.classList.toggle("busy", isBusy);
  }

  /** Stop the running call. */
  leave() {
    this.running?.abort();
    this.view?.close();
  }
}

const isOpen = (access) => !access?.requiredScopes?.length && !access?.requiredScopesAny && !access?.resourceType;

function header(spec, id, source) {
  return el(
    "header",
    { class: "title" },
    el("h1", { tabIndex: -1 }, el("span", { class: "namespace" }, `${spec.namespace}.`), spec.name),
    el(
      "div",
      { class: "badges" },
      el("span", { class: `badge type ${spec.type}` }, spec.type),
      sourceBadge(source),
      spec.idempotent ? el("span", { class: "badge" }, "idempotent") : null,
      spec._meta?.deprecated === true ? el("span", { class: "badge warn" }, "deprecated") : null,
      isOpen(spec.accessControl) ? null : el("span", { class: "badge key" }, icon("key"), plainString(accessWords(spec.accessControl))),
      (spec.tags ?? []).map((tag) => el("span", { class: "badge tag" }, plainString(tag))),
      el("span", { class: "version" }, `v${plainString(spec.version)}`),
    ),
    spec.title ? el("p", { class: "lead", dir: "auto" }, plain(spec.title)) : null,
    spec.description ? el("p", { class: "description", dir: "auto" }, plain(spec.description)) : null,
  );
}

function accessWords({ requiredScopes = [], requiredScopesAny, resourceType, resourceAction }) {
  const parts = [...requiredScopes];
  if (requiredScopesAny) parts.push(`one of ${requiredScopesAny.join(", ")}`);
  if (resourceType) parts.push(`${resourceAction} on ${resourceType}`);
  return parts.join(", ");
}

function about(spec) {
  const errors = spec.errorSchemas ?? [];
  const part = (words, content) => el("details", { class: "part" }, el("summary", {}, words), content);
  return el(
    "section",
    { class: "about", "aria-label": "Contract" },
    part("Input schema", schemaView(spec.inputSchema)),
    part(spec.type === "subscription" ? "Schema of each item" : "Output schema", schemaView(spec.outputSchema)),
    errors.length > 0
      ? part(
          `Declared errors (${errors.length})`,
          el("dl", {}, errors.map(({ code, description, httpStatus }) => [
            el("dt", {}, el("code", {}, plainString(code)), httpStatus ? el("span", { class: "type" }, `HTTP ${httpStatus}`) : null),
            el("dd", { dir: "auto" }, plain(description ?? "")),
          ])),
        )
      : null,
  );
}
