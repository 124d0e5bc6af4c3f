// One stream of server-sent events for the whole console: reconnects with back-off and says how it is doing.

import { getJson } from "./api.js";

const PATH = "/admin/events?kinds=request,cluster";
const BACK_OFF_MS = [500, 1000, 2000, 4000, 8000, 15_000];
/** `cluster` comes every second: silence this long means a dead connection that nobody closed. */
const SILENCE_MS_MAX = 6000;

/** Events: `request`, `cluster` (detail is the page), `open` (the first time), `reload` (after a gap; detail has words), `state`. */
export class Live extends EventTarget {
  constructor() {
    super();
    this.status = "connecting";
    this.lastDataAt = null;
    this.retryAt = null;
    this.failures = 0;
    this.wasOpen = false;
  }

  start() {
    this.connect();
    setInterval(() => this.watch(), 1000);
  }

  connect() {
    clearTimeout(this.timer);
    this.source?.close();
    this.openedAt = Date.now();
    this.retryAt = null;
    const source = new EventSource(PATH);
    this.source = source;
    const heard = (name, act) =>
      source.addEventListener(name, (event) => {
        if (this.source === source) act(event.data);
      });
    heard("request", (data) => this.take("request", data));
    heard("cluster", (data) => this.take("cluster", data));
    heard("lagged", (data) => this.lagged(data));
    source.onopen = () => this.source === source && this.opened();
    source.onerror = () => this.source === source && this.failed();
  }

  /** From here on nothing is missed: what is read now and what comes next fit together without a hole. */
  opened() {
    if (this.wasOpen) this.tell("reload", "The connection came back; the list was read again.");
    else this.tell("open");
    this.wasOpen = true;
  }

  take(name, data) {
    let detail;
    try {
      detail = JSON.parse(data);
    } catch {
      return;
    }
    this.lastDataAt = Date.now();
    this.failures = 0;
    if (this.status !== "live") this.set("live");
    this.tell(name, detail);
  }

  lagged(data) {
    let missed = null;
    try {
      missed = JSON.parse(data).missed;
    } catch {
      // The number is only for the message.
    }
    const events = Number.isFinite(missed) ? `${missed} events` : "some events";
    this.tell("reload", `This page was too slow for ${events}; the list was read again.`);
  }

  failed() {
    this.source?.close();
    this.source = null;
    const wait = BACK_OFF_MS[Math.min(this.failures, BACK_OFF_MS.length - 1)] * (0.8 + 0.4 * Math.random());
    this.failures += 1;
    this.retryAt = Date.now() + wait;
    this.timer = setTimeout(() => this.connect(), wait);
    this.set("away");
    // The stream does not say with which status it was refused. A session that has ended leads to the sign-in.
    getJson("/session").catch(() => {});
  }

  retryNow() {
    this.failures = 0;
    this.connect();
    this.set("connecting");
  }

  watch() {
    const since = Math.max(this.lastDataAt ?? 0, this.openedAt ?? 0);
    // A tab in the background runs its timers late: only an open stream that says nothing counts.
    if (this.source && Date.now() - since > SILENCE_MS_MAX) this.failed();
    this.tell("state", this.status);
  }

  set(status) {
    this.status = status;
    this.tell("state", status);
  }

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
