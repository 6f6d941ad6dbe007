/* The page: a list at the side, one operation or the recent calls beside it, and the keyboard.

   The fragment of the address selects the page: `#/namespace.name`, `#/~calls`, `#/~sources`, `#/~workers`, `#/~approvals`, `#/~runs`,
   `#/~runs/ID`, `#/~code`, or nothing.
*/

import * as api from "./api.js";
import { ApprovalsPage } from "./approvals.js";
import { CallsPage } from "./calls.js";
import { Catalog } from "./catalog.js";
import { CodePage, forgetScript } from "./code.js";
import { el, fill, icon, plainString } from "./dom.js";
import { OperationList } from "./list.js";
import { forget, OperationPage } from "./operation.js";
import { failure } from "./result.js";
import { RunPage, RunsPage } from "./runs.js";
import { Session } from "./session.js";
import { SourcesPage } from "./sources.js";
import { WorkersPage } from "./workers.js";

const MANY = 300;
const LOOK_SECONDS = 2;
const LONGEST_SECONDS = 10;
const CALLS = "~calls";
const SOURCES = "~sources";
const WORKERS = "~workers";
const APPROVALS = "~approvals";
const RUNS = "~runs";
const CODE = "~code";
/** The code of an address that signs in, such as `#code=K7QF-2MXA`. */
const ONE_TIME = /^#code=([A-Za-z0-9-]+)$/;
const RUN = /^~runs\/(.+)$/;
const PAGES = { [CALLS]: "Recent calls", [SOURCES]: "Sources", [WORKERS]: "Workers", [APPROVALS]: "Approvals", [RUNS]: "Runs", [CODE]: "Code" };

class Console {
  constructor() {
    this.catalog = new Catalog([]);
    this.page = null;
    this.filters = { type: "", source: "" };
    this.main = document.getElementById("main");
    this.search = document.getElementById("search");
    this.summary = document.getElementById("summary");
    this.filterBar = document.getElementById("filters");
    this.links = Object.fromEntries(Object.keys(PAGES).map((page) => [page, document.getElementById(page.slice(1))]));
    this.absent = document.getElementById("absent");
    this.disconnected = "";
    this.list = new OperationList({ leaveUp: () => this.search.focus() });
    document.getElementById("list").append(this.list.element);
    this.session = new Session(() => this.onIdentity());
    document.getElementById("session").append(this.session.element);
    this.themeButton = document.getElementById("theme");
    this.themeButton.addEventListener("click", () => this.showTheme(globalThis.nextTheme()));
    this.showTheme(document.documentElement.dataset.theme);
    this.search.addEventListener("input", () => this.refresh());
    this.search.addEventListener("keydown", (event) => this.onSearchKey(event));
    document.addEventListener("keydown", (event) => this.onKey(event));
    addEventListener("hashchange", () => this.route());
  }

  async start() {
    const [, code] = ONE_TIME.exec(location.hash) ?? [];
    if (code) {
      history.replaceState(null, "", location.pathname);
      await this.session.redeem(code);
    }
    await this.session.look();
    await this.load();
    await this.route();
    document.addEventListener("visibilitychange", () => this.look());
    this.look();
  }

  /** Poll for changes while the page is visible. */
  async look(pause = LOOK_SECONDS) {
    clearTimeout(this.next);
    if (document.hidden) return;
    const tag = this.tag;
    try {
      const news = await api.overview(tag);
      // Signing in or out meanwhile has already refreshed the page.
      if (news !== null && this.tag === tag) await this.take(news);
      this.announce(this.disconnected);
      if (this.page?.isLost) await this.route();
      pause = LOOK_SECONDS;
    } catch (error) {
      // The session may have ended.
      if (error.status === 401) await this.session.look();
      // Keep the page while the server restarts.
      if (error.isLost) this.announce("The server cannot be reached. Trying again…");
      pause = Math.min(2 * pause, LONGEST_SECONDS);
    }
    clearTimeout(this.next);
    this.next = setTimeout(() => this.look(pause), 1000 * pause);
  }

  /** Update the list after a change, without disturbing the open page or its input. */
  async take(overview) {
    const wasMissing = this.problem !== null || !this.offers(this.wanted());
    this.use(overview);
    this.drawFilters();
    this.refresh({ stay: true });
    // The caller may have changed: the session may have ended, or another tab may have signed in.
    await this.session.look();
    const wanted = this.wanted();
    const isMissing = !this.offers(wanted);
    if (wasMissing ? wanted === "" || !isMissing : isMissing && wanted in PAGES) await this.route();
  }

