// Draws the spans of one request as bars over time; keeps the range shown, the chosen span and the keys that move both.

import { replace, s } from "../dom.js";
import { ms } from "../format.js";
import { linear, tickLabel, ticks } from "./scale.js";
import { drawRow, LINE_PX } from "./waterfall-row.js";
import { rowsOf } from "../trace-model.js";

const AXIS_PX = 26;
const RIGHT_PX = 14;
const ZOOM = 0.6;
const RANGE_MS_MIN = 0.01;

export class Waterfall {
  /** `onChoose(span)` is called with the span under pointer or focus. */
  constructor(element, model, onChoose) {
    Object.assign(this, { element, onChoose, grouping: "calls", chosenId: null });
    this.svg = s("svg", { class: "waterfall", role: "listbox", "aria-label": "Spans over time", tabindex: 0 });
    replace(element, this.svg);
    this.setModel(model);
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(element);
    this.svg.addEventListener("pointerdown", (event) => this.brush(event));
    this.svg.addEventListener("dblclick", () => this.whole());
    this.svg.addEventListener("focus", () => this.chosenId === null && this.step(0));
  }

  setModel(model) {
    const wasWhole = !this.model || (this.from === this.lowest && this.to === this.highest);
    this.model = model;
    // A little room at both ends, so that what happens at the very end can be seen.
    const room = (model.to - model.from) * 0.01;
    this.lowest = model.from - (model.from < 0 ? room : 0);
    this.highest = model.to + room;
    if (wasWhole) [this.from, this.to] = [this.lowest, this.highest];
    this.draw();
  }

  setGrouping(grouping) {
    this.grouping = grouping;
    this.draw();
  }

  show(from, to) {
    const width = Math.min(Math.max(to - from, RANGE_MS_MIN), this.highest - this.lowest);
    this.from = Math.min(Math.max(from, this.lowest), this.highest - width);
    this.to = this.from + width;
    this.draw();
  }

  whole() {
    this.show(this.lowest, this.highest);
  }

  toFirstToken() {
    const { ttft_ms: ttft } = this.model.request;
    if (Number.isFinite(ttft)) this.show(this.lowest, ttft * 1.04);
  }

  zoom(factor) {
    const chosen = this.model.byId.get(this.chosenId);
    const middle = (this.from + this.to) / 2;
    const centre =
      chosen && chosen.start >= this.from && chosen.start <= this.to
        ? Math.min((chosen.start + chosen.end) / 2, this.to)
        : middle;
    const width = (this.to - this.from) * factor;
    const share = (centre - this.from) / (this.to - this.from);
    this.show(centre - width * share, centre + width * (1 - share));
  }

  pan(share) {
    const by = (this.to - this.from) * share;
    this.show(this.from + by, this.to + by);
  }

  step(by) {
    const spans = rowsOf(this.model, this.grouping)
      .filter((row) => row.span)
      .map((row) => row.span);
    if (spans.length === 0) return;
    const now = spans.findIndex((span) => span.span_id === this.chosenId);
    this.choose(spans[Math.min(Math.max(now < 0 ? 0 : now + by, 0), spans.length - 1)]);
    this.element.querySelector(".is-chosen")?.scrollIntoView({ block: "nearest" });
  }

  choose(span) {
    if (this.chosenId === span.span_id) return;
    this.chosenId = span.span_id;
    for (const row of this.svg.querySelectorAll(".span-row")) this.markRow(row);
    this.onChoose(span);
  }

  markRow(row) {
    const isChosen = row.dataset.span === this.chosenId;
    row.classList.toggle("is-chosen", isChosen);
    row.setAttribute("aria-selected", isChosen);
    if (isChosen) this.svg.setAttribute("aria-activedescendant", row.id);
  }

  get nameWidth() {
    // On a narrow page the bars get the larger part, and the names are cut.
    return Math.min(330, Math.max(Math.min(236, this.width * 0.45), this.width * 0.26));
  }

  draw() {
    this.width = this.element.clientWidth;
    if (this.width < 100) return;
    const rows = rowsOf(this.model, this.grouping);
    const height = AXIS_PX + rows.length * LINE_PX + 6;
    const x = linear(this.from, this.to, this.nameWidth, this.width - RIGHT_PX);
    this.x = x;
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", height);
    const frame = {
      x,
      left: this.nameWidth,
      right: this.width - RIGHT_PX,
      width: this.width,
      from: this.from,
      to: this.to,
      model: this.model,
    };
    const places = new Map(rows.map((row, at) => [row.span?.span_id, AXIS_PX + at * LINE_PX]));
    const drawn = rows.map((row, at) => drawRow(row, AXIS_PX + at * LINE_PX, frame));
    replace(
      this.svg,
      this.clip(frame, height),
      this.axis(frame, height),
      drawn,
      this.links(frame, places),
      this.firstToken(frame, height),
    );
    for (const row of this.svg.querySelectorAll(".span-row")) {
      this.markRow(row);
      const span = this.model.byId.get(row.dataset.span);
      row.addEventListener("pointerenter", () => this.choose(span));
    }
  }

