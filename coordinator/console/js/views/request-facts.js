// The parts of a request's page that are words and figures: headline, facts, stalls, failed legs, clocks.

import { h, table } from "../dom.js";
import { bytes, clockWords, count, dateAndTime, ms, NONE, number, percent, text, words } from "../format.js";
import { outcomeOf } from "../outcome.js";

const fact = (name, content, note) =>
  h("div", { class: "fact" }, h("dt", null, name), h("dd", null, content, h("small", null, note ?? "")));

export function headline(r) {
  const { glyph, word, className } = outcomeOf(r);
  const breached = r.breached ?? [];
  return h(
    "div",
    { class: "headline" },
    h("span", { class: `badge ${className}` }, `${glyph} ${word}`),
    h("span", { class: "badge" }, text(r.lane)),
    breached.length > 0
      ? h(
          "span",
          { class: "badge is-breached" },
          `! over the ${breached.map((name) => name.toUpperCase()).join(" and ")} limit of ${text(r.slo)}`,
        )
      : h("span", { class: "badge" }, `SLO ${text(r.slo)}${r.outcome === "ok" ? ": met" : ""}`),
    r.error ? h("p", { class: "because is-failed" }, `${r.status ? `${r.status}: ` : ""}${r.error}`) : null,
    r.slow_because ? h("p", { class: "because" }, r.slow_because) : null,
  );
}

export function facts(r) {
  const gaps = r.output_tokens > 1 ? `n = ${number(r.output_tokens - 1)} gaps` : null;
  const cachedShare = r.prompt_tokens > 0 && r.cached_tokens > 0 ? percent(r.cached_tokens / r.prompt_tokens, 0) : null;
  return h(
    "dl",
    { class: "facts" },
    fact("TTFT", ms(r.ttft_ms)),
    fact("End to end", ms(r.e2e_ms), r.outcome === null ? "so far" : null),
    fact("Queue", ms(r.queue_ms)),
    fact("TPOT", ms(r.tpot_ms)),
    fact("ITL median", ms(r.itl_p50_ms), gaps),
    fact("ITL longest", ms(r.itl_max_ms)),
    fact("Prompt", count(r.prompt_tokens, "token"), cachedShare ? `${cachedShare} cached` : null),
    fact("Output", count(r.output_tokens, "token")),
    fact(
      "Prefill on",
      r.prefill_node ?? (r.local_prefill ? "decode node" : NONE),
      r.local_prefill ? `local: ${words(r.local_prefill)}` : null,
    ),
    fact("Decode on", text(r.decode_node)),
    fact("KV moved", r.kv_bytes > 0 ? bytes(r.kv_bytes) : NONE, r.transport ?? null),
    fact("KV transfer", ms(r.kv_transfer_ms)),
    fact("Attempts", number(r.attempts)),
    fact("Preemptions", number(r.preemptions)),
    ...(r.drafted_tokens > 0
      ? [fact("Guessed", count(r.drafted_tokens, "token"), `${number(r.accepted_tokens)} right`)]
      : []),
  );
}

export function identity(r) {
  const line = (name, content) => [h("dt", null, name), h("dd", null, content)];
  return h(
    "dl",
    { class: "facts-list identity" },
    line("received", dateAndTime(r.received_unix_ms)),
    line("endpoint, model", `${text(r.endpoint)}${r.is_streaming ? ", streaming" : ""}, ${text(r.model)}`),
    line("route", text(r.route_reason)),
    line("response id", h("code", null, text(r.response_id))),
    line("trace id", h("code", null, text(r.trace_id))),
    line("record", `number ${number(r.seq)}`),
  );
}

const CAUSES = {
  transfer_tail: "the rest of the KV",
  preemption: "preempted",
  prefill_chunk: "a prompt in the same step",
  step_time: "a slow step",
  network: "network",
  egress_back_pressure: "a slow reader",
  migration: "moved to another node",
};

