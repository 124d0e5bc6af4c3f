// The lines of the cluster map: each pair as thick as its KV bytes a second, the coordinator's as thin dashes.

import { replace, s } from "../dom.js";
import { rate, text } from "../format.js";

const THIN_PX = 1.5;
/** Bytes a second at which a line is visibly more than idle; each ten times as much adds the same again. */
const VISIBLE_RATE = 512 * 1024;
const LABELS_MAX = 8;
/** On a narrower map the labels would cover each other; the table below has what they say. */
const LABELS_WIDTH_PX_MIN = 560;

export const thickness = (bytesPerSecond) => THIN_PX + 3 * Math.log10(1 + (bytesPerSecond ?? 0) / VISIBLE_RATE);

const curve = (from, to) => {
  const bend = (to.y - from.y) / 2;
  return `M${from.x},${from.y} C${from.x},${from.y + bend} ${to.x},${to.y - bend} ${to.x},${to.y}`;
};

/** On the same curve, at share t of it. */
function pointAt(from, to, t) {
  const bend = (to.y - from.y) / 2;
  const [a, b, c, d] = [(1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t ** 2, t ** 3];
  return {
    x: a * from.x + b * from.x + c * to.x + d * to.x,
    y: a * from.y + b * (from.y + bend) + c * (to.y - bend) + d * to.y,
  };
}

/** The n-th of several lines at one card: they leave it side by side, in the order of where they go. */
const share = (names, name) => (names.indexOf(name) + 1) / (names.length + 1);

function pairEdge(pair, place, bytesPerSecond, hasLabel) {
  const [from, to] = [place(pair.prefill, "bottom", pair.fromShare), place(pair.decode, "top", pair.toShare)];
  if (!from || !to) return null;
  const state = pair.is_usable ? (bytesPerSecond > 0 ? "is-busy" : "is-idle") : "is-unusable";
  const how = pair.transport ? `KV by ${pair.transport}, ` : "KV ";
  const words = `${pair.prefill} to ${pair.decode}: ${pair.is_usable ? `${how}${rate(bytesPerSecond ?? 0)}` : `not usable, ${text(pair.unusable_reason)}`}`;
  const now = bytesPerSecond > 0 ? rate(bytesPerSecond) : "idle";
  const label = pair.is_usable ? [pair.transport, now].filter(Boolean).join(" · ") : "✕ not usable";
  // Near where the line leaves its card: lines that cross would have their labels in one place. Neighbours take turns.
  const at = pointAt(from, to, 0.17 + 0.16 * (pair.order % 2));
  return s(
    "g",
    {
      class: `edge ${state}`,
      data: { prefill: pair.prefill, decode: pair.decode, rate: String(Math.round(bytesPerSecond ?? 0)) },
    },
    s("path", { d: curve(from, to), "stroke-width": thickness(bytesPerSecond).toFixed(2) }, s("title", null, words)),
    hasLabel ? s("text", { x: at.x, y: at.y + 4, "text-anchor": "middle" }, label) : null,
  );
}

/** `place(name, side, share)` gives the point that far along a card's side, or null. */
export function drawEdges(svg, { page, place, rateOf, width }) {
  const [prefills, decodes] = ["prefill", "decode"].map((side) =>
    page.nodes.map((node) => node.name).filter((name) => page.pairs.some((pair) => pair[side] === name)),
  );
  const pairs = page.pairs.map((pair) => ({
    ...pair,
    fromShare: share(decodes, pair.decode),
    toShare: share(prefills, pair.prefill),
    order: decodes.indexOf(pair.decode),
  }));
  const rates = new Map(pairs.map((pair) => [pair, rateOf(pair)]));
  // The broken ones first, then the busiest.
  const notable = [...pairs]
    .sort((a, b) => a.is_usable - b.is_usable || (rates.get(b) ?? 0) - (rates.get(a) ?? 0))
    .slice(0, width < LABELS_WIDTH_PX_MIN ? 0 : LABELS_MAX);
  const control = page.nodes.map((node) => {
    const [from, to] = [place("coordinator", "bottom", 0.5), place(node.name, "top", 0.5)];
    // A line to the second row would only cross the first; those nodes are reached beside it, in the table.
    return from && to && node.role !== "decode" ? s("path", { class: "control", d: curve(from, to) }) : null;
  });
  replace(
    svg,
    control.filter(Boolean),
    pairs.map((pair) => pairEdge(pair, place, rates.get(pair), notable.includes(pair))).filter(Boolean),
  );
}
