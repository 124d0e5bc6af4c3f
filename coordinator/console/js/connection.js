// Shows how fresh the page is: the light in the header, and a banner in words while the coordinator is away.

import { clock, seconds } from "./format.js";
import { h, replace, setText } from "./dom.js";

const STALE_MS = 3000;

export function startConnection(live, light, banner) {
  const dot = h("span", { class: "dot", "aria-hidden": "true" });
  const says = h("span");
  const retry = h("button", { type: "button", on: { click: () => live.retryNow() } }, "Try now");
  const what = h("span");
  replace(light, dot, says);
  replace(banner, h("strong", null, "The coordinator is away. "), what, " ", retry);

  const show = () => {
    const isStale = live.lastDataAt !== null && Date.now() - live.lastDataAt > STALE_MS;
    const state = live.status === "live" && isStale ? "late" : live.status;
    light.dataset.state = state;
    setText(says, { live: "live", late: "late", connecting: "connecting", away: "away" }[state]);
    light.title = live.lastDataAt === null ? "No data yet" : `Last data at ${clock(live.lastDataAt, false)}`;
    banner.hidden = live.status !== "away";
    if (live.status === "away") setText(what, awayWords(live));
  };
  live.addEventListener("state", show);
  live.addEventListener("cluster", show);
  show();
}

function awayWords(live) {
  const last =
    live.lastDataAt === null
      ? "It has not answered since this page was opened."
      : `What you see is of ${clock(live.lastDataAt, false)}, ${seconds((Date.now() - live.lastDataAt) / 1000)} ago.`;
  const wait = live.retryAt === null ? 0 : Math.max(0, Math.ceil((live.retryAt - Date.now()) / 1000));
  return `${last} ${wait > 0 ? `Next try in ${wait} s.` : "Trying."}`;
}
