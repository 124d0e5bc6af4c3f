// A histogram as its buckets are: one bar per bucket, the edges below, limits and percentiles as lines between them.

import { replace, s } from "../dom.js";
import { count, ms, number, percent } from "../format.js";
import { quantile, shareWithin } from "../prometheus.js";
import { linear, tickLabel, ticks } from "./scale.js";

const HEIGHT = 210;
const PAD = { left: 46, right: 26, top: 44, bottom: 34 };
/** Fewer samples than this say little about a 99th percentile. */
export const SAMPLES_ENOUGH = 100;

/** First and last bucket worth showing: what is filled, what the limits are in, and one more on each side. */
function range({ edges, counts }, limits) {
  const of = (value) => edges.findIndex((edge) => edge >= value - 1e-9);
  const filled = counts.flatMap((n, at) => (n > 0 ? [at] : []));
  const wanted = [...filled, ...limits.map((limit) => of(limit.value)).filter((at) => at >= 0)];
  if (wanted.length === 0) return { first: 0, last: edges.length - 1 };
  return { first: Math.max(0, Math.min(...wanted) - 1), last: Math.min(edges.length - 1, Math.max(...wanted) + 1) };
}

/** Buckets are equally wide whatever they span: a value lies as far into its bucket as it lies between the edges. */
function placer({ edges }, { first, last }, left, right) {
  const x = linear(first, last + 1, left, right);
  return (value) => {
    const at = edges.findIndex((edge) => edge >= value - 1e-12);
    const low = at > 0 ? edges[at - 1] : 0;
    const inside = Number.isFinite(edges[at]) ? (value - low) / (edges[at] - low) : 0.5;
    return x(Math.min(Math.max(at + inside, first), last + 1));
  };
}

const edgeLabel = (edge) => (Number.isFinite(edge) ? tickLabel(edge * 1000) : "∞");

function bars(histogram, { first, last }, box, limits) {
  const x = linear(first, last + 1, box.left, box.right);
  const highest = Math.max(1, ...histogram.counts);
  const y = linear(0, highest * 1.05, box.bottom, box.top);
  const strictest = Math.min(Infinity, ...limits.map((limit) => limit.value));
  const drawn = [];
  for (let at = first; at <= last; at += 1) {
    const n = histogram.counts[at];
    const low = at > 0 ? histogram.edges[at - 1] : 0;
    const isOver = low >= strictest - 1e-9;
    const label = `${edgeLabel(low)} to ${edgeLabel(histogram.edges[at])} ms: ${number(n)} (${percent(n / (histogram.total || 1))})`;
    drawn.push(
      s(
        "g",
        { class: `hist-bar ${isOver ? "is-over" : ""}` },
        s("rect", { class: "hit", x: x(at), width: x(at + 1) - x(at), y: box.top, height: box.bottom - box.top }),
        s("rect", {
          class: "fill",
          x: x(at) + 1,
          width: Math.max(1, x(at + 1) - x(at) - 2),
          y: y(n),
          height: box.bottom - y(n),
        }),
        s("title", null, label),
      ),
    );
  }
  const lines = ticks(0, highest, 4)
    .filter(Number.isInteger)
    .map((n) => [
      s("line", { x1: box.left, x2: box.right, y1: y(n), y2: y(n) }),
      s("text", { x: box.left - 6, y: y(n) + 4, "text-anchor": "end" }, number(n)),
    ]);
  const room = (box.right - box.left) / (last - first + 1);
  const every = Math.ceil(42 / room);
  const labels = [];
  for (let at = first; at <= last; at += 1) {
    if ((at - first) % every === 0)
      labels.push(
        s("text", { x: x(at + 1), y: box.bottom + 15, "text-anchor": "middle" }, edgeLabel(histogram.edges[at])),
      );
  }
  return [s("g", { class: "axis" }, lines, labels), drawn];
}

/** Labels of lines stand in rows of their own, one below the other, so that near ones do not overlap. */
function marks(entries, box, place) {
  let [lastRight, row] = [-Infinity, 0];
  return entries
    .filter((entry) => Number.isFinite(entry.value))
    .sort((a, b) => a.value - b.value)
    .map((entry) => {
      const x = place(entry.value);
      const width = entry.label.length * 6.3 + 10;
      const isLate = x + width > box.right;
      const left = isLate ? x - width : x;
      row = left < lastRight ? (row + 1) % 3 : 0;
      lastRight = Math.max(row === 0 ? -Infinity : lastRight, left + width);
      const y = 11 + row * 13;
      return s(
        "g",
        { class: entry.className },
        s("line", { x1: x, x2: x, y1: y + 2, y2: box.bottom }),
        s("text", { x: isLate ? x - 4 : x + 4, y, "text-anchor": isLate ? "end" : "start" }, entry.label),
      );
    });
}

export const quantileWords = (found) =>
  found === null ? "–" : found.atLeast !== undefined ? `> ${ms(found.atLeast * 1000)}` : ms(found.value * 1000);

/** `limits`: [{name, value in seconds}]. */
export function drawHistogram(svg, histogram, limits, name) {
  const width = Math.max(280, svg.parentElement?.clientWidth ?? 480);
  const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: HEIGHT - PAD.bottom };
  const shown = range(histogram, limits);
  const place = placer(histogram, shown, box.left, box.right);
  const few = histogram.total < SAMPLES_ENOUGH;
  const found = [0.5, 0.95, 0.99].map((q) => ({ q, at: quantile(histogram, q) }));
  const entries = [
    ...limits.map((limit) => ({
      value: limit.value,
      label: `SLO ${limit.name} ${ms(limit.value * 1000)}`,
      className: "limit",
    })),
    ...found.map(({ q, at }) => ({
      value: at?.value,
      label: `p${q * 100}`,
      className: `percentile ${few ? "is-few" : ""}`,
    })),
  ];
  svg.setAttribute("width", width);
  svg.setAttribute("height", HEIGHT);
  svg.setAttribute("role", "img");
  svg.setAttribute(
    "aria-label",
    `${name}: ${found.map(({ q, at }) => `p${q * 100} ${quantileWords(at)}`).join(", ")}, n = ${number(histogram.total)}`,
  );
  replace(
    svg,
    bars(histogram, shown, box, limits),
    marks(entries, box, place),
    s(
      "text",
      { class: "axis-name", x: box.right, y: HEIGHT - 3, "text-anchor": "end" },
      "upper edge of the bucket, ms",
    ),
    histogram.total > 0
      ? null
      : s(
          "text",
          { class: "no-data", x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, "text-anchor": "middle" },
          "no sample in this time",
        ),
  );
}

/** "96.0 % within 300 ms", where the limit is an edge of the histogram. */
export function withinWords(histogram, limit) {
  const share = shareWithin(histogram, limit.value);
  return share === null ? null : `${percent(share)} within ${ms(limit.value * 1000)} (${limit.name})`;
}

export const sampleWords = (histogram, one) => `n = ${count(histogram.total, one)}`;
