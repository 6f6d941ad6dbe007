/* Server-sent events out of a stream of bytes. */

/** Each event as `{type, data, id}`. The consumer sets the pace. */
export async function* readEvents(stream) {
  let event = { type: "message", data: [], id: "" };
  for await (const line of lines(stream)) {
    if (line === "") {
      if (event.data.length > 0 || event.type !== "message") yield { ...event, data: event.data.join("\n") };
      event = { type: "message", data: [], id: event.id };
      continue;
    }
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (name === "data") event.data.push(value);
    else if (name === "event") event.type = value;
    else if (name === "id") event.id = value;
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield part.endsWith("\r") ? part.slice(0, -1) : part;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
