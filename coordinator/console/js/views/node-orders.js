// The two orders that the console can give to a node, each behind a dialog that says what will happen.

import { order } from "../api.js";
import { toast } from "../copy.js";
import { h, replace } from "../dom.js";
import { count, text } from "../format.js";

/** A node that is leaving, or gone, takes no order. */
const OVER = ["draining", "lost", "left"];
const LAST_DECODE_NODE = "last_decode_node";

export const canDrain = (node) => !OVER.includes(node.state);
export const otherRoles = (node) => (node.roles ?? []).filter((role) => role !== node.role);

const load = (node) =>
  `${count(node.running, "sequence")} running and ${count(node.waiting, "sequence")} waiting on it by its last report`;

function drainWords(node) {
  return [
    `Nothing new goes to ${node.name} from now on.`,
    `What runs there ends there, or goes on elsewhere after the node's drain_ms_max (${load(node)}).`,
    "Then its process exits with status 0. systemd, compose or Kubernetes may start it again.",
    "The coordinator writes the order into its log. It cannot be taken back.",
  ];
}

function roleWords(node, role) {
  return [
    `${node.name} drains first: nothing new goes there, and what runs there ends or goes on elsewhere (${load(node)}).`,
    `Then it joins again as a ${role} node, with the same name, address and weights and an empty KV cache.`,
    `Until then the cluster has one ${node.role} node less, and for good once it is back.`,
    "The coordinator writes the order into its log. It can be taken back by another change of role.",
  ];
}

const list = (words) =>
  h(
    "ul",
    null,
    words.map((one) => h("li", null, one)),
  );

/** One dialog at a time; it leaves the page when it is closed, in whatever way. */
class OrderDialog {
  /** `ask` is {title, words, action, path, done}: `path` is where the order goes, `done` what is said when it was taken. */
  constructor(ask) {
    this.ask = ask;
    this.body = h("div", { class: "order-words" }, list(ask.words));
    this.problem = h("p", { class: "warning", role: "alert", hidden: true });
    this.go = h("button", { type: "button", class: "danger", on: { click: () => this.send() } }, ask.action);
    this.element = h(
      "dialog",
      { class: "order", "aria-labelledby": "order-title" },
      h("h2", { id: "order-title" }, ask.title),
      ask.choice ?? null,
      this.body,
      this.problem,
      h(
        "div",
        { class: "order-buttons" },
        // The harmless one has the focus first.
        h("button", { type: "button", autofocus: true, on: { click: () => this.element.close() } }, "Cancel"),
        this.go,
      ),
    );
    this.element.addEventListener("close", () => this.element.remove());
  }

  open() {
    document.body.append(this.element);
    this.element.showModal();
  }

  /** Another order than before, as when another role was chosen. */
  change(ask) {
    this.ask = { ...this.ask, ...ask };
    replace(this.body, list(this.ask.words));
    this.go.textContent = this.ask.action;
    this.isForced = false;
    this.problem.hidden = true;
  }

  async send() {
    this.go.disabled = true;
    try {
      await order(`${this.ask.path}${this.isForced ? "?force=true" : ""}`);
      this.element.close();
      toast(this.ask.done);
    } catch (problem) {
      this.problem.textContent = problem.message;
      this.problem.hidden = false;
      // The one refusal that may be overruled, now that its words have been read.
      this.isForced = problem.code === LAST_DECODE_NODE;
      this.go.textContent = this.isForced ? `${this.ask.action} all the same` : this.ask.action;
    }
    this.go.disabled = false;
  }
}

const address = (node, rest) => `/admin/nodes/${encodeURIComponent(node.name)}/${rest}`;

export function askDrain(node) {
  const dialog = new OrderDialog({
    title: `Drain ${node.name}?`,
    words: drainWords(node),
    action: "Drain",
    path: address(node, "drain"),
    done: `${node.name} is draining`,
  });
  dialog.open();
}

function roleAsk(node, role) {
  return {
    words: roleWords(node, role),
    action: `Make it a ${role} node`,
    path: address(node, `role/${encodeURIComponent(role)}`),
    done: `${node.name} is draining, then it comes back as a ${role} node`,
  };
}

export function askRole(node) {
  const roles = otherRoles(node);
  const select = h(
    "select",
    { id: "order-role", on: { change: () => dialog.change(roleAsk(node, select.value)) } },
    roles.map((role) => h("option", { value: role }, role)),
  );
  const choice = h("label", { class: "field" }, h("span", null, `It is a ${text(node.role)} node. New role`), select);
  const dialog = new OrderDialog({ title: `Change the role of ${node.name}?`, choice, ...roleAsk(node, roles[0]) });
  dialog.open();
}
