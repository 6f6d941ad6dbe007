/* The workers of the hub's brokers, live, and their dead letters: each can be replayed or dropped.

   Rule 1: the table is made again with every report; what has the keyboard focus is not part of it.
*/

import { el, fill, plain, plainString } from "./dom.js";
import { stringify } from "./json.js";
import { button, LivePage } from "./live.js";

const count = (number, noun) => `${number.toLocaleString()} ${noun}${number === 1 ? "" : "s"}`;

/** The page of workers. */
export class WorkersPage extends LivePage {
  constructor({ may }) {
    super("hub.watch_workers", { may });
    this.brokers = new Map();
    this.groups = el("div", { class: "groups" });
    this.letters = el("div", { class: "sources" });
    this.element = this.table(
      "Workers",
      "The processes that serve operations behind a broker, and the calls that run and wait.",
      "Connected workers",
      ["Worker", "Version", "Running", "Waiting", "Finished", "Failed", "Since"],
      this.groups,
      this.letters,
      el("div", { class: "actions" }, this.news),
    );
    this.follow();
  }

  show(brokers) {
    const names = new Set(brokers.map(({ broker }) => broker));
    for (const [name, group] of this.brokers) {
      if (names.has(name)) continue;
      group.element.remove();
      this.brokers.delete(name);
    }
    for (const report of brokers) {
      const group = this.brokers.get(report.broker) ?? new Group(report.broker, this);
      this.brokers.set(report.broker, group);
      group.show(report);
      if (group.element.parentNode === null) this.groups.append(group.element);
    }
    const several = brokers.length > 1;
    fill(this.body, ...brokers.flatMap(({ broker, group }) => (group?.workers ?? []).map((worker) => row(worker, several ? broker : null))));
  }

  /** Show the dead letters of a broker, or the outcome of an action. */
  async list(broker) {
    await this.run("hub.dead_letters", { broker }, (letters) => {
      fill(this.letters, letters.length === 0 ? null : this.letterTable(broker, letters));
      return letters.length === 0 ? `${broker} has no dead letters.` : `${broker}: ${count(letters.length, "dead letter")}.`;
    });
  }

  letterTable(broker, letters) {
    const act = (id, letter, done) => async () => {
      await this.run(id, { broker, letter }, done);
      if (this.error.hidden) this.list(broker);
    };
    const rows = letters.map(({ id, operation, input, deliveries, storedAt }) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, plain(operation)),
        el("td", {}, el("pre", { tabIndex: 0, "aria-label": "Input" }, plain(stringify(input ?? null, 2)))),
        el("td", {}, new Date(storedAt).toLocaleString(), el("p", { class: "hint" }, `${deliveries} deliveries`)),
        el(
          "td",
          { class: "controls" },
          this.may("hub.replay_letter") ? button("Replay", act("hub.replay_letter", id, () => `${operation} succeeded.`), operation) : null,
          this.may("hub.drop_letter") ? button("Drop", act("hub.drop_letter", id, () => `${operation} was dropped.`), operation) : null,
        ),
      ),
    );
    const heads = ["Operation", "Input", "Stored", "Actions"].map((name) => el("th", { scope: "col" }, name));
    return el("table", {}, el("caption", {}, `Dead letters of ${plainString(broker)}`), el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
  }
}

/** One broker: a line that is changed in place, and the button for its dead letters. */
class Group {
  constructor(broker, page) {
    this.broker = broker;
    this.words = el("span", {});
    this.button = page.may("hub.dead_letters") ? button("Dead letters", () => page.list(broker), broker) : null;
    this.element = el("p", {}, this.words, " ", this.button);
  }

  show({ problem, group }) {
    const broker = plainString(this.broker);
    if (group === null || group === undefined) {
      this.words.textContent = `${broker}: ${plainString(problem ?? "nothing is known")}`;
      if (this.button) this.button.hidden = true;
      return;
    }
    const parts = [count(group.workers.length, "worker")];
    if (group.silent) parts.push(`${group.silent} not responding`);
    parts.push(`${group.running} running`, `${group.waiting} waiting${group.lag ? ` for ${group.lag.toFixed(1)} s` : ""}`);
    const letters = group.deadLetters ?? null;
    if (letters !== null) parts.push(count(letters, "dead letter"));
    const words = `${broker}: ${parts.join(", ")}`;
    if (this.words.textContent !== words) this.words.textContent = words;
    if (this.button) this.button.hidden = !letters;
  }
}

const row = (worker, broker) =>
  el(
    "tr",
    {},
    el("th", { scope: "row" }, plain(worker.name || worker.worker.slice(-8)), broker === null ? null : el("p", { class: "hint" }, plain(broker))),
    el("td", {}, plain(worker.version ?? "")),
    ...[worker.running, worker.waiting, worker.finished, worker.failed].map((number) => el("td", { class: "count" }, (number ?? 0).toLocaleString())),
    el("td", {}, worker.startedAt ? new Date(worker.startedAt).toLocaleString() : "", worker.leaving ? el("p", { class: "hint" }, "leaving") : null),
  );