  clip({ left, right }, height) {
    return s("clipPath", { id: "plot" }, s("rect", { x: left, y: 0, width: Math.max(0, right - left + 2), height }));
  }

  axis({ x, left, right, from, to }, height) {
    const marks = ticks(from, to, Math.max(2, Math.floor((right - left) / 90)));
    return s(
      "g",
      { class: "axis", "aria-hidden": "true" },
      s("text", { x: 8, y: 16 }, "span, process"),
      marks.map((at) => [
        s("line", { x1: x(at), x2: x(at), y1: AXIS_PX - 4, y2: height }),
        s("text", { x: x(at), y: 16, "text-anchor": "middle" }, `${tickLabel(at)} ms`),
      ]),
    );
  }

  /** Where the reader got the first token. */
  firstToken({ x, from, to }, height) {
    const { ttft_ms: at } = this.model.request;
    if (!Number.isFinite(at) || at < from || at > to) return null;
    return s(
      "g",
      { class: "first-token" },
      s("line", { x1: x(at), x2: x(at), y1: AXIS_PX - 6, y2: height }),
      s("title", null, `first token at ${ms(at)}`),
    );
  }

  /** From the sender's bar to the receiver's. */
  links({ x }, places) {
    const lines = this.model.spans
      .flatMap((span) => span.links.map((id) => [this.model.byId.get(id), span]))
      .filter(([from]) => from);
    return s(
      "g",
      { class: "links", "clip-path": "url(#plot)" },
      lines.map(([from, to]) => {
        const [x1, y1, x2, y2] = [
          x(from.start),
          places.get(from.span_id) + LINE_PX / 2,
          x(to.start),
          places.get(to.span_id) + LINE_PX / 2,
        ];
        const bend = Math.max(14, Math.min(60, Math.abs(y2 - y1) / 3));
        return [
          s(
            "path",
            { d: `M${x1},${y1} C${x1 - bend},${y1} ${x2 - bend},${y2} ${x2 - 5},${y2}` },
            s("title", null, `${to.name} on ${to.process} is linked to ${from.name} on ${from.process}`),
          ),
          s("path", { class: "arrow", d: `M${x2},${y2} l-6,-3.5 v7 z` }),
        ];
      }),
    );
  }

  /** Dragging over the plot shows that part of the time. */
  brush(event) {
    const origin = this.svg.getBoundingClientRect().left;
    const start = event.clientX - origin;
    if (event.button !== 0 || start < this.nameWidth) return;
    const box = s("rect", { class: "brush", y: 0, height: this.svg.getAttribute("height"), x: start, width: 0 });
    const place = (move) => {
      const now = Math.min(Math.max(move.clientX - origin, this.nameWidth), this.width - RIGHT_PX);
      box.setAttribute("x", Math.min(start, now));
      box.setAttribute("width", Math.abs(now - start));
      if (!box.isConnected && Math.abs(now - start) > 4) this.svg.append(box);
    };
    const end = () => {
      this.svg.removeEventListener("pointermove", place);
      window.removeEventListener("pointerup", end);
      const [left, width] = [Number(box.getAttribute("x")), Number(box.getAttribute("width"))];
      box.remove();
      const at = linear(this.nameWidth, this.width - RIGHT_PX, this.from, this.to);
      if (width > 4) this.show(at(left), at(left + width));
    };
    this.svg.addEventListener("pointermove", place);
    window.addEventListener("pointerup", end);
  }

  keys() {
    const again = (act) => () => act();
    const keys = {
      j: again(() => this.step(1)),
      k: again(() => this.step(-1)),
      h: again(() => this.pan(-0.2)),
      l: again(() => this.pan(0.2)),
      "+": again(() => this.zoom(ZOOM)),
      "-": again(() => this.zoom(1 / ZOOM)),
      0: again(() => this.whole()),
      f: again(() => this.toFirstToken()),
    };
    return { ...keys, ArrowDown: keys.j, ArrowUp: keys.k, ArrowLeft: keys.h, ArrowRight: keys.l, "=": keys["+"] };
  }

  dispose() {
    this.sizes.disconnect();
  }
}
