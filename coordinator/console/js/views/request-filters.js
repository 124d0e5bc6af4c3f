// The filter bar of the request table; its state is the address, so that a filtered list can be passed on.

import { h, replace } from "../dom.js";
import { text } from "../format.js";

const SWITCHES = [
  ["breached", "SLO breached", "true"],
  ["stalled", "Stalled", "true"],
  ["running", "Running", "true"],
];
const TYPING_MS = 250;

function select(name, label, onChange) {
  const field = h("select", { id: `filter-${name}`, on: { change: () => onChange(name, field.value) } });
  return { name, field, element: h("label", { class: "field" }, h("span", null, label), field), known: "" };
}

/** `onChange(name, value)` with "" for no filter; `onClear()`. */
export class FilterBar {
  constructor(onChange, onClear) {
    this.selects = [
      ["outcome", "Outcome"],
      ["lane", "Lane"],
      ["node", "Node"],
      ["model", "Model"],
    ].map(([name, label]) => select(name, label, onChange));
    this.switches = SWITCHES.map(([name, label, on]) => ({
      name,
      on,
      button: h(
        "button",
        {
          type: "button",
          class: "switch",
          id: `filter-${name}`,
          "aria-pressed": "false",
          on: {
            click: (event) => onChange(name, event.currentTarget.getAttribute("aria-pressed") === "true" ? "" : on),
          },
        },
        label,
      ),
    }));
    this.slower = h("input", {
      id: "filter-slower",
      type: "number",
      min: 0,
      step: "any",
      inputmode: "decimal",
      on: { input: () => this.typed(onChange) },
    });
    this.clear = h("button", { type: "button", class: "quiet", on: { click: onClear } }, "Clear");
    this.element = h(
      "div",
      { class: "filters", role: "group", "aria-label": "Filters" },
      this.selects.map((one) => one.element),
      this.switches.map((one) => one.button),
      h("label", { class: "field" }, h("span", null, "Slower than"), this.slower, h("span", { class: "unit" }, "ms")),
      this.clear,
    );
  }

  typed(onChange) {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => {
      this.typing = undefined;
      onChange("slower_than_ms", this.slower.value);
    }, TYPING_MS);
  }

  /** The choices are what the records and the cluster have. */
  offer(choices) {
    for (const one of this.selects) {
      const values = choices[one.name] ?? [];
      // With one model there is nothing to choose.
      if (one.name === "model") one.element.hidden = values.length < 2 && !one.field.value;
      const known = values.join("\n");
      if (known === one.known && one.field.options.length > 0) continue;
      one.known = known;
      const now = one.wanted ?? one.field.value;
      replace(
        one.field,
        h("option", { value: "" }, "any"),
        values.map((value) => h("option", { value }, value === "failed" ? "failed (any)" : text(value))),
      );
      this.choose(one, now);
    }
  }

  choose(one, value) {
    one.wanted = value;
    // A link may name a node or an outcome that no record has any more: it must still be seen to filter.
    if (value && ![...one.field.options].some((option) => option.value === value))
      one.field.append(h("option", { value }, value));
    one.field.value = value;
  }

  show(query) {
    for (const one of this.selects) this.choose(one, query.get(one.name) ?? "");
    for (const one of this.switches) one.button.setAttribute("aria-pressed", query.get(one.name) === one.on);
    // What is being typed is not yet in the address.
    if (this.typing === undefined && document.activeElement !== this.slower)
      this.slower.value = query.get("slower_than_ms") ?? "";
    this.clear.disabled = [...query.keys()].every((name) => name === "sort");
  }

  /** What is being typed must not change the address of the next view. */
  dispose() {
    clearTimeout(this.typing);
  }
}
