/* JSON without loss: a number that JavaScript would round keeps its text, if the browser supports it. */

const isExact = typeof JSON.rawJSON === "function";

/** A JSON text as a value; throws a SyntaxError. */
export const parse = (text) => (isExact ? JSON.parse(text, keepNumber) : JSON.parse(text));

function keepNumber(_key, value, context) {
  if (typeof value !== "number" || isKept(value, context?.source)) return value;
  return JSON.rawJSON(context.source);
}

const isKept = (value, source) =>
  source === undefined || Number.isSafeInteger(value) || (Number.isFinite(value) && /[.eE]/.test(source));

/** A value as JSON text, over several lines by default. */
export const stringify = (value, indent = 2) => JSON.stringify(value, null, indent);

/** The number in a text, or undefined. */
export function number(text) {
  if (!/^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(text)) return undefined;
  return parse(text);
}

/** The JSON type of a value. */
export function typeOf(value) {
  if (value === null) return "null";
  if (Array.isArray(value)) return "array";
  if (isExact && JSON.isRawJSON(value)) return "number";
  return typeof value;
}

export const isObject = (value) => typeOf(value) === "object";

/** The text of a scalar. */
export const scalarText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** The steps of a JSON pointer. */
export const pointerSteps = (pointer) =>
  pointer === "" ? [] : pointer.slice(1).split("/").map((step) => step.replaceAll("~1", "/").replaceAll("~0", "~"));
