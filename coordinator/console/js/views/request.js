// One request: where its time went, as a sentence, as stages to the first token, and as a waterfall of spans.

import { getJson } from "../api.js";
import { Waterfall } from "../charts/waterfall.js";
import { ttftBar } from "../charts/ttft-bar.js";
import { copyButton, download } from "../copy.js";
import { h, replace } from "../dom.js";
import { idOf } from "../outcome.js";
import { absolute, link } from "../router.js";
import { modelOf } from "../trace-model.js";
import { clocksPart, facts, headline, identity, legsPart, promptsPart, restPart, stallsPart } from "./request-facts.js";
import { showSpan } from "./span-details.js";

const part = (title, className, ...content) =>
  h("section", { class: `panel ${className}` }, h("h2", null, title), content);
/** Only what a shell takes as it is may stay without quotes. */
const shellWord = (id) => (/^[\w.:-]+$/.test(id) ? id : `'${id.replaceAll("'", "'\\''")}'`);
/** A client may begin its id like a flag. */
const traceCommand = (id) => `baton trace ${id.startsWith("-") ? "-- " : ""}${shellWord(id)}`;

class RequestView {
  constructor(root, route, app) {
    Object.assign(this, { root, app, id: route.id, page: null, record: null, waterfall: null });
    this.body = h("div", { class: "request-body" });
    this.heading = h("h1", { class: "mono" }, this.id);
    root.append(
      h(
        "div",
        { class: "request-head" },
        h("a", { class: "back", href: this.back(), title: "Back to the list (Esc)" }, "‹ Requests"),
        this.heading,
        (this.tools = this.buttons()),
      ),
      this.body,
    );
    replace(this.body, h("p", { class: "muted pad" }, "Asking the nodes for their spans."));
    this.onRequest = ({ detail }) => this.heard(detail);
    app.live.addEventListener("request", this.onRequest);
    this.onReload = () => this.load();
    app.live.addEventListener("reload", this.onReload);
    // The address of the viewer is on the page of the cluster, which may come later.
    this.onCluster = () => this.showViewer();
    app.cluster.addEventListener("change", this.onCluster);
    this.load();
  }

  back() {
    return this.app.requestsLink ?? link("requests");
  }

  buttons() {
    const json = () => JSON.stringify({ ...this.page, request: this.record }, null, 2);
    this.viewer = h(
      "a",
      {
        class: "viewer",
        target: "_blank",
        rel: "noopener noreferrer",
        title: "The trace in your viewer, which has only what was sampled and exported",
        hidden: true,
      },
      "Open in trace viewer",
    );
    return h(
      "div",
      { class: "request-buttons" },
      this.viewer,
      copyButton("Copy as JSON", "JSON", json),
      h(
        "button",
        { type: "button", class: "small", on: { click: () => download(`baton-trace-${this.id}.json`, json()) } },
        "Download JSON",
      ),
      copyButton("Copy CLI", "command", () => traceCommand(this.id)),
      copyButton("Copy link", "link", () => absolute(link("requests", this.id))),
    );
  }

  showViewer() {
    const template = this.app.cluster.page?.coordinator?.trace_viewer_url;
    const id = this.record?.trace_id;
    // The coordinator has checked it; a link to anything else than a web page would be worth an attack.
    const isWeb = /^https?:\/\//i.test(template ?? "");
    const href = id && isWeb ? template.replaceAll("{trace_id}", encodeURIComponent(id)) : null;
    this.viewer.hidden = href === null;
    if (href !== null && this.viewer.getAttribute("href") !== href) this.viewer.setAttribute("href", href);
  }

  /** The same request, changed: read it again, for its stages and spans are only on its own pages. */
  heard(summary) {
    if (!this.record || summary.seq !== this.record.seq || this.record.outcome !== null) return;
    this.load();
  }

  async load() {
    this.reading?.abort();
    const reading = new AbortController();
    this.reading = reading;
    const id = encodeURIComponent(this.id);
    const [record, page] = await Promise.allSettled([
      getJson(`/admin/requests/${id}`, reading.signal),
      getJson(`/admin/traces/${id}?view=waterfall`, reading.signal),
    ]);
    if (reading.signal.aborted) return;
    if (record.status === "rejected" && page.status === "rejected") {
      this.fail(record.reason);
      return;
    }
    this.page = page.value ?? null;
    // Either page may know more: failed legs are only promised on the first.
    this.record = { ...page.value?.request, ...record.value };
    this.traceProblem = page.reason;
    this.draw();
  }

  fail(problem) {
    // What is already on the page stays; the banner says that the coordinator is away.
    if (this.record) return;
    this.tools.hidden = true;
    const isGone = problem.status === 404;
    replace(
      this.body,
      h(
        "div",
        { class: "nothing", role: "alert" },
        h("h2", null, isGone ? "Not kept" : "Could not be read"),
        h(
          "p",
          null,
          isGone
            ? "The coordinator keeps no request with this id: it was never here, or newer ones have taken its place, or the coordinator was restarted since."
            : problem.message,
        ),
        h(
          "p",
          null,
          h("button", { type: "button", on: { click: () => this.load() } }, "Try again"),
          " ",
          h("a", { href: link("requests") }, "All requests"),
        ),
      ),
    );
  }

