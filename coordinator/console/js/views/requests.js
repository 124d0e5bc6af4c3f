// The request list: live, filtered, slowest or newest first; opening a row leads to its waterfall.

import { copyButton } from "../copy.js";
import { h, setText } from "../dom.js";
import { number } from "../format.js";
import { idOf } from "../outcome.js";
import { filterOf, FILTERS, sorted } from "../request-store.js";
import { link, rewrite } from "../router.js";
import { COLUMNS } from "./request-columns.js";
import { FilterBar } from "./request-filters.js";
import { VirtualRows } from "./virtual-rows.js";

const REDRAW_MS = 250;
const DEFAULT_SORT = "-seq";
const SORTS = new Set(COLUMNS.map((column) => column.sort).filter(Boolean));

/** `sort=-e2e_ms`, or the API's own `slowest=true`. */
function sortOf(query) {
  const given = query.get("slowest") === "true" ? "-e2e_ms" : (query.get("sort") ?? DEFAULT_SORT);
  const key = given.replace(/^-/, "");
  return SORTS.has(key) ? { key, isDescending: given.startsWith("-") } : { key: "seq", isDescending: true };
}

class RequestsView {
  constructor(root, route, app) {
    this.app = app;
    this.query = route.query;
    this.isHeld = false;
    this.filters = new FilterBar(
      (name, value) => this.change(name, value),
      () => this.clear(),
    );
    this.rows = new VirtualRows({
      label: "Requests",
      columns: COLUMNS,
      keyOf: (r) => r.seq,
      onOpen: (r) => this.open(r),
      onSort: (key) => this.sortBy(key),
    });
    this.says = h("span", { class: "list-says", role: "status" });
    this.notice = h("span", { class: "list-notice" });
    this.order = h(
      "button",
      { type: "button", class: "switch", id: "slowest", on: { click: () => this.turnOrder() } },
      "Slowest first",
    );
    this.hold = h(
      "button",
      {
        type: "button",
        class: "switch",
        id: "hold",
        "aria-pressed": "false",
        title: "Keep the rows as they are (Space)",
        on: { click: () => this.turnHold() },
      },
      "Hold",
    );
    root.append(
      h("h1", { class: "visually-hidden" }, "Requests"),
      h(
        "div",
        { class: "bar" },
        this.filters.element,
        h("div", { class: "bar-end" }, this.order, this.hold, copyButton("Copy CLI", "command", "baton tap")),
      ),
      h("div", { class: "list-line" }, this.says, this.notice),
      this.rows.element,
    );
    this.onChange = () => this.later();
    app.requests.addEventListener("change", this.onChange);
    this.apply();
    this.rows.selected = app.openedSeq ?? null;
    const at = this.rows.selectedIndex();
    if (at >= 0) this.rows.moveTo(at);
  }

  open(record) {
    // Coming back, the reader finds the row again.
    this.app.openedSeq = record.seq;
    this.app.navigate(link("requests", idOf(record)));
  }

  keys() {
    const by = (step) => () => this.rows.move(step);
    const screen = () => this.rows.visible() - 1;
    return {
      j: by(1),
      ArrowDown: by(1),
      k: by(-1),
      ArrowUp: by(-1),
      PageDown: () => this.rows.move(screen()),
      PageUp: () => this.rows.move(-screen()),
      Home: () => this.rows.moveTo(0),
      End: () => this.rows.moveTo(this.rows.records.length - 1),
      Enter: () => this.rows.openSelected(),
      s: () => this.turnOrder(),
      " ": () => this.turnHold(),
    };
  }

  follow(route) {
    this.query = route.query;
    this.apply();
  }

  change(name, value) {
    if (value) this.query.set(name, value);
    else this.query.delete(name);
    this.apply();
  }

  clear() {
    for (const name of FILTERS) this.query.delete(name);
    this.apply();
  }

