// Buttons that take something along: to the clipboard, or into a file.

import { h } from "./dom.js";

let hideTimer;

export function toast(words) {
  const box = document.getElementById("toast");
  box.textContent = words;
  box.hidden = false;
  clearTimeout(hideTimer);
  hideTimer = setTimeout(() => {
    box.hidden = true;
  }, 3000);
}

/** Plain HTTP on another machine is no secure context and has no clipboard API; the old way still works there. */
function copyTheOldWay(text) {
  const area = h("textarea", { class: "visually-hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  const before = document.activeElement;
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  before?.focus?.();
  return isCopied;
}

export async function copyText(text, name) {
  let isCopied = false;
  try {
    await navigator.clipboard.writeText(text);
    isCopied = true;
  } catch {
    isCopied = copyTheOldWay(text);
  }
  toast(isCopied ? `${name} copied` : `The browser did not allow copying the ${name}`);
}

/** `text` may be a function, asked when the button is pressed. */
export function copyButton(label, name, text) {
  const take = () => copyText(typeof text === "function" ? text() : text, name);
  return h(
    "button",
    { type: "button", class: "small", title: typeof text === "string" ? text : null, on: { click: take } },
    label,
  );
}

export function download(fileName, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const anchor = h("a", { href: address, download: fileName.replace(/[^\w.-]+/g, "_") });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** The two buttons every chart has. */
export function chartButtons(promql, cli) {
  return h(
    "span",
    { class: "chart-buttons" },
    copyButton("Copy PromQL", "PromQL", promql),
    copyButton("Copy CLI", "command", cli),
  );
}