  draw() {
    const r = this.record;
    this.tools.hidden = false;
    this.heading.textContent = idOf(r);
    this.showViewer();
    const chosenId = this.waterfall?.chosenId;
    this.waterfall?.dispose();
    const model = modelOf({ ...(this.page ?? {}), request: r });
    const bar = ttftBar(r, this.limit(r));
    replace(
      this.body,
      headline(r),
      facts(r),
      part(
        "Time to first token",
        "ttft-panel",
        bar ?? h("p", { class: "muted" }, r.outcome === null ? "No token yet." : "No token was sent."),
      ),
      this.waterfallPart(model, this.traceProblem),
      r.prompts?.length ? part(`Prompts (${r.prompts.length})`, "", promptsPart(r)) : null,
      h(
        "div",
        { class: "columns" },
        part(`Stalls${r.stalls?.length ? ` (${r.stalls.length})` : ""}`, "", stallsPart(r)),
        part("Failed legs", "", legsPart(r)),
        part("After the first token", "", restPart(r)),
        this.page ? part("Clocks and gaps", "", clocksPart(model, this.page)) : null,
        part("Identity", "", identity(r)),
      ),
    );
    if (model.spans.length > 0) this.startWaterfall(model, chosenId);
  }

  limit(r) {
    const profile = this.slo?.profiles?.find((one) => one.name === r.slo);
    if (!this.slo && !this.asksSlo) {
      this.asksSlo = true;
      // Only for the line of the limit: without it the page is whole.
      getJson("/admin/slo").then(
        (slo) => {
          this.slo = slo;
          if (this.root.isConnected && this.body.isConnected) this.draw();
        },
        () => {},
      );
    }
    return profile?.ttft_ms_max ?? null;
  }

  waterfallPart(model, problem) {
    if (problem)
      return part("Waterfall", "", h("p", { class: "warning" }, `The spans could not be read. ${problem.message}`));
    if (model.spans.length === 0) return part("Waterfall", "", h("p", { class: "muted" }, "No spans."));
    this.plot = h("div", { class: "waterfall-plot" });
    this.details = h("aside", { class: "details", "aria-label": "Details of the span", "aria-live": "polite" });
    const act = (label, title, run) =>
      h("button", { type: "button", class: "small", title, on: { click: run } }, label);
    const grouping = h(
      "select",
      {
        "aria-label": "Group spans",
        on: { change: () => this.waterfall.setGrouping((this.grouping = grouping.value)) },
      },
      h("option", { value: "calls" }, "as called"),
      h("option", { value: "processes" }, "by process"),
    );
    grouping.value = this.grouping ?? "calls";
    const legend = [
      ["coordinator", "coordinator"],
      ["prefill", "prefill node"],
      ["decode", "decode node"],
    ].map(([role, name]) => h("span", { class: `legend role-${role}` }, h("i"), name));
    return h(
      "section",
      { class: "panel waterfall-panel" },
      h(
        "div",
        { class: "panel-head" },
        h("h2", null, `Waterfall (${model.spans.length} spans)`),
        h(
          "span",
          { class: "legends" },
          legend,
          h("span", { class: "legend" }, h("b", { class: "mark-tick" }, "|"), "chunk or other event"),
          h("span", { class: "legend" }, h("b", { class: "mark-stall" }, "▼"), "stall"),
        ),
        h(
          "span",
          { class: "panel-tools" },
          grouping,
          act("Whole", "Whole request (0)", () => this.waterfall.whole()),
          act("To first token", "To the first token (f)", () => this.waterfall.toFirstToken()),
          act("+", "Zoom in (+); or drag over the plot", () => this.waterfall.zoom(0.6)),
          act("−", "Zoom out (−)", () => this.waterfall.zoom(1 / 0.6)),
        ),
      ),
      h("div", { class: "waterfall-split" }, this.plot, this.details),
    );
  }

  startWaterfall(model, chosenId) {
    const range = this.waterfall
      ? [
          this.waterfall.from,
          this.waterfall.to,
          this.waterfall.to < this.waterfall.highest || this.waterfall.from > this.waterfall.lowest,
        ]
      : null;
    this.waterfall = new Waterfall(this.plot, model, (span) => showSpan(this.details, span, model));
    if (this.grouping) this.waterfall.setGrouping(this.grouping);
    if (range?.[2]) this.waterfall.show(range[0], range[1]);
    this.waterfall.choose(model.byId.get(chosenId) ?? model.spans[0]);
  }

  keys() {
    const ofWaterfall = (name) => () => (this.waterfall ? this.waterfall.keys()[name]?.() : false);
    const names = ["j", "k", "h", "l", "+", "-", "=", "0", "f", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight"];
    return {
      ...Object.fromEntries(names.map((name) => [name, ofWaterfall(name)])),
      Escape: () => this.app.navigate(this.back()),
    };
  }

  dispose() {
    this.reading?.abort();
    this.waterfall?.dispose();
    this.app.live.removeEventListener("request", this.onRequest);
    this.app.live.removeEventListener("reload", this.onReload);
    this.app.cluster.removeEventListener("change", this.onCluster);
  }
}

export function mountRequest(root, route, app) {
  const view = new RequestView(root, route, app);
  return { title: `Request ${route.id}`, keys: view.keys(), dispose: () => view.dispose() };
}