  sortBy(key) {
    const { key: now, isDescending } = sortOf(this.query);
    this.query.delete("slowest");
    this.change("sort", `${key === now && isDescending ? "" : "-"}${key}`);
  }

  turnOrder() {
    const isSlowest = sortOf(this.query).key === "e2e_ms";
    this.query.delete("slowest");
    this.change("sort", isSlowest ? "" : "-e2e_ms");
  }

  turnHold() {
    this.isHeld = !this.isHeld;
    this.hold.setAttribute("aria-pressed", this.isHeld);
    this.draw();
  }

  /** The filters or the order have changed. */
  apply() {
    rewrite(link("requests", null, this.query));
    this.app.requestsLink = link("requests", null, this.query);
    const { key, isDescending } = sortOf(this.query);
    this.filters.show(this.query);
    this.order.setAttribute("aria-pressed", key === "e2e_ms" && isDescending);
    this.rows.showSort(key, isDescending);
    this.rows.toTop();
    this.isHeld = false;
    this.hold.setAttribute("aria-pressed", "false");
    const { requests } = this.app;
    const isNarrowed = key === "e2e_ms" || FILTERS.some((name) => this.query.get(name));
    if (isNarrowed && !requests.isComplete) requests.askFor(this.query, key === "e2e_ms" && isDescending);
    this.draw();
  }

  later() {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.draw();
    }, REDRAW_MS);
  }

  draw() {
    const { requests } = this.app;
    const all = [...requests.bySeq.values()];
    this.filters.offer(this.choices(all));
    const { key, isDescending } = sortOf(this.query);
    if (!this.isHeld) this.shown = sorted(all.filter(filterOf(this.query)), key, isDescending);
    else this.shown = this.shown.map((r) => requests.bySeq.get(r.seq) ?? r);
    this.rows.setRecords(this.shown, this.emptyWords(all.length));
    this.say(all);
  }

  choices(all) {
    const seen = (key) => [...new Set(all.map((r) => r[key]).filter(Boolean))];
    const nodes = [
      ...(this.app.cluster.page?.nodes ?? []).map((node) => node.name),
      ...seen("prefill_node"),
      ...seen("decode_node"),
    ];
    return {
      outcome: ["failed", ...seen("outcome").sort()],
      lane: seen("lane").sort(),
      node: [...new Set(nodes)].sort(),
      model: seen("model").sort(),
    };
  }

  emptyWords(total) {
    const { requests } = this.app;
    if (requests.problem && total === 0) return `The list could not be read. ${requests.problem}`;
    if (!requests.hasLoaded && total === 0) return "Reading the list.";
    return total === 0
      ? "No request yet. Send one, for example in the playground (g p)."
      : "No request passes these filters.";
  }

  say(all) {
    const { requests } = this.app;
    const running = all.reduce((n, r) => n + (r.outcome === null), 0);
    const parts = [`${number(this.shown.length)} of ${number(all.length)} requests`, `${number(running)} running`];
    if (requests.kept !== null && requests.kept > all.length && !requests.isLoading)
      parts.push(`the coordinator keeps ${number(requests.kept)}`);
    if (requests.forgotten > 0) parts.push(`${number(requests.forgotten)} older ones forgotten`);
    if (requests.isLoading && !requests.hasLoaded) parts.push("reading older ones");
    if (this.isHeld) parts.push("held: new requests are not shown");
    setText(this.says, parts.join(" · "));
    setText(
      this.notice,
      requests.problem && all.length > 0 ? `Not up to date: ${requests.problem}` : (requests.notice ?? ""),
    );
  }

  dispose() {
    clearTimeout(this.timer);
    this.app.requests.removeEventListener("change", this.onChange);
    this.filters.dispose();
    this.rows.dispose();
  }
}

export function mountRequests(root, route, app) {
  const view = new RequestsView(root, route, app);
  return { title: "Requests", keys: view.keys(), follow: (next) => view.follow(next), dispose: () => view.dispose() };
}