export function stallsPart(r) {
  const stalls = r.stalls ?? [];
  if (stalls.length === 0) return h("p", { class: "muted" }, "No stall.");
  const rows = stalls.map((stall) => [
    number(stall.token),
    ms(stall.at_ms),
    ms(stall.gap_ms),
    CAUSES[stall.cause] ?? words(stall.cause),
    text(stall.words),
  ]);
  const some = stalls.some((stall) => stall.choice > 0);
  return table(
    "Stalls",
    [
      { title: "token", className: "number" },
      { title: "at", className: "number" },
      { title: "gap", className: "number" },
      { title: "cause" },
      { title: "in words" },
    ],
    some ? rows.map((row, at) => [`${row[0]} of choice ${stalls[at].choice}`, ...row.slice(1)]) : rows,
  );
}

/** Where each of several prompts ran; nothing for one. */
export function promptsPart(r) {
  const prompts = r.prompts ?? [];
  const took = (prompt, name) => ms((prompt.stages ?? []).find((stage) => stage.stage === name)?.ms);
  return table(
    "Prompts",
    [
      { title: "prompt", className: "number" },
      { title: "tokens in", className: "number" },
      { title: "tokens out", className: "number" },
      { title: "prefill on" },
      { title: "decode on" },
      { title: "queue", className: "number" },
      { title: "forward", className: "number" },
      { title: "decode", className: "number" },
      { title: "KV moved", className: "number" },
      { title: "attempts", className: "number" },
    ],
    prompts.map((prompt, at) => [
      number(at),
      number(prompt.prompt_tokens),
      number(prompt.output_tokens),
      prompt.prefill_node ?? (prompt.local_prefill ? `local: ${words(prompt.local_prefill)}` : NONE),
      text(prompt.decode_node),
      took(prompt, "queue"),
      took(prompt, "prefill_forward"),
      took(prompt, "decode"),
      prompt.kv_bytes > 0 ? `${bytes(prompt.kv_bytes)} over ${text(prompt.transport)}` : NONE,
      number(prompt.attempts),
    ]),
  );
}

/** `leg:node:cause`. */
export function legsPart(r) {
  const legs = r.failed_legs ?? [];
  if (legs.length === 0) return h("p", { class: "muted" }, "No leg failed.");
  const rows = legs.map((leg) => {
    const [name, node, ...cause] = String(leg).split(":");
    return [text(name), text(node), words(cause.join(":"))];
  });
  return table("Failed legs", [{ title: "leg" }, { title: "node" }, { title: "cause" }], rows);
}

export function restPart(r) {
  const rest = (r.stages ?? []).filter((stage) => stage.phase === "rest");
  if (rest.length === 0) return h("p", { class: "muted" }, "None measured.");
  return table(
    "Stages after the first token",
    [{ title: "stage" }, { title: "measured by" }, { title: "time", className: "number" }],
    rest.map((stage) => [words(stage.stage), text(stage.process), ms(stage.ms)]),
  );
}

export function clocksPart(model, page) {
  const rows = model.processes.map((one) => [
    one.name,
    one.clock ? clockWords(one.clock) : one.role === "coordinator" ? "the reference" : NONE,
  ]);
  const early = model.spans.filter((span) => span.warnings.some((warning) => warning.isBeyond));
  const notAsked = page.not_asked ?? [];
  return [
    table("Clocks", [{ title: "process" }, { title: "offset ± error", className: "number" }], rows),
    early.length > 0
      ? h(
          "p",
          { class: "warning" },
          `⚠ ${count(early.length, "span begins", "spans begin")} earlier than the clocks' errors allow: ${early.map((span) => span.name).join(", ")}.`,
        )
      : h("p", { class: "muted" }, "No span begins before its parent by more than the clocks' errors."),
    notAsked.map((one) => h("p", { class: "warning" }, `⚠ Spans of ${one.node} are missing: ${one.why}.`)),
    page.orphan_count > 0
      ? h(
          "p",
          { class: "warning" },
          `⚠ ${count(page.orphan_count, "span has", "spans have")} a parent that is not here.`,
        )
      : null,
  ];
}
