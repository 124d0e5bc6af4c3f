// Everything known about one span, beside the waterfall.

import { copyButton, copyText } from "../copy.js";
import { h, replace, table } from "../dom.js";
import { clockWords, ms, text } from "../format.js";

/** Attributes with the same first word belong together; one that is alone in its group stands with the others. */
const GROUP_MIN = 2;
const REST = "other";

const value = (any) => (any !== null && typeof any === "object" ? JSON.stringify(any) : text(any));

function warningWords({ early_ms: early, error_ms: error, isBeyond, what }) {
  if (isBeyond)
    return h(
      "p",
      { class: "warning" },
      `⚠ Begins ${ms(early)} before ${what}; the clocks' error explains at most ${ms(error)}.`,
    );
  return h("p", { class: "muted" }, `Begins ${ms(early)} before ${what}: within the clocks' error of ${ms(error)}.`);
}

/** Names and values under each other; a value may be copied. `rows`: [name, value, text to copy or nothing]. */
function pairs(rows) {
  return h(
    "dl",
    { class: "attributes" },
    rows.map(([name, content, whole]) =>
      h(
        "div",
        { class: "attribute" },
        h("dt", null, name),
        h(
          "dd",
          null,
          h("span", { class: "attribute-value" }, content),
          whole === undefined
            ? null
            : h(
                "button",
                {
                  type: "button",
                  class: "quiet small",
                  title: "Copy the value",
                  "aria-label": `Copy the value of ${name}`,
                  on: { click: () => copyText(whole, "value") },
                },
                // Drawn: few fonts have a sign for it.
                h("span", { class: "two-sheets" }),
              ),
        ),
      ),
    ),
  );
}

/** Map of group → [[name, value]], in the order of the names; `gen_ai.usage.input_tokens` is in `gen_ai`. */
function groupsOf(attributes) {
  const byWord = new Map();
  for (const [name, any] of Object.entries(attributes).sort(([a], [b]) => a.localeCompare(b))) {
    const word = name.includes(".") ? name.slice(0, name.indexOf(".")) : REST;
    byWord.set(word, [...(byWord.get(word) ?? []), [name, any]]);
  }
  const groups = new Map();
  const rest = [];
  for (const [word, own] of byWord) {
    if (word === REST || own.length < GROUP_MIN) rest.push(...own);
    else groups.set(word, own);
  }
  if (rest.length > 0) groups.set(REST, rest);
  return groups;
}

function attributesOf(span) {
  const names = Object.keys(span.attributes);
  if (names.length === 0) return [h("h3", null, "Attributes"), h("p", { class: "muted" }, "none")];
  const groups = groupsOf(span.attributes);
  const isOne = groups.size === 1;
  const short = (word, name) => (isOne || word === REST ? name : name.slice(word.length + 1));
  return [
    h(
      "div",
      { class: "attributes-head" },
      h("h3", null, `Attributes (${names.length})`),
      copyButton("Copy all", "attributes", () => JSON.stringify(span.attributes, null, 2)),
    ),
    [...groups].map(([word, own]) => [
      isOne ? null : h("h4", null, word),
      pairs(own.map(([name, any]) => [short(word, name), value(any), value(any)])),
    ]),
  ];
}

function eventsOf(span) {
  if (span.events.length === 0) return null;
  const rows = span.events.map((event) => [
    ms(event.at_ms),
    event.name,
    Object.entries(event.attributes ?? {})
      .map(([key, any]) => `${key}=${value(any)}`)
      .join(" "),
  ]);
  return [
    h("h3", null, `Events (${span.events.length})`),
    table(
      "Events of the span",
      [{ title: "at", className: "number" }, { title: "event" }, { title: "attributes", className: "mono" }],
      rows,
    ),
  ];
}

function linksOf(span, model) {
  if (span.links.length === 0) return null;
  const words = span.links.map((id) => {
    const other = model.byId.get(id);
    return other
      ? `${other.name} on ${other.process}, which began ${ms(Math.abs(span.start - other.start))} ${other.start <= span.start ? "earlier" : "later"}`
      : `span ${id}, not in this trace`;
  });
  return [
    h("h3", null, "Linked to"),
    h(
      "ul",
      null,
      words.map((one) => h("li", null, one)),
    ),
  ];
}

export function showSpan(panel, span, model) {
  const clock = model.processes.find((one) => one.name === span.process)?.clock;
  replace(
    panel,
    h("h2", null, span.name, " ", h("span", { class: `role-chip role-${span.role}` }, span.process)),
    span.error
      ? h(
          "p",
          { class: "warning" },
          `✕ ${text(typeof span.error === "object" ? JSON.stringify(span.error) : span.error)}`,
        )
      : null,
    span.warnings.map(warningWords),
    pairs(
      [
        ["from – to", `${ms(span.start)} – ${span.isOpen ? "not ended" : ms(span.end)}`],
        ["takes", `${ms(span.end - span.start)}${span.isOpen ? " so far" : ""}`],
        ["service, kind", `${text(span.service)}, ${text(span.kind)}`],
        clock ? ["clock", clockWords(clock)] : null,
        ["span id", h("code", null, text(span.span_id)), text(span.span_id)],
      ].filter(Boolean),
    ),
    attributesOf(span),
    eventsOf(span),
    linksOf(span, model),
  );
}
