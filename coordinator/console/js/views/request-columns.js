// The columns of the request table: what each shows, how it is sorted, when it leaves on narrow pages.

import { clock, dateAndTime, inMs, NONE, number, text } from "../format.js";
import { idOf, outcomeOf } from "../outcome.js";
import { link } from "../router.js";

const time = (key, title, label, className = "") => ({
  key,
  title,
  label: `${label}, in milliseconds`,
  sort: key,
  className: `number ${className}`,
  fill: (r) => ({ text: inMs(r[key]), className: r.outcome === null ? "so-far" : "" }),
});

const amount = (key, title, label, className = "") => ({
  key,
  title,
  label,
  sort: key,
  className: `number ${className}`,
  fill: (r) => ({ text: number(r[key]) }),
});

const node = (key, title, label) => ({
  key,
  title,
  label,
  sort: key,
  className: "medium",
  fill: (r) => ({ text: text(r[key]), title: r.route_reason ?? "" }),
});

function outcome(r) {
  const { glyph, word, className } = outcomeOf(r);
  return { text: `${glyph} ${word}`, className, title: r.error ?? "" };
}

function prefillNode(r) {
  if (r.prefill_node) return { text: r.prefill_node, title: r.route_reason ?? "" };
  return { text: r.local_prefill ? "local" : NONE, title: r.local_prefill ? `local prefill: ${r.local_prefill}` : "" };
}

function breaches(r) {
  const names = (r.breached ?? []).map((name) => name.toUpperCase()).join(", ");
  if (names) return { text: `! ${names}`, className: "is-breached", title: `over the limit of profile ${text(r.slo)}` };
  // Only what ended well can have met its limits.
  if (r.outcome === "ok") return { text: "met", className: "muted", title: `profile ${text(r.slo)}` };
  return { text: r.outcome === null ? "" : NONE, className: "muted", title: `profile ${text(r.slo)}` };
}

export const COLUMNS = [
  {
    key: "received",
    title: "Received",
    label: "time received",
    sort: "seq",
    className: "mono",
    fill: (r) => ({ text: clock(r.received_unix_ms), title: dateAndTime(r.received_unix_ms) }),
  },
  { key: "outcome", title: "Outcome", label: "outcome", sort: "outcome", className: "", fill: outcome },
  {
    key: "lane",
    title: "Lane",
    label: "lane",
    sort: "lane",
    className: "medium",
    fill: (r) => ({ text: text(r.lane) }),
  },
  {
    key: "id",
    title: "Request",
    label: "request id",
    className: "mono tight",
    isLink: true,
    fill: (r) => ({ text: idOf(r), title: idOf(r), href: link("requests", idOf(r)) }),
  },
  amount("prompt_tokens", "Prompt", "prompt tokens", "narrow"),
  amount("output_tokens", "Output", "output tokens", "narrow"),
  { ...node("prefill_node", "Prefill on", "prefill node"), fill: prefillNode },
  node("decode_node", "Decode on", "decode node"),
  time("queue_ms", "Queue ms", "time in the queue", "wide"),
  time("ttft_ms", "TTFT ms", "time to first token"),
  time("tpot_ms", "TPOT ms", "time per output token", "wide"),
  time("itl_max_ms", "ITL max ms", "longest gap between two tokens", "medium"),
  time("e2e_ms", "E2E ms", "end to end"),
  {
    key: "stall_count",
    title: "Stalls",
    label: "stalls",
    sort: "stall_count",
    className: "number narrow",
    fill: (r) => ({
      text: r.stall_count > 0 ? `▼ ${number(r.stall_count)}` : "0",
      className: r.stall_count > 0 ? "is-stalled" : "muted",
    }),
  },
  { key: "breached", title: "SLO", label: "service level limits", sort: "breached", className: "tight", fill: breaches },
  {
    key: "slow_because",
    title: "Where the time went",
    label: "where the time went",
    className: "why",
    fill: (r) => ({ text: r.error ?? r.slow_because ?? "", title: r.error ?? r.slow_because ?? "" }),
  },
];
