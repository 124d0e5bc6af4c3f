// The pairs of the cluster as a table: what the lines of the map say, and how each pair's KV travels.

import { pairKey } from "../cluster-store.js";
import { h, table } from "../dom.js";
import { bytes, number, rate, text } from "../format.js";

const COLUMNS = [
  { title: "Pair" },
  { title: "Transport" },
  { title: "State" },
  { title: "KV now", className: "number" },
  { title: "KV in all", className: "number" },
  { title: "Handoffs", className: "number" },
];

/** The label, and for two nodes that do not fit the facts in which they differ. */
const whyNot = (pair) => [pair.unusable_reason, pair.unusable_because].filter(Boolean).map(text).join(": ");

export function pairsTable(pairs, rateOf) {
  if (pairs.length === 0) {
    const words = "No pair: KV moves between one prefill node and one decode node, and one of the two is missing.";
    return h("p", { class: "muted" }, words);
  }
  const rows = pairs.map((pair) => {
    const cell = (content) => ({ className: pair.is_usable ? "" : "is-failed", content });
    return [
      cell(pairKey(pair)),
      cell(text(pair.transport)),
      cell(pair.is_usable ? "● usable" : `✕ not usable: ${whyNot(pair)}`),
      cell(rate(rateOf(pair))),
      cell(bytes(pair.kv_bytes_total)),
      cell(number(pair.handoffs_total)),
    ];
  });
  return table("Pairs of nodes", COLUMNS, rows);
}
