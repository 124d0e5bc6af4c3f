// The SLO profiles with their error budgets, and the budget of each stage against what it took.

import { h } from "../dom.js";
import { ms, NONE, number, percent, words } from "../format.js";
import { SAMPLES_ENOUGH } from "../charts/histogram.js";

/** At 14.4 times the allowed rate a week's budget is gone in 12 hours: the usual line for waking somebody. */
const BURN_FAST = 14.4;

function breachWords(breaches) {
  const parts = Object.entries(breaches ?? {})
    .filter(([, n]) => n > 0)
    .map(([kind, n]) => `${words(kind)} ${number(n)}`);
  return parts.join(", ") || "none";
}

function budget(left, isJudged) {
  if (!isJudged || !Number.isFinite(left)) return NONE;
  const share = Math.min(1, Math.max(0, left));
  return h(
    "span",
    { class: `budget ${left <= 0 ? "is-spent" : ""}` },
    h("span", { class: "budget-bar", "aria-hidden": "true" }, h("i", { css: { width: `${share * 100}%` } })),
    left <= 0 ? `! spent ${number(1 - left)} times` : percent(left, 0),
  );
}

function burn(rate) {
  if (!Number.isFinite(rate)) return NONE;
  const text = `${number(rate)} ×`;
  return h(
    "span",
    { class: rate >= BURN_FAST ? "is-breached" : rate > 1 ? "is-warm" : "" },
    rate >= BURN_FAST ? `! ${text}` : text,
  );
}

const head = (titles) =>
  h(
    "thead",
    null,
    h(
      "tr",
      null,
      titles.map(([title, className]) => h("th", { scope: "col", class: className }, title)),
    ),
  );

export function budgetTable(slo) {
  const rows = slo.profiles.flatMap((profile) => profile.lanes.map((lane) => ({ profile, lane })));
  if (rows.length === 0) return h("p", { class: "muted" }, "No request has been judged yet.");
  const n = "number";
  return h(
    "table",
    { class: "plain" },
    head([
      ["Profile"],
      ["Lane"],
      ["TTFT limit", n],
      ["ITL limit", n],
      ["Good", n],
      ["of n", n],
      ["Share", n],
      ["Breaches"],
      ["Burn 5 min", n],
      ["Burn 1 h", n],
      ["Budget left"],
    ]),
    h(
      "tbody",
      null,
      rows.map(({ profile, lane }) => {
        const share = lane.total > 0 ? lane.good / lane.total : null;
        return h(
          "tr",
          null,
          h("td", null, profile.name),
          h("td", null, lane.lane),
          h("td", { class: n }, ms(profile.ttft_ms_max)),
          h("td", { class: n }, ms(profile.itl_ms_max)),
          h("td", { class: n }, number(lane.good)),
          h("td", { class: n }, number(lane.total)),
          h(
            "td",
            { class: `${n} ${lane.total < SAMPLES_ENOUGH ? "is-few" : share < slo.objective ? "is-breached" : ""}` },
            `${share !== null && share < slo.objective ? "! " : ""}${percent(share, 2)}`,
          ),
          h("td", null, breachWords(lane.breaches)),
          h("td", { class: n }, burn(lane.burn_5m)),
          h("td", { class: n }, burn(lane.burn_1h)),
          h("td", null, budget(lane.budget_left, lane.total > 0)),
        );
      }),
    ),
  );
}

export function stageTable(stages) {
  if (!stages || stages.length === 0) return h("p", { class: "muted" }, "No stage has been measured yet.");
  const widest = Math.max(...stages.map((stage) => Math.max(stage.budget_ms ?? 0, stage.p99_ms ?? 0)), 1);
  return h(
    "table",
    { class: "plain" },
    head([["Stage"], ["Budget", "number"], ["p99", "number"], ["n", "number"], ["p99 against budget"]]),
    h(
      "tbody",
      null,
      stages.map((stage) => {
        const over =
          Number.isFinite(stage.p99_ms) && Number.isFinite(stage.budget_ms) ? stage.p99_ms - stage.budget_ms : null;
        const few = stage.count < SAMPLES_ENOUGH;
        const bar = h(
          "span",
          { class: `stage-bar ${over > 0 ? "is-over" : ""}`, "aria-hidden": "true" },
          h("i", { css: { width: `${((stage.p99_ms ?? 0) / widest) * 100}%` } }),
          Number.isFinite(stage.budget_ms) ? h("b", { css: { left: `${(stage.budget_ms / widest) * 100}%` } }) : null,
        );
        return h(
          "tr",
          { class: few ? "is-few" : null },
          h("td", null, words(stage.stage)),
          h("td", { class: "number" }, ms(stage.budget_ms)),
          h("td", { class: "number" }, ms(stage.p99_ms)),
          h("td", { class: "number" }, number(stage.count)),
          h(
            "td",
            { class: "stage-cell" },
            bar,
            h(
              "span",
              { class: over > 0 ? "is-breached" : "muted" },
              over === null ? "no budget" : over > 0 ? `! over by ${ms(over)}` : "within",
            ),
          ),
        );
      }),
    ),
  );
}
