/* A form made from a schema.

   A field is a label, a control and its errors. Objects, lists and alternatives are controls that contain
   fields. A field shows a value that does not fit its control (a text instead of an object) as JSON, so that
   no input is lost between the form and the JSON beside it.
*/

import * as controls from "./controls.js";
import { el, fill, freshId, icon, plain, plainString } from "./dom.js";
import { ListControl, ObjectControl, VariantsControl } from "./parts.js";
import { kindOf, Schemas } from "./schema.js";

const MAX_DEPTH = 16;
const ROW_OF_CHOICES = 4;

/** The form of one input schema. `read` returns the value, `write` shows one, `blame` shows errors at their fields. */
export class Form {
  constructor(schema, changed) {
    this.schemas = new Schemas(schema);
    this.field = new Field(this, schema, { isRequired: true, isBare: true, depth: 0, changed });
    this.element = el("div", { class: "form" }, this.field.element);
  }

  read() {
    return this.field.read();
  }

  write(value) {
    this.field.write(value);
  }

  /** Show errors `{path, message}` at their fields; return the first invalid element. */
  blame(errors) {
    this.field.forgive();
    for (const { steps, message } of errors) this.field.blame(steps, message);
    return this.element.querySelector("[aria-invalid=true], .field.wrong");
  }
}

class Field {
  constructor(form, schema, { label, isRequired, isBare = false, isItem = false, depth, changed }) {
    const { schema: flat, nullable } = form.schemas.split(schema);
    Object.assign(this, { form, flat, nullable, isRequired, isItem, depth, changed });
    this.isHeld = HELD.has(this.shape());
    this.state = isRequired ? "value" : "absent";
    this.labelId = freshId("label");
    this.errorId = freshId("error");
    this.body = el("div", { class: "body" });
    this.error = el("p", { class: "error", id: this.errorId, hidden: true });
    this.tools = el("span", { class: "tools" });
    this.element = this.build(label, isBare);
    this.enter(this.makeControl());
    this.update();
  }

  build(label, isBare) {
    if (isBare) return el("div", { class: "field bare" }, this.error, this.body);
    const words = this.flat.description;
    this.name = el(this.isHeld ? "span" : "label", { id: this.labelId, class: "label" }, plain(label));
    return el(
      "div",
      { class: this.isHeld ? "field held" : "field", role: this.isHeld ? "group" : undefined, "aria-labelledby": this.isHeld ? this.labelId : undefined },
      el(
        "div",
        { class: "head" },
        this.name,
        this.isRequired && !this.isItem ? el("span", { class: "required", title: "required" }, "*", el("span", { class: "away" }, " required")) : null,
        el("span", { class: "type" }, plainString(this.form.schemas.describe(this.nullable ? { anyOf: [this.flat, { type: "null" }] } : this.flat))),
        this.tools,
      ),
      words ? el("p", { class: "hint", dir: "auto" }, plain(words)) : null,
      this.body,
      this.error,
    );
  }

  shape() {
    if (this.depth > MAX_DEPTH) return "any";
    if ("const" in this.flat || Array.isArray(this.flat.enum)) return kindOf(this.flat);
    return this.form.schemas.variants(this.flat).length > 0 ? "variants" : kindOf(this.flat);
  }

  makeControl() {
    // Absent parts are created on demand, because schemas may be recursive.
    if (this.state !== "value" && this.isHeld) return null;
    const options = { changed: () => this.onChange(), isRequired: this.isRequired, isItem: this.isItem, labelId: this.labelId };
    const { flat } = this;
    switch (this.shape()) {
      case "const": return controls.constControl(flat);
      case "enum":
        return flat.enum.length <= ROW_OF_CHOICES && JSON.stringify(flat.enum).length < 60
          ? controls.switchControl(flat.enum, flat, options)
          : controls.menuControl(flat, options);
      case "boolean": return controls.switchControl([true, false], flat, options);
      case "number":
      case "integer": return controls.numberControl(flat, options);
      case "file": return controls.fileControl(flat, options);
      case "string":
        return flat.format === "date-time" ? controls.momentControl(flat, options) : controls.textControl(flat, options);
      case "null": return controls.constControl({ const: null });
      case "object": return new ObjectControl(this);
      case "array": return this.isTicked() ? controls.boxesControl(this.itemChoices(), options) : new ListControl(this);
      case "variants": return new VariantsControl(this);
      default: return controls.anyControl(flat, options);
    }
  }

  /** A field within this one. */
  inner(schema, options) {
    return new Field(this.form, schema, { depth: this.depth + 1, changed: () => this.onChange(), ...options });
  }

