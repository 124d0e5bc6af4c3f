// How a request went, as a glyph, a word and a class; never by colour alone.

export function outcomeOf(record) {
  if (record.outcome === null || record.outcome === undefined)
    return { glyph: "▸", word: record.state ?? "running", className: "is-running" };
  if (record.outcome === "ok") return { glyph: "✓", word: "ok", className: "is-ok" };
  if (record.outcome === "cancelled") return { glyph: "⊘", word: "cancelled", className: "is-cancelled" };
  return { glyph: "✕", word: record.outcome.replaceAll("_", " "), className: "is-failed" };
}

/** The id that a link should carry: the x-request-id, else what the record has. */
export const idOf = (record) => record.id || record.response_id || record.trace_id || String(record.seq);
