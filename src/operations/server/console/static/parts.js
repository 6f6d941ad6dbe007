/* Controls that hold fields: objects, lists, and alternatives.

   Like every control, but with `fields()` and `fieldAt(step)`, which lead an error to its field.
*/

import { el, fill, icon, plainString } from "./dom.js";
import { isObject } from "./json.js";

/** Known properties in a column; others as pairs of a name and a value. */
export class ObjectControl {
  constructor(field) {
    const { form, flat } = field;
    this.owner = field;
    this.input = null;
    this.isOpen = flat.additionalProperties !== false && (flat.additionalProperties !== undefined || !flat.properties);
    this.known = new Map();
    this.extra = [];
    const required = new Set(flat.required ?? []);
    for (const [name, schema] of Object.entries(flat.properties ?? {})) {
      if (form.schemas.resolve(schema).readOnly === true) continue;
      const isRequired = required.has(name);
      this.known.set(name, field.inner(schema, { label: name, isRequired }));
    }
    this.rows = el("div", { class: "fields" });
    // Required properties come first.
    const sorted = [...this.known.values()].sort((one, other) => Number(other.isRequired) - Number(one.isRequired));
    const adder = el(
      "button",
      { type: "button", class: "quiet add", onclick: () => this.addRow("", undefined, true) },
      icon("plus"),
      "Add property",
    );
    const isEmpty = sorted.length === 0 && !this.isOpen;
    this.element = el(
      "div",
      { class: "object" },
      isEmpty ? el("p", { class: "hint" }, "No input is needed.") : null,
      el("div", { class: "fields" }, sorted.map((one) => one.element)),
      this.rows,
      this.isOpen ? adder : null,
    );
  }

  addRow(name, value, isNew = false) {
    const { flat } = this.owner;
    const schema = isObject(flat.additionalProperties) ? flat.additionalProperties : {};
    const key = el("input", {
      type: "text", class: "key mono", value: name, "aria-label": "Property name", placeholder: "name",
      autocomplete: "off", spellcheck: "false", oninput: () => this.rename(row),
    });
    const field = this.owner.inner(schema, { isRequired: true, isBare: true, isItem: true });
    if (value !== undefined) field.write(value);
    // A name can be empty, but only on purpose: one that was not given yet is not sent.
    const row = { key, field, element: null, isNamed: !isNew };
    const remove = () => {
      this.extra = this.extra.filter((one) => one !== row);
      row.element.remove();
      this.owner.onChange();
    };
    row.element = el("div", { class: "pair" }, key, field.element, removeButton("property", remove));
    this.extra.push(row);
    this.rows.append(row.element);
    if (isNew) {
      this.owner.onChange();
      key.focus();
    }
  }

  rename(row) {
    row.isNamed = row.key.value !== "";
    this.owner.onChange();
  }

  accepts(value) {
    return isObject(value);
  }

  read() {
    const known = [...this.known].map(([name, field]) => [name, field.read()]);
    const extra = this.extra.filter(({ isNamed }) => isNamed).map(({ key, field }) => [key.value, field.read() ?? null]);
    return Object.fromEntries([...known, ...extra].filter(([, value]) => value !== undefined));
  }

  write(value = {}) {
    for (const [name, field] of this.known) field.write(Object.hasOwn(value, name) ? value[name] : undefined);
    const extra = Object.entries(value).filter(([name]) => !this.known.has(name));
    const isSame = extra.length === this.extra.length && extra.every(([name], at) => this.extra[at].key.value === name);
    if (isSame) {
      extra.forEach(([, one], at) => this.extra[at].field.write(one));
      return;
    }
    this.extra = [];
    fill(this.rows);
    for (const [name, one] of extra) this.addRow(name, one);
  }

  fieldAt(name) {
    return this.known.get(name) ?? this.extra.find(({ key }) => key.value === name)?.field ?? null;
  }

  fields() {
    return [...this.known.values(), ...this.extra.map(({ field }) => field)];
  }
}

const removeButton = (what, onclick) =>
  el("button", { type: "button", class: "quiet remove", "aria-label": `Remove this ${what}`, onclick }, icon("cross"));

