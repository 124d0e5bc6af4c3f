// The keyboard: keys of the whole console, two-key jumps (g then a letter), and the keys of the view that is open.

import { h, replace } from "./dom.js";
import { link } from "./router.js";

const JUMPS = { c: "cluster", r: "requests", l: "latency", k: "kv", p: "playground", o: "reports" };
const JUMP_MS_MAX = 1500;

const HELP = [
  [
    "Anywhere",
    [
      ["?", "these shortcuts"],
      ["/", "open a request by id"],
      ["t", "change the theme"],
      ["Esc", "back, or leave a field"],
      ["g c", "cluster map"],
      ["g r", "requests"],
      ["g l", "latency"],
      ["g k", "KV"],
      ["g p", "playground"],
      ["g o", "reports"],
    ],
  ],
  [
    "Requests",
    [
      ["j ↓  k ↑", "next, previous"],
      ["PgDn PgUp", "a screen on, back"],
      ["Home End", "first, last"],
      ["Enter", "open"],
      ["s", "slowest or newest first"],
      ["Space", "hold the list still, go on"],
    ],
  ],
  [
    "One request",
    [
      ["j ↓  k ↑", "next, previous span"],
      ["+  −  0", "zoom in, out, whole"],
      ["h ←  l →", "move along the time axis"],
      ["f", "to the first token"],
    ],
  ],
  [
    "Playground",
    [
      ["Enter", "send"],
      ["Shift Enter", "new line"],
      ["Esc", "stop the answer"],
    ],
  ],
];

const isField = (element) =>
  element instanceof HTMLElement && (element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName));

/** A dialog has its own keys, and nothing behind it may be reached. */
const isAnyDialogOpen = () => document.querySelector("dialog[open]") !== null;

export class Keys {
  constructor({ navigate, focusSearch, changeTheme }) {
    this.act = { navigate, focusSearch, changeTheme };
    this.ofView = {};
    this.jumpUntil = 0;
    this.dialog = null;
    document.addEventListener("keydown", (event) => this.pressed(event));
  }

  /** `keys` maps a key's name to a function; one that returns false has not used the key. */
  setView(keys) {
    this.ofView = keys;
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || isAnyDialogOpen()) return;
    const run = isField(event.target) ? this.inField(event) : this.find(event);
    if (run && run(event) !== false) event.preventDefault();
  }

  inField(event) {
    if (event.key !== "Escape") return null;
    return () => {
      this.ofView.EscapeInField?.(event);
      event.target.blur();
    };
  }

  find(event) {
    const { key } = event;
    if (performance.now() < this.jumpUntil && JUMPS[key]) {
      this.jumpUntil = 0;
      return () => this.act.navigate(link(JUMPS[key]));
    }
    this.jumpUntil = 0;
    // Enter and Space on a button or link are its own.
    if ((key === "Enter" || key === " ") && event.target.closest?.("button, a, summary")) return null;
    if (this.ofView[key]) return this.ofView[key];
    switch (key) {
      case "g":
        return () => {
          this.jumpUntil = performance.now() + JUMP_MS_MAX;
        };
      case "?":
        return () => this.showHelp();
      case "/":
        return () => this.act.focusSearch();
      case "t":
        return () => this.act.changeTheme();
      default:
        return null;
    }
  }

  showHelp() {
    if (!this.dialog) {
      this.dialog = h("dialog", { class: "help", "aria-labelledby": "help-title" });
      document.body.append(this.dialog);
      const close = h("button", { type: "button", autofocus: true, on: { click: () => this.dialog.close() } }, "Close");
      replace(
        this.dialog,
        h("header", null, h("h2", { id: "help-title" }, "Keyboard shortcuts"), close),
        h(
          "div",
          { class: "help-groups" },
          HELP.map(([title, keys]) =>
            h(
              "section",
              null,
              h("h3", null, title),
              h(
                "dl",
                null,
                keys.map(([key, what]) => [h("dt", null, h("kbd", null, key)), h("dd", null, what)]),
              ),
            ),
          ),
        ),
      );
    }
    this.dialog.showModal();
  }
}
