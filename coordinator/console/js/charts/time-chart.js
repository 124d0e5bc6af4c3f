// Values over the last minutes: stacked areas or one line, with a pointer that reads off single samples.

import { replace, s } from "../dom.js";
import { clock } from "../format.js";
import { linear, ticks } from "./scale.js";

const PAD = { left: 70, right: 10, top: 8, bottom: 20 };
/** Between time labels, by how much time is shown. */
const STEPS_S = [10, 30, 60, 180, 300];

/** Samples come every second: a longer silence is drawn as a gap, not as a straight line. */
const GAP_MS = 3500;

function segments(points) {
  const parts = [];
  for (const point of points) {
    const part = parts.at(-1);
    if (part && point.at - part.at(-1).at <= GAP_MS) part.push(point);
    else parts.push([point]);
  }
  return parts;
}

function frameOf(svg, { height, to, spanMs, highest }) {
  const width = Math.max(220, svg.parentElement?.clientWidth ?? 400);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  const box = { left: PAD.left, right: width - PAD.right, top: PAD.top, bottom: height - PAD.bottom };
  return { box, x: linear(to - spanMs, to, box.left, box.right), y: linear(0, highest || 1, box.bottom, box.top) };
}

function axes({ box, x, y }, { to, spanMs, highest, label, yTicks }) {
  const step = STEPS_S.find((one) => spanMs / 1000 / one <= 6) ?? STEPS_S.at(-1);
  const times = Array.from({ length: Math.floor(spanMs / 1000 / step) + 1 }, (_, n) => n * step);
  const name = (ago) => (ago === 0 ? "now" : ago % 60 === 0 ? `−${ago / 60} min` : `−${ago} s`);
  return s(
    "g",
    { class: "axis", "aria-hidden": "true" },
    (yTicks ?? ticks(0, highest || 1, 3)).map((value) => [
      s("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
      s("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, label(value)),
    ]),
    times.map((ago) =>
      s("text", { x: x(to - ago * 1000), y: box.bottom + 15, "text-anchor": ago === 0 ? "end" : "middle" }, name(ago)),
    ),
  );
}

/** `points`: [{at, values}], bottom first; `series`: [{className}]. */
export function drawStack(svg, points, series, options) {
  const frame = frameOf(svg, options);
  const { x, y } = frame;
  const areas = segments(points).flatMap((part) => {
    let floor = part.map(() => 0);
    return series.map((one, at) => {
      const ceiling = part.map((point, n) => floor[n] + point.values[at]);
      const up = part.map((point, n) => `${x(point.at).toFixed(1)},${y(ceiling[n]).toFixed(1)}`);
      const down = part.map((point, n) => `${x(point.at).toFixed(1)},${y(floor[n]).toFixed(1)}`).reverse();
      floor = ceiling;
      return s("polygon", { class: one.className, points: [...up, ...down].join(" ") });
    });
  });
  finish(svg, frame, [axes(frame, options), areas], points, options);
}

/** `points`: [{at, value}]. */
export function drawLine(svg, points, options) {
  const frame = frameOf(svg, options);
  const { x, y, box } = frame;
  const lines = segments(points).map((part) => {
    const path = part.map((point) => `${x(point.at).toFixed(1)},${y(point.value).toFixed(1)}`);
    const first = x(part[0].at).toFixed(1);
    const last = x(part.at(-1).at).toFixed(1);
    return [
      s("polygon", {
        class: "line-fill",
        points: [`${first},${box.bottom}`, ...path, `${last},${box.bottom}`].join(" "),
      }),
      s("polyline", { class: "line", points: path.join(" ") }),
    ];
  });
  finish(svg, frame, [axes(frame, options), lines], points, options);
}

/** The pointer's line and what it reads; it stays where the pointer is while the chart moves under it. */
function finish(svg, frame, drawn, points, { read, readout }) {
  const { box, x } = frame;
  const cross = s("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  replace(svg, drawn, cross);
  const point = (pixels) => {
    if (points.length === 0) return;
    const nearest = points.reduce((best, one) =>
      Math.abs(x(one.at) - pixels) < Math.abs(x(best.at) - pixels) ? one : best,
    );
    cross.setAttribute("x1", x(nearest.at));
    cross.setAttribute("x2", x(nearest.at));
    cross.setAttribute("visibility", "visible");
    readout.textContent = `${clock(nearest.at, false)}  ${read(nearest)}`;
  };
  svg.onpointermove = (event) => {
    svg.pointerAt = event.clientX - svg.getBoundingClientRect().left;
    point(svg.pointerAt);
  };
  svg.onpointerleave = () => {
    svg.pointerAt = undefined;
    cross.setAttribute("visibility", "hidden");
    readout.textContent = "";
  };
  if (svg.pointerAt !== undefined) point(svg.pointerAt);
}
