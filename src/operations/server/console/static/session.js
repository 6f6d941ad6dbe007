/* Signing in and out. The key is sent to the server once and not stored. */

import * as api from "./api.js";
import { el, fill, icon, plainString } from "./dom.js";
import { stringify } from "./json.js";

/** The corner that shows the signed-in caller; `changed` is called when the caller changes. */
export class Session {
  constructor(changed) {
    this.changed = changed;
    this.identity = null;
    this.codeProblem = "";
    this.element = el("div", { class: "session" });
    const cancel = el("button", { type: "button", class: "quiet", onclick: () => this.dialog.close() }, "Cancel");
    this.form = this.formOf("key", el("h2", { id: "sign-in" }, "Sign in"), cancel);
    this.dialog = el("dialog", { "aria-labelledby": "sign-in" }, this.form.element);
    this.dialog.addEventListener("close", () => (this.form.key.value = ""));
    document.body.append(this.dialog);
    this.draw();
  }

  /** Ask the server for the signed-in caller. If the session has ended, its response deletes the cookie. */
  async look() {
    const before = this.identity;
    const found = await api.whoami().catch((error) => (error.status === 401 ? null : before));
    // Signing in or out meanwhile is newer.
    if (this.identity !== before) return;
    this.identity = found;
    // A button that is drawn again would lose the focus.
    if (stringify(found) !== stringify(before)) this.draw();
  }

  /** Sign in with a code of the address, which a device gets from a QR code; the address forgets it. */
  async redeem(code) {
    try {
      this.identity = await api.signIn(code);
      this.draw();
    } catch {
      this.codeProblem = "The code of this address was used, or has ended. Sign in with a new one.";
    }
  }

  /** A form that asks for a key; `id` is that of its field. */
  formOf(id, heading, cancel = null) {
    const key = el("input", { type: "password", id, autocomplete: "off", spellcheck: "false" });
    const error = el("p", { class: "error", role: "alert", hidden: true });
    const form = { key, error };
    form.element = el(
      "form",
      { method: "dialog", onsubmit: (event) => this.submit(event, form) },
      heading,
      el("label", { for: id, class: "label" }, "Key or token"),
      key,
      el("p", { class: "hint" }, "The key is sent once, and exchanged for a cookie that scripts cannot read."),
      error,
      el("div", { class: "actions" }, el("button", { type: "submit", class: "primary" }, "Sign in"), cancel),
    );
    return form;
  }

  /** The page of a server that shows nothing to callers without a key. */
  page() {
    const heading = el("h1", { tabIndex: -1 }, "Sign in");
    const form = this.formOf("page-key", el("p", { class: "description" }, "This server shows its operations to callers with a key or a token."));
    form.element.className = "sign-in";
    if (this.codeProblem) fill(form.error, this.codeProblem).hidden = false;
    return el("article", { class: "operation" }, el("header", { class: "title" }, heading), form.element);
  }

  ask = () => {
    this.form.error.hidden = true;
    this.dialog.showModal();
    this.form.key.focus();
  };

  async submit(event, form) {
    event.preventDefault();
    const key = form.key.value.trim();
    form.key.value = "";
    if (key === "") return;
    try {
      // Not valid in a header, so not a key.
      if (/[^\x21-\x7e]/.test(key)) throw new Error("A key has only printable ASCII characters, without spaces.");
      this.identity = await api.signIn(key);
    } catch (error) {
      fill(form.error, error.status === 401 ? "This key or token is not valid." : plainString(error.message)).hidden = false;
      form.key.focus();
      return;
    }
    this.dialog.close();
    this.draw();
    this.changed();
  }

  async leave() {
    await api.signOut().catch(() => {});
    this.identity = null;
    this.draw();
    this.changed();
  }

  draw() {
    fill(
      this.element,
      this.identity === null
        ? el("button", { type: "button", class: "quiet", onclick: this.ask }, icon("key"), "Sign in")
        : [
            el("span", { class: "who", title: `Scopes: ${plainString((this.identity.scopes ?? []).join(", ") || "none")}` }, icon("person"), plainString(this.identity.id)),
            el("button", { type: "button", class: "quiet", onclick: () => this.leave() }, "Sign out"),
          ],
    );
  }
}
