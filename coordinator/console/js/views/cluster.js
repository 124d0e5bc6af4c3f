// The first page: the rates of the last hour, and the cluster map with coordinators, prefill row, decode row and pairs.

import { chartButtons } from "../copy.js";
import { h, replace, s } from "../dom.js";
import { number } from "../format.js";
import { Coordinators } from "./coordinators.js";
import { drawEdges } from "./map-edges.js";
import { NodeCard } from "./node-card.js";
import { pairsTable } from "./pairs-table.js";
import { RatesPanel } from "./rates.js";

const ROWS = [
  ["prefill", "Prefill nodes"],
  ["decode", "Decode nodes"],
  ["co-located", "Co-located nodes"],
];
const PROMQL = "max by (node, state) (baton_kv_blocks)";

class ClusterView {
  constructor(root, app) {
    this.app = app;
    this.cards = new Map();
    this.svg = s("svg", { class: "edges", role: "img", "aria-label": "Pairs; the table below says the same" });
    this.coordinators = new Coordinators();
    this.rates = new RatesPanel(app);
    this.rows = Object.fromEntries(ROWS.map(([role, title]) => [role, this.row(role, title)]));
    this.map = h(
      "div",
      { class: "map" },
      this.svg,
      this.coordinators.element,
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
            "lines: how KV travels, and its bytes a second over the last 5 s, thicker by the same step for each ten times as much",
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
            chartButtons('sum by (transport) (rate(baton_kv_transfer_bytes_sum{job="baton-decode"}[1m]))', "baton top"),
          ),
        ),
        this.pairs,
      ),
    );
    root.append(
      h("h1", { class: "visually-hidden" }, "Cluster map"),
      h("div", { class: "stack" }, this.rates.element, this.waiting, this.panel),
    );
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
    this.coordinators.update(page, at);
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
      const element = name === "coordinator" ? this.coordinators.own : this.cards.get(name)?.element;
      if (!element?.isConnected) return null;
      const box = element.getBoundingClientRect();
      return { x: box.left + box.width * share - origin.left, y: (side === "top" ? box.top : box.bottom) - origin.top };
    };
    drawEdges(this.svg, { page, place, width: origin.width, rateOf: (pair) => this.app.cluster.rateOf(pair) });
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
    replace(this.pairs, pairsTable(page.pairs, (pair) => this.app.cluster.rateOf(pair)));
  }

  dispose() {
    this.rates.dispose();
    this.app.cluster.removeEventListener("change", this.onChange);
    this.sizes.disconnect();
  }
}

export function mountCluster(root, _route, app) {
  const view = new ClusterView(root, app);
  return { title: "Cluster", dispose: () => view.dispose() };
}
