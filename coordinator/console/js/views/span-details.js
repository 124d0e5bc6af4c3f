// Everything known about one span, beside the waterfall.

import { h, replace, table } from "../dom.js";
import { clockWords, ms, text } from "../format.js";

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

function pairs(entries) {
  return h(
    "dl",
    { class: "facts-list" },
    entries.map(([name, content]) => [h("dt", null, name), h("dd", null, content)]),
  );
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
  const attributes = Object.entries(span.attributes);
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
        ["span id", h("code", null, text(span.span_id))],
      ].filter(Boolean),
    ),
    h("h3", null, "Attributes"),
    attributes.length > 0
      ? pairs(attributes.map(([key, any]) => [key, value(any)]))
      : h("p", { class: "muted" }, "none"),
    eventsOf(span),
    linksOf(span, model),
  );
}
