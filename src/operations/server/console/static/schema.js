/* JSON Schema, as far as forms need it. Only the server decides what is valid. */

import { isObject, pointerSteps, typeOf } from "./json.js";

const MAX_STEPS = 50;

/** The schemas of one document, with references followed and `allOf` merged. */
export class Schemas {
  constructor(root) {
    this.root = root;
  }

  /** One flat schema: references followed, `allOf` merged. A boolean schema becomes an object. */
  resolve(schema, steps = MAX_STEPS) {
    if (!isObject(schema)) return schema === false ? { not: {} } : {};
    if (steps === 0) return {};
    let flat = { ...schema };
    if (typeof schema.$ref === "string") {
      const { $ref, ...rest } = flat;
      flat = merge(this.resolve(this.find($ref), steps - 1), rest);
    }
    if (Array.isArray(schema.allOf)) {
      const { allOf, ...rest } = flat;
      flat = [...schema.allOf.map((part) => this.resolve(part, steps - 1)), rest].reduce(merge, {});
    }
    return flat;
  }

  /** The target of a reference within the document; a schema that accepts anything for other references. */
  find(reference) {
    if (!reference.startsWith("#")) return {};
    let pointer = reference.slice(1);
    try {
      pointer = decodeURIComponent(pointer);
    } catch {
      return {};
    }
    if (pointer !== "" && !pointer.startsWith("/")) return anchored(this.root, pointer) ?? {};
    let found = this.root;
    for (const step of pointerSteps(pointer)) {
      if (found === null || typeof found !== "object" || !Object.hasOwn(found, step)) return {};
      found = found[step];
    }
    return found;
  }

  /** A flat schema without its `null`: `{schema, nullable}`. */
  split(schema) {
    const flat = this.resolve(schema);
    if (Array.isArray(flat.type) && flat.type.includes("null")) {
      const rest = flat.type.filter((type) => type !== "null");
      if (rest.length === 0) return { schema: { ...flat, type: "null" }, nullable: false };
      return { schema: { ...flat, type: rest.length === 1 ? rest[0] : rest, ...withoutNull(flat) }, nullable: true };
    }
    for (const keyword of ["anyOf", "oneOf"]) {
      const members = flat[keyword];
      if (!Array.isArray(members)) continue;
      const kept = members.filter((member) => !isNull(this.resolve(member)));
      if (kept.length === members.length || kept.length === 0) continue;
      const { [keyword]: _, ...rest } = flat;
      const inner = kept.length === 1 ? merge(this.resolve(kept[0]), rest) : { ...rest, [keyword]: kept };
      // `anyOf: [{anyOf: [...]}, null]` and the like.
      return { schema: this.split(inner).schema, nullable: true };
    }
    if (flat.nullable === true) return { schema: flat, nullable: true };
    if (Array.isArray(flat.enum) && flat.enum.length > 1 && flat.enum.includes(null)) {
      return { schema: { ...flat, ...withoutNull(flat) }, nullable: true };
    }
    return { schema: flat, nullable: false };
  }

  /** The alternatives of a flat schema; empty if it has none. */
  variants(flat) {
    const members = flat.oneOf ?? flat.anyOf;
    if (Array.isArray(members) && members.length > 0) {
      const { oneOf, anyOf, title, description, default: _, discriminator, ...shared } = flat;
      return members.map((member) => merge(shared, this.resolve(member)));
    }
    if (Array.isArray(flat.type)) return flat.type.map((type) => ({ ...flat, type, title: undefined }));
    return [];
  }