  /** Whether the caller may see a page or an operation. */
  offers(wanted) {
    if (RUN.test(wanted)) return !this.links[RUNS].hidden;
    return wanted in PAGES ? !this.links[wanted].hidden : this.catalog.byId.has(wanted);
  }

  /** Show what is missing. */
  announce(words) {
    this.absent.hidden = words === "";
    // Announce only changes.
    if (this.absent.textContent !== words) this.absent.textContent = words;
  }

  /** Show why a development server cannot use the files. */
  warn(problem) {
    const broken = document.getElementById("broken");
    broken.hidden = problem === undefined;
    const text = plainString(problem ?? "");
    const lines = broken.querySelector("pre");
    if (lines.textContent !== text) lines.textContent = text;
  }

  use({ operations, hasCalls, hasRuns, disconnected, problem, tag }) {
    this.warn(problem);
    this.catalog = new Catalog(operations);
    this.links[CALLS].hidden = !hasCalls;
    this.links[RUNS].hidden = !hasRuns;
    this.links[SOURCES].hidden = !this.catalog.byId.has("hub.watch");
    this.links[WORKERS].hidden = !this.catalog.byId.has("hub.watch_workers");
    this.links[CODE].hidden = !this.catalog.byId.has("code.run");
    this.links[APPROVALS].hidden = !this.catalog.byId.has("approvals.watch");
    this.disconnected = disconnected.length === 0 ? "" : `Not connected: ${plainString(disconnected.join(", "))}`;
    this.announce(this.disconnected);
    this.tag = tag;
    this.problem = null;
  }

  /** Clear the page and all input after the caller has changed. */
  async onIdentity() {
    if (this.session.identity === null) {
      forget();
      forgetScript();
    }
    await this.load();
    await this.route();
  }

  /** Load the operations, which depend on the caller. */
  async load() {
    try {
      this.use(await api.overview());
    } catch (error) {
      this.catalog = new Catalog([]);
      this.tag = null;
      this.problem = error;
    }
    const namespaces = [...this.catalog.namespaces.keys()];
    this.list.fold(this.catalog.entries.length > MANY && namespaces.length > 1 ? namespaces : []);
    this.drawFilters();
    this.refresh();
  }

  refresh({ stay = false } = {}) {
    const query = this.search.value;
    const found = this.catalog.search(query, this.filters);
    this.list.show(found, { isRanked: query.trim() !== "", stay });
    const all = this.catalog.entries.length;
    const one = all === 1 ? "operation" : "operations";
    const some = found.length === 0 ? "no matches" : `${found.length.toLocaleString()} of ${all.toLocaleString()}`;
    this.summary.textContent = found.length === all ? `${all.toLocaleString()} ${one}` : some;
  }

  drawFilters() {
    const menu = (key, words, values) =>
      values.length < 2
        ? null
        : el(
            "select",
            { "aria-label": words, onchange: (event) => this.filter(key, event.target.value) },
            el("option", { value: "" }, words),
            values.map((value) => el("option", { value, selected: value === this.filters[key] }, value)),
          );
    for (const key of ["type", "source"]) if (!this.catalog.values(key).includes(this.filters[key])) this.filters[key] = "";
    fill(this.filterBar, menu("type", "All types", this.catalog.values("type")), menu("source", "All sources", this.catalog.values("source")));
  }

  filter(key, value) {
    this.filters[key] = value;
    this.refresh();
  }

  async route() {
    const wanted = this.wanted();
    this.page?.leave?.();
    this.page = null;
    this.list.select(wanted);
    // On a phone, the list hides the page, but a problem is shown on the page.
    document.body.dataset.view = wanted === "" && this.problem === null ? "list" : "page";
    for (const [page, link] of Object.entries(this.links)) link.toggleAttribute("aria-current", wanted === page || (page === RUNS && RUN.test(wanted)));
    document.title = wanted === "" ? "operations" : `${PAGES[wanted] ?? wanted} · operations`;
    // Close the previous page.
    this.main.inert = true;
    const page = await this.pageOf(wanted);
    if (this.wanted() === wanted) this.open(page);
    else page.leave?.();
  }

