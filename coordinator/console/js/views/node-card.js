// One node of the cluster map: its state, load, KV blocks, lease and clock, updated in place once a second.

import { BLOCK_STATES } from "../cluster-store.js";
import { h, replace, setText } from "../dom.js";
import { clockWords, count, ms, NONE, number, percent, text, words } from "../format.js";
import { link } from "../router.js";
import { askDrain, askRole, canDrain, otherRoles } from "./node-orders.js";

const STATE_GLYPHS = { ready: "●", joining: "◌", draining: "◑", suspected: "?", lost: "✕", left: "○" };
/** Below this a lease that is not renewed ends before the reader has looked twice. */
const LEASE_SHORT_MS = 3000;

export const totalBlocks = (blocks) => BLOCK_STATES.reduce((sum, state) => sum + (blocks?.[state] ?? 0), 0);
/** Blocks that belong to some request: what cannot be given to the next one. */
export const heldBlocks = (blocks) => totalBlocks(blocks) - (blocks?.free ?? 0) - (blocks?.cached ?? 0);

/** A stacked bar of a node's blocks; `update(blocks)` moves its pieces. */
export function blockBar() {
  const pieces = BLOCK_STATES.map((state) => h("span", { class: `blocks-${state.replace("_", "-")}` }));
  const element = h("div", { class: "block-bar", role: "img" }, pieces);
  return {
    element,
    update(blocks) {
      const total = totalBlocks(blocks);
      const parts = BLOCK_STATES.map((state, at) => {
        const n = blocks?.[state] ?? 0;
        pieces[at].style.setProperty("flex-grow", String(n));
        pieces[at].title = `${words(state)}: ${count(n, "block")}`;
        return `${words(state)} ${number(n)}`;
      });
      element.setAttribute("aria-label", `KV blocks, ${number(total)} in all: ${parts.join(", ")}`);
    },
  };
}

export class NodeCard {
  constructor() {
    const line = (name) => h("dd", { data: { line: name } });
    this.bar = blockBar();
    this.name = h("a", { class: "node-name" });
    this.state = h("span", { class: "node-state" });
    this.blocks = h("div", { class: "node-blocks" });
    this.lines = Object.fromEntries(
      ["load", "permits", "lease", "clock", "build", "coordinators", "address"].map((name) => [name, line(name)]),
    );
    const terms = {
      load: "running, waiting",
      permits: "permits",
      lease: "lease left",
      clock: "clock",
      build: "version",
      coordinators: "coordinators",
      address: "address",
    };
    const act = (label, run) => h("button", { type: "button", class: "small", on: { click: run } }, label);
    this.drain = act("Drain", () => askDrain(this.node));
    this.role = act("Change role", () => askRole(this.node));
    this.element = h(
      "article",
      { class: "node-card", tabindex: -1 },
      h("header", null, this.name, this.state),
      this.bar.element,
      this.blocks,
      h(
        "dl",
        null,
        Object.entries(terms).map(([name, term]) => [h("dt", null, term), this.lines[name]]),
      ),
      h("div", { class: "node-orders" }, this.drain, this.role),
    );
  }

  update(node) {
    this.node = node;
    setText(this.name, node.name);
    this.name.setAttribute("href", link("requests", null, { node: node.name }));
    this.name.title = `Requests on ${node.name}`;
    setText(this.state, `${STATE_GLYPHS[node.state] ?? "?"} ${text(node.state)}`);
    this.element.className = `node-card role-${node.role} state-${node.state}`;
    this.element.dataset.node = node.name;
    this.bar.update(node.kv_blocks);
    this.showBlocks(node);
    const { load, permits, lease, clock, build, coordinators, address } = this.lines;
    setText(load, `${number(node.running)}, ${number(node.waiting)}`);
    setText(permits, `${number(node.permits_available)} ${node.role === "prefill" ? "tokens" : "blocks"}`);
    setText(lease, ms(node.lease_left_ms));
    lease.className = Number.isFinite(node.lease_left_ms) && node.lease_left_ms < LEASE_SHORT_MS ? "is-short" : "";
    setText(clock, clockWords(node.clock));
    setText(build, text(node.version));
    setText(coordinators, number(node.coordinators));
    address.title = `epoch ${text(node.epoch)}; transports ${(node.transports ?? []).join(", ") || "none"}`;
    setText(address, text(node.address));
    this.showOrders(node);
  }

  /** What the node cannot do now has a button that says why. */
  showOrders(node) {
    const why = canDrain(node) ? null : `it is ${text(node.state)}`;
    const orders = [
      [this.drain, "Drain", why],
      [this.role, "Change role of", why ?? (otherRoles(node).length > 0 ? null : "its process has this role only")],
    ];
    for (const [button, what, because] of orders) {
      button.disabled = because !== null;
      const label = because === null ? `${what} ${node.name}` : `${what} ${node.name}: not possible, ${because}`;
      if (button.title === label) continue;
      button.title = label;
      button.setAttribute("aria-label", label);
    }
  }

  showBlocks(node) {
    const { kv_blocks: blocks } = node;
    const total = totalBlocks(blocks);
    const shown = BLOCK_STATES.filter((state) => state !== "free" && (blocks?.[state] ?? 0) > 0);
    const key = JSON.stringify([blocks, total]);
    if (this.blocksKey === key) return;
    this.blocksKey = key;
    const used = total > 0 ? percent(heldBlocks(blocks) / total, 0) : NONE;
    replace(
      this.blocks,
      h(
        "span",
        { class: "blocks-total", title: `${number(total)} blocks of ${number(node.block_tokens)} tokens` },
        `KV ${used} held of ${number(total)}`,
      ),
      shown.map((state) =>
        h(
          "span",
          { class: "block-count" },
          h("i", { class: `blocks-${state.replace("_", "-")}` }),
          `${words(state)} ${number(blocks[state])}`,
        ),
      ),
    );
  }
}
