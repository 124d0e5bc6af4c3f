// Makes a waterfall page ready to draw: rows, processes, the time range, and what the clocks can and cannot say.

/** Coordinator, prefill or decode: what a process is coloured by. */
export function roleOfService(service, process) {
  for (const role of ["prefill", "decode", "coordinator"]) if (service?.includes(role)) return role;
  return /^(prefill|decode)/.exec(process ?? "")?.[1] ?? "coordinator";
}

/** Times come with three decimals. */
const ROUNDING_MS = 0.002;

const finite = (value, fallback) => (Number.isFinite(value) ? value : fallback);

function normalised(span, request) {
  const start = finite(span.start_ms, 0);
  // A span that has not ended reaches as far as the request has come.
  const end = finite(span.end_ms, Math.max(start, finite(request?.e2e_ms, start)));
  return {
    ...span,
    start,
    end,
    isOpen: !Number.isFinite(span.end_ms),
    depth: Math.max(0, finite(span.depth, 0)),
    role: roleOfService(span.service, span.process),
    events: (span.events ?? []).filter((event) => Number.isFinite(event.at_ms)),
    links: span.links ?? [],
    attributes: span.attributes ?? {},
    warnings: [],
  };
}

/**
 * Clocks of two processes are compared with the errors of both. A span that begins before what it follows by more than that is a
 * fault of the clocks or of the spans; it is said, not straightened.
 */
function checkOrder(span, before, errorOf, isLink) {
  if (!before) return;
  const early = before.start - span.start;
  if (early <= 0) return;
  const error = span.process === before.process ? 0 : errorOf(span.process) + errorOf(before.process);
  const what = isLink ? `the linked ${before.name}` : `its parent ${before.name}`;
  span.warnings.push({ early_ms: early, error_ms: error, isBeyond: early > error + ROUNDING_MS, what });
}

function checkEnd(span) {
  if (span.end < span.start) {
    span.warnings.push({
      early_ms: span.start - span.end,
      error_ms: 0,
      isBeyond: true,
      what: "its own start (it ends there)",
    });
  }
}

/** {spans, byId, processes, clocks, from, to, request}; `from` is below 0 when a span begins before the request does. */
export function modelOf(page) {
  const request = page.request ?? {};
  const spans = (page.spans ?? []).map((span) => normalised(span, request));
  const byId = new Map(spans.map((span) => [span.span_id, span]));
  const clocks = new Map((page.clocks ?? []).map((one) => [one.node, one]));
  const errorOf = (process) => finite(clocks.get(process)?.error_ms, 0);
  for (const span of spans) {
    checkOrder(span, byId.get(span.parent_span_id), errorOf, false);
    for (const id of span.links) checkOrder(span, byId.get(id), errorOf, true);
    checkEnd(span);
  }
  const processes = [];
  for (const span of spans) {
    if (!processes.some((one) => one.name === span.process)) {
      processes.push({
        name: span.process,
        service: span.service,
        role: span.role,
        clock: clocks.get(span.process) ?? null,
      });
    }
  }
  const last = Math.max(finite(request.e2e_ms, 0), 0.001, ...spans.map((span) => span.end));
  return { request, spans, byId, processes, errorOf, from: Math.min(0, ...spans.map((span) => span.start)), to: last };
}

/** Rows in drawing order: as called (parents above children) or under one heading for each process. */
export function rowsOf(model, grouping) {
  if (grouping === "calls") return model.spans.map((span) => ({ span, indent: span.depth }));
  return model.processes.flatMap((process) => {
    const own = model.spans
      .filter((span) => span.process === process.name)
      .sort((a, b) => a.start - b.start || b.end - a.end);
    const top = Math.min(...own.map((span) => span.depth));
    return [{ process }, ...own.map((span) => ({ span, indent: span.depth - top + 1 }))];
  });
}

/** Stages to the first token in the order they happened, what they add up to, and what nobody measured. */
export function ttftParts(request) {
  const stages = (request.stages ?? []).filter((stage) => stage.phase === "ttft" && Number.isFinite(stage.ms));
  const sum = stages.reduce((total, stage) => total + stage.ms, 0);
  const ttft = finite(request.ttft_ms, null);
  const unattributed = finite(request.unattributed_ms, ttft === null ? null : ttft - sum);
  return { stages, sum, ttft, unattributed };
}
