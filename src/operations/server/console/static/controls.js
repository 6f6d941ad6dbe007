/* Controls for single values.

   A control has an `element`, the `input` that a label belongs to, `accepts(value)`, `write(value)` and `read()`, which
   returns undefined if nothing was entered. `changed` is called after every change.
*/

import { el, freshId, icon, plainString } from "./dom.js";
import { number, parse, scalarText, stringify, typeOf } from "./json.js";
import { same } from "./schema.js";

const hintOf = (schema) => {
  if ("default" in schema && schema.default !== null) return `default: ${scalarText(schema.default)}`;
  const example = schema.examples?.[0] ?? schema.example;
  return example === undefined ? "" : `such as ${scalarText(example)}`;
};

function entry(changed, attributes) {
  return el("input", { type: "text", autocomplete: "off", spellcheck: "false", oninput: changed, ...attributes });
}

const INPUTS = { date: "date", time: "time", email: "email", uri: "url", password: "password" };

/** Text. Enter calls, Shift+Enter makes a new line; one of the known formats has an input of its own. */
export function textControl(schema, { changed, isItem }) {
  const type = INPUTS[schema.format];
  const placeholder = plainString(hintOf(schema));
  const input =
    type
      ? entry(changed, { type, placeholder, step: type === "time" ? "1" : undefined })
      : el("textarea", { rows: "1", placeholder, oninput: changed, spellcheck: "false", class: "line" });
  // An empty field is not sent, so that the server reports it as missing. An item of a list, and an empty
  // string written as JSON, are sent.
  let isEmptyMeant = false;
  input.addEventListener("input", () => (isEmptyMeant = false));
  return {
    element: input,
    input,
    // The browser's own inputs drop values that they cannot show.
    accepts: (value) => typeof value === "string" && (SHOWN[type]?.(value) ?? true),
    read: () => (input.value === "" && !isItem && !isEmptyMeant ? undefined : input.value),
    write(value) {
      input.value = value ?? "";
      isEmptyMeant = value === "";
    },
  };
}

const SHOWN = {
  date: (text) => /^\d{4}-\d\d-\d\d$/.test(text) && !Number.isNaN(Date.parse(text)),
  time: (text) => /^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?$/.test(text),
  email: (text) => !/^\s|\s$|[\r\n]/.test(text),
  url: (text) => !/^\s|\s$|[\r\n]/.test(text),
  password: (text) => !/[\r\n]/.test(text),
};

/** A date and time, picked in local time and sent in UTC. A value written as JSON stays unchanged until edited. */
export function momentControl(schema, { changed }) {
  let written;
  const input = entry(
    () => {
      written = undefined;
      changed();
    },
    { type: "datetime-local", step: "1" },
  );
  const now = el("button", { type: "button", class: "quiet", onclick: () => set(new Date()) }, "Now");
  function set(date) {
    written = undefined;
    input.value = local(date);
    changed();
  }
  return {
    element: el("div", { class: "joined" }, input, now),
    input,
    accepts: (value) => typeof value === "string" && !Number.isNaN(Date.parse(value)),
    read: () => written ?? (input.value === "" ? undefined : new Date(input.value).toISOString().replace(".000Z", "Z")),
    write(value) {
      written = value;
      input.value = value === undefined ? "" : local(new Date(value));
    },
  };
}

function local(date) {
  const shifted = new Date(date.getTime() - date.getTimezoneOffset() * 60_000);
  return shifted.toISOString().slice(0, 19);
}

/** A number. Other text is sent unchanged, and the server rejects it. */
export function numberControl(schema, { changed }) {
  const input = entry(changed, {
    inputmode: schema.type === "integer" ? "numeric" : "decimal",
    placeholder: plainString(hintOf(schema)),
    class: "number",
  });
  return {
    element: input,
    input,
    accepts: (value) => typeOf(value) === "number",
    read() {
      const text = input.value.trim();
      return text === "" ? undefined : (number(text) ?? text);
    },
    write: (value) => (input.value = value === undefined ? "" : scalarText(value)),
  };
}

