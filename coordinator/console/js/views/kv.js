// KV: blocks of every node by state, and bytes moved between each pair, over the last minutes as this page saw them.

import { drawLine, drawStack } from "../charts/time-chart.js";
import { BLOCK_STATES, pairKey, rateBetween } from "../cluster-store.js";
import { chartButtons } from "../copy.js";
import { h, replace, s, setText } from "../dom.js";
import { bytes, count, number, percent, rate, seconds, words } from "../format.js";
import { link, rewrite } from "../router.js";
import { heldBlocks, totalBlocks } from "./node-card.js";

const SPANS = [
  ["1", "last minute"],
  ["5", "last 5 minutes"],
  ["15", "last 15 minutes"],
];
const DRAWN = BLOCK_STATES.filter((state) => state !== "free");
const HEIGHT = 120;
const classOf = (state) => `blocks-${state.replace("_", "-")}`;

function chart(title, role, promql, data) {
  const svg = s("svg", { class: "time-chart", role: "img" });
  const figures = h("p", { class: "figures" });
  const readout = h("p", { class: "readout", "aria-hidden": "true" });
  const chip = role ? h("span", { class: `role-chip role-${role}` }, role) : null;
  const element = h(
    "figure",
    { class: "panel chart", data },
    h(
      "div",
      { class: "panel-head" },
      h("h2", null, title, chip),
      h("span", { class: "panel-tools" }, chartButtons(promql, "baton top")),
    ),
    figures,
    h("div", { class: "chart-plot time-plot" }, svg, readout),
  );
  return { svg, figures, readout, chip, element };
}

/** Round byte values for an axis, powers of two, not of ten; the last one is above everything. */
function byteTicks(highest) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(highest, 1) / 3));
  return Array.from({ length: Math.ceil(highest / step) + 1 }, (_, n) => n * step);
}

