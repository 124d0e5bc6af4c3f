// Reads the Prometheus text format, and percentiles out of its histograms.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

function valueOf(text) {
  if (text === "+Inf" || text === "Inf") return Infinity;
  if (text === "-Inf") return -Infinity;
  return Number(text);
}

const unescaped = (text) => text.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));

/** [{name, labels, value}]; comments, exemplars and broken lines are passed over. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries(
      [...(match[2] ?? "").matchAll(LABEL)].map(([, key, value]) => [key, unescaped(value)]),
    );
    samples.push({ name: match[1], labels, value: valueOf(match[3]) });
  }
  return samples;
}

/** Map of lane → {edges, counts, total, sum}: counts per bucket (not cumulative), the last one beyond the last edge. */
export function histogramsByLane(samples, metric) {
  const cumulative = new Map();
  const sums = new Map();
  for (const { name, labels, value } of samples) {
    const lane = labels.lane ?? "all";
    if (name === `${metric}_bucket` && Number.isFinite(value)) {
      const edges = cumulative.get(lane) ?? new Map();
      edges.set(valueOf(labels.le), (edges.get(valueOf(labels.le)) ?? 0) + value);
      cumulative.set(lane, edges);
    }
    if (name === `${metric}_sum`) sums.set(lane, (sums.get(lane) ?? 0) + value);
  }
  const result = new Map();
  for (const [lane, byEdge] of [...cumulative].sort(([a], [b]) =>
    a === "interactive" ? -1 : b === "interactive" ? 1 : a.localeCompare(b),
  )) {
    const sorted = [...byEdge].sort(([a], [b]) => a - b);
    const counts = sorted.map(([, n], at) => n - (at > 0 ? sorted[at - 1][1] : 0));
    result.set(lane, {
      edges: sorted.map(([edge]) => edge),
      counts,
      total: sorted.at(-1)?.[1] ?? 0,
      sum: sums.get(lane) ?? null,
    });
  }
  return result;
}

/** What came between two readings. A bucket that went back was restarted, even if there are more samples than before, and all is new. */
export function since(now, before) {
  const isAlike = before && before.edges.length === now.edges.length;
  if (!isAlike || now.counts.some((n, at) => n < before.counts[at])) return now;
  return {
    edges: now.edges,
    counts: now.counts.map((n, at) => n - before.counts[at]),
    total: now.total - before.total,
    sum: now.sum === null || before.sum === null ? null : now.sum - before.sum,
  };
}

/** The q-quantile, between the edges of its bucket as PromQL does it; {atLeast} when it lies beyond the last edge, null for no sample. */
export function quantile(histogram, q) {
  const { edges, counts, total } = histogram;
  if (!(total > 0)) return null;
  const rank = q * total;
  let seen = 0;
  for (let at = 0; at < counts.length; at += 1) {
    if (seen + counts[at] >= rank && counts[at] > 0) {
      const low = at > 0 ? edges[at - 1] : 0;
      if (!Number.isFinite(edges[at])) return { atLeast: low };
      return { value: low + (edges[at] - low) * ((rank - seen) / counts[at]) };
    }
    seen += counts[at];
  }
  return null;
}

/** The share at or below `limit`; null unless the limit is an edge, because between edges nobody knows. */
export function shareWithin(histogram, limit) {
  const at = histogram.edges.findIndex((edge) => Math.abs(edge - limit) < 1e-9);
  if (at < 0 || !(histogram.total > 0)) return null;
  return histogram.counts.slice(0, at + 1).reduce((sum, n) => sum + n, 0) / histogram.total;
}
