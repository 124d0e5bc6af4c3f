// Deep links: `#/requests/ID`, `#/requests?breached=true`; parsing, building and following them.

export const VIEWS = ["cluster", "requests", "latency", "kv", "playground", "reports"];

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** {view, id, query}; an unknown view is the cluster map. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [view, ...rest] = path.split("/");
  const id = rest.length > 0 ? decoded(rest.join("/")) : "";
  return { view: VIEWS.includes(view) ? view : "cluster", id: id || null, query: new URLSearchParams(query) };
}

export function link(view, id = null, query = {}) {
  const search = new URLSearchParams(query).toString();
  return `#/${view}${id === null ? "" : `/${encodeURIComponent(id)}`}${search ? `?${search}` : ""}`;
}

export const absolute = (hash) => `${location.origin}${location.pathname}${hash}`;

/** Replaces the address without a new history entry and without telling the views (they made the change). */
export function rewrite(hash) {
  if (location.hash !== hash) history.replaceState(history.state, "", hash);
}

export function startRouter(follow) {
  const now = () => follow(parse(location.hash));
  window.addEventListener("hashchange", now);
  now();
}
