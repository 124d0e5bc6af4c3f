// The request records this page knows: read page by page, kept current by events, filtered and sorted here.

import { getJson } from "./api.js";

/** As many as a coordinator keeps by default; the oldest go first. */
const RECORDS_MAX = 10_000;
const PAGE = 1000;
const FIRST_PAGE = 200;

/** The filters of `/admin/requests`, in the order of the filter bar. */
export const FILTERS = ["outcome", "lane", "model", "node", "breached", "stalled", "running", "slower_than_ms"];

const isTrue = (text) => text === "true";

/** A function that says whether a record passes the filters of `query` (all must hold, as on the server). */
export function filterOf(query) {
  const get = (name) => query.get(name) ?? "";
  const [outcome, lane, model, node] = ["outcome", "lane", "model", "node"].map(get);
  const slower = Number.parseFloat(get("slower_than_ms"));
  return (r) =>
    (!outcome ||
      (outcome === "failed"
        ? r.outcome !== null && r.outcome !== "ok" && r.outcome !== "cancelled"
        : r.outcome === outcome)) &&
    (!lane || r.lane === lane) &&
    (!model || r.model === model) &&
    (!node || r.prefill_node === node || r.decode_node === node) &&
    (!isTrue(get("breached")) || (r.breached?.length ?? 0) > 0) &&
    (!isTrue(get("stalled")) || r.stall_count > 0) &&
    (!get("running") || (r.outcome === null) === isTrue(get("running"))) &&
    (!Number.isFinite(slower) || r.e2e_ms > slower);
}

/** Sorted copies are cheap (10,000 records: a few ms); nothing-values go last in either direction. */
export function sorted(records, key, isDescending) {
  const sign = isDescending ? -1 : 1;
  const value = (r) => (Array.isArray(r[key]) ? r[key].length : r[key]);
  return records.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const [noX, noY] = [x === null || x === undefined, y === null || y === undefined];
    if (noX || noY) return noX - noY || b.seq - a.seq;
    if (x === y) return b.seq - a.seq;
    return x < y ? -sign : sign;
  });
}

/** Event: `change`. `problem` holds the words of the last failed read. */
export class RequestStore extends EventTarget {
  constructor(live) {
    super();
    this.bySeq = new Map();
    this.kept = null;
    this.forgotten = 0;
    this.isLoading = false;
    this.hasLoaded = false;
    this.problem = null;
    this.notice = null;
    live.addEventListener("request", ({ detail }) => this.upsert([detail]));
    live.addEventListener("open", () => this.load());
    live.addEventListener(
      "state",
      ({ detail }) => detail === "away" && this.problem === null && !this.hasLoaded && !this.isLoading && this.load(),
    );
    live.addEventListener("reload", ({ detail }) => {
      this.notice = detail;
      this.load();
    });
  }

  upsert(records) {
    for (const record of records) {
      if (!Number.isFinite(record?.seq)) continue;
      const known = this.bySeq.get(record.seq);
      // A page read before an event must not take an ended request back. One of another trace is of a coordinator's earlier life.
      if (known?.trace_id === record.trace_id && known.outcome !== null && record.outcome === null) continue;
      this.bySeq.set(record.seq, record);
    }
    this.forgetOldest();
    this.changed();
  }

  forgetOldest() {
    const excess = this.bySeq.size - RECORDS_MAX;
    if (excess <= 0) return;
    for (const seq of [...this.bySeq.keys()].sort((a, b) => a - b).slice(0, excess)) this.bySeq.delete(seq);
  }

  /** The newest first, quickly; then the older pages behind them. */
  async load() {
    this.reading?.abort();
    const reading = new AbortController();
    this.reading = reading;
    this.isLoading = true;
    this.changed();
    const fresh = new Map();
    const knownBefore = [...this.bySeq.keys()];
    try {
      let before = null;
      do {
        const page = await getJson(this.path(before), reading.signal);
        if (before === null) this.dropEarlierLife(knownBefore, page.records);
        for (const record of page.records) fresh.set(record.seq, record);
        this.kept = page.kept;
        this.forgotten = page.forgotten;
        this.upsert(page.records);
        before = page.records.length > 0 ? page.next_before : null;
      } while (before !== null && before !== undefined && fresh.size < RECORDS_MAX);
      // What came as an event while the pages were read stays.
      for (const seq of knownBefore) if (!fresh.has(seq)) this.bySeq.delete(seq);
      this.problem = null;
      this.hasLoaded = true;
    } catch (problem) {
      if (reading.signal.aborted) return;
      this.problem = problem.message;
    }
    this.isLoading = false;
    this.changed();
  }

  /** A coordinator that started again counts from 1. Its first page has the newest record, so all are gone of which one was newer. */
  dropEarlierLife(knownBefore, newestRecords) {
    const newest = Math.max(0, ...newestRecords.map((record) => record.seq));
    if (knownBefore.every((seq) => seq <= newest)) return;
    for (const seq of knownBefore) this.bySeq.delete(seq);
  }

  path(before) {
    return before === null ? `/admin/requests?limit=${FIRST_PAGE}` : `/admin/requests?limit=${PAGE}&before=${before}`;
  }

  /** More records pass the filters on the server than are known here: asks it for them, the slowest first. */
  async askFor(query, isSlowestFirst) {
    const wanted = new URLSearchParams({ limit: String(PAGE) });
    for (const name of FILTERS) {
      // `failed` is a word of this page: every outcome but ok and cancelled.
      if (query.get(name) && !(name === "outcome" && query.get(name) === "failed")) wanted.set(name, query.get(name));
    }
    if (isSlowestFirst) wanted.set("slowest", "true");
    try {
      this.upsert((await getJson(`/admin/requests?${wanted}`)).records);
    } catch (problem) {
      this.problem = problem.message;
      this.changed();
    }
  }

  get isComplete() {
    return this.hasLoaded && !this.isLoading && (this.kept === null || this.kept <= RECORDS_MAX);
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}