  wanted() {
    try {
      return decodeURIComponent(location.hash.replace(/^#\/?/, ""));
    } catch {
      return "";
    }
  }

  async pageOf(wanted) {
    const signIn = this.session.ask;
    const isSignedIn = this.session.identity !== null;
    if (this.problem?.status === 401 && !isSignedIn) return { element: this.session.page() };
    if (this.problem) return { element: failure(this.problem, undefined, { signIn }) };
    if (wanted === "") return { element: this.welcome() };
    if (wanted === CALLS) return new CallsPage({ isSignedIn, signIn });
    if (wanted in PAGES && !this.offers(wanted)) {
      return { element: this.missing(PAGES[wanted], el("p", {}, "You may not see this page."), true) };
    }
    const may = (id) => this.catalog.byId.has(id);
    if (wanted === SOURCES) return new SourcesPage({ may });
    if (wanted === WORKERS) return new WorkersPage({ may });
    if (wanted === APPROVALS) return new ApprovalsPage({ may });
    if (wanted === CODE) return new CodePage({ may, hasCalls: !this.links[CALLS].hidden, signIn });
    if (wanted === RUNS) return new RunsPage();
    const run = RUN.exec(wanted);
    if (run !== null) return new RunPage(run[1], { may });
    try {
      const spec = await api.schema(wanted);
      const source = this.catalog.byId.get(wanted)?.source ?? "local";
      return new OperationPage(spec, { source, isSignedIn, signIn });
    } catch (error) {
      return { element: this.missing(wanted, failure(error, undefined, { signIn }), error.status === 404), isLost: error.isLost };
    }
  }

  open(page) {
    // The same page may have been opened meanwhile.
    this.page?.leave?.();
    this.page = page;
    this.main.inert = false;
    fill(this.main, page.element);
    this.main.scrollTop = 0;
    // Move the focus to the page after a link, but not away from a field.
    if (document.activeElement !== this.search) page.element.querySelector("h1")?.focus({ preventScroll: true });
  }

  /** Explain that another caller may see this page. */
  missing(title, reason, isHidden) {
    return el(
      "article",
      { class: "operation" },
      el("header", { class: "title" }, el("h1", { tabIndex: -1 }, title)),
      reason,
      isHidden && this.session.identity === null
        ? el(
            "p",
            { class: "perhaps" },
            el("span", { class: "hint" }, "You may see it after you sign in. "),
            el("button", { type: "button", class: "primary", onclick: this.session.ask }, "Sign in"),
          )
        : null,
    );
  }

  welcome() {
    const key = (name, words) => el("div", {}, el("dt", {}, name.split(" ").map((one) => el("kbd", {}, one))), el("dd", {}, words));
    const namespaces = [...this.catalog.namespaces];
    return el(
      "article",
      { class: "welcome" },
      el("h1", { tabIndex: -1 }, "Everything you can call"),
      el(
        "p",
        { class: "lead" },
        namespaces.length === 0
          ? "There are no operations that you may call. Sign in to see more."
          : "Local functions, HTTP APIs and MCP tools, all called the same way. Select one in the list, or search.",
      ),
      el(
        "ul",
        { class: "spaces" },
        namespaces.slice(0, 60).map(([name, count]) =>
          el(
            "li",
            {},
            el(
              "button",
              { type: "button", onclick: () => this.browse(name) },
              el("span", { class: "name" }, name),
              el("span", { class: "count" }, `${count} ${count === 1 ? "operation" : "operations"}`),
            ),
          ),
        ),
      ),
      el(
        "dl",
        { class: "shortcuts" },
        key("/", "search"),
        key("↑ ↓", "move in the list"),
        key("Enter", "open"),
        key("Ctrl Enter", "call"),
        key("Esc", "back"),
      ),
    );
  }

  /** Show one namespace in the list. */
  browse(namespace) {
    this.search.value = "";
    this.list.fold([...this.catalog.namespaces.keys()].filter((name) => name !== namespace));
    this.refresh();
    this.list.focus(this.list.rows.findIndex((row) => row.group === namespace) + 1);
  }

  onSearchKey(event) {
    if (event.key === "ArrowDown") {
      event.preventDefault();
      this.list.focus(0);
    } else if (event.key === "Enter") {
      const first = this.list.first();
      if (first) location.hash = `#/${encodeURIComponent(first.id)}`;
    }
  }

  onKey(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const isTyping = event.target.matches("input, textarea, select");
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      this.search.focus();
      this.search.select();
    } else if (event.key === "Escape") this.back(event.target);
  }

  /** Go back one step: clear the search, leave the field, close the page. */
  back(from) {
    if (from === this.search && this.search.value !== "") {
      this.search.value = "";
      this.refresh();
    } else if (from.matches("input, textarea, select")) from.blur();
    else if (this.list.element.contains(from)) this.search.focus();
    else if (location.hash.length > 2) location.hash = "#/";
  }

  showTheme(theme) {
    fill(this.themeButton, icon({ light: "sun", dark: "moon" }[theme] ?? "auto"));
    const words = `Colours: ${theme === "auto" ? "system" : theme}`;
    this.themeButton.setAttribute("aria-label", words);
    this.themeButton.title = words;
  }
}

new Console().start();
