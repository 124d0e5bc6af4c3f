// Starts the console: the stores, the header, and whichever view the address names.

import { ClusterStore } from "./cluster-store.js";
import { startConnection } from "./connection.js";
import { h, replace } from "./dom.js";
import { Keys } from "./keys.js";
import { Live } from "./live.js";
import { RequestStore } from "./request-store.js";
import { link, startRouter } from "./router.js";
import { startSession } from "./session.js";
import { startTheme } from "./theme.js";
import { mountCluster } from "./views/cluster.js";
import { mountKv } from "./views/kv.js";
import { mountLatency } from "./views/latency.js";
import { mountPlayground } from "./views/playground.js";
import { mountReports } from "./views/reports.js";
import { mountRequest } from "./views/request.js";
import { mountRequests } from "./views/requests.js";

const NAV = [
  ["cluster", "Cluster", "c"],
  ["requests", "Requests", "r"],
  ["latency", "Latency", "l"],
  ["kv", "KV", "k"],
  ["playground", "Playground", "p"],
  ["reports", "Reports", "o"],
];
const MOUNTS = {
  cluster: mountCluster,
  requests: mountRequests,
  request: mountRequest,
  latency: mountLatency,
  kv: mountKv,
  playground: mountPlayground,
  reports: mountReports,
};

const byId = (id) => document.getElementById(id);
const main = byId("main");
const live = new Live();
const app = { live, cluster: new ClusterStore(live), requests: new RequestStore(live), keys: null, navigate };
/** What a view gives back from mounting: {title, keys?, follow?(route), dispose?()}. */
let open = null;

function navigate(hash) {
  location.hash = hash;
}

function markNav(view) {
  for (const anchor of byId("nav").children) {
    if (anchor.dataset.view === view) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
}

function follow(route) {
  const name = route.view === "requests" && route.id !== null ? "request" : route.view;
  const isSame = open?.name === name && open.id === route.id && open.follow;
  if (isSame) {
    open.follow(route);
  } else {
    open?.dispose?.();
    replace(main);
    main.className = `view view-${name}`;
    app.keys.setView({});
    const mounted = MOUNTS[name](main, route, app);
    open = { name, id: route.id, ...mounted };
    app.keys.setView(mounted.keys ?? {});
    document.title = `${mounted.title} · baton`;
    if (document.activeElement === document.body || !document.activeElement) main.focus({ preventScroll: true });
  }
  markNav(route.view);
}

function startSearch() {
  const field = byId("open-id");
  byId("open-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const id = field.value.trim();
    if (!id) return;
    field.value = "";
    field.blur();
    navigate(link("requests", id));
  });
  return () => {
    field.focus();
    field.select();
  };
}

replace(
  byId("nav"),
  NAV.map(([view, title, key]) => h("a", { href: link(view), data: { view }, title: `${title} (g ${key})` }, title)),
);
app.keys = new Keys({ navigate, focusSearch: startSearch(), changeTheme: startTheme(byId("theme")) });
byId("help").addEventListener("click", () => app.keys.showHelp());
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
startConnection(live, byId("live"), byId("banner"));
startSession(byId("sign-out"));
startRouter(follow);
live.start();