  /** A score of how well a value fits a schema, to choose among alternatives; negative if it does not fit. */
  fit(schema, value, depth = 3) {
    const { schema: flat, nullable } = this.split(schema);
    if (value === null && nullable) return 1;
    if ("const" in flat) return same(flat.const, value) ? 3 : -1;
    if (Array.isArray(flat.enum)) return flat.enum.some((one) => same(one, value)) ? 3 : -1;
    const variants = this.variants(flat);
    if (variants.length > 0) return Math.max(...variants.map((one) => this.fit(one, value, depth - 1)));
    const kind = kindOf(flat);
    const type = typeOf(value);
    if (kind === "any") return 0;
    if (TYPES[kind] !== type) return -1;
    if (kind === "integer" && Number.isFinite(value) && !Number.isInteger(value)) return -1;
    if (type !== "object" || depth === 0) return 2;
    let score = 2;
    for (const name of flat.required ?? []) if (!Object.hasOwn(value, name)) score -= 1;
    for (const [name, one] of Object.entries(value)) {
      const property = flat.properties?.[name];
      if (property === undefined) score -= flat.additionalProperties === false ? 2 : 0;
      else {
        const inner = this.fit(property, one, depth - 1);
        // A tag that does not match excludes an alternative.
        if (inner < 0 && ("const" in this.resolve(property) || "enum" in this.resolve(property))) return -1;
        score += inner < 0 ? -1 : 1;
      }
    }
    return Math.max(score, 0);
  }

  /** A few words for the type of a value. */
  describe(schema, depth = 2) {
    const { schema: flat, nullable } = this.split(schema);
    const words = this.describeFlat(flat, depth);
    return nullable ? `${words} or null` : words;
  }

  describeFlat(flat, depth) {
    if ("const" in flat) return JSON.stringify(flat.const);
    const variants = this.variants(flat);
    if (variants.length > 0 && !Array.isArray(flat.enum)) {
      if (depth === 0) return "one of several";
      return [...new Set(variants.map((one) => one.title ?? this.describe(one, depth - 1)))].join(" or ");
    }
    const kind = kindOf(flat);
    if (kind === "enum") return flat.enum.length <= 4 ? flat.enum.map((one) => JSON.stringify(one)).join(" | ") : "choice";
    if (kind === "array" && flat.items !== undefined && depth > 0) return `list of ${this.describe(flat.items, depth - 1)}`;
    if (kind === "array") return "list";
    if (kind === "string") return flat.format ?? "text";
    return kind;
  }
}

const TYPES = {
  string: "string", file: "string", number: "number", integer: "number",
  boolean: "boolean", object: "object", array: "array", null: "null",
};

/** The control for a flat schema without alternatives. */
export function kindOf(flat) {
  if ("const" in flat) return "const";
  if (Array.isArray(flat.enum)) return "enum";
  if (typeof flat.type === "string") {
    if (flat.type === "string" && isFile(flat)) return "file";
    return flat.type in TYPES ? flat.type : "any";
  }
  if (flat.properties || flat.patternProperties || isObject(flat.additionalProperties)) return "object";
  if (flat.items !== undefined || flat.prefixItems) return "array";
  return "any";
}

const isFile = (flat) => flat.contentEncoding === "base64" || flat.format === "binary" || flat.format === "byte";
const isNull = (flat) => flat.type === "null" || ("const" in flat && flat.const === null);
const withoutNull = (flat) => (Array.isArray(flat.enum) ? { enum: flat.enum.filter((one) => one !== null) } : {});
export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

function anchored(node, name, depth = 20) {
  if (node === null || typeof node !== "object" || depth === 0) return undefined;
  if (node.$anchor === name) return node;
  for (const child of Object.values(node)) {
    const found = anchored(child, name, depth - 1);
    if (found !== undefined) return found;
  }
  return undefined;
}

function merge(one, other) {
  const merged = { ...one, ...other };
  if (one.properties && other.properties) {
    const both = { ...one.properties };
    for (const [name, schema] of Object.entries(other.properties)) {
      both[name] = Object.hasOwn(both, name) ? { allOf: [both[name], schema] } : schema;
    }
    merged.properties = both;
  }
  if (one.required && other.required) merged.required = [...new Set([...one.required, ...other.required])];
  return merged;
}
