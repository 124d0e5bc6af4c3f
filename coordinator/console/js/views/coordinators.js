// The top of the cluster map: the coordinator that serves this page, and what is known of the others.

import { h, replace } from "../dom.js";
import { clock, count, NONE, number, seconds, text } from "../format.js";
import { link } from "../router.js";

/** Coordinators that the nodes say they are connected to: the most that one of them counts. What a gone node said is old. */
const heardBy = (nodes) =>
  Math.max(0, ...nodes.filter(({ state }) => state !== "lost" && state !== "left").map((node) => node.coordinators ?? 0));

/** The names in etcd, this one's left out; and how many more the nodes count, whose names nobody here knows. */
function othersOf(page) {
  const names = (page.membership?.coordinators ?? []).filter((name) => name !== page.coordinator.name);
  return { names, unnamed: Math.max(0, heardBy(page.nodes) - 1 - names.length) };
}

function ownCard(page, at) {
  const { coordinator, membership } = page;
  const waiting = Object.entries(coordinator.waiting ?? {})
    .map(([lane, n]) => `${lane} ${number(n)}`)
    .join(", ");
  const isReady = coordinator.readiness === "ready";
  const registered = membership?.kind === "etcd" ? `${number(membership.coordinators?.length ?? 0)} in etcd, ` : "";
  const heard = page.nodes.length > 0 ? `nodes connected to ${number(heardBy(page.nodes))}` : NONE;
  return [
    h(
      "header",
      null,
      h("a", { class: "node-name", href: link("requests") }, text(coordinator.name)),
      h(
        "span",
        { class: `node-state ${isReady ? "" : "is-failed"}` },
        `${isReady ? "●" : "✕"} ${text(coordinator.readiness).replaceAll("_", " ")}`,
      ),
    ),
    coordinator.not_ready_because ? h("p", { class: "warning" }, coordinator.not_ready_because) : null,
    coordinator.unsplit_because ? h("p", { class: "warning" }, coordinator.unsplit_because) : null,
    membership?.trouble ? h("p", { class: "warning" }, `etcd: ${membership.trouble}`) : null,
    h(
      "dl",
      null,
      [
        ["model", text(coordinator.model)],
        ["unfinished", count(coordinator.unfinished, "request")],
        ["waiting", waiting || "none"],
        ["listens on", text(coordinator.listen)],
        ["version, up", `${text(coordinator.version)}, ${seconds(coordinator.uptime_s)}`],
        ["coordinators", `${registered}${heard}`],
        ["as of", clock(at, false)],
      ].map(([name, value]) => [h("dt", null, name), h("dd", { title: value }, value)]),
    ),
  ];
}

function otherCard(name, data, words) {
  return h(
    "article",
    { class: "node-card coordinator-card is-other", data },
    h("header", null, h("span", { class: "node-name" }, name), h("span", { class: "muted" }, "coordinator")),
    h("p", { class: "muted" }, words),
  );
}

function otherCards(page) {
  const { names, unnamed } = othersOf(page);
  const inEtcd = "Registered in etcd. It serves the same nodes; its requests are on its own console.";
  const cards = names.map((name) => otherCard(name, { coordinator: name }, inEtcd));
  if (unnamed > 0) {
    const words = "The nodes are connected to it. A name is known here only with etcd as membership.";
    cards.push(otherCard(`${number(unnamed)} more`, { coordinator: "" }, words));
  }
  return cards;
}

/** {element, own, update(page, at)}; `own` is the card of this coordinator, which stays the same element. */
export class Coordinators {
  constructor() {
    this.own = h("article", { class: "node-card coordinator-card", data: { node: "coordinator" } });
    this.others = h("div", { class: "other-coordinators" });
    this.element = h("section", { class: "map-top", "aria-label": "Coordinators" }, this.own, this.others);
  }

  update(page, at) {
    const key = JSON.stringify([page.coordinator, page.membership, heardBy(page.nodes), Math.floor(at / 1000)]);
    if (key === this.key) return;
    this.key = key;
    replace(this.own, ownCard(page, at));
    replace(this.others, otherCards(page));
    this.others.hidden = this.others.childElementCount === 0;
  }
}
