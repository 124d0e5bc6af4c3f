// The cluster map: coordinator, prefill row, decode row, and the pairs between them.

import { pairKey } from "../cluster-store.js";
import { chartButtons } from "../copy.js";
import { h, replace, s } from "../dom.js";
import { bytes, clock, count, number, rate, seconds, text } from "../format.js";
import { link } from "../router.js";
import { drawEdges } from "./map-edges.js";
import { NodeCard } from "./node-card.js";

const ROWS = [
  ["prefill", "Prefill nodes"],
  ["decode", "Decode nodes"],
  ["co-located", "Co-located nodes"],
];
const PROMQL = "sum by (node, state) (baton_kv_blocks)";

/** The label, and for two nodes that do not fit the facts in which they differ. */
const whyNot = (pair) => [pair.unusable_reason, pair.unusable_because].filter(Boolean).map(text).join(": ");

class ClusterView {
  constructor(root, app) {
    this.app = app;
    this.cards = new Map();
    this.svg = s("svg", { class: "edges", role: "img", "aria-label": "Pairs; the table below says the same" });
    this.coordinator = h("article", { class: "node-card coordinator-card" });
    this.rows = Object.fromEntries(ROWS.map(([role, title]) => [role, this.row(role, title)]));
    this.map = h(
      "div",
      { class: "map" },
      this.svg,
      h("div", { class: "map-top" }, this.coordinator),
      ROWS.map(([role]) => this.rows[role].element),
    );
    this.pairs = h("div");
    this.waiting = h("p", { class: "muted pad" }, "Waiting for the first page of the cluster.");
    this.panel = h(
      "div",
      { class: "stack", hidden: true },
      h(
        "section",
        { class: "panel map-panel" },
        h(
          "div",
          { class: "panel-head" },
          h("h2", null, "Cluster"),
          h(
            "span",
            { class: "muted" },
            "lines: KV bytes a second over the last 5 s, thicker by the same step for each ten times as much",
          ),
          h("span", { class: "panel-tools" }, chartButtons(PROMQL, "baton status")),
        ),
        this.map,
      ),
      h(
        "section",
        { class: "panel" },
        h(
          "div",
          { class: "panel-head" },
          h("h2", null, "Pairs"),
          h(
            "span",
            { class: "panel-tools" },
            chartButtons("sum by (transport) (rate(baton_kv_transfer_bytes_sum[1m]))", "baton top"),
          ),
        ),
        this.pairs,
      ),
    );
    root.append(h("h1", { class: "visually-hidden" }, "Cluster map"), this.waiting, this.panel);
    this.onChange = () => this.draw();
    app.cluster.addEventListener("change", this.onChange);
    this.sizes = new ResizeObserver(() => this.drawEdges());
    this.sizes.observe(this.map);
    this.map.addEventListener("pointerover", (event) => this.light(event.target.closest?.(".node-card")?.dataset.node));
    this.map.addEventListener("pointerleave", () => this.light(null));
    this.draw();
  }

  row(role, title) {
    const cards = h("div", { class: "map-cards" });
    const says = h("span", { class: "muted" });
    return {
      cards,
      says,
      element: h(
        "section",
        { class: `map-row map-row-${role}`, "aria-label": title, data: { role } },
        h("h3", null, title, " ", says),
        cards,
      ),
    };
  }

  draw() {
    const { page, at } = this.app.cluster;
    this.waiting.hidden = page !== null;
    this.panel.hidden = page === null;
    if (page === null) return;
    this.drawCoordinator(page.coordinator, at);
    for (const [role] of ROWS) this.drawRow(role);
    const names = new Set(page.nodes.map((node) => node.name));
    for (const [name, card] of this.cards) {
      if (names.has(name)) continue;
      card.element.remove();
      this.cards.delete(name);
    }
    this.drawPairs(page);
    this.drawEdges();
  }

  drawCoordinator(coordinator, at) {
    const key = JSON.stringify([coordinator, Math.floor(at / 1000)]);
    if (key === this.coordinatorKey) return;
    this.coordinatorKey = key;
    const waiting = Object.entries(coordinator.waiting ?? {})
      .map(([lane, n]) => `${lane} ${number(n)}`)
      .join(", ");
    const isReady = coordinator.readiness === "ready";
    this.coordinator.dataset.node = "coordinator";
    replace(
      this.coordinator,
      h(
        "header",
        null,
        h("a", { class: "node-name", href: link("requests") }, text(coordinator.name)),
        h(
          "span",
          { class: `node-state ${isReady ? "" : "is-failed"}` },
          `${isReady ? "●" : "✕"} ${text(coordinator.readiness).replaceAll("_", " ")}`,
        ),
      ),
      coordinator.not_ready_because ? h("p", { class: "warning" }, coordinator.not_ready_because) : null,
      coordinator.unsplit_because ? h("p", { class: "warning" }, coordinator.unsplit_because) : null,
      h(
        "dl",
        null,
        [
          ["model", text(coordinator.model)],
          ["unfinished", count(coordinator.unfinished, "request")],
          ["waiting", waiting || "none"],
          ["listens on", text(coordinator.listen)],
          ["version, up", `${text(coordinator.version)}, ${seconds(coordinator.uptime_s)}`],
          ["as of", clock(at, false)],
        ].map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
      ),
    );
  }

