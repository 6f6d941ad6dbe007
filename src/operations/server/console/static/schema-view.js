/* A schema as a table of contents: names, types, descriptions. Parts are opened on demand. */

import { el, plain, plainString } from "./dom.js";
import { kindOf, Schemas } from "./schema.js";

/** A readable view of a schema. */
export function schemaView(schema) {
  const schemas = new Schemas(schema);
  return el("div", { class: "contract" }, row(schemas, null, schema, false));
}

function row(schemas, name, schema, isRequired) {
  const { schema: flat } = schemas.split(schema);
  const children = childrenOf(schemas, flat);
  const words = flat.description;
  const head = [
    name === null ? null : el("span", { class: "key mono" }, plain(name)),
    isRequired ? el("span", { class: "required", title: "required" }, "*") : null,
    el("span", { class: "type" }, plainString(schemas.describe(schema))),
    limits(flat),
    words ? el("span", { class: "hint", dir: "auto" }, plain(words.length > 300 ? `${words.slice(0, 300)}…` : words)) : null,
  ];
  if (children.length === 0) return el("div", { class: "leaf" }, head);
  const content = el("div", { class: "content" });
  const make = () => content.childNodes.length === 0 && content.append(...children.map((child) => row(schemas, ...child)));
  const details = el("details", { class: "branch" }, el("summary", {}, head), content);
  details.addEventListener("toggle", () => details.open && make());
  if (name === null) {
    details.open = true;
    make();
  }
  return details;
}

function childrenOf(schemas, flat) {
  const variants = schemas.variants(flat);
  if (variants.length > 0 && !Array.isArray(flat.enum)) {
    const named = variants.filter((one) => kindOf(one) === "object" || kindOf(one) === "array");
    return named.map((one, at) => [one.title ?? `either ${at + 1}`, one, false]);
  }
  const kind = kindOf(flat);
  if (kind === "object") {
    const required = new Set(flat.required ?? []);
    const named = Object.entries(flat.properties ?? {}).map(([name, one]) => [name, one, required.has(name)]);
    const any = flat.additionalProperties;
    return any !== null && typeof any === "object" ? [...named, ["…any name", any, false]] : named;
  }
  if (kind !== "array") return [];
  const fixed = (flat.prefixItems ?? []).map((one, at) => [String(at), one, true]);
  const items = flat.items === undefined ? {} : schemas.split(flat.items).schema;
  return isLeaf(schemas, items) ? fixed : [...fixed, ["each", flat.items, false]];
}

const isLeaf = (schemas, flat) =>
  schemas.variants(flat).length === 0 && !["object", "array"].includes(kindOf(flat));

const WORDS = {
  minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<",
  minLength: "length ≥", maxLength: "length ≤", minItems: "items ≥", maxItems: "items ≤", pattern: "matches",
};

function limits(flat) {
  const parts = Object.entries(WORDS).filter(([key]) => key in flat).map(([key, words]) => `${words} ${flat[key]}`);
  if ("default" in flat) parts.push(`default ${JSON.stringify(flat.default)}`);
  if (Array.isArray(flat.enum) && flat.enum.length > 4) parts.push(flat.enum.map((one) => JSON.stringify(one)).join(" | "));
  return parts.length > 0 ? el("span", { class: "limits" }, plainString(parts.join(", ").slice(0, 300))) : null;
}
