// The time to the first token as one bar of its stages, which visibly add up; what nobody measured has its own piece.

import { h } from "../dom.js";
import { ms, percent, words } from "../format.js";
import { roleOfService, ttftParts } from "../trace-model.js";

/** A share below this is drawn, but too narrow to carry its number. */
const LABEL_SHARE_MIN = 0.035;

function piece(part, total) {
  const share = part.ms / total;
  const label = share >= LABEL_SHARE_MIN ? h("span", { class: "piece-number" }, part.number) : null;
  return h(
    "span",
    {
      class: `piece ${part.className}`,
      css: { "flex-grow": String(Math.max(0, part.ms)) },
      title: `${part.title}: ${ms(part.ms)}, ${percent(share)} of TTFT`,
    },
    label,
  );
}

function row(part, total) {
  return h(
    "li",
    null,
    h("span", { class: `swatch ${part.className}`, "aria-hidden": "true" }, part.number),
    h("span", null, part.title),
    h("span", { class: "muted" }, part.process),
    h("span", { class: "number" }, ms(part.ms)),
    h("span", { class: "number muted" }, percent(part.ms / total)),
  );
}

/** The words stand on the side of the line where there is room. */
function limitMark(limitMs, total) {
  const at = (limitMs / total) * 100;
  const isLate = at > 60;
  const css = isLate ? { right: `${100 - at}%` } : { left: `${at}%` };
  return h("span", { class: isLate ? "is-late" : null, css }, `limit ${ms(limitMs)}`);
}

/** Null while there is no first token. `limitMs` is the limit of the request's SLO profile, when known. */
export function ttftBar(request, limitMs = null) {
  const { stages, sum, ttft, unattributed } = ttftParts(request);
  if (ttft === null || stages.length === 0) return null;
  const parts = stages.map((stage, at) => ({
    ms: stage.ms,
    title: words(stage.stage),
    process: stage.process ?? "",
    number: String(at + 1),
    className: `stage-${stage.stage.replaceAll("_", "-")} of-${roleOfService("", stage.process)}`,
  }));
  const rest = {
    ms: unattributed ?? 0,
    title: "unattributed",
    process: "not measured",
    number: "?",
    className: "stage-unattributed",
  };
  // Counted twice: the stages are longer than the whole, and the bar is as long as the stages.
  const total = Math.max(ttft, sum);
  const bar = h(
    "div",
    {
      class: "ttft-bar",
      role: "img",
      "aria-label": `Time to first token ${ms(ttft)}: ${parts.map((p) => `${p.title} ${ms(p.ms)}`).join(", ")}, unattributed ${ms(rest.ms)}`,
    },
    parts.map((part) => piece(part, total)),
    rest.ms > 0 ? piece(rest, total) : null,
  );
  const line = [
    `${ms(sum)} in ${parts.length} stages`,
    rest.ms < 0 ? " − " : " + ",
    h("strong", null, `${ms(Math.abs(rest.ms))} unattributed`),
    " = ",
    h("strong", null, `TTFT ${ms(ttft)}`),
  ];
  const limit =
    limitMs === null
      ? null
      : h(
          "span",
          { class: ttft > limitMs ? "is-breached" : "muted" },
          ` · limit ${ms(limitMs)}: ${ttft > limitMs ? `! over by ${ms(ttft - limitMs)}` : "met"}`,
        );
  return h(
    "div",
    { class: "ttft" },
    bar,
    limitMs !== null && limitMs < total
      ? h(
          "div",
          { class: "ttft-limit" },
          limitMark(limitMs, total),
        )
      : null,
    h(
      "p",
      { class: "ttft-sum" },
      line,
      limit,
      rest.ms < 0 ? h("span", { class: "is-breached" }, " ! below zero: something was counted twice") : null,
    ),
    h(
      "ol",
      { class: "ttft-legend", "aria-label": "Stages to the first token" },
      parts.map((part) => row(part, total)),
      row(rest, total),
    ),
  );
}
