// Latency: histograms of TTFT and ITL per lane with their limits, error budgets, and budgets of the stages.

import { drawHistogram, quantileWords, SAMPLES_ENOUGH, sampleWords, withinWords } from "../charts/histogram.js";
import { chartButtons } from "../copy.js";
import { h, replace, s, setText, table } from "../dom.js";
import { number, percent, seconds } from "../format.js";
import { LatencyStore } from "../latency-store.js";
import { quantile } from "../prometheus.js";
import { link, rewrite } from "../router.js";
import { budgetTable, stageTable } from "./slo-tables.js";

const WINDOWS = [
  ["all", "since the coordinator started", null],
  ["1m", "last minute", 60_000],
  ["5m", "last 5 minutes", 300_000],
  ["15m", "last 15 minutes", 900_000],
];
const CHARTS = [
  { metric: "baton_ttft_seconds", title: "Time to first token", short: "TTFT", one: "request", limit: "ttft_ms_max" },
  { metric: "baton_itl_seconds", title: "Gaps between tokens", short: "ITL", one: "gap", limit: "itl_ms_max" },
];
const promql = (metric, lane) => `histogram_quantile(0.99, sum by (le) (rate(${metric}_bucket{lane="${lane}"}[5m])))`;

class Chart {
  constructor(kind, lane) {
    Object.assign(this, { kind, lane });
    this.svg = s("svg", { class: "histogram" });
    this.figures = h("p", { class: "figures" });
    this.numbers = h("details", { on: { toggle: () => this.fillNumbers() } }, h("summary", null, "Buckets as a table"));
    this.element = h(
      "figure",
      { class: "panel chart", data: { metric: kind.metric, lane } },
      h(
        "div",
        { class: "panel-head" },
        h("h2", null, kind.title, " ", h("span", { class: "muted" }, lane)),
        h("span", { class: "panel-tools" }, chartButtons(promql(kind.metric, lane), "baton slo")),
      ),
      this.figures,
      h("div", { class: "chart-plot" }, this.svg),
      this.numbers,
    );
  }

  update(histogram, limits) {
    this.histogram = histogram;
    const few = histogram.total < SAMPLES_ENOUGH;
    const figure = (q) =>
      h(
        "span",
        { class: few ? "is-few" : "" },
        h("b", null, `p${q * 100}`),
        ` ${quantileWords(quantile(histogram, q))}`,
      );
    const within = limits.map((limit) => withinWords(histogram, limit)).filter(Boolean);
    replace(
      this.figures,
      [0.5, 0.95, 0.99].map(figure),
      h("span", null, sampleWords(histogram, this.kind.one)),
      within.map((words) => h("span", { class: few ? "is-few" : "" }, words)),
      few && histogram.total > 0 ? h("span", { class: "muted" }, `grey: fewer than ${SAMPLES_ENOUGH} samples`) : null,
    );
    drawHistogram(this.svg, histogram, limits, `${this.kind.title}, ${this.lane}`);
    this.fillNumbers();
  }

  fillNumbers() {
    if (!this.numbers.open || !this.histogram) return;
    const { edges, counts, total } = this.histogram;
    const name = (edge) => (Number.isFinite(edge) ? number(edge * 1000) : "∞");
    const rows = edges.map((edge, at) => [
      `${name(at > 0 ? edges[at - 1] : 0)} – ${name(edge)}`,
      number(counts[at]),
      percent(counts[at] / (total || 1)),
    ]);
    this.numbers.lastElementChild.tagName === "TABLE" && this.numbers.lastElementChild.remove();
    this.numbers.append(
      table(
        this.kind.title,
        [
          { title: "ms", className: "number" },
          { title: `${this.kind.one}s`, className: "number" },
          { title: "share", className: "number" },
        ],
        rows,
      ),
    );
  }
}

