// Axes: round tick values and the mapping from values to pixels.

/** At most about `wanted` round values that cover [from, to]. */
export function ticks(from, to, wanted = 6) {
  const span = to - from;
  if (!(span > 0)) return [from];
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const values = [];
  for (let value = Math.ceil(from / step - 1e-9) * step; value <= to + step * 1e-9; value += step) {
    values.push(Math.abs(value) < step * 1e-9 ? 0 : Number(value.toPrecision(12)));
  }
  return values;
}

export function linear(from, to, left, right) {
  const factor = (right - left) / (to - from || 1);
  return (value) => left + (value - from) * factor;
}

/** A number on an axis: no more digits than its neighbours need. */
export function tickLabel(value) {
  return Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 4 });
}
