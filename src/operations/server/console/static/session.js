/* Signing in and out. The key is sent to the server once and not stored. */

import * as api from "./api.js";
import { el, fill, icon, plainString } from "./dom.js";
import { stringify } from "./json.js";

/** The corner that shows the signed-in caller; `changed` is called when the caller changes. */
export class Session {
  constructor(changed) {
    this.changed = changed;
    this.identity = null;
    this.element = el("div", { class: "session" });
    this.key = el("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.dialog = el(
      "dialog",
      { "aria-labelledby": "sign-in" },
      el(
        "form",
        { method: "dialog", onsubmit: (event) => this.submit(event) },
        el("h2", { id: "sign-in" }, "Sign in"),
        el("label", { for: "key", class: "label" }, "Key or token"),
        this.key,
        el("p", { class: "hint" }, "The key is sent once, and exchanged for a cookie that scripts cannot read."),
        this.error,
        el(
          "div",
          { class: "actions" },
          el("button", { type: "submit", class: "primary" }, "Sign in"),
          el("button", { type: "button", class: "quiet", onclick: () => this.dialog.close() }, "Cancel"),
        ),
      ),
    );
    this.dialog.addEventListener("close", () => (this.key.value = ""));
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

  ask = () => {
    this.error.hidden = true;
    this.dialog.showModal();
    this.key.focus();
  };

  async submit(event) {
    event.preventDefault();
    const key = this.key.value.trim();
    this.key.value = "";
    if (key === "") return;
    try {
      // Not valid in a header, so not a key.
      if (/[^\x21-\x7e]/.test(key)) throw new Error("A key has only printable ASCII characters, without spaces.");
      this.identity = await api.signIn(key);
    } catch (error) {
      fill(this.error, error.status === 401 ? "This key or token is not valid." : plainString(error.message)).hidden = false;
      this.key.focus();
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
