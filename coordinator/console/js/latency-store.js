// Reads `/metrics` and `/admin/slo` every few seconds, and keeps the readings, so that the last minutes can be told from all time.

import { getJson, getText } from "./api.js";
import { histogramsByLane, parseMetrics, since } from "./prometheus.js";

const EVERY_MS = 5000;
/** Fifteen minutes. */
const READINGS_MAX = 180;
export const METRICS = ["baton_ttft_seconds", "baton_itl_seconds"];

/** Event: `change`. Reading starts with the first view that wants it and goes on behind the others. */
export class LatencyStore extends EventTarget {
  constructor() {
    super();
    this.readings = [];
    this.slo = null;
    this.problem = null;
    this.read();
    this.timer = setInterval(() => this.read(), EVERY_MS);
  }

  async read() {
    if (this.isReading) return;
    this.isReading = true;
    const [metrics, slo] = await Promise.allSettled([getText("/metrics"), getJson("/admin/slo")]);
    this.isReading = false;
    if (metrics.status === "fulfilled") {
      const samples = parseMetrics(metrics.value);
      this.readings.push({
        at: Date.now(),
        ...Object.fromEntries(METRICS.map((name) => [name, histogramsByLane(samples, name)])),
      });
      if (this.readings.length > READINGS_MAX) this.readings.shift();
    }
    if (slo.status === "fulfilled") this.slo = slo.value;
    this.problem = metrics.reason?.message ?? slo.reason?.message ?? null;
    this.dispatchEvent(new Event("change"));
  }

  /** {histograms: Map lane → histogram, seconds}: of the last `windowMs`, or of all time with null (seconds is then null). */
  histograms(metric, windowMs) {
    const now = this.readings.at(-1);
    if (!now) return { histograms: new Map(), seconds: null };
    if (windowMs === null) return { histograms: now[metric], seconds: null };
    const before = this.readings.find((reading) => now.at - reading.at <= windowMs + EVERY_MS / 2) ?? now;
    const histograms = new Map(
      [...now[metric]].map(([lane, histogram]) => [lane, since(histogram, before[metric].get(lane))]),
    );
    return { histograms, seconds: (now.at - before.at) / 1000 };
  }

  /** [{name, ttft_ms_max, itl_ms_max}] of the profiles a lane's requests are judged by. */
  profilesOf(lane) {
    return (this.slo?.profiles ?? []).filter((profile) => profile.lanes?.some((one) => one.lane === lane));
  }
}
