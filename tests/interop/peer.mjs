// The documented wire format, spoken by another language: plain `ws` and `ioredis`, in both roles.
//
//   node peer.mjs {redis|websocket} {caller|worker} URL PREFIX
//
// As a caller it prints one line of JSON with what it received; as a worker it serves `node.*` until it is killed.
import { randomUUID } from "node:crypto";
import Redis from "ioredis";
import WebSocket from "ws";

const [transport, role, url, prefix = ""] = process.argv.slice(2);
const ANSWERS = ["call.responded", "call.completed", "call.error", "call.aborted"];

async function connect(types, onEvent) {
  if (transport === "redis") {
    const reader = new Redis(url);
    const writer = new Redis(url);
    reader.on("message", (_, text) => onEvent(JSON.parse(text)));
    await reader.subscribe(...types.map((type) => `${prefix}${type}:`));
    return (type, payload) =>
      writer.publish(`${prefix}${type}:`, JSON.stringify({ type, id: "", payload }));
  }
  const socket = new WebSocket(url);
  socket.on("message", (text) => onEvent(JSON.parse(text)));
  await new Promise((resolve, reject) => socket.on("open", resolve).on("error", reject));
  for (const type of types) {
    socket.send(JSON.stringify({ type: "__subscribe", id: "", payload: { topic: `${type}:` } }));
  }
  return (type, payload) => socket.send(JSON.stringify({ type, id: "", payload }));
}

async function call() {
  const open = new Map();
  const send = await connect(ANSWERS, ({ type, payload }) => {
    const one = open.get(payload.requestId);
    if (one === undefined) return;
    one.events.push([type, payload]);
    if (type !== "call.responded" || !one.many) {
      open.delete(payload.requestId);
      one.resolve(one.events);
    }
  });
  const request = (operationId, input, many = false) =>
    new Promise((resolve) => {
      const requestId = randomUUID();
      open.set(requestId, { events: [], many, resolve });
      send("call.requested", { requestId, operationId, input, timeoutMs: 20000 });
    });
  const [sum] = await request("math.add", { a: 1, b: 2 });
  const [failure] = await request("fail.domain", {});
  const [missing] = await request("no.such", {});
  const items = await request("count.up", { n: 3 }, true);
  console.log(JSON.stringify({
    sum: sum[1].output,
    failure: failure[1],
    missing: missing[1].code,
    items: items.filter(([type]) => type === "call.responded").map(([, payload]) => payload.output.data),
    end: items.at(-1)[0],
  }));
  process.exit(0);
}

async function work() {
  const envelope = (operationId, data) => ({
    data,
    meta: { source: "local", operationId, timestamp: Date.now() },
  });
  const send = await connect(["call.requested", "call.aborted"], ({ type, payload }) => {
    if (type !== "call.requested") return;
    const { requestId, operationId, input } = payload;
    const respond = (data) =>
      send("call.responded", { requestId, output: envelope(operationId, data) });
    if (operationId === "node.double") respond(input.value * 2);
    else if (operationId === "node.count") {
      for (let index = 0; index < input.n; index++) respond(index);
      send("call.completed", { requestId });
    } else {
      send("call.error", { requestId, code: "OPERATION_NOT_FOUND", message: operationId });
    }
  });
  console.log("ready");
}

await (role === "caller" ? call() : work());