/** Items one under the other. */
export class ListControl {
  constructor(field) {
    this.owner = field;
    this.input = null;
    this.items = [];
    this.fixed = field.flat.prefixItems ?? [];
    this.rows = el("div", { class: "items" });
    this.adder = el(
      "button",
      { type: "button", class: "quiet add", onclick: () => this.add(undefined, true) },
      icon("plus"),
      "Add item",
    );
    this.element = el("div", { class: "array" }, this.rows, this.adder);
    // As many as `minItems`.
    const least = Math.min(Math.max(field.flat.minItems ?? 0, 0), 10);
    for (let count = 0; count < least; count += 1) this.add();
  }

  schemaAt(at) {
    return this.fixed[at] ?? this.owner.flat.items ?? {};
  }

  add(value, isNew = false) {
    const at = this.items.length;
    const field = this.owner.inner(this.schemaAt(at), { label: String(at + 1), isRequired: true, isItem: true });
    if (value !== undefined) field.write(value);
    const element = el("div", { class: "item" }, field.element, removeButton("item", () => this.remove(field)));
    this.items.push({ field, element });
    this.rows.append(element);
    if (isNew) {
      this.owner.onChange();
      element.querySelector("input, textarea, select, button")?.focus();
    }
  }

  remove(field) {
    // Written anew, so that numbers and the schemas that depend on them are right.
    const kept = this.items.filter((item) => item.field !== field).map((item) => item.field.read() ?? null);
    this.clear();
    for (const value of kept) this.add(value);
    this.owner.onChange();
    this.adder.focus();
  }

  clear() {
    this.items = [];
    fill(this.rows);
  }

  accepts(value) {
    return Array.isArray(value);
  }

  read() {
    return this.items.map(({ field }) => field.read() ?? null);
  }

  write(value = []) {
    if (value.length === this.items.length) {
      value.forEach((one, at) => this.items[at].field.write(one));
      return;
    }
    this.clear();
    for (const one of value) this.add(one);
  }

  fieldAt(step) {
    return this.items[Number(step)]?.field ?? null;
  }

  fields() {
    return this.items.map(({ field }) => field);
  }
}

/** A menu of alternatives, and the one that was chosen. */
export class VariantsControl {
  constructor(field) {
    this.owner = field;
    this.isSameValue = true;
    this.variants = field.form.schemas.variants(field.flat);
    this.input = el(
      "select",
      { class: "variant", onchange: () => this.choose(Number(this.input.value), true) },
      this.variants.map((variant, at) => el("option", { value: String(at) }, plainString(this.nameOf(variant)))),
    );
    this.body = el("div", { class: "chosen" });
    this.element = el("div", { class: "variants" }, this.input, this.body);
    this.choose(0);
  }

  nameOf(variant) {
    if (typeof variant.title === "string") return variant.title;
    for (const [, property] of Object.entries(variant.properties ?? {})) {
      const flat = this.owner.form.schemas.resolve(property);
      if ("const" in flat) return String(flat.const);
      if (Array.isArray(flat.enum) && flat.enum.length === 1) return String(flat.enum[0]);
    }
    return this.owner.form.schemas.describe(variant);
  }

  choose(at, isNew = false) {
    const before = this.field?.read();
    const { schemas } = this.owner.form;
    this.at = at;
    this.input.value = String(at);
    this.field = this.owner.inner(this.variants[at], { isRequired: true, isBare: true });
    fill(this.body, this.field.element);
    if (!isNew) return;
    const properties = this.variants[at].properties;
    if (isObject(before) && properties) {
      // Properties of both alternatives stay, except the tag that selects one.
      const isShared = ([name, value]) => Object.hasOwn(properties, name) && schemas.fit(properties[name], value) >= 0;
      this.field.write(Object.fromEntries(Object.entries(before).filter(isShared)));
    }
    this.owner.onChange();
  }

  best(value) {
    const fits = this.variants.map((variant) => this.owner.form.schemas.fit(variant, value));
    const most = Math.max(...fits);
    if (most < 0) return -1;
    return fits[this.at] === most ? this.at : fits.indexOf(most);
  }

  accepts(value) {
    return this.best(value) >= 0;
  }

  read() {
    return this.field.read();
  }

  write(value) {
    if (value === undefined) {
      this.choose(0);
      return;
    }
    const at = this.best(value);
    if (at !== this.at) this.choose(at);
    this.field.write(value);
  }

  fieldAt() {
    return this.field;
  }

  fields() {
    return [this.field];
  }
}
