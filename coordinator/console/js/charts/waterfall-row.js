// One line of the waterfall: name and process at the left, the bar with its events at the right.

import { s } from "../dom.js";
import { clockWords, ms } from "../format.js";

export const LINE_PX = 24;
const BAR_PX = 13;
/** Even a span of a microsecond must be seen. */
const BAR_PX_MIN = 2;
/** Where names have less room than this, the process is told by the details and the colour only. */
const CHIP_NAMES_PX_MIN = 200;
const CHARACTER_PX = 6.7;

const EVENT_GLYPHS = { stall: "stall", preempt: "stall", preemption: "stall", error: "stall" };
const clipped = (text, pixels) => {
  const fit = Math.max(3, Math.floor(pixels / CHARACTER_PX));
  return text.length > fit ? `${text.slice(0, fit - 1)}…` : text;
};

function processRow({ process }, y, frame) {
  const clock = process.clock ? ` · clock ${clockWords(process.clock)}` : "";
  return s(
    "g",
    { class: `process-row role-${process.role}`, role: "presentation" },
    s("rect", { x: 0, y, width: frame.width, height: LINE_PX }),
    s("text", { x: 8, y: y + 16 }, `${process.name}  (${process.service ?? process.role})${clock}`),
  );
}

function tick(event, y, { x }) {
  const at = x(event.at_ms);
  const details = Object.entries(event.attributes ?? {})
    .map(([key, value]) => `${key}=${value}`)
    .join(" ");
  const title = s("title", null, `${event.name} at ${ms(event.at_ms)} ${details}`);
  const top = y + (LINE_PX - BAR_PX) / 2;
  if (EVENT_GLYPHS[event.name]) return s("path", { class: "event-stall", d: `M${at},${top + 3} l-4.5,-7 h9 z` }, title);
  return s("line", { class: "event", x1: at, x2: at, y1: top, y2: top + BAR_PX }, title);
}

/** How uncertain the place of the bar is, where that can be seen at this zoom. */
function whisker(span, y, { x, model }) {
  const error = model.errorOf(span.process);
  const half = x(span.start + error) - x(span.start);
  if (half < 3) return null;
  const [at, middle] = [x(span.start), y + LINE_PX / 2];
  return s(
    "path",
    {
      class: "whisker",
      d: `M${at - half},${middle} H${at + half} M${at - half},${middle - 3} v6 M${at + half},${middle - 3} v6`,
    },
    s("title", null, `clock of ${span.process}: ± ${ms(error)}`),
  );
}

/** The part of the bar that cannot be where it is: it lies before what the span follows. */
function early(span, y, { x }) {
  const worst = Math.max(0, ...span.warnings.filter((warning) => warning.isBeyond).map((warning) => warning.early_ms));
  if (worst === 0) return null;
  return s(
    "rect",
    {
      class: "early",
      x: x(span.start),
      y: y + (LINE_PX - BAR_PX) / 2,
      width: Math.max(BAR_PX_MIN, x(span.start + worst) - x(span.start)),
      height: BAR_PX,
    },
    s("title", null, `begins ${ms(worst)} too early`),
  );
}

function duration(span, y, frame, barEnd) {
  const text = `${ms(span.end - span.start)}${span.isOpen ? " so far" : ""}`;
  const start = frame.x(span.start);
  const needs = text.length * CHARACTER_PX + 10;
  const place = { y: y + 16, class: "duration" };
  if (barEnd + needs < frame.right) return s("text", { ...place, x: barEnd + 6 }, text);
  if (start - needs > frame.left && start <= frame.right)
    return s("text", { ...place, x: start - 6, "text-anchor": "end" }, text);
  // No room beside the bar: on it, on a plate that keeps it legible over any colour.
  const right = Math.min(barEnd, frame.right) - 6;
  return [
    s("rect", { class: "plate", x: right - needs + 4, y: y + 6, width: needs, height: BAR_PX - 1, rx: 2 }),
    s("text", { ...place, x: right, "text-anchor": "end" }, text),
  ];
}

function bar(span, y, frame) {
  const [start, end] = [frame.x(span.start), frame.x(Math.max(span.end, span.start))];
  if (end < frame.left) return s("text", { class: "duration off", x: frame.left + 2, y: y + 16 }, "◂");
  if (start > frame.right)
    return s("text", { class: "duration off", x: frame.right, y: y + 16, "text-anchor": "end" }, "▸");
  const beyond = span.warnings.some((warning) => warning.isBeyond);
  const shown = Math.max(BAR_PX_MIN, end - start);
  const classes = ["bar", beyond && "is-early", span.error && "is-error", span.isOpen && "is-open"]
    .filter(Boolean)
    .join(" ");
  return [
    s(
      "g",
      { "clip-path": "url(#plot)" },
      s("rect", { class: classes, x: start, y: y + (LINE_PX - BAR_PX) / 2, width: shown, height: BAR_PX, rx: 2 }),
      early(span, y, frame),
      span.events.map((event) => tick(event, y, frame)),
      whisker(span, y, frame),
    ),
    duration(span, y, frame, start + shown),
  ];
}

function chip(span, y, frame, width) {
  const place = { x: frame.left - width / 2 - 10, y: y + 15.5, "text-anchor": "middle" };
  return [
    s("rect", { class: "chip", x: frame.left - width - 10, y: y + 5, width, height: LINE_PX - 10, rx: 3 }),
    s("text", { class: "chip-text", ...place }, clipped(span.process, 14 * CHARACTER_PX)),
  ];
}

/** A row is {span, indent} or {process}. */
export function drawRow(row, y, frame) {
  if (row.process) return processRow(row, y, frame);
  const { span, indent } = row;
  const beyond = span.warnings.some((warning) => warning.isBeyond);
  const mark = `${beyond ? "⚠ " : ""}${span.error ? "✕ " : ""}`;
  const left = 10 + Math.min(indent, 8) * 12;
  const hasChip = frame.left >= CHIP_NAMES_PX_MIN;
  const processWidth = hasChip ? Math.min(span.process.length, 14) * CHARACTER_PX + 8 : 0;
  return s(
    "g",
    {
      class: `span-row role-${span.role}`,
      id: `span-${span.span_id}`,
      role: "option",
      data: { span: span.span_id },
      "aria-label": `${span.name} on ${span.process}, starts at ${ms(span.start)}, takes ${ms(span.end - span.start)}${beyond ? ", begins too early" : ""}${span.error ? ", failed" : ""}`,
    },
    s("rect", { class: "row-back", x: 0, y, width: frame.width, height: LINE_PX }),
    indent > 0 ? s("path", { class: "tree", d: `M${left - 7},${y} v${LINE_PX / 2} h5` }) : null,
    s(
      "text",
      { class: "span-name", x: left, y: y + 16 },
      clipped(mark + span.name, frame.left - left - processWidth - 14),
    ),
    hasChip ? chip(span, y, frame, processWidth) : null,
    bar(span, y, frame),
  );
}