class LatencyView {
  constructor(root, route, app) {
    app.latency ??= new LatencyStore();
    this.store = app.latency;
    this.charts = new Map();
    this.window = h(
      "select",
      { id: "latency-window", on: { change: () => this.choose(this.window.value) } },
      WINDOWS.map(([value, title]) => h("option", { value }, title)),
    );
    this.says = h("span", { class: "muted", role: "status" });
    this.grid = h("div", { class: "chart-grid" });
    this.budgets = h("div", { class: "scroll-x" });
    this.objective = h("span", { class: "muted" });
    this.stages = h("div");
    root.append(
      h("h1", { class: "visually-hidden" }, "Latency"),
      h("div", { class: "bar" }, h("label", { class: "field" }, h("span", null, "Samples"), this.window), this.says),
      this.grid,
      h(
        "section",
        { class: "panel" },
        h(
          "div",
          { class: "panel-head" },
          h("h2", null, "Error budget"),
          this.objective,
          h(
            "span",
            { class: "panel-tools" },
            chartButtons(
              "1 - sum by (slo, lane) (rate(baton_slo_good_total[1h])) / sum by (slo, lane) (rate(baton_slo_total[1h]))",
              "baton slo",
            ),
          ),
        ),
        this.budgets,
      ),
      h(
        "section",
        { class: "panel" },
        h(
          "div",
          { class: "panel-head" },
          h("h2", null, "Budget of each stage"),
          h(
            "span",
            { class: "panel-tools" },
            chartButtons(
              'histogram_quantile(0.99, sum by (stage, le) (rate(baton_stage_seconds_bucket{phase="ttft"}[5m])))',
              "baton slo",
            ),
          ),
        ),
        this.stages,
      ),
    );
    this.onChange = () => this.draw();
    this.store.addEventListener("change", this.onChange);
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.grid);
    this.follow(route);
  }

  follow(route) {
    const wanted = route.query.get("window") ?? "all";
    this.window.value = WINDOWS.some(([value]) => value === wanted) ? wanted : "all";
    this.draw();
  }

  choose(value) {
    rewrite(link("latency", null, value === "all" ? {} : { window: value }));
    this.draw();
  }

  draw() {
    const windowMs = WINDOWS.find(([value]) => value === this.window.value)[2];
    for (const kind of CHARTS) this.drawKind(kind, windowMs);
    if (this.store.slo) {
      const { slo } = this.store;
      setText(
        this.objective,
        `objective ${percent(slo.objective, 2)} good requests; burn 1 × spends the budget exactly`,
      );
      replace(this.budgets, budgetTable(slo));
      replace(this.stages, stageTable(slo.stages));
    }
    const { seconds: covered } = this.store.histograms(CHARTS[0].metric, windowMs);
    const short =
      covered !== null && covered * 1000 < windowMs * 0.9
        ? `so far ${seconds(covered)}: earlier readings are not kept`
        : "";
    setText(
      this.says,
      this.store.problem
        ? `Not up to date: ${this.store.problem}`
        : this.store.readings.length === 0
          ? "Reading."
          : short,
    );
  }

  drawKind(kind, windowMs) {
    const { histograms } = this.store.histograms(kind.metric, windowMs);
    for (const [lane, histogram] of histograms) {
      const key = `${kind.metric} ${lane}`;
      let chart = this.charts.get(key);
      if (!chart) {
        chart = new Chart(kind, lane);
        this.charts.set(key, chart);
        this.place();
      }
      const limits = this.store
        .profilesOf(lane)
        .filter((p) => Number.isFinite(p[kind.limit]))
        .map((p) => ({ name: p.name, value: p[kind.limit] / 1000 }));
      chart.update(histogram, limits);
    }
    this.empty ??= h("p", { class: "muted pad" }, "No first token and no gap has been measured yet.");
    if (this.charts.size === 0 && this.store.readings.length > 0) replace(this.grid, this.empty);
  }

  /** A row for each lane: its TTFT at the left, its ITL at the right. */
  place() {
    const lanes = [...new Set([...this.charts.values()].map((chart) => chart.lane))];
    const inOrder = lanes
      .flatMap((lane) => CHARTS.map(({ metric }) => this.charts.get(`${metric} ${lane}`)))
      .filter(Boolean);
    replace(
      this.grid,
      inOrder.map((chart) => chart.element),
    );
  }

  dispose() {
    this.store.removeEventListener("change", this.onChange);
    this.sizes.disconnect();
  }
}

export function mountLatency(root, route, app) {
  const view = new LatencyView(root, route, app);
  return { title: "Latency", follow: (next) => view.follow(next), dispose: () => view.dispose() };
}