/** One of a few: radio buttons. An optional value may stay unset. */
export function switchControl(choices, schema, { changed, isRequired, labelId }) {
  const name = freshId("choice");
  const options = choices.map((value) => ({ value, text: scalarText(value) }));
  if (!isRequired) {
    const text = "default" in schema ? `default (${scalarText(schema.default)})` : "not set";
    options.unshift({ value: undefined, text });
  }
  const inputs = options.map(() => el("input", { type: "radio", name, onchange: changed }));
  const element = el(
    "div",
    { class: "switch", role: "radiogroup", "aria-labelledby": labelId },
    options.map(({ text }, at) => el("label", {}, inputs[at], el("span", {}, plainString(text)))),
  );
  const control = {
    element,
    input: null,
    first: inputs[0],
    accepts: (value) => choices.some((choice) => same(choice, value)),
    read: () => options[inputs.findIndex((input) => input.checked)]?.value,
    write(value) {
      options.forEach((option, at) => (inputs[at].checked = same(option.value, value)));
    },
  };
  // Select the only choice.
  control.write(isRequired ? (schema.default ?? (choices.length === 1 ? choices[0] : undefined)) : undefined);
  return control;
}

/** One of many: a menu. */
export function menuControl(schema, { changed, isRequired }) {
  const unset = "default" in schema && !isRequired ? `default (${scalarText(schema.default)})` : "choose…";
  const input = el(
    "select",
    { onchange: changed },
    el("option", { value: "" }, plainString(unset)),
    schema.enum.map((value, at) => el("option", { value: String(at) }, plainString(scalarText(value)))),
  );
  return {
    element: input,
    input,
    accepts: (value) => schema.enum.some((choice) => same(choice, value)),
    read: () => (input.value === "" ? undefined : schema.enum[Number(input.value)]),
    write: (value) => (input.value = value === undefined ? "" : String(schema.enum.findIndex((one) => same(one, value)))),
  };
}

/** Several of a few, each at most once: boxes to tick. */
export function boxesControl(choices, { changed, labelId }) {
  const boxes = choices.map(() => el("input", { type: "checkbox", onchange: changed }));
  return {
    element: el(
      "div",
      { class: "boxes", role: "group", "aria-labelledby": labelId },
      choices.map((choice, at) => el("label", {}, boxes[at], el("span", {}, plainString(scalarText(choice))))),
    ),
    input: null,
    first: boxes[0],
    accepts: (value) =>
      Array.isArray(value) && value.every((one) => choices.some((choice) => same(choice, one))) && new Set(value).size === value.length,
    read: () => choices.filter((_, at) => boxes[at].checked),
    write: (value) => choices.forEach((choice, at) => (boxes[at].checked = (value ?? []).some((one) => same(one, choice)))),
  };
}

/** The only allowed value. */
export function constControl(schema) {
  return {
    element: el("code", { class: "const" }, plainString(stringify(schema.const, 0))),
    input: null,
    accepts: (value) => same(value, schema.const),
    read: () => schema.const,
    write: () => {},
  };
}

/** A file, sent as base64. */
export function fileControl(schema, { changed }) {
  let content;
  const picker = el("input", { type: "file", onchange: () => take(picker.files[0]) });
  const words = el("span", { class: "hint" });
  const clear = el("button", { type: "button", class: "quiet", onclick: () => take(undefined) }, "Remove");
  async function take(file) {
    content = file === undefined ? undefined : base64(new Uint8Array(await file.arrayBuffer()));
    describe(file?.name);
    changed();
  }
  function describe(name) {
    const size = content === undefined ? 0 : Math.floor((content.replace(/=+$/, "").length * 3) / 4);
    words.textContent = content === undefined ? (schema.contentMediaType ?? "sent as base64") : `${name ?? "content"}, ${size} bytes`;
    clear.hidden = content === undefined;
    if (content === undefined) picker.value = "";
  }
  describe();
  return {
    element: el("div", { class: "file" }, picker, words, clear),
    input: picker,
    accepts: (value) => typeof value === "string",
    read: () => content,
    write(value) {
      if (value === content) return;
      content = value;
      describe();
    },
  };
}

/** Bytes as base64, in chunks, because one call cannot take a whole file. */
function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

/** Any value: JSON, or text that is not JSON. */
export function anyControl(schema, { changed }) {
  const input = el("textarea", { rows: "1", class: "line mono", spellcheck: "false", oninput: changed, placeholder: "JSON" });
  return {
    element: input,
    input,
    accepts: () => true,
    read() {
      const text = input.value.trim();
      if (text === "") return undefined;
      try {
        return parse(text);
      } catch {
        return input.value;
      }
    },
    write: (value) => (input.value = value === undefined ? "" : stringify(value)),
  };
}
