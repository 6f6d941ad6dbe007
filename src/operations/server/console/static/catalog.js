/* The operations of the caller: searched, filtered, and grouped by namespace. */

const words = (text) =>
  text
    .replace(/([a-z0-9])([A-Z])/g, "$1 $2")
    .toLowerCase()
    .split(/[^\p{L}\p{N}]+/u)
    .filter(Boolean);

const WEIGHTS = { name: 8, tag: 5, title: 4, description: 1 };

/** Operations in the order of their ids, ready to be searched. */
export class Catalog {
  constructor(operations) {
    this.entries = operations
      .map((operation) => {
        const places = placesOf(operation);
        const text = places.flatMap(([held]) => held).join(" ");
        return { ...operation, ...split(operation.id), places, text };
      })
      .sort((one, other) => (one.id < other.id ? -1 : 1));
    this.byId = new Map(this.entries.map((entry) => [entry.id, entry]));
  }

  /** The namespaces with the number of their operations. */
  get namespaces() {
    const counts = new Map();
    for (const { namespace } of this.entries) counts.set(namespace, (counts.get(namespace) ?? 0) + 1);
    return counts;
  }

  /** The sources, `type`s or other values that occur at a key. */
  values(key) {
    return [...new Set(this.entries.map((entry) => entry[key]))].sort();
  }

  /** Entries that have every word somewhere, the best first; all of them, by id, without a word. */
  search(query, { type = "", source = "" } = {}) {
    const kept = this.entries.filter((entry) => (!type || entry.type === type) && (!source || entry.source === source));
    const wanted = query.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter(Boolean);
    if (wanted.length === 0) return kept;
    const scored = [];
    for (const entry of kept) {
      // A cheap check excludes most of them.
      if (!wanted.every((word) => entry.text.includes(word))) continue;
      const score = scoreOf(entry, wanted, query.trim().toLowerCase());
      if (score > 0) scored.push({ entry, score });
    }
    scored.sort((one, other) => other.score - one.score || one.entry.id.length - other.entry.id.length);
    return scored.map(({ entry }) => entry);
  }
}

function split(id) {
  const dot = id.indexOf(".");
  return { namespace: id.slice(0, dot), name: id.slice(dot + 1) };
}

function placesOf({ id, title, description, tags }) {
  return [
    [words(id), WEIGHTS.name],
    [words((tags ?? []).join(" ")), WEIGHTS.tag],
    [words(title ?? ""), WEIGHTS.title],
    [words(description ?? ""), WEIGHTS.description],
  ];
}

function scoreOf(entry, wanted, whole) {
  let total = entry.id.toLowerCase().includes(whole) ? 10 : 0;
  for (const word of wanted) {
    let best = 0;
    for (const [held, weight] of entry.places) {
      if (weight <= best) break;
      for (const one of held) {
        const share = one === word ? 1 : one.startsWith(word) ? 0.6 : one.includes(word) ? 0.2 : 0;
        best = Math.max(best, share * weight);
      }
    }
    if (best === 0) return 0;
    total += best;
  }
  return total;
}
