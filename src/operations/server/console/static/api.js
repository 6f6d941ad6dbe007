/* The server's public paths, and nothing else. Addresses are relative, so that the console works under any path. */

import { parse, stringify } from "./json.js";
import { readEvents } from "./events.js";

/** No response, or the response of a proxy while the server restarts. */
const UNREACHABLE = new Set([0, 502, 503, 504]);

/** A failed call, as the server reports it. */
export class Failure extends Error {
  constructor(status, { code, message, details, requestId, retryable }) {
    super(message);
    Object.assign(this, { status, code, details, requestId, retryable, isLost: UNREACHABLE.has(status) });
  }
}

const lost = (error) => new Failure(0, { code: "UNAVAILABLE", message: `The server cannot be reached: ${error.message}` });

async function request(path, { method = "GET", body, headers = {}, signal } = {}) {
  const options = { method, headers, signal, credentials: "same-origin", cache: "no-store", redirect: "error" };
  if (body !== undefined) {
    options.body = body;
    options.headers = { ...headers, "content-type": "application/json" };
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : lost(error);
  }
  if (!response.ok && response.status !== 304) throw await failure(response);
  return response;
}

async function failure(response) {
  const text = await response.text();
  try {
    const error = parse(text);
    if (typeof error.code === "string") return new Failure(response.status, error);
  } catch {
    // Perhaps the response of a proxy.
  }
  return new Failure(response.status, { code: `HTTP ${response.status}`, message: text.slice(0, 500) || "No response" });
}

const json = async (path, options) => parse(await (await request(path, options)).text());

/** `/call` and `/subscribe` take their input as text, so that it is sent exactly as written. */
const envelopeOf = (id, inputText) => `{"operation":${stringify(id)},"input":${inputText}}`;

/** A summary of the caller's operations, and whether `recentCalls` is available; null if `tag` is still current. */
export async function overview(tag) {
  const response = await request("operations", { headers: tag ? { "if-none-match": tag } : {} });
  return response.status === 304 ? null : { ...parse(await response.text()), tag: response.headers.get("etag") };
}

/** The whole contract of one operation. */
export const schema = (id) => json("schema", { method: "POST", body: stringify({ operation: id, output: true }) });

/** The caller's recent calls, the latest last. */
export const recentCalls = async (signal) => (await json("calls", { signal })).calls;

/** The identity of the caller; null if not signed in. */
export const whoami = async () => (await json("session")).identity;

/** Exchange a key for a cookie that scripts cannot read. */
export const signIn = async (key) =>
  (await json("session", { method: "POST", headers: { authorization: `Bearer ${key}` } })).identity;

export const signOut = () => request("session", { method: "DELETE" });

/** Run a query or mutation: `{envelope, bytes, requestId}`. */
export async function call(id, inputText, signal) {
  const response = await request("call", { method: "POST", body: envelopeOf(id, inputText), signal });
  let text;
  try {
    text = await response.text();
  } catch (error) {
    throw error.name === "AbortError" ? error : lost(error);
  }
  return { envelope: parse(text), size: text.length, requestId: response.headers.get("x-request-id") };
}

/** Run a subscription: an async iterator of its items; returns at its end, throws a `Failure` if it fails. */
export async function* subscribe(id, inputText, signal) {
  const response = await request("subscribe", {
    method: "POST",
    body: envelopeOf(id, inputText),
    headers: { accept: "text/event-stream" },
    signal,
  });
  for await (const item of events(response)) yield { data: parse(item), size: item.length };
}

/** The text of each item of a stream. */
async function* events(response) {
  try {
    for await (const event of readEvents(response.body)) {
      if (event.type === "error") throw new Failure(response.status, parse(event.data));
      if (event.type === "complete") return;
      yield event.data;
    }
  } catch (error) {
    throw error.name === "AbortError" || error instanceof Failure ? error : lost(error);
  }
  throw new Failure(0, { code: "UNAVAILABLE", message: "The stream ended early: the connection was lost" });
}

/** Some of the runs that the caller may see: `{runs, next}`. Empty filters are left out. */
export const runs = (query, signal) => {
  const given = Object.entries(query).filter(([, text]) => text);
  return json(`runs?${new URLSearchParams(given)}`, { signal });
};

const runPath = (id) => `runs/${encodeURIComponent(id)}`;

/** The recorded steps of a run: `{steps}`. */
export const runSteps = (id, signal) => json(`${runPath(id)}/steps`, { signal });

/** Cancel, answer, signal or retry a run. */
export const changeRun = (id, path, body, signal) => request(`${runPath(id)}/${path}`, { method: "POST", body, signal });

/** The present state of a run, then every change, until it ends. */
export async function* runStates(id, signal) {
  const response = await request(`${runPath(id)}/events`, { headers: { accept: "text/event-stream" }, signal });
  for await (const item of events(response)) yield parse(item);
}