  itemChoices() {
    const items = this.form.schemas.resolve(this.flat.items);
    return Array.isArray(items.enum) && items.enum.length <= 12 ? items.enum : null;
  }

  isTicked() {
    return this.flat.uniqueItems === true && this.itemChoices() !== null;
  }

  enter(control) {
    this.control = control;
    if (control === null) return;
    const { input } = control;
    if (input) {
      input.id ||= freshId("input");
      input.setAttribute("aria-describedby", this.errorId);
      if (this.name) {
        if (this.name.tagName === "LABEL") this.name.setAttribute("for", input.id);
        else input.setAttribute("aria-labelledby", this.labelId);
      } else input.setAttribute("aria-label", "Input");
    }
  }

  /** Mark the value as present after input. */
  onChange() {
    if (!this.isHeld) this.state = "value";
    this.forgiveHere();
    this.update();
    this.changed();
  }

  set(state) {
    this.state = state;
    if (state === "value" && this.control === null) this.enter(this.makeControl());
    if (state !== "value" && this.isHeld) this.control = null;
    this.forgive();
    this.update();
    this.changed();
  }

  update() {
    const isThere = this.state === "value" && this.control !== null;
    const isNull = this.state === "null";
    if (isNull) fill(this.body, el("code", { class: "const" }, "null"));
    else if (this.control !== null && (isThere || !this.isHeld)) {
      if (this.control.element.parentNode !== this.body) fill(this.body, this.control.element);
    } else fill(this.body);
    const tools = [];
    const tool = (name, text, state) =>
      tools.push(
        el(
          "button",
          { type: "button", class: "quiet", "aria-label": `${text} ${this.name?.textContent ?? "value"}`, onclick: () => this.set(state) },
          name ? icon(name) : null,
          text,
        ),
      );
    if (this.isHeld && !isThere) tool("plus", "Add", "value");
    if (this.isHeld && isThere && !this.isRequired) tool("cross", "Remove", "absent");
    if (this.nullable && !isNull) tool(null, "Set null", "null");
    if (isNull && !this.isHeld) tool("plus", "Set value", this.isRequired ? "value" : "absent");
    if (isNull && this.isHeld && !this.isRequired) tool("cross", "Remove", "absent");
    // Replaced only if they change, so that a button being pressed stays.
    const wanted = tools.map((one) => one.textContent).join();
    if (this.toolsShown !== wanted) fill(this.tools, tools);
    this.toolsShown = wanted;
    this.element.classList.toggle("absent", this.isHeld && !isThere);
    // A value with a single choice needs no check.
    this.element.classList.toggle("given", "const" in this.flat && this.isRequired && !this.isItem && this.name !== undefined);
  }

  read() {
    if (this.state === "null") return null;
    if (this.control === null || (this.state === "absent" && this.isHeld)) return undefined;
    return this.control.read();
  }

  write(value) {
    if (value === null && this.nullable) this.state = "null";
    else this.state = value === undefined && !this.isRequired ? "absent" : "value";
    if (this.state === "value") {
      const isKept = this.control !== null && !this.control.isStandIn && (value === undefined || this.control.accepts(value));
      if (!isKept) this.enter(this.makeControl());
      if (value !== undefined && !this.control.accepts(value)) {
        this.enter(controls.anyControl({}, { changed: () => this.onChange() }));
        this.control.isStandIn = true;
      }
      this.control.write(value);
    } else if (this.isHeld) this.control = null;
    else this.control?.write(undefined);
    this.update();
  }

  blame(steps, message) {
    if (steps.length > 0 && this.state === "value" && this.control?.fieldAt) {
      const [step, ...rest] = steps;
      const field = this.control.fieldAt(step, rest);
      if (field !== null) {
        // An alternative is the value itself, so the path stays the same.
        field.blame(this.control.isSameValue ? steps : rest, message);
        return;
      }
    }
    const where = steps.length > 0 ? `${steps.join(" › ")}: ` : "";
    this.error.append(el("span", {}, plainString(where + message)));
    this.error.hidden = false;
    this.element.classList.add("wrong");
    this.control?.input?.setAttribute("aria-invalid", "true");
  }

  forgiveHere() {
    fill(this.error).hidden = true;
    this.element.classList.remove("wrong");
    this.control?.input?.removeAttribute("aria-invalid");
  }

  forgive() {
    this.forgiveHere();
    for (const field of this.control?.fields?.() ?? []) field.forgive();
  }
}

const HELD = new Set(["object", "array", "variants", "const", "null"]);
