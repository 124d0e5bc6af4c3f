// Numbers as words: every figure with its unit, "–" for what is not known.

export const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant figures below 100, whole numbers above, thousands separated. */
export function number(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** A duration given in milliseconds. */
export function ms(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size < 1000) return `${number(value)} ms`;
  if (size < 60_000) return `${value % 1000 === 0 ? value / 1000 : (value / 1000).toFixed(2)} s`;
  const whole = Math.round(value / 1000);
  return `${Math.trunc(whole / 60)} min ${Math.abs(whole % 60)} s`;
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172_800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86_400).toFixed(1)} days`;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  let unit = 0;
  let left = value;
  while (Math.abs(left) >= 1024 && unit < BYTE_UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? number(left) : left.toFixed(left >= 100 ? 0 : 1)} ${BYTE_UNITS[unit]}`;
}

export const rate = (value) => (isNumber(value) ? `${bytes(value)}/s` : NONE);
export const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;
export const percent = (share, digits = 1) => (isNumber(share) ? `${(share * 100).toFixed(digits)} %` : NONE);
export const text = (value) => (value === null || value === undefined || value === "" ? NONE : String(value));

/** A column of durations under a heading that says ms: the same digits for whole numbers as for others. */
export function inMs(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  return size >= 100 ? number(Math.round(value)) : value.toFixed(size >= 10 ? 1 : 2);
}

/** A clock against the coordinator's: "+0.02 ± 0.05 ms". */
export function clockWords(clock) {
  if (!clock || !isNumber(clock.offset_ms)) return NONE;
  return `${clock.offset_ms < 0 ? "−" : "+"}${inMs(Math.abs(clock.offset_ms))} ± ${inMs(clock.error_ms)} ms`;
}

export function clock(unixMs, withMillis = true) {
  if (!isNumber(unixMs)) return NONE;
  const at = new Date(unixMs);
  const two = (part) => String(part).padStart(2, "0");
  const base = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return withMillis ? `${base}.${String(at.getMilliseconds()).padStart(3, "0")}` : base;
}

export function dateAndTime(unixMs) {
  if (!isNumber(unixMs)) return NONE;
  const at = new Date(unixMs);
  const two = (part) => String(part).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(unixMs)}`;
}

/** `prefill_forward` as it is written for people. */
export const words = (name) => text(name).replaceAll("_", " ");
