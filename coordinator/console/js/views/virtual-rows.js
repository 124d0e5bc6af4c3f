// A table of any length that keeps only the visible rows in the page; keyboard and screen reader see a grid.

import { h, replace, setText } from "../dom.js";

const ROW_PX = 28;
/** Rows kept ready above and below what can be seen. */
const SPARE = 8;
let ids = 0;

export class VirtualRows {
  /**
   * `columns`: {key, title, label, className, fill(record) → {text, title?, className?, href?}}; `keyOf(record)` names a row for good.
   * `onOpen(record)` on click or Enter, `onSort(key)` on a header.
   */
  constructor({ label, columns, keyOf, onOpen, onSort }) {
    Object.assign(this, { columns, keyOf, onOpen, onSort, records: [], selected: null, slots: [] });
    this.id = `rows-${(ids += 1)}`;
    this.head = h(
      "div",
      { class: "grid-head grid-row", role: "row", "aria-rowindex": 1 },
      columns.map((column) => this.header(column)),
    );
    this.body = h("div", { class: "grid-body", role: "rowgroup" });
    this.empty = h("p", { class: "grid-empty", hidden: true });
    this.element = h(
      "div",
      {
        class: "grid",
        role: "grid",
        tabindex: 0,
        "aria-label": label,
        on: { scroll: () => this.draw(), click: (event) => this.clicked(event) },
      },
      h("div", { role: "rowgroup", class: "grid-head-group" }, this.head),
      this.body,
      this.empty,
    );
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.element);
  }

  header(column) {
    const inside = column.sort
      ? h(
          "button",
          {
            type: "button",
            title: `Sort by ${column.label}`,
            on: { click: () => this.onSort(column.sort) },
          },
          column.title,
        )
      : h("span", { title: column.label }, column.title);
    return h("div", { role: "columnheader", class: column.className, data: { key: column.key } }, inside);
  }

  showSort(key, isDescending) {
    for (const [at, cell] of [...this.head.children].entries()) {
      const isThis = this.columns[at].sort === key;
      if (isThis) cell.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
  }

  /** New contents; what the reader looks at stays where it is unless the top of the list is shown. */
  setRecords(records, emptyWords) {
    const top = Math.floor(this.element.scrollTop / ROW_PX);
    const anchor = top > 0 && this.records[top] ? this.keyOf(this.records[top]) : null;
    this.records = records;
    this.element.setAttribute("aria-rowcount", records.length + 1);
    this.body.style.height = `${records.length * ROW_PX}px`;
    this.empty.hidden = records.length > 0;
    setText(this.empty, emptyWords);
    if (anchor !== null) {
      const at = records.findIndex((record) => this.keyOf(record) === anchor);
      if (at >= 0 && at !== top) this.element.scrollTop += (at - top) * ROW_PX;
    }
    this.draw();
  }

  toTop() {
    this.element.scrollTop = 0;
  }

  visible() {
    return Math.max(1, Math.floor((this.element.clientHeight - this.head.offsetHeight) / ROW_PX));
  }

  draw() {
    const from = Math.max(0, Math.floor(this.element.scrollTop / ROW_PX) - SPARE);
    const wanted = Math.min(this.records.length, this.visible() + 2 * SPARE + 1);
    while (this.slots.length < wanted) this.slots.push(this.makeSlot());
    const used = new Set();
    for (let at = from; at < Math.min(from + wanted, this.records.length); at += 1) {
      // The same row keeps its slot while the list scrolls: only rows that come into view are filled.
      const slot = this.slots[at % this.slots.length];
      this.fillSlot(slot, at);
      used.add(slot);
    }
    for (const slot of this.slots) slot.row.hidden = !used.has(slot);
    const at = this.selectedIndex();
    if (at >= from && at < from + wanted) this.element.setAttribute("aria-activedescendant", this.rowId(at));
    else this.element.removeAttribute("aria-activedescendant");
  }

  rowId(at) {
    return `${this.id}-${at % Math.max(1, this.slots.length)}`;
  }

  makeSlot() {
    const cells = this.columns.map((column) =>
      h("div", { role: "gridcell", class: column.className }, column.isLink ? h("a", { tabindex: -1 }) : null),
    );
    const row = h("div", { role: "row", class: "grid-row", id: `${this.id}-${this.slots.length}` }, cells);
    this.body.append(row);
    return { row, cells, at: null };
  }

  fillSlot(slot, at) {
    const record = this.records[at];
    slot.at = at;
    slot.row.style.transform = `translateY(${at * ROW_PX}px)`;
    slot.row.setAttribute("aria-rowindex", at + 2);
    slot.row.setAttribute("aria-selected", this.keyOf(record) === this.selected);
    this.columns.forEach((column, n) => {
      const { text, title = "", className = "", href } = column.fill(record);
      const cell = slot.cells[n];
      const target = column.isLink ? cell.firstChild : cell;
      setText(target, text);
      if (cell.title !== title) cell.title = title;
      const wanted = `${column.className ?? ""} ${className}`.trim();
      if (cell.className !== wanted) cell.className = wanted;
      if (href) target.setAttribute("href", href);
    });
  }

  selectedIndex() {
    return this.selected === null ? -1 : this.records.findIndex((record) => this.keyOf(record) === this.selected);
  }

  move(by) {
    if (this.records.length === 0) return;
    const now = this.selectedIndex();
    const start = now < 0 ? Math.floor(this.element.scrollTop / ROW_PX) - (by > 0 ? 1 : 0) : now;
    this.moveTo(start + by);
  }

  moveTo(index) {
    const at = Math.min(Math.max(index, 0), this.records.length - 1);
    if (at < 0) return;
    this.selected = this.keyOf(this.records[at]);
    const [first, last] = [at * ROW_PX, (at + 1) * ROW_PX];
    const room = this.element.clientHeight - this.head.offsetHeight;
    if (first < this.element.scrollTop) this.element.scrollTop = first;
    else if (last > this.element.scrollTop + room) this.element.scrollTop = last - room;
    this.draw();
  }

  openSelected() {
    const at = this.selectedIndex();
    if (at >= 0) this.onOpen(this.records[at]);
    return at >= 0;
  }

  clicked(event) {
    // A link opens itself, in a new tab if asked to.
    if (event.target.closest("a, button")) return;
    const row = event.target.closest("[role=row]");
    const slot = this.slots.find((candidate) => candidate.row === row);
    if (slot?.at === null || slot === undefined || String(getSelection())) return;
    this.onOpen(this.records[slot.at]);
  }

  dispose() {
    this.sizes.disconnect();
    replace(this.element);
  }
}
