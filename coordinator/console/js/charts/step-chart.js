// One small chart over slots of time: one or two lines in steps, and a gap where a slot has no value.

import { replace, s } from "../dom.js";
import { clock } from "../format.js";
import { linear } from "./scale.js";

const HEIGHT = 78;
const WIDTH_MIN = 120;
const PAD = { left: 1, right: 1, top: 16, bottom: 17 };

/** Neighbouring points that have a value: each run is a line of its own. */
function runsOf(points, at) {
  const runs = [];
  let isOpen = false;
  for (const point of points) {
    const hasValue = Number.isFinite(point.values[at]);
    if (hasValue && isOpen) runs.at(-1).push(point);
    else if (hasValue) runs.push([point]);
    isOpen = hasValue;
  }
  return runs;
}

function line(run, at, x, y) {
  const steps = run.map(({ from, to, values }, n) => {
    const [left, right, level] = [x(from).toFixed(1), x(to).toFixed(1), y(values[at]).toFixed(1)];
    return `${n === 0 ? `M${left},${level}` : `V${level}`} H${right}`;
  });
  return s("path", { class: `step-line step-line-${at}`, d: steps.join(" ") });
}

function frame(box, { highest, label, minutes }) {
  const edge = (y) => s("line", { x1: box.left, x2: box.right, y1: y, y2: y });
  return s(
    "g",
    { class: "axis", "aria-hidden": "true" },
    edge(box.top),
    edge(box.bottom),
    s("text", { x: box.left, y: box.top - 4 }, highest === null ? "no request" : label(highest)),
    s("text", { x: box.left, y: box.bottom + 13 }, `−${minutes} min`),
    s("text", { x: box.right, y: box.bottom + 13, "text-anchor": "end" }, "now"),
  );
}

/**
 * `points`: [{from, to, values}], times in ms, the oldest first, at least one. `options`: {name, label(value), read(point),
 * readout}; `readout` is the element that shows the point under the pointer.
 */
export function drawSteps(svg, points, { name, label, read, readout }) {
  const width = Math.max(WIDTH_MIN, svg.parentElement?.clientWidth ?? 200);
  const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: HEIGHT - PAD.bottom };
  const [from, to] = [points[0].from, points.at(-1).to];
  const values = points.flatMap((point) => point.values).filter(Number.isFinite);
  const highest = values.length > 0 ? Math.max(...values) : null;
  const x = linear(from, to, box.left, box.right);
  const y = linear(0, highest || 1, box.bottom, box.top);
  svg.setAttribute("width", width);
  svg.setAttribute("height", HEIGHT);
  svg.setAttribute("aria-label", name);
  const cross = s("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const lines = points[0].values.map((_, at) => runsOf(points, at).map((run) => line(run, at, x, y)));
  replace(svg, frame(box, { highest, label, minutes: Math.max(1, Math.round((to - from) / 60_000)) }), lines, cross);
  svg.onpointermove = (event) => {
    const pixels = event.clientX - svg.getBoundingClientRect().left;
    const time = from + ((pixels - box.left) / (box.right - box.left)) * (to - from);
    const point = points.find((one) => time < one.to) ?? points.at(-1);
    const middle = x((point.from + point.to) / 2);
    cross.setAttribute("x1", middle);
    cross.setAttribute("x2", middle);
    cross.setAttribute("visibility", "visible");
    readout.textContent = `${clock(point.from, false)}  ${read(point)}`;
  };
  svg.onpointerleave = () => {
    cross.setAttribute("visibility", "hidden");
    readout.textContent = "";
  };
}
