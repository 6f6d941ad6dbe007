/* Recent calls as a tree, with the time each of them took. */

import * as api from "./api.js";
import { el, fill, plainString } from "./dom.js";
import { duration, failure } from "./result.js";

const EVERY = 2000;

/** The page of recent calls, refreshed every two seconds while it is visible. */
export class CallsPage {
  constructor({ signIn, isSignedIn }) {
    this.signIn = signIn;
    this.none = isSignedIn
      ? "No calls yet. Make one, and it appears here."
      : "No calls yet. Sign in to see your own calls: each caller sees only its own.";
    this.rows = el("div", { class: "calls" }, el("p", { class: "hint" }, "Loading…"));
    this.element = el(
      "article",
      { class: "operation" },
      el(
        "header",
        { class: "title" },
        el("h1", { tabIndex: -1 }, "Recent calls"),
        el("p", { class: "description" }, "Your calls and their nested calls. Bars show their start and duration, on one scale."),
      ),
      this.rows,
    );
    this.abort = new AbortController();
    this.look();
    this.timer = setInterval(() => document.hidden || this.look(), EVERY);
  }

  async look() {
    try {
      this.show(await api.recentCalls(this.abort.signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      clearInterval(this.timer);
      this.isLost = error.isLost;
      fill(this.rows, failure(error, undefined, { signIn: this.signIn }));
    }
  }

  show(calls) {
    const text = JSON.stringify(calls);
    if (text === this.shown) return;
    this.shown = text;
    const trees = treesOf(calls);
    // One scale for all calls on the page, so that a bar shows how long a call took compared with the others.
    const span = Math.max(0.001, ...trees.map(durationOf));
    fill(this.rows, trees.length > 0 ? trees.map((tree) => treeView(tree, span)) : el("p", { class: "hint" }, this.none));
  }

  leave() {
    clearInterval(this.timer);
    this.abort.abort();
  }
}

/** Nest calls below their parents, the latest first; those of one call only if `requestId` is given. */
export function treesOf(calls, requestId) {
  const nodes = new Map(calls.map((call) => [call.requestId, { call, children: [] }]));
  const roots = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(node.call.parentRequestId);
    (parent ? parent.children : roots).push(node);
  }
  if (requestId !== undefined) return nodes.has(requestId) ? [nodes.get(requestId)] : [];
  return roots.sort((one, other) => other.call.startedAt - one.call.startedAt);
}

const endOf = ({ startedAt, duration: seconds }) => startedAt + (seconds ?? 0) * 1000;

/** The calls of a tree from top to bottom, with their depth. */
function callsOf(root) {
  const all = [];
  const walk = (node, depth) => {
    all.push({ ...node.call, depth });
    for (const child of node.children) walk(child, depth + 1);
  };
  walk(root, 0);
  return all;
}

const startOf = (all) => Math.min(...all.map((call) => call.startedAt));

/** The milliseconds from the first start to the last end of a tree. */
function durationOf(root) {
  const all = callsOf(root);
  return Math.max(...all.map(endOf)) - startOf(all);
}

/** One recent call with its nested calls; null if it is not among them. */
export function callTree(calls, requestId) {
  const nodes = treesOf(calls, requestId);
  return nodes.length === 0 ? null : treeView(nodes[0], Math.max(0.001, durationOf(nodes[0])));
}

function treeView(root, span) {
  const all = callsOf(root);
  const from = startOf(all);
  return el("ul", { class: "call-tree" }, all.map((call) => callRow(call, from, span)));
}

function callRow(call, from, span) {
  const isPending = call.duration === undefined || call.duration === null;
  const isGood = call.outcome === "success";
  const bar = el("span", { class: `bar ${isPending ? "pending" : isGood ? "good" : "bad"}` });
  bar.style.insetInlineStart = `${((call.startedAt - from) / span) * 100}%`;
  bar.style.inlineSize = isPending ? "100%" : `max(3px, ${Math.min(100, ((call.duration * 1000) / span) * 100)}%)`;
  const name = call.operationId
    ? el("a", { class: "name", href: `#/${encodeURIComponent(call.operationId)}` }, call.operationId)
    : el("span", { class: "name hint" }, "an operation that you may not see");
  const indent = el("span", { class: "indent" });
  indent.style.inlineSize = `${call.depth * 18}px`;
  return el(
    "li",
    {},
    el("span", { class: "what" }, indent, name),
    el("span", { class: `outcome-word ${isPending ? "" : isGood ? "good" : "bad"}` }, plainString(call.outcome ?? "pending"), call.items ? `, ${call.items} items` : ""),
    el("span", { class: "when" }, new Date(call.startedAt).toLocaleTimeString()),
    el("span", { class: "took" }, isPending ? "…" : duration(call.duration * 1000)),
    el("span", { class: "track", "aria-hidden": "true" }, bar),
  );
}
