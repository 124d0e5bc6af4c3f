// Reports of comparisons and runs: a list, and one report in a frame that may do nothing but show itself.

import { getJson } from "../api.js";
import { h, replace, table } from "../dom.js";
import { bytes } from "../format.js";
import { link } from "../router.js";

const COLUMNS = [{ title: "Report" }, { title: "Written" }, { title: "Size", className: "number" }];
const written = (report) => new Date(report.modified_unix_ms).toISOString().slice(0, 16).replace("T", " ") + " UTC";
const address = (name) => `/admin/reports/${encodeURIComponent(name)}`;

function list(page) {
  if (!page.is_enabled) {
    return h("p", { class: "muted" }, "This coordinator shows no reports: start it with --reports-dir FOLDER.");
  }
  if (page.reports.length === 0) {
    return h("p", { class: "muted" }, "The folder has no report yet: baton compare --out FOLDER/NAME writes one.");
  }
  const rows = page.reports.map((report) => [
    h("a", { href: link("reports", report.name) }, report.name),
    written(report),
    bytes(report.bytes),
  ]);
  return table("Reports, the newest first", COLUMNS, rows);
}

function one(name) {
  return [
    h(
      "div",
      { class: "bar" },
      h("a", { href: link("reports") }, "All reports"),
      h("a", { href: address(name), target: "_blank", rel: "noopener" }, "Open alone, to print"),
    ),
    h("iframe", { class: "report-frame", sandbox: "", src: address(name), title: `Report ${name}` }),
  ];
}

export function mountReports(root, route) {
  const gone = new AbortController();
  const body = h("div", { class: "reports" });
  root.append(h("h1", { class: "visually-hidden" }, route.id ? `Report ${route.id}` : "Reports"), body);
  if (route.id) {
    replace(body, one(route.id));
  } else {
    getJson("/admin/reports", gone.signal).then(
      (page) => replace(body, list(page)),
      (problem) => gone.signal.aborted || replace(body, h("p", { role: "alert" }, problem.message)),
    );
  }
  return { title: route.id ? `Report ${route.id}` : "Reports", dispose: () => gone.abort() };
}