  drawRow(role) {
    const { cards, says, element } = this.rows[role];
    const nodes = this.app.cluster.nodesOf(role);
    // A cluster of co-located nodes alone has no empty pools to complain about.
    const hasOther = this.app.cluster.nodesOf("co-located").length > 0;
    element.hidden = nodes.length === 0 && (role === "co-located" || hasOther);
    const ready = nodes.filter((node) => node.state === "ready").length;
    const all = (key) => number(nodes.reduce((n, node) => n + node[key], 0));
    const words =
      nodes.length === 0
        ? ["none has joined"]
        : [`${ready} of ${nodes.length} ready`, `${all("running")} running`, `${all("waiting")} waiting`];
    if (says.dataset.words !== words.join())
      replace(
        says,
        words.map((word) => h("span", null, word)),
      );
    says.dataset.words = words.join();
    element.classList.toggle("is-dense", nodes.length > 6);
    nodes.forEach((node, at) => {
      const card = this.cards.get(node.name) ?? new NodeCard();
      this.cards.set(node.name, card);
      card.update(node);
      if (cards.children[at] !== card.element) cards.insertBefore(card.element, cards.children[at] ?? null);
    });
  }

  drawEdges() {
    const { page } = this.app.cluster;
    if (page === null || this.map.clientWidth === 0) return;
    const origin = this.map.getBoundingClientRect();
    this.svg.setAttribute("width", origin.width);
    this.svg.setAttribute("height", origin.height);
    const place = (name, side, share) => {
      const element = name === "coordinator" ? this.coordinator : this.cards.get(name)?.element;
      if (!element?.isConnected) return null;
      const box = element.getBoundingClientRect();
      return { x: box.left + box.width * share - origin.left, y: (side === "top" ? box.top : box.bottom) - origin.top };
    };
    drawEdges(this.svg, { page, place, rateOf: (pair) => this.app.cluster.rateOf(pair) });
    this.light(this.lit);
  }

  /** The pairs of the node under the pointer stand out. */
  light(name) {
    this.lit = name ?? null;
    const isNode = this.cards.has(this.lit);
    this.svg.classList.toggle("has-light", isNode);
    for (const edge of this.svg.querySelectorAll(".edge"))
      edge.classList.toggle("is-lit", isNode && (edge.dataset.prefill === name || edge.dataset.decode === name));
  }

  drawPairs(page) {
    const key = JSON.stringify(page.pairs.map((pair) => [pair, this.app.cluster.rateOf(pair)]));
    if (key === this.pairsKey) return;
    this.pairsKey = key;
    if (page.pairs.length === 0) {
      replace(
        this.pairs,
        h(
          "p",
          { class: "muted" },
          "No pair: KV moves between one prefill node and one decode node, and one of the two is missing.",
        ),
      );
      return;
    }
    const head = [["Pair"], ["State"], ["KV now", "number"], ["KV in all", "number"], ["Handoffs", "number"]];
    replace(
      this.pairs,
      h(
        "table",
        { class: "plain" },
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            head.map(([title, className]) => h("th", { scope: "col", class: className }, title)),
          ),
        ),
        h(
          "tbody",
          null,
          page.pairs.map((pair) =>
            h(
              "tr",
              { class: pair.is_usable ? null : "is-failed" },
              h("td", null, pairKey(pair)),
              h("td", null, pair.is_usable ? "● usable" : `✕ not usable: ${whyNot(pair)}`),
              h("td", { class: "number" }, rate(this.app.cluster.rateOf(pair))),
              h("td", { class: "number" }, bytes(pair.kv_bytes_total)),
              h("td", { class: "number" }, number(pair.handoffs_total)),
            ),
          ),
        ),
      ),
    );
  }

  dispose() {
    this.app.cluster.removeEventListener("change", this.onChange);
    this.sizes.disconnect();
  }
}

export function mountCluster(root, _route, app) {
  const view = new ClusterView(root, app);
  return { title: "Cluster", dispose: () => view.dispose() };
}
