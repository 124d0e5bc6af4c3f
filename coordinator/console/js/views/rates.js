// The last hour at a glance: requests, tokens, errors, TTFT and gaps, as the coordinator keeps them over a reload.

import { getJson } from "../api.js";
import { SAMPLES_ENOUGH } from "../charts/histogram.js";
import { drawSteps } from "../charts/step-chart.js";
import { copyButton } from "../copy.js";
import { h, s, setText } from "../dom.js";
import { count, ms, NONE, number, percent, seconds } from "../format.js";

const EVERY_MS = 10_000;
/** A slot that has just begun says little: one request in it would look like a flood. */
const OPEN_SLOT_S_MIN = 5;

const perSecond = (unit) => (value) => (Number.isFinite(value) ? `${number(value)} ${unit}` : NONE);
const requests = (rates) => ({ n: rates.requests, words: count(rates.requests, "request") });
const LINES = "— p50  ┄ p99";
const P99 = (metric) => `histogram_quantile(0.99, sum by (le) (rate(${metric}_bucket[5m])))`;

/** `keys` are fields of `/admin/rates`, with the names of their lines; `of` says how many samples they come from. */
const CHARTS = [
  {
    name: "requests",
    title: "Requests ended",
    keys: { requests_per_s: "" },
    show: perSecond("per s"),
    of: requests,
    promql: "sum(rate(baton_requests_total[1m]))",
  },
  {
    name: "tokens",
    title: "Output tokens",
    keys: { output_tokens_per_s: "" },
    show: perSecond("per s"),
    of: requests,
    promql: "sum(rate(baton_output_tokens_sum[1m]))",
  },
  {
    name: "errors",
    title: "Errors",
    keys: { error_share: "" },
    show: percent,
    of: requests,
    promql:
      'sum(rate(baton_slo_breaches_total{breach=~"incomplete|hard_timeout|5xx"}[5m])) / sum(rate(baton_slo_total[5m]))',
  },
  {
    name: "ttft",
    title: "Time to first token",
    lines: LINES,
    keys: { ttft_p50_ms: "p50", ttft_p99_ms: "p99" },
    show: ms,
    of: (rates) => ({ n: rates.ttft_count, words: count(rates.ttft_count, "request") }),
    promql: P99("baton_ttft_seconds"),
  },
  {
    name: "itl",
    title: "Gaps between tokens",
    lines: LINES,
    keys: { itl_p50_ms: "p50", itl_p99_ms: "p99" },
    show: ms,
    of: (rates) => ({ n: rates.itl_count, words: count(rates.itl_count, "gap") }),
    promql: P99("baton_itl_seconds"),
  },
];

class RateChart {
  constructor(kind) {
    this.kind = kind;
    this.svg = s("svg", { class: "step-chart", role: "img" });
    this.readout = h("p", { class: "rate-read", "aria-hidden": "true" });
    this.now = h("p", { class: "rate-now" });
    this.hour = h("p", { class: "rate-hour" });
    this.element = h(
      "figure",
      { class: "rate", data: { rate: kind.name } },
      h("h3", null, kind.title, " ", h("span", { class: "muted" }, kind.lines ?? "")),
      this.now,
      h("div", { class: "chart-plot" }, this.svg),
      this.readout,
      this.hour,
      h(
        "span",
        { class: "chart-buttons" },
        copyButton("PromQL", "PromQL", kind.promql),
        copyButton("CLI", "command", "baton top"),
      ),
    );
  }

  words(rates) {
    const { keys, show } = this.kind;
    return Object.entries(keys)
      .map(([key, name]) => `${name} ${show(rates[key])}`.trim())
      .join(" · ");
  }

  draw(slots, hour) {
    const { keys, of, show, title } = this.kind;
    const newest = slots.at(-1);
    const { n, words } = of(hour);
    const isFew = Object.keys(keys).length > 1 && n < SAMPLES_ENOUGH;
    setText(this.now, this.words(newest));
    setText(this.hour, `over ${seconds(hour.seconds)}: ${this.words(hour)}, n = ${words}`);
    this.hour.classList.toggle("is-few", isFew);
    drawSteps(
      this.svg,
      slots.map((slot) => ({
        from: slot.from_unix_ms,
        to: slot.from_unix_ms + slot.seconds * 1000,
        values: Object.keys(keys).map((key) => slot[key]),
        slot,
      })),
      {
        name: `${title}: ${this.words(newest)} now, ${this.words(hour)} over ${seconds(hour.seconds)}, n = ${words}`,
        label: show,
        read: (point) => `${this.words(point.slot)}, n = ${of(point.slot).words}`,
        readout: this.readout,
      },
    );
  }
}

/** A panel that reads itself while it is shown: {element, dispose()}. What was read last is in `app.rates`. */
export class RatesPanel {
  constructor(app) {
    this.app = app;
    this.gone = new AbortController();
    this.charts = CHARTS.map((kind) => new RateChart(kind));
    this.says = h("span", { class: "muted", role: "status" }, "Reading.");
    this.grid = h(
      "div",
      { class: "rates", hidden: true },
      this.charts.map((chart) => chart.element),
    );
    this.element = h(
      "section",
      { class: "panel rates-panel", "aria-label": "The last hour" },
      h("div", { class: "panel-head" }, h("h2", null, "Last hour"), this.says),
      this.grid,
    );
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.element);
    this.draw();
    this.read();
  }

  async read() {
    const { signal } = this.gone;
    let problem = null;
    try {
      this.app.rates = await getJson("/admin/rates", signal);
    } catch (failure) {
      problem = failure.message;
    }
    if (signal.aborted) return;
    const what = "above each chart its newest slot; a gap in a line is a slot without a request";
    setText(this.says, problem === null ? what : `Not up to date: ${problem}`);
    this.draw();
    this.timer = setTimeout(() => this.read(), EVERY_MS);
  }

  draw() {
    const page = this.app.rates;
    if (!page?.slots?.length) return;
    this.grid.hidden = false;
    // Of a process that has just started the open slot is all there is.
    const old = page.slots.filter((slot, at) => at < page.slots.length - 1 || slot.seconds >= OPEN_SLOT_S_MIN);
    const slots = old.length > 0 ? old : page.slots;
    for (const chart of this.charts) chart.draw(slots, page.hour);
  }

  dispose() {
    this.gone.abort();
    clearTimeout(this.timer);
    this.sizes.disconnect();
  }
}