class KvView {
  constructor(root, route, app) {
    this.app = app;
    this.nodes = new Map();
    this.pairs = new Map();
    this.span = h(
      "select",
      { id: "kv-span", on: { change: () => this.choose() } },
      SPANS.map(([value, title]) => h("option", { value }, title)),
    );
    this.says = h("span", { class: "muted", role: "status" });
    this.nodeGrid = h("div", { class: "chart-grid" });
    this.pairGrid = h("div", { class: "chart-grid" });
    this.pairsHead = h("h2", { class: "section-head" }, "KV moved between pairs");
    const legend = BLOCK_STATES.map((state) =>
      h("span", { class: "legend" }, h("i", { class: classOf(state) }), words(state)),
    );
    root.append(
      h("h1", { class: "visually-hidden" }, "KV"),
      h(
        "div",
        { class: "bar" },
        h("label", { class: "field" }, h("span", null, "Time"), this.span),
        this.says,
        h("span", { class: "legends bar-end" }, legend),
      ),
      h("h2", { class: "section-head" }, "KV blocks by state"),
      this.nodeGrid,
      this.pairsHead,
      this.pairGrid,
    );
    this.onChange = () => this.draw();
    app.cluster.addEventListener("change", this.onChange);
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.nodeGrid);
    this.follow(route);
  }

  follow(route) {
    const wanted = route.query.get("minutes") ?? "5";
    this.span.value = SPANS.some(([value]) => value === wanted) ? wanted : "5";
    this.draw();
  }

  choose() {
    rewrite(link("kv", null, this.span.value === "5" ? {} : { minutes: this.span.value }));
    this.draw();
  }

  draw() {
    const { page, at, samples } = this.app.cluster;
    if (page === null) {
      setText(this.says, "Waiting for the first page of the cluster.");
      return;
    }
    const wantedMs = Number(this.span.value) * 60_000;
    const covered = (at - samples[0].at) / 1000;
    // Whole minutes, no more than were watched: an axis of mostly nothing shows nothing.
    const spanMs = Math.min(wantedMs, Math.max(1, Math.ceil(covered / 60)) * 60_000);
    const shown = samples.filter((sample) => sample.at >= at - spanMs);
    setText(
      this.says,
      `${count(shown.length, "sample")}, one a second${covered * 1000 < wantedMs ? `; this page has watched for ${seconds(covered)}` : ""}`,
    );
    this.keep(
      this.nodes,
      page.nodes.map((node) => node.name),
      this.nodeGrid,
      (name) => {
        const { role } = page.nodes.find((node) => node.name === name);
        return chart(name, role, `max by (state) (baton_kv_blocks{node=${JSON.stringify(name)}})`, { node: name });
      },
    );
    this.keep(this.pairs, page.pairs.map(pairKey), this.pairGrid, (key) =>
      chart(key, null, 'sum by (transport) (rate(baton_kv_transfer_bytes_sum{job="baton-decode"}[1m]))', { pair: key }),
    );
    this.pairsHead.hidden = page.pairs.length === 0;
    for (const node of page.nodes) this.drawNode(node, shown, at, spanMs);
    this.drawPairs(page, shown, at, spanMs);
  }

  /** Charts stay the same elements from second to second: a button under the pointer must not vanish. */
  keep(charts, names, grid, make) {
    const isSame = charts.size === names.length && names.every((name) => charts.has(name));
    if (isSame) return;
    const before = new Map(charts);
    charts.clear();
    for (const name of names) charts.set(name, before.get(name) ?? make(name));
    replace(
      grid,
      [...charts.values()].map((one) => one.element),
    );
  }

  drawNode(node, samples, to, spanMs) {
    const { svg, figures, readout, chip } = this.nodes.get(node.name);
    // A node that has changed its role keeps its name, and so its chart.
    if (chip) {
      setText(chip, node.role);
      chip.className = `role-chip role-${node.role}`;
    }
    const blocks = node.kv_blocks ?? {};
    const total = totalBlocks(blocks);
    replace(
      figures,
      h("span", null, h("b", null, percent(total > 0 ? heldBlocks(blocks) / total : null)), " held by requests"),
      BLOCK_STATES.map((state) =>
        h(
          "span",
          { class: "block-count" },
          h("i", { class: classOf(state) }),
          `${words(state)} ${number(blocks[state] ?? 0)}`,
        ),
      ),
      h("span", { class: "muted" }, `n = ${count(total, "block")} of ${count(node.block_tokens, "token")}`),
    );
    const points = samples
      .filter((sample) => sample.nodes[node.name])
      .map((sample) => ({ at: sample.at, values: DRAWN.map((state) => sample.nodes[node.name][state] ?? 0) }));
    svg.setAttribute(
      "aria-label",
      `KV blocks of ${node.name}: ${BLOCK_STATES.map((state) => `${words(state)} ${number(blocks[state] ?? 0)}`).join(", ")}`,
    );
    drawStack(
      svg,
      points,
      DRAWN.map((state) => ({ className: classOf(state) })),
      {
        height: HEIGHT,
        to,
        spanMs,
        highest: total,
        yTicks: [0, Math.round(total / 2), total],
        label: number,
        readout,
        read: (point) => DRAWN.map((state, at) => `${words(state)} ${number(point.values[at])}`).join(" · "),
      },
    );
  }

  drawPairs(page, samples, to, spanMs) {
    const pointsOf = (key) =>
      samples.slice(1).flatMap((sample, at) => {
        const value = sample.at - samples[at].at <= 3500 ? rateBetween(samples[at], sample, key) : null;
        return value === null ? [] : [{ at: sample.at, value }];
      });
    const all = new Map(page.pairs.map((pair) => [pairKey(pair), pointsOf(pairKey(pair))]));
    // One scale for all pairs: they are there to be compared.
    const highest = [...all.values()].flat().reduce((most, point) => Math.max(most, point.value), 1024);
    const yTicks = byteTicks(highest);
    for (const pair of page.pairs) {
      const points = all.get(pairKey(pair));
      const { svg, figures, readout } = this.pairs.get(pairKey(pair));
      const peak = points.length > 0 ? Math.max(...points.map((point) => point.value)) : null;
      replace(
        figures,
        h("span", null, h("b", null, rate(this.app.cluster.rateOf(pair))), " over the last 5 s"),
        h("span", null, `highest second ${rate(peak)}`),
        h("span", null, `${bytes(pair.kv_bytes_total)} in ${count(pair.handoffs_total, "handoff")}`),
        pair.is_usable
          ? null
          : h("span", { class: "is-failed" }, `✕ not usable: ${pair.unusable_reason ?? "no reason given"}`),
      );
      svg.setAttribute(
        "aria-label",
        `KV bytes a second, ${pairKey(pair)}: now ${rate(this.app.cluster.rateOf(pair))}, highest ${rate(peak)}`,
      );
      drawLine(svg, points, {
        height: HEIGHT,
        to,
        spanMs,
        highest: yTicks.at(-1),
        yTicks,
        label: rate,
        readout,
        read: (point) => rate(point.value),
      });
    }
  }

  dispose() {
    this.app.cluster.removeEventListener("change", this.onChange);
    this.sizes.disconnect();
  }
}

export function mountKv(root, route, app) {
  const view = new KvView(root, route, app);
  return { title: "KV", follow: (next) => view.follow(next), dispose: () => view.dispose() };
}
