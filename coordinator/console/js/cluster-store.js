// What the once-a-second page of the cluster says now and said in the last minutes; the coordinator keeps no history.

/** 15 minutes of one sample a second. */
const SAMPLES_MAX = 900;
/** Handoffs come in bursts: a rate over one second would flicker between nothing and everything. */
const RATE_SAMPLES = 5;

export const BLOCK_STATES = ["active", "cached", "reserved", "in_transfer", "quarantined", "free"];

export const pairKey = (pair) => `${pair.prefill} → ${pair.decode}`;

/** Bytes a second between two samples; a counter that went back was restarted and counts from zero. */
export function rateBetween(older, newer, key) {
  const after = newer.pairs[key];
  const before = older.pairs[key];
  if (after === undefined || before === undefined || newer.at <= older.at) return null;
  return (after >= before ? after - before : after) / ((newer.at - older.at) / 1000);
}

/** Event: `change`, after every page. */
export class ClusterStore extends EventTarget {
  constructor(live) {
    super();
    this.page = null;
    this.at = null;
    this.samples = [];
    live.addEventListener("cluster", ({ detail }) => this.take(detail, Date.now()));
  }

  take(page, at) {
    if (!Array.isArray(page?.nodes) || !Array.isArray(page?.pairs)) return;
    this.page = page;
    this.at = at;
    this.samples.push({
      at,
      nodes: Object.fromEntries(page.nodes.map((node) => [node.name, node.kv_blocks])),
      pairs: Object.fromEntries(page.pairs.map((pair) => [pairKey(pair), pair.kv_bytes_total])),
    });
    if (this.samples.length > SAMPLES_MAX) this.samples.shift();
    this.dispatchEvent(new Event("change"));
  }

  /** KV bytes a second of a pair over the last seconds; null until two samples have it. */
  rateOf(pair) {
    const recent = this.samples.slice(-RATE_SAMPLES - 1);
    if (recent.length < 2) return null;
    return rateBetween(recent[0], recent.at(-1), pairKey(pair));
  }

  nodesOf(role) {
    return (this.page?.nodes ?? []).filter((node) => node.role === role);
  }

  /** The role of a node by name, also for those that have left while their requests are still listed. */
  roleOf(name) {
    const known = this.page?.nodes.find((node) => node.name === name);
    if (known) return known.role;
    return /^(prefill|decode)/.exec(name ?? "")?.[1] ?? "coordinator";
  }
}
