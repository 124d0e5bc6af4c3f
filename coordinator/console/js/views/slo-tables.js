// The SLO profiles with their error budgets, and the budget of each stage against what it took.

import { h, table } from "../dom.js";
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

function share(lane, objective) {
  const part = lane.total > 0 ? lane.good / lane.total : null;
  const isMissed = part !== null && part < objective;
  const className = lane.total < SAMPLES_ENOUGH ? "is-few" : isMissed ? "is-breached" : "";
  return { className, content: `${isMissed ? "! " : ""}${percent(part, 2)}` };
}

const figure = (title) => ({ title, className: "number" });

const BUDGET_COLUMNS = [
  { title: "Profile" },
  { title: "Lane" },
  figure("TTFT limit"),
  figure("ITL limit"),
  figure("Good"),
  figure("of n"),
  figure("Share"),
  { title: "Breaches" },
  figure("Burn 5 min"),
  figure("Burn 1 h"),
  { title: "Budget left" },
];

export function budgetTable(slo) {
  const rows = slo.profiles.flatMap((profile) => profile.lanes.map((lane) => ({ profile, lane })));
  if (rows.length === 0) return h("p", { class: "muted" }, "No request has been judged yet.");
  return table(
    "Error budgets",
    BUDGET_COLUMNS,
    rows.map(({ profile, lane }) => [
      profile.name,
      lane.lane,
      ms(profile.ttft_ms_max),
      ms(profile.itl_ms_max),
      number(lane.good),
      number(lane.total),
      share(lane, slo.objective),
      breachWords(lane.breaches),
      burn(lane.burn_5m),
      burn(lane.burn_1h),
      budget(lane.budget_left, lane.total > 0),
    ]),
  );
}

const STAGE_COLUMNS = [
  { title: "Stage" },
  figure("Budget"),
  figure("p99"),
  figure("n"),
  { title: "p99 against budget", className: "stage-cell" },
];

function stageBar(stage, over, widest) {
  const part = (value) => `${((value ?? 0) / widest) * 100}%`;
  return [
    h(
      "span",
      { class: `stage-bar ${over > 0 ? "is-over" : ""}`, "aria-hidden": "true" },
      h("i", { css: { width: part(stage.p99_ms) } }),
      Number.isFinite(stage.budget_ms) ? h("b", { css: { left: part(stage.budget_ms) } }) : null,
    ),
    h(
      "span",
      { class: over > 0 ? "is-breached" : "muted" },
      over === null ? "no budget" : over > 0 ? `! over by ${ms(over)}` : "within",
    ),
  ];
}

export function stageTable(stages) {
  if (!stages || stages.length === 0) return h("p", { class: "muted" }, "No stage has been measured yet.");
  const widest = Math.max(...stages.map((stage) => Math.max(stage.budget_ms ?? 0, stage.p99_ms ?? 0)), 1);
  const rows = stages.map((stage) => {
    const isKnown = Number.isFinite(stage.p99_ms) && Number.isFinite(stage.budget_ms);
    const over = isKnown ? stage.p99_ms - stage.budget_ms : null;
    const cell = (content) => ({ className: stage.count < SAMPLES_ENOUGH ? "is-few" : "", content });
    return [
      cell(words(stage.stage)),
      cell(ms(stage.budget_ms)),
      cell(ms(stage.p99_ms)),
      cell(number(stage.count)),
      cell(stageBar(stage, over, widest)),
    ];
  });
  return table("Budgets of the stages", STAGE_COLUMNS, rows);
}
